"""The field of an optax state, and the parameter, that an array belongs to."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from actjax._core.paths import named_leaves, path_name


def map_state(
    fun: Callable[[list[str], str | None, Any], Any],
    state: Any,
    params: Any,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Maps `fun(fields, weight, array)` over the arrays of a state.

    A part of a state with the structure of the parameters has one array for each of them.
    Elsewhere, as in a masked transform, an array belongs to the parameter that its path ends with.

    Args:
      fun: returns another array, given the fields of the state that lead to an array, such as
        ["0", "mu"], the path of its parameter (None if it has none), and the array.
      state: an optax state.
      params: the parameters, or their shapes.
      is_leaf: which nodes of the state count as arrays too.
    """
    structure, weights = jax.tree.structure(params), list(named_leaves(params))

    def is_like_params(x: Any) -> bool:
        return jax.tree.structure(x, is_leaf=is_leaf) == structure

    def map_part(path: Any, part: Any) -> Any:
        name = path_name(path)
        if is_like_params(part):
            pairs = zip(weights, jax.tree.leaves(part, is_leaf=is_leaf), strict=True)
            return jax.tree.unflatten(structure, [fun(_fields(name), w, x) for w, x in pairs])
        return fun(*split_path(name, weights), part)

    return jax.tree_util.tree_map_with_path(
        map_part, state, is_leaf=lambda x: is_like_params(x) or (is_leaf is not None and is_leaf(x))
    )


def split_path(name: str, weights: Iterable[str]) -> tuple[list[str], str | None]:
    """Splits the path of an array in a state, such as "0.mu.layers.q", before its parameter's path.

    Args:
      name: the path.
      weights: paths of the parameters.

    Returns:
      The fields of the state, here ["0", "mu"], and the parameter, or None if there is none.
    """
    ends = [weight for weight in weights if name == weight or name.endswith(f".{weight}")]
    weight = max(ends, key=len, default=None)
    return _fields(name if weight is None else name.removesuffix(weight)), weight


def _fields(name: str) -> list[str]:
    return [field for field in name.split(".") if field]
