"""Types and sizes of the variables of a program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue

_ARRAYS = (jax.Array, jax.Ref, jax.ShapeDtypeStruct, np.ndarray, np.generic, AbstractValue)

VIEWS = frozenset({
    "broadcast_in_dim", "copy", "copy_p", "name", "reshape", "reshard", "rev",
    "sharding_constraint", "slice", "split", "squeeze", "transpose", "unstack",
})  # fmt: skip
"""Operations that move numbers and change none."""


def nbytes(var: Any) -> int:
    """Returns the bytes of a variable."""
    return var.aval.size * var.aval.dtype.itemsize


def size(var: Any) -> int:
    """Returns the number of elements of a variable."""
    return var.aval.size


def has_floats(var: Any) -> bool:
    """Returns whether a variable or a literal has floating point numbers."""
    return is_floating(var.aval)


def is_array(x: Any) -> bool:
    """Returns whether a leaf of a pytree is an array, and no Python number, text or function.

    A configuration or a module of linen may have a `dtype` too, and is none.
    """
    return isinstance(x, _ARRAYS)


def is_floating(x: Any) -> bool:
    """Returns whether an array, a shape or an abstract value has floating point numbers."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def is_on_host(aval: Any) -> bool:
    """Returns whether an array is in the memory of the host, beside that of its device."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host
