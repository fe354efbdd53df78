"""Moments that are stored in few bits between steps, in the place of arrays in an optax state."""

from typing import Any

import jax

from actjax.formats.blockwise import Blockwise
from actjax.formats.four_bit import RankOneFourBit, SignedFourBit

Code = Blockwise | SignedFourBit | RankOneFourBit
"""A moment in 8 or 4 bits. `decode()` returns the array, `encode(x)` another one in its form."""


def is_code(x: Any) -> bool:
    """Returns whether `x` is a moment in few bits: for `is_leaf` of `jax.tree` functions."""
    return isinstance(x, Code)


def decoded(state: Any) -> Any:
    """Returns a state with every moment as an array."""
    return jax.tree.map(lambda x: x.decode() if is_code(x) else x, state, is_leaf=is_code)


def encoded_like(old: Any, new: Any) -> Any:
    """Returns the arrays of `new` in the form of those in `old`."""
    return jax.tree.map(lambda a, b: a.encode(b) if is_code(a) else b, old, new, is_leaf=is_code)
