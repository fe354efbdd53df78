"""The definition of `rms_norm_backward`: plain JAX, never tuned."""

import jax
import jax.numpy as jnp

from actjax._math.precision import accumulation_dtype, by_feature
from actjax.formats.code import QuantizedCode
from actjax.formats.quantize import dequantize


def rms_norm_backward(
    x: QuantizedCode | jax.Array,
    scale: jax.Array,
    dy: jax.Array,
    addend: jax.Array | None,
    *,
    eps: float,
    with_value: bool,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """As `actjax.kernels.rms_norm_backward.api.rms_norm_backward`."""
    wide = accumulation_dtype(x.dtype)
    decoded = dequantize(x) if isinstance(x, QuantizedCode) else x
    unit, inverse = normalize(decoded.astype(wide), eps)
    factor = by_feature(scale, unit)
    dx, dscale = grads(unit, inverse, factor, dy.astype(wide))
    value = (unit * factor).astype(x.dtype) if with_value else None
    dx = dx.astype(x.dtype)
    return value, dx if addend is None else dx + addend, dscale.astype(scale.dtype)


def normalize(x: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """Returns `x` over its root mean square, and the inverse of that."""
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * inverse, inverse


def grads(
    unit: jax.Array, inverse: jax.Array, scale: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of the input and of the scale, from the results of `normalize`."""
    dunit = dy * scale
    dx = inverse * (dunit - unit * jnp.mean(dunit * unit, axis=-1, keepdims=True))
    return dx, jnp.sum(dy * unit, axis=tuple(range(dy.ndim - 1)))
