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
    written: dict[int, list[int]] = {}
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
            after = dict(nnx.to_flat_state(nnx.state(copy)))
            known = {path: after.pop(path, None) for path, _ in nnx.to_flat_state(states[name])}
            lost = [path for path, variable in known.items() if variable is None]
            _check_paths(nnx, lost, after, copy, where)
            values = [variable.get_value() for variable in known.values()]
            pairs = zip(before[name], values, strict=True)
            written[name] = [i for i, (old, new) in enumerate(pairs) if _differs(old, new)]
            added[name] = {path: type(variable) for path, variable in after.items()}
            settings[name] = _settings(nnx, copy)
            new = [variable.get_value() for variable in after.values()]
            changes.append(([values[i] for i in written[name]], new))
        return output, changes

    def finish(result: Any) -> Any:
        output, changes = result
        for (name, module), (values, new) in zip(modules.items(), changes, strict=True):
            variables = [variable for _, variable in nnx.to_flat_state(nnx.state(module))]
            for i, value in zip(written[name], values, strict=True):
                variables[i].set_value(value)
            old = _settings(nnx, module)
            nodes = dict(nnx.iter_modules(module))
            for ((*parent, attribute), kind), value in zip(added[name].items(), new, strict=True):
                setattr(nodes[tuple(parent)], attribute, kind(value))
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


def _values(nnx: Any, state: Any) -> list[Any]:
    """Returns the values of the variables of a state, in the order of their paths."""
    return [variable.get_value() for _, variable in nnx.to_flat_state(state)]


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


def _check_paths(nnx: Any, lost: Any, added: Any, module: Any, where: str) -> None:
    """Raises a `ValueError` if variables are gone, or new ones are no attributes of modules."""
    nodes = {path for path, _ in nnx.iter_modules(module)}
    if odd := sorted(map(str, [*lost, *(path for path in added if path[:-1] not in nodes)])):
        raise ValueError(
            f"{where}: the function adds variables to a {type(module).__name__}, or removes them:"
            f" {', '.join(odd[:3])}. They would be lost: call it once before, without the"
            " transform, or return what they hold."
        )
