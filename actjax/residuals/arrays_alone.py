"""Functions of anything as functions of arrays."""

from collections.abc import Callable
from typing import Any

import jax

from actjax._core.nnx_modules import Opened, open_modules
from actjax.residuals.graph.variables import is_array


def open_function(fun: Callable[..., Any], args: tuple[Any, ...], where: str) -> Opened:
    """Returns a function of arrays, made from a function of pytrees with modules and settings.

    Its arguments have states in the place of Flax nnx modules, and None in the place of what is not
    an array: Python numbers and booleans, text, functions, as modules of Equinox hold them. A
    function is traced anew in each call, so it may depend on their values.

    Args:
      fun: the function.
      args: its arguments.
      where: the transform, for messages.

    Raises:
      ValueError: when called, if `fun` adds variables to an nnx module, or removes them.
    """
    opened = open_modules(fun, args, where)
    of_arrays, arrays = without_statics(opened.fun, opened.args)
    return Opened(of_arrays, arrays, opened.finish)


def without_statics(
    fun: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a function of arrays, and its arguments: None in the place of what is not an array.

    Args:
      fun: a function of pytrees.
      args: its arguments.
    """
    leaves, treedef = jax.tree.flatten(args)
    if all(map(is_array, leaves)):
        return fun, args

    def of_arrays(*args: Any) -> Any:
        arrays = treedef.flatten_up_to(args)
        merged = [y if is_array(x) else x for x, y in zip(leaves, arrays, strict=True)]
        return fun(*treedef.unflatten(merged))

    return of_arrays, treedef.unflatten([x if is_array(x) else None for x in leaves])
