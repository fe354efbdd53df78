"""Names of the leaves of a pytree by their paths."""

from collections.abc import Callable
from typing import Any

import jax


def path_name(path: Any) -> str:
    """Returns the name of a leaf from its path in a pytree, such as "layers.attention.q"."""
    # Flax nnx holds an array in an attribute `value`, which names leave out. They keep a dict key.
    if len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator=".")


def map_named(
    fun: Callable[[str, Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Returns a tree of the same structure with `fun(name, leaf)` in the place of each leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: fun(path_name(path), leaf), tree, is_leaf=is_leaf
    )


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Returns the leaves of a pytree by name, in their order.

    Raises:
      ValueError: two leaves have the same name, as in `{"a.b": x, "a": {"b": y}}`.
    """
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        name = path_name(path)
        if name in named:
            raise ValueError(f"two parameters have the same path `{name}`: rename one of them.")
        named[name] = leaf
    return named
