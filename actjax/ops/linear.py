"""Linear operators that hold a code of their input instead of the input.

Wei et al. (2026), Theorems 3.2 and 3.3: for `z = x w` the value and `dx = dz wᵀ` do not read the
stored input, so only `dw = x_hatᵀ dz` carries the codec's error, and it is unbiased if the codec
is.
"""

import dataclasses
import functools
from typing import Any, overload

import jax
import jax.numpy as jnp

from actjax.codecs import Codec, Exact
from actjax.codecs import basis as in_basis
from actjax.ops.checks import check_codec, check_floating
from actjax.precision import accumulation_dtype, contract_tokens, matmul
from actjax.tags import encoded_first, keep, name_code
from actjax.taps import HeldWeight, TappedWeight, hold_weight, mark_weights, plain_weight

_Weights = tuple[Any, ...]
"""Arrays or `TappedWeight`s."""
_Biases = tuple[jax.Array | None, ...]


@overload
def linear(
    x: jax.Array,
    w: jax.Array,
    *,
    bias: jax.Array | None = None,
    codec: Codec = Exact(),
    key: jax.Array | None = None,
    name: str = "input",
) -> jax.Array: ...
@overload
def linear(
    x: jax.Array,
    w: tuple[jax.Array, ...],
    *,
    bias: tuple[jax.Array | None, ...] | None = None,
    codec: Codec = Exact(),
    key: jax.Array | None = None,
    name: str = "input",
) -> tuple[jax.Array, ...]: ...
def linear(
    x: jax.Array,
    w: Any,
    *,
    bias: Any = None,
    codec: Codec = Exact(),
    key: jax.Array | None = None,
    name: str = "input",
) -> Any:
    """Returns `x @ w + bias`, and holds `codec.encode(x, key)` rather than `x`.

    With a tuple of weights, returns a tuple of outputs that share one stored copy of `x`.

    The values and `dx` are exact. `dw = x_hatᵀ dz` carries the codec's error; it is unbiased if
    the codec is, since it is linear in `x`. Computed in the dtype of `x`, with sums in float32 at
    least; a weight of another dtype is cast on the fly, in both passes, and no cast copy is kept.

    Args:
      x: activations, [..., d].
      w: weight, [d, n], or a tuple of weights [d, n_i]; a Flax nnx variable stands for its value.
        Under `actjax.value_and_grad` these may be `TappedWeight`s, whose gradient comes in two
        factors.
      bias: [n], or a tuple of biases (or None) as long as `w`. Its gradient is exact.
      codec: what is kept of `x`.
      key: randomness of the encoding; consumed. Needed if `codec.needs_key`.
      name: what `actjax.explain` calls the stored input.

    Returns:
      [..., n] in the dtype of `x`, or a tuple of such.

    Raises:
      ValueError: shapes that do not fit, a missing key, a codec that does not fit `x`.
      TypeError: `codec` is no codec, or `x` or a weight is not floating point.
    """
    weights, biases = check_linear(x, w, bias)
    check_codec(codec)
    if codec.needs_key:
        codec.required_key(key)
    outputs: Any = _linear(name, x, weights, biases, key, codec)
    return outputs if isinstance(w, tuple | list) else outputs[0]


