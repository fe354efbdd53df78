"""The linear operator and its backward pass, for every kind of weight.

Arguments are checked before: see `actjax.linear`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from actjax._core.tags import encoded_first, keep, name_code
from actjax._math.precision import accumulation_dtype, contract_tokens, matmul
from actjax.codecs import Codec, Exact
from actjax.codecs import basis as in_basis
from actjax.weights.frozen import DroppedInput, FrozenWeight, array_of
from actjax.weights.tapped import HeldWeight, TappedWeight, hold_weight, mark_weights, plain_weight

Weights = tuple[Any, ...]
"""Arrays, `TappedWeight`s, `FrozenWeight`s or `DroppedInput`s."""
Biases = tuple[jax.Array | None, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear_vjp(
    name: str,
    x: jax.Array,
    weights: Weights,
    biases: Biases,
    key: jax.Array | None,
    codec: Codec,
) -> tuple[jax.Array, ...]:
    """Returns `x w + b` for each weight and bias, as `actjax.linear` with a tuple of weights."""
    del name
    plain = [plain_weight(w) for w in weights]
    arrays = [w for w in plain if not isinstance(w, FrozenWeight | DroppedInput)]
    rank = codec.gradient_rank(x.shape)
    marked = iter(mark_weights(arrays, rank, x, key) if arrays else ())
    plain = [w if isinstance(w, FrozenWeight | DroppedInput) else next(marked) for w in plain]
    return tuple(_apply(x, w, b) for w, b in zip(plain, biases, strict=True))


def _apply(x: jax.Array, w: Any, bias: jax.Array | None) -> jax.Array:
    if isinstance(w, DroppedInput):
        x, w = w.drop(x), w.weight
    z = matmul(x, array_of(w, x.dtype))
    return (z if bias is None else z + bias.astype(z.dtype)).astype(x.dtype)


def _linear_fwd(name, x, weights, biases, key, codec):
    with jax.named_scope("actjax.linear"):
        if all(isinstance(w, FrozenWeight) for w in weights):
            # Nothing that the backward pass makes reads the input.
            code, basis = None, None
        else:
            x, code, basis = _keep_input(name, x, weights, key, codec)
        outputs = tuple(_apply(x, plain_weight(w), b) for w, b in zip(weights, biases, strict=True))
        held = tuple(hold_weight(w, keep_basis=False) for w in weights)
    return outputs, (code, basis, held, biases, codec)


def _keep_input(name, x, weights, key, codec) -> tuple[jax.Array, Any, jax.Array | None]:
    """Returns `x` to compute with, its code, and the basis that this is in, if it is read again."""
    tapped = [w for w in weights if isinstance(w, TappedWeight) and w.basis is not None]
    if not tapped:
        return *keep(x, codec, key, "linear", name), None
    # One basis for all: they share it, as they share the stored input.
    basis, bits = tapped[0].basis, tapped[0].bits
    x, code = encoded_first(x, in_basis.encode(x, basis, bits))
    code = name_code(code, x, in_basis.describe(basis, bits), "linear", name)
    # Needed only where a weight that has no tap wants its gradient in full.
    return x, code, basis if len(tapped) < len(weights) else None


def _linear_bwd(name, residuals, dzs):
    del name
    code, basis, held, biases, codec = residuals
    with jax.named_scope("actjax.linear"):
        if not isinstance(codec, Exact):
            # Without the barrier XLA could decode early, and the inputs of many layers in one go.
            code, dzs = jax.lax.optimization_barrier((code, dzs))
        dx = _input_grad(tuple(_unheld(h) for h in held), dzs)
        dws, dbs = _parameter_grads(codec, code, basis, held, biases, dzs)
    return dx.astype(dzs[0].dtype), dws, dbs, None, None


def input_grad(weights: Weights, dzs: tuple[jax.Array, ...]) -> jax.Array:
    """Returns the cotangent of the input of `linear`, without computing `linear` itself.

    Args:
      weights: as `linear` takes them, tapped or not; a tuple.
      dzs: cotangents of the outputs.
    """
    return _input_grad(tuple(plain_weight(w) for w in weights), dzs).astype(dzs[0].dtype)


def parameter_grads(
    x: jax.Array, weights: Weights, biases: Biases, dzs: tuple[jax.Array, ...]
) -> tuple[tuple[Any, ...], tuple[jax.Array | None, ...]]:
    """Returns the cotangents of weights and biases, likewise.

    Args:
      x: the input, rebuilt.
      weights: as `linear` takes them, tapped or not; a tuple.
      biases: as many.
      dzs: cotangents of the outputs.
    """
    # Nothing is stored here, so coordinates in a basis need not be in few bits.
    whole = tuple(_in_full(w) for w in weights)
    _, code, basis = _keep_input("rebuilt input", x, whole, None, Exact())
    held = tuple(hold_weight(w, keep_basis=False) for w in weights)
    return _parameter_grads(Exact(), code, basis, held, biases, dzs)


def _parameter_grads(
    codec: Codec,
    code: Any,
    basis: jax.Array | None,
    held: tuple[Any, ...],
    biases: Biases,
    dzs: tuple[jax.Array, ...],
) -> tuple[tuple[Any, ...], tuple[jax.Array | None, ...]]:
    dws = tuple(_weight_grad(codec, code, basis, h, dz) for h, dz in zip(held, dzs, strict=True))
    dbs = tuple(
        None
        if b is None
        else jnp.sum(dz, range(dz.ndim - 1), accumulation_dtype(dz.dtype)).astype(b.dtype)
        for b, dz in zip(biases, dzs, strict=True)
    )
    return dws, dbs


def _in_full(w: Any) -> Any:
    return dataclasses.replace(w, bits=16) if isinstance(w, TappedWeight) else w


def _unheld(held: Any) -> Any:
    return held.weight if isinstance(held, HeldWeight) else held


def _weight_grad(codec, code, basis, held: Any, dz: jax.Array) -> Any:
    """Returns the gradient of a weight, or of the taps of one; None of one that has none."""
    if isinstance(held, FrozenWeight):
        return None
    if isinstance(held, DroppedInput):
        if isinstance(code, in_basis.BasisCode):
            coordinates = in_basis.decode(code)
            x = matmul(coordinates, basis.astype(coordinates.dtype).T).astype(dz.dtype)
        else:
            x = codec.decode(code)
        gradient = contract_tokens(held.drop(x), dz)
        return dataclasses.replace(held, weight=gradient.astype(held.dtype), key=None)
    if isinstance(code, in_basis.BasisCode):
        right = contract_tokens(in_basis.decode(code), dz)
        if isinstance(held, HeldWeight):
            return held.cotangent(None, right)
        return matmul(basis.astype(right.dtype), right).astype(held.dtype)
    if isinstance(held, HeldWeight):
        left = None if held.left is None else codec.left(code)
        return held.cotangent(left, codec.right(code, dz))
    return codec.weight_grad(code, dz).astype(held.dtype)


def _input_grad(weights: Weights, dzs: tuple[jax.Array, ...]) -> jax.Array:
    """Returns `Σ dz_i w_iᵀ`, in the accumulation dtype."""
    terms = [_input_term(w, dz) for w, dz in zip(weights, dzs, strict=True)]
    return functools.reduce(jnp.add, terms)


def _input_term(w: Any, dz: jax.Array) -> jax.Array:
    if isinstance(w, FrozenWeight):
        # Without the barrier XLA could keep what the forward pass decoded.
        w, dz = jax.lax.optimization_barrier((w, dz))
    if isinstance(w, DroppedInput):
        return w.drop(matmul(dz, w.weight.astype(dz.dtype).T))
    return matmul(dz, array_of(w, dz.dtype).T)


linear_vjp.defvjp(_linear_fwd, _linear_bwd)
