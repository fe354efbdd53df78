"""Argument checks that the operators share."""

import jax
import jax.numpy as jnp

from actjax.codecs import Codec


def check_floating(name: str, x: jax.Array) -> None:
    """Raises a `TypeError` unless `x` is an array of floating point numbers of 16 bits or more."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise TypeError(
            f"`{name}` must be a floating point array, got {dtype or type(x).__name__}:"
            " cast it with `.astype(jnp.float32)` or `.astype(jnp.bfloat16)`."
        )


def check_codec(codec: object) -> None:
    """Raises a `TypeError` unless `codec` is a codec."""
    if not isinstance(codec, Codec):
        hint = " (an instance, not the class)" if isinstance(codec, type) else ""
        raise TypeError(
            f"`codec` must be an actjax.Codec{hint}, for example Exact(), got {codec!r}."
        )
