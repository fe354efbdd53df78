"""The product of an input with weights of any kind, and its backward pass.

Callers check the arguments: see `actjax.linear`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from actjax._core.coded_call import Operator, coded_call
from actjax._core.tags import encoded_first, keep, name_code
from actjax._math.precision import accumulation_dtype, by_feature
from actjax.codecs import Codec, Exact
from actjax.codecs import basis as in_basis
from actjax.residuals.graph.uses import mark_weights
from actjax.weights.base import ArrayWeight, StoredInput, Weight, as_weight

Weights = tuple[Weight, ...]
Biases = tuple[jax.Array | None, ...]


def product(
    name: str,
    x: jax.Array,
    weights: Weights,
    biases: Biases,
    key: jax.Array | None = None,
    codec: Codec = Exact(),
    features: int | None = None,
) -> tuple[jax.Array, ...]:
    """Returns `x w + b` for each weight and bias, and keeps one code of `x`.

    Args:
      name: the name of the input in `actjax.explain`.
      x: [..., d].
      weights: [d, n_i] each.
      biases: [n_i] or None each.
      key: randomness of the encoding; None if the codec draws none.
      codec: stores `x`.
      features: number of features of `x` that are not padding; None for all.

    Returns:
      [..., n_i] in the dtype of `x` each.
    """
    operator = _Product(codec.gradient_rank(x.shape), features)
    others, keys = (weights, biases, key), None if key is None else (key,)
    return coded_call(operator, (x,), others, (codec,), keys, "linear", (name,))


def single_product(name: str, x: jax.Array, w: Any) -> jax.Array:
    """Returns `x w`, [..., n], for one array or `Weight` [d, n], and keeps `x`."""
    return product(name, x, (as_weight(w),), (None,))[0]


@dataclasses.dataclass(frozen=True)
class _Product(Operator):
    """The products as an operator of one activation, with (weights, biases, key) as `others`.

    Attributes:
      rank: rank of the factored gradients of the weights; None if they are dense.
      features: number of features of the input that are not padding; None for all.
    """

    rank: int | None
    features: int | None

    def __call__(self, activations: Sequence[jax.Array], others: Any) -> tuple[jax.Array, ...]:
        (x,), (weights, biases, key) = activations, others
        plain = [w.plain() for w in weights]
        arrays = [w.weight for w in plain if isinstance(w, ArrayWeight)]
        marked = iter(mark_weights(arrays, self.rank, x, key) if arrays else ())
        plain = [ArrayWeight(next(marked)) if isinstance(w, ArrayWeight) else w for w in plain]
        return _products(x, plain, biases)

    def forward(self, activations: Sequence[jax.Array], others: Any) -> tuple[jax.Array, ...]:
        (x,), (weights, biases, _) = activations, others
        return _products(x, [w.plain() for w in weights], biases)

    def encode(self, activations, others, codecs, key, operator, names):
        (x,), (codec,), (name,), (weights, *_) = activations, codecs, names, others
        del operator
        if not any(w.needs_input for w in weights):
            return (x,), (None, None)
        x, code, basis = _keep_input(name, x, weights, None if key is None else key[0], codec)
        return (x,), (code, basis)

    def hold(self, others: Any) -> Any:
        weights, biases, _ = others
        return tuple(w.hold_for_linear() for w in weights), biases

    def backward(self, codes, codecs, held, cotangent):
        (code, basis), (codec,), (weights, biases), dzs = codes, codecs, held, cotangent
        if not isinstance(codec, Exact):
            # Without the barrier XLA could decode early, and the inputs of many layers at once.
            code, dzs = jax.lax.optimization_barrier((code, dzs))
        dx = input_grad(weights, dzs)
        stored = StoredInput(codec, code, basis, self.features)
        return (dx,), (*_parameter_grads(stored, weights, biases, dzs), None)


def _products(x: jax.Array, weights: Sequence[Weight], biases: Biases) -> tuple[jax.Array, ...]:
    products = [w.times(x) for w in weights]
    pairs = zip(products, biases, strict=True)
    return tuple((z if b is None else z + by_feature(b, z)).astype(x.dtype) for z, b in pairs)


def _keep_input(
    name: str, x: jax.Array, weights: Weights, key: jax.Array | None, codec: Codec
) -> tuple[jax.Array, Any, jax.Array | None]:
    """Returns `x` for the forward pass, its code, and the basis if a gradient reads it."""
    bases = [basis for w in weights if (basis := w.input_basis()) is not None]
    if not bases:
        return *keep(x, codec, key, "linear", name), None
    # The weights share one basis, as they share the stored input.
    basis, bits = bases[0]
    x, code = encoded_first(x, in_basis.encode(x, basis, bits))
    code = name_code(code, x, in_basis.describe(basis, bits), "linear", name)
    # Only the full gradient of a weight that is not tapped needs the basis.
    return x, code, basis if len(bases) < len(weights) else None


def joined_products(
    run: Callable[[Weights, Biases], tuple[jax.Array, ...]],
    weights: Weights,
    biases: Biases,
    split: bool,
    name: str,
) -> tuple[Any, ...]:
    """Returns the outputs of a linear operator whose weights may have several parts.

    Args:
      run: the operator. It gets the parts of all weights, which share its stored input.
      weights: [d, n_i] each.
      biases: [n_i] or None each.
      split: whether an adapted weight gives an `actjax.LowRankSum`.
      name: the name of the input in `actjax.explain`.
    """
    first_parts = tuple(w.parts()[0] for w in weights)
    adapters = tuple(w.parts()[1:] for w in weights)
    flat = tuple(part for parts in adapters for part in parts)
    products = run((*first_parts, *flat), (*biases, *(None for _ in flat)))
    further = iter(products[len(weights) :])
    adapted = [i for i, parts in enumerate(adapters) if parts]
    outputs = []
    for i, w in enumerate(weights):
        number = f" {adapted.index(i)}" if i in adapted and len(adapted) > 1 else ""
        products_of_w = (products[i], *(next(further) for _ in adapters[i]))
        outputs.append(w.join(products_of_w, split, f"{name} adapter{number}"))
    return tuple(outputs)


def input_grad(weights: Weights, dzs: Sequence[jax.Array]) -> jax.Array:
    """Returns the cotangent of the input, `Σ dz_i w_iᵀ`, without computing the products.

    Args:
      weights: [d, n_i] each.
      dzs: cotangents of the products, [..., n_i] each.
    """
    terms = [w.transposed_times(dz) for w, dz in zip(weights, dzs, strict=True)]
    # The newest product first: XLA for GPUs adds an operand within the product that is the first.
    return functools.reduce(lambda total, term: term + total, terms).astype(dzs[0].dtype)


def parameter_grads(
    x: jax.Array, weights: Weights, biases: Biases, dzs: Sequence[jax.Array]
) -> tuple[tuple[Any, ...], Biases]:
    """Returns the cotangents of weights and biases from the input itself.

    Args:
      x: the input, rebuilt, [..., d].
      weights: [d, n_i] each.
      biases: [n_i] or None each.
      dzs: cotangents of the products, [..., n_i] each.
    """
    # Nothing is stored here, so coordinates in a basis need no quantization.
    unquantized = tuple(w.with_unquantized_input() for w in weights)
    _, code, basis = _keep_input("rebuilt input", x, unquantized, None, Exact())
    held = tuple(w.hold_for_linear() for w in weights)
    return _parameter_grads(StoredInput(Exact(), code, basis), held, biases, dzs)


def _parameter_grads(
    stored: StoredInput, weights: Weights, biases: Biases, dzs: Sequence[jax.Array]
) -> tuple[tuple[Any, ...], Biases]:
    dws = tuple(w.gradient(stored, dz) for w, dz in zip(weights, dzs, strict=True))
    tokens, wide = range(dzs[0].ndim - 1), accumulation_dtype(dzs[0].dtype)
    dbs = tuple(
        None if b is None else jnp.sum(dz, tokens, wide).astype(b.dtype)
        for b, dz in zip(biases, dzs, strict=True)
    )
    return dws, dbs
