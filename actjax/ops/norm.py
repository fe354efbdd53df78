"""RMS normalisation (Zhang and Sennrich, 2019) that keeps its input, or a code of it."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from actjax.checkpointing import coded_call
from actjax.codecs import Codec, Exact
from actjax.ops.checks import all_exact, check_codecs, check_floating
from actjax.precision import accumulation_dtype
from actjax.tags import keep


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    *,
    eps: float = 1e-6,
    codec: Codec = Exact(),
    key: jax.Array | None = None,
    name: str = "norm input",
) -> jax.Array:
    """Returns `x / sqrt(mean(x²) + eps) * scale` over the last axis, computed in float32.

    The value is exact. Holds `x`, in its own dtype or as `codec` stores it, and nothing else: the
    inverse root mean square is taken again in the backward pass (a pass over `x`, no product),
    where autodiff would keep the normalised copy and float32 copies of both. The gradients are
    those at the decoded `x`: biased even where the codec is not, and the error of `dx` reaches all
    that is upstream (Wei et al., 2026, Theorems 3.2 and 3.3).

    Args:
      x: [..., d].
      scale: [d].
      eps: added to the mean square.
      codec: what is kept of `x`.
      key: randomness of the encoding; consumed. Needed if `codec.needs_key`.
      name: what `actjax.explain` calls the kept input.

    Returns:
      [..., d] in the dtype of `x`.

    Raises:
      ValueError: `scale` does not fit `x`, or a missing key.
      TypeError: `x` is not floating point, or `codec` no codec.
    """
    check_norm(x, scale)
    codecs = check_codecs(codec, ("x",), key)
    if all_exact(codecs):
        return _rms_norm(eps, name, x, scale)
    return coded_call(_coded_form(eps, name), (x,), scale, codecs, key, "rms_norm", (name,))


def check_norm(x: jax.Array, scale: jax.Array) -> None:
    """Raises unless `x` is a floating point array and `scale` fits it."""
    check_floating("x", x)
    if x.ndim < 1 or scale.shape != x.shape[-1:]:
        raise ValueError(f"`scale` must be {x.shape[-1:]} for x{x.shape}, got {scale.shape}.")


def _coded_form(eps: float, name: str) -> Callable[[tuple[jax.Array], jax.Array], jax.Array]:
    return lambda activations, scale: _rms_norm(eps, name, *activations, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rms_norm(eps: float, name: str, x: jax.Array, scale: jax.Array) -> jax.Array:
    del name
    unit, _ = _normalize(x, eps)
    return (unit * scale.astype(unit.dtype)).astype(x.dtype)


def _normalize(x: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """Returns `x` over its root mean square, and the inverse of that, in the accumulation dtype."""
    x = x.astype(accumulation_dtype(x.dtype))
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * inverse, inverse


def _rms_norm_fwd(eps, name, x, scale):
    with jax.named_scope("actjax.rms_norm"):
        x, kept = keep(x, Exact(), None, "rms_norm", name)
        return _rms_norm(eps, name, x, scale), (kept, scale)


def _rms_norm_bwd(eps, name, residuals, dy):
    del name
    x, scale = residuals
    with jax.named_scope("actjax.rms_norm"):
        unit, inverse = _normalize(x, eps)
        dy = dy.astype(unit.dtype)
        dunit = dy * scale.astype(unit.dtype)
        dx = inverse * (dunit - unit * jnp.mean(dunit * unit, axis=-1, keepdims=True))
        dscale = jnp.sum(dy * unit, axis=tuple(range(dy.ndim - 1)))
    return dx.astype(x.dtype), dscale.astype(scale.dtype)


_rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)
