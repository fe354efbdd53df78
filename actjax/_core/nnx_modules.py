"""Functions that change the state of Flax nnx modules, as functions of arrays alone.

JAX traces a function with copies of its modules. Changes of these copies, such as the statistics of
a batch norm or the number of dropout masks drawn, are lost unless they are outputs.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Opened(NamedTuple):
    """A function of arrays, made from a function of modules.

    Attributes:
      fun: returns the output, and the values that it wrote into the modules.
      args: its arguments: states in the place of modules.
      finish: from the result of `fun` to the output; writes into the modules.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    finish: Callable[[Any], Any]


def open_modules(fun: Callable[..., Any], args: tuple[Any, ...], where: str) -> Opened:
    """Returns a function of arrays.

    Args:
      fun: a function of pytrees, in which there may be nnx modules.
      args: its arguments.
      where: the transform, for messages.

    Raises:
      ValueError: when called, if `fun` adds variables to a module in other places than attributes
        of its modules, where `sow` puts them, or removes variables.
    """
    nnx: Any = sys.modules.get("flax.nnx")

    def is_module(x: Any) -> bool:
        return nnx is not None and isinstance(x, nnx.Module)

    leaves, treedef = jax.tree.flatten(args, is_leaf=is_module)
    modules = {id(x): x for x in leaves if is_module(x)}
    if not modules:
        return Opened(lambda *args: (fun(*args), ()), args, lambda result: result[0])
    graphs, states = {}, {}
    for name, module in modules.items():
        graphs[name], states[name] = nnx.split(module)
    # A module in two places is one module.
    first = {id(x): i for i, x in reversed(list(enumerate(leaves)))}
    array_leaves = [
        (states[id(x)] if first[id(x)] == i else None) if is_module(x) else x
        for i, x in enumerate(leaves)
    ]
    written: dict[int, list[Any]] = {}
    added: dict[int, dict[Any, Any]] = {}
    settings: dict[int, dict[Any, Any]] = {}

    def of_arrays(*args: Any) -> Any:
        arrays = treedef.flatten_up_to(args)
        before = {name: _values(nnx, arrays[first[name]]) for name in modules}
        copies = {name: nnx.merge(graphs[name], arrays[first[name]]) for name in modules}
        values = [copies[id(x)] if is_module(x) else y for x, y in zip(leaves, arrays, strict=True)]
        output = fun(*treedef.unflatten(values))
        changes = []
        for name, copy in copies.items():
            old, state = before[name], nnx.state(copy)
            _check_paths(nnx, old.keys(), state, modules[name], where)
            variables, now = dict(nnx.to_flat_state(state)), _values(nnx, state)
            written[name] = [path for path in old if _differs(old[path], now[path])]
            added[name] = {
                path: (type(x), x.get_metadata())
                for path, x in variables.items()
                if path not in old
            }
            settings[name] = _settings(nnx, copy)
            changes.append([[now[path] for path in paths[name]] for paths in (written, added)])
        return output, changes

    def finish(result: Any) -> Any:
        output, changes = result
        for (name, module), (values, new) in zip(modules.items(), changes, strict=True):
            variables = dict(nnx.to_flat_state(nnx.state(module)))
            for path, value in zip(written[name], values, strict=True):
                variables[path].set_value(value)
            old = _settings(nnx, module)
            nodes = dict(nnx.iter_modules(module))
            for (path, (kind, metadata)), value in zip(added[name].items(), new, strict=True):
                setattr(nodes[path[:-1]], path[-1], kind(value, **metadata))
            for (path, attribute), value in settings[name].items():
                if old.get((path, attribute), _MISSING) != value:
                    setattr(nodes[path], attribute, value)
        return output

    return Opened(of_arrays, tuple(treedef.unflatten(array_leaves)), finish)


def are_parameters(tree: Any) -> list[bool]:
    """Returns for each array of a pytree whether it is a parameter.

    A variable of Flax nnx is a parameter if it is an `nnx.Param`, as for `nnx.grad`. Every array
    outside of a variable is a parameter.
    """
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return [True] * len(jax.tree.leaves(tree))
    nodes = jax.tree.leaves(tree, is_leaf=_is_variable(nnx))
    return [
        not isinstance(x, nnx.Variable) or isinstance(x, nnx.Param)
        for x in nodes
        for _ in jax.tree.leaves(x)
    ]


_MISSING = object()


def _is_variable(nnx: Any) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, nnx.Variable)


def _values(nnx: Any, state: Any) -> dict[Any, Any]:
    """Returns the values of the variables of a state by path."""
    return {path: variable.get_value() for path, variable in nnx.to_flat_state(state)}


def _differs(old: Any, new: Any) -> bool:
    """Returns whether a variable was written: the arrays of a trace are compared by identity."""
    a, b = jax.tree.flatten(old), jax.tree.flatten(new)
    return a[1] != b[1] or any(x is not y for x, y in zip(a[0], b[0], strict=True))


def _settings(nnx: Any, module: Any) -> dict[Any, Any]:
    """Returns attributes such as `deterministic`, by the path of their module and their name."""
    return {
        (path, name): value
        for path, node in nnx.iter_modules(module)
        for name, value in vars(node).items()
        if value is None or isinstance(value, bool | int | float | str)
    }


def _check_paths(nnx: Any, old: Any, state: Any, module: Any, where: str) -> None:
    """Raises a `ValueError` if variables are gone, or new ones are no attributes of a module.

    Args:
      nnx: Flax.
      old: paths of the variables before.
      state: the state after.
      module: the module before, to which new variables are added.
      where: the transform, for messages.
    """
    nodes, now = {path for path, _ in nnx.iter_modules(module)}, dict(nnx.to_flat_state(state))
    new = (path for path in now if path not in old and path[:-1] not in nodes)
    if odd := sorted(map(str, [*(path for path in old if path not in now), *new])):
        raise ValueError(
            f"{where}: the function adds variables to a {type(module).__name__}, or removes them:"
            f" {', '.join(odd[:3])}. They would be lost: call it once before, without the"
            " transform, or return what they hold."
        )
