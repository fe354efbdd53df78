"""Types and sizes of the variables of a program."""

from typing import Any

import jax.numpy as jnp


def nbytes(var: Any) -> int:
    """Returns the bytes of a variable."""
    return var.aval.size * var.aval.dtype.itemsize


def is_floating(x: Any) -> bool:
    """Returns whether an array, a shape or an abstract value has floating point numbers."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)
