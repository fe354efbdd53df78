"""Transforms that look at several arrays at once, which an update by layers would not show them."""

from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import partial_eval

from actjax._core.paths import named_leaves


def check_separate(init: Callable[[Any], Any], update: Callable[..., Any], params: Any) -> None:
    """Raises a `ValueError` if the update of an array depends on the gradient of another.

    The program of the update tells it. So a dependence through a condition counts, such as whether
    all gradients are finite, and one through the state of earlier steps. A transform that cannot be
    traced with gradients and parameters alone is not looked at: its update raises the error.

    Args:
      init: of an optax transform.
      update: of the transform.
      params: the parameters of one layer and of the rest, or their shapes.
    """
    # An array alone may be a stack of layers.
    tree = params if len(jax.tree.leaves(params)) > 1 else (params, params)
    shapes = jax.eval_shape(lambda x: x, tree)
    names = list(named_leaves(shapes))
    try:
        state = jax.eval_shape(init, shapes)
        program = jax.make_jaxpr(update)(shapes, state, shapes).jaxpr
    except Exception:  # A transform that wants other arguments may raise anything.
        return
    count, kept = len(names), len(jax.tree.leaves(state))
    if len(program.outvars) != count + kept:
        return
    for i, name in enumerate(names):
        wanted, used = [False] * kept, [False] * kept
        gradients = [False] * count
        while True:
            outputs = [*(j == i for j in range(count)), *wanted]
            _, inputs = partial_eval.dce_jaxpr(program, outputs)
            gradients, used = inputs[:count], inputs[count : count + kept]
            if used == wanted:
                break
            wanted = [a or b for a, b in zip(used, wanted, strict=True)]
        others = [n for n, is_used in zip(names, gradients, strict=True) if is_used and n != name]
        if others:
            raise ValueError(
                f"`tx` looks at several arrays at once: its update of `{name}` depends on the"
                f" gradient of `{others[0]}`. Here it would get one layer at a time, and compute"
                " something else. Clip with `clip` of actjax.optim.apply or in_backward; for other"
                " transforms use `tx.init`, `tx.update` and `optax.apply_updates`."
            )
