"""Argument checks of all kernels: with a wrong shape a kernel would read out of bounds."""

from typing import Any

import jax.numpy as jnp


def check_shape(kernel: str, name: str, x: Any, shape: tuple[int, ...]) -> None:
    """Raises a `ValueError` unless `x` has this shape."""
    if getattr(x, "shape", None) != tuple(shape):
        came = getattr(x, "shape", type(x).__name__)
        raise ValueError(f"`{name}` of {kernel} must have shape {tuple(shape)}, got {came}.")


def check_floating(kernel: str, name: str, x: Any) -> None:
    """Raises a `TypeError` unless `x` is an array of floating point numbers of 16 bits or more."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize < 2:
        raise TypeError(
            f"`{name}` of {kernel} must be a floating point array of 16 bits or more, got"
            f" {dtype or type(x).__name__}."
        )


def check_code(kernel: str, name: str, x: Any, shape: tuple[int, ...]) -> None:
    """Raises unless `x` is a code of an activation of this shape.

    Raises:
      TypeError: `x` is not a code.
      ValueError: it is a code of another shape.
    """
    if not hasattr(x, "planes"):
        raise TypeError(f"`{name}` of {kernel} must be a QuantizedCode, got {type(x).__name__}.")
    came = (*x.planes[0].shape[:-1], x.features)
    if came != tuple(shape):
        raise ValueError(
            f"`{name}` of {kernel} must be a code of {tuple(shape)}, got one of {came}."
        )
