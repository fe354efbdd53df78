"""Support for pytrees of Flax. Flax is optional: this module never imports it."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax


def is_variable(x: Any) -> bool:
    """Returns whether `x` is a variable of Flax nnx."""
    module = sys.modules.get("flax.nnx")
    return module is not None and isinstance(x, module.Variable)


def is_nnx_state(x: Any) -> bool:
    """Returns whether `x` is a state of Flax nnx, as `nnx.state(model)` returns it."""
    module = sys.modules.get("flax.nnx")
    return module is not None and isinstance(x, module.State)


def without_variables(tree: Any) -> Any:
    """Returns an nnx state with values in the place of its variables, and any other tree unchanged.

    `nnx.Optimizer` gives variables to `init` and values to `update`. It replaces the content of a
    variable by a state, unless the content is one array.
    """
    if not is_nnx_state(tree):
        return tree
    return jax.tree.map(lambda x: x.get_value() if is_variable(x) else x, tree, is_leaf=is_variable)


def in_structure_of(tree: Any, original: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Returns the leaves of a tree in the structure of `original`: undoes `without_variables`.

    Args:
      tree: the tree, one leaf for each leaf of `original`.
      original: the tree with variables.
      is_leaf: whether a node of `original`, such as a `LowRank`, is one leaf.
    """
    if not is_nnx_state(original):
        return tree
    return jax.tree.unflatten(jax.tree.structure(original, is_leaf), jax.tree.leaves(tree))


_serializable: set[type] = set()


def register_fields(kind: type, *names: str) -> None:
    """Lets `flax.serialization` write these fields of a dataclass, and restore them into another.

    To be called whenever an instance is made: the program may import Flax in between.
    """
    module = sys.modules.get("flax.serialization")
    if module is None or kind in _serializable:
        return
    _serializable.add(kind)

    def to_state_dict(x: Any) -> dict[str, Any]:
        return {name: module.to_state_dict(getattr(x, name)) for name in names}

    def from_state_dict(x: Any, state: dict[str, Any]) -> Any:
        restored = {name: module.from_state_dict(getattr(x, name), state[name]) for name in names}
        return dataclasses.replace(x, **restored)

    module.register_serialization_state(kind, to_state_dict, from_state_dict)
