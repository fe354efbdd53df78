"""Large matrices outside the layers, such as an embedding, which are updated some rows at a time.

An update computes in float32, and an embedding of 128,256 x 4,096 takes 2 GiB in it, for each of
the arrays that exist at once. Rows `i, i + n, i + 2 n, ...` are piece `i` of `n`: a piece has rows
of every part of a matrix that is divided over devices, and the same columns.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from actjax._core.paths import map_named, named_leaves
from actjax.factored.low_rank import is_low_rank

LARGEST = 2**24
"""Most numbers of a piece: 64 MiB in float32."""
_MOST = 512
"""Most pieces of a matrix: each is a step of a loop."""


def plan_pieces(rest: Any, is_whole: Callable[[str], bool]) -> dict[str, int]:
    """Returns the number of pieces of each matrix that is cut, by path.

    Args:
      rest: parameters, or their shapes.
      is_whole: from a path to whether a transform must see this matrix whole.
    """
    counts = {name: count_pieces(jnp.shape(x)) for name, x in named_leaves(rest).items()}
    return {name: n for name, n in counts.items() if n > 1 and not is_whole(name)}


def count_pieces(shape: tuple[int, ...]) -> int:
    """Returns the pieces of an array: the least number of which all are small enough, or else 1."""
    if len(shape) != 2:
        return 1
    rows, columns = shape
    fitting = (n for n in range(1, _MOST + 1) if rows % n == 0 and rows // n * columns <= LARGEST)
    return next(fitting, 1)


def cut(matrix: Any, count: int) -> Any:
    """Returns a matrix [d, n] as [d / count, count, n], whose middle axis numbers the pieces."""
    return matrix.reshape(-1, count, matrix.shape[-1])


def stacked(matrix: jax.Array, count: int) -> jax.Array:
    """Returns the pieces of a matrix with a leading axis, [count, d / count, n]."""
    return jnp.swapaxes(cut(matrix, count), 0, 1)


def only(tree: Any, name: str, value: Any) -> Any:
    """Returns a tree with a value in the place of one leaf, and `None` in the place of others."""
    return map_named(lambda leaf, _: value if leaf == name else None, tree, is_low_rank)


def without(tree: Any, names: Iterable[str]) -> Any:
    """Returns a tree with `None` in the place of some leaves."""
    left_out = set(names)
    return map_named(lambda leaf, x: None if leaf in left_out else x, tree, is_low_rank)


def filled(tree: Any, values: Mapping[str, Any], like: Any) -> Any:
    """Returns a tree with values where `without` left them out, in the structure of `like`."""
    leaves = {**named_leaves(tree), **values}
    return map_named(lambda leaf, _: leaves[leaf], like)