def qkv_projection(
    x: jax.Array,
    wq: jax.Array,
    wk: jax.Array,
    wv: jax.Array,
    *,
    bias: tuple[jax.Array | None, jax.Array | None, jax.Array | None] | None = None,
    codec: Codec = Exact(),
    key: jax.Array | None = None,
    name: str = "qkv input",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the query, key and value projections of `x`, which share one stored copy of it.

    `linear(x, (wq, wk, wv), ...)` by its name in attention; see there for what is exact.

    Args:
      x: activations, [..., d].
      wq: [d, heads * head_dim].
      wk: [d, kv_heads * head_dim].
      wv: [d, kv_heads * head_dim].
      bias: the three biases, or None.
      codec: what is kept of `x`; `PointApproximation` here is PAMM.
      key: randomness of the encoding; consumed.
      name: what `actjax.explain` calls the stored input.

    Returns:
      q, k and v, [..., n_i] in the dtype of `x`.
    """
    q, k, v = linear(x, (wq, wk, wv), bias=bias, codec=codec, key=key, name=name)
    return q, k, v


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(
    name: str,
    x: jax.Array,
    weights: _Weights,
    biases: _Biases,
    key: jax.Array | None,
    codec: Codec,
) -> tuple[jax.Array, ...]:
    del name
    plain = [plain_weight(w) for w in weights]
    marked = mark_weights(plain, codec.gradient_rank(x.shape), x, key)
    return tuple(_apply(x, w, b) for w, b in zip(marked, biases, strict=True))


def _apply(x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
    z = matmul(x, w.astype(x.dtype))
    return (z if bias is None else z + bias.astype(z.dtype)).astype(x.dtype)


def _linear_fwd(name, x, weights, biases, key, codec):
    with jax.named_scope("actjax.linear"):
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
        dx = _input_grad(tuple(_array(h) for h in held), dzs)
        dws, dbs = _parameter_grads(codec, code, basis, held, biases, dzs)
    return dx.astype(dzs[0].dtype), dws, dbs, None, None


def input_grad(weights: _Weights, dzs: tuple[jax.Array, ...]) -> jax.Array:
    """Returns the cotangent of the input of `linear`, without computing `linear` itself.

    Args:
      weights: as `linear` takes them, tapped or not; a tuple.
      dzs: cotangents of the outputs.
    """
    return _input_grad(tuple(plain_weight(w) for w in weights), dzs).astype(dzs[0].dtype)


def parameter_grads(
    x: jax.Array, weights: _Weights, biases: _Biases, dzs: tuple[jax.Array, ...]
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
    biases: _Biases,
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


def _array(held: Any) -> jax.Array:
    return held.weight if isinstance(held, HeldWeight) else held


def _weight_grad(codec, code, basis, held: Any, dz: jax.Array) -> Any:
    """Returns the gradient of a weight, or of the taps of one."""
    if isinstance(code, in_basis.BasisCode):
        right = contract_tokens(in_basis.decode(code), dz)
        if isinstance(held, HeldWeight):
            return held.cotangent(None, right)
        return matmul(basis.astype(right.dtype), right).astype(held.dtype)
    if isinstance(held, HeldWeight):
        left = None if held.left is None else codec.left(code)
        return held.cotangent(left, codec.right(code, dz))
    return codec.weight_grad(code, dz).astype(held.dtype)


def _input_grad(weights: _Weights, dzs: tuple[jax.Array, ...]) -> jax.Array:
    """Returns `Σ dz_i w_iᵀ`, in the accumulation dtype."""
    terms = [matmul(dz, w.astype(dz.dtype).T) for w, dz in zip(weights, dzs, strict=True)]
    return functools.reduce(jnp.add, terms)


_linear.defvjp(_linear_fwd, _linear_bwd)


def check_linear(x: Any, w: Any, bias: Any) -> tuple[_Weights, _Biases]:
    """Returns weights and biases as tuples, or raises if they do not fit.

    Args:
      x: the input, or its shape and dtype.
      w: as for `linear`; a Flax nnx variable stands for its value, which may be a `TappedWeight`.
      bias: as for `linear`.

    Raises:
      ValueError: shapes that do not fit.
      TypeError: what is not floating point.
    """
    single = not isinstance(w, tuple | list)
    weights = tuple(
        v.get_value() if hasattr(v, "get_value") else v for v in ((w,) if single else w)
    )
    given = (bias,) if single else bias
    biases = (None,) * len(weights) if given is None else tuple(given)
    check_floating("x", x)
    if not weights:
        raise ValueError("`w` is an empty tuple: pass at least one weight.")
    if len(biases) != len(weights):
        raise ValueError(
            f"`bias` has {len(biases)} entries for {len(weights)} weights: pass one each, or None."
        )
    for i, (w, bias) in enumerate(zip(weights, biases, strict=True)):
        name = "w" if len(weights) == 1 else f"w[{i}]"
        check_floating(name, w)
        if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[0]:
            hint = " Did you pass it transposed?" if x.shape[-1:] == w.shape[-1:] else ""
            raise ValueError(
                f"`{name}` must be [d, n] with d = {x.shape[-1:]} features of `x`:"
                f" got x{x.shape} @ {name}{w.shape}.{hint}"
            )
        if bias is None:
            continue
        check_floating("bias" if len(weights) == 1 else f"bias[{i}]", bias)
        if bias.shape != w.shape[1:]:
            raise ValueError(
                f"the bias of `{name}`{w.shape} must be {w.shape[1:]}, got {bias.shape}."
            )
    return weights, biases
