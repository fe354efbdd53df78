"""RMS normalisation (Zhang and Sennrich, 2019) that keeps its input and no copy of it."""

import functools

import jax
import jax.numpy as jnp

from actjax.codecs import Exact
from actjax.ops.checks import check_floating
from actjax.precision import accumulation_dtype
from actjax.tags import keep


def rms_norm(
    x: jax.Array, scale: jax.Array, *, eps: float = 1e-6, name: str = "norm input"
) -> jax.Array:
    """Returns `x / sqrt(mean(x²) + eps) * scale` over the last axis, computed in float32.

    Value and gradients are exact. Holds `x` in its own dtype and nothing else: the inverse root
    mean square is taken again in the backward pass (a pass over `x`, no product), where autodiff
    would keep the normalised copy and float32 copies of both.

    Args:
      x: [..., d].
      scale: [d].
      eps: added to the mean square.
      name: what `actjax.explain` calls the kept input.

    Returns:
      [..., d] in the dtype of `x`.

    Raises:
      ValueError: `scale` does not fit `x`.
      TypeError: `x` is not floating point.
    """
    check_floating("x", x)
    if x.ndim < 1 or scale.shape != x.shape[-1:]:
        raise ValueError(f"`scale` must be {x.shape[-1:]} for x{x.shape}, got {scale.shape}.")
    return _rms_norm(eps, name, x, scale)


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
