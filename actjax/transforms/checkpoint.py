"""Running a function again in the backward pass, from a code of what it was given.

`jax.checkpoint` keeps the arguments of a function and recomputes the rest. Kept as a code, an
argument takes a fraction of that; the recomputation then starts from the decoded argument, as GACT
(Liu et al., 2022, section 5.5) does with checkpointed segments. Where a function is cheap up to the
products whose outputs its backward pass does not read, nothing but the cheap part is recomputed:
that is how a linear operator's input is rebuilt from what the operator before it keeps.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from actjax._core.coded_call import coded_call
from actjax._jaxpr.programs import close
from actjax.codecs import Codec, Quantized
from actjax.transforms.checks import check_function, check_positions, positions_of


def checkpoint(
    fun: Callable[..., Any],
    codec: Codec = Quantized(4),
    *,
    activations: int | Sequence[int] = 0,
    key: jax.Array | None = None,
    name: str = "checkpoint",
) -> Callable[..., Any]:
    """Returns `fun`, of which the backward pass keeps a code of its input and nothing else.

    As `jax.checkpoint(fun)`, but that its activations are stored by `codec` and decoded again. The
    value is exact. The gradient is that of `fun` at the decoded activations, in the accumulation of
    JAX: an error of the codec reaches what `fun` was fed by, unlike that of a linear operator.

        def layer(x, weights): ...
        x = actjax.checkpoint(layer, Quantized(4))(x, weights)

    Works under `jit`, `lax.scan` and `vmap`, may close over arrays, and may be nested.

    Args:
      fun: a function of arrays and pytrees of them. What is passed by name may be static, and its
        arrays are closed over.
      codec: what is stored of each activation. `Exact()` gives what `jax.checkpoint` does.
      activations: positions of the arguments of which all floating point arrays, but for scalars,
        are stored as a code. Other arguments, and what `fun` closes over, are kept as they are:
        weights that stay alive anyway cost nothing.
      key: randomness of the encoding; consumed. Needed if `codec.needs_key`.
      name: what `actjax.explain` calls the stored activations.

    Raises:
      TypeError: `fun` is no function, `codec` no codec, `activations` are no positions; when
        called: an argument that is no array.
      ValueError: when called: a position that is not there, a missing key.
    """
    check_function(fun, "checkpoint")
    if not isinstance(codec, Codec):
        raise TypeError(f"`codec` of checkpoint must be an actjax.Codec, got {codec!r}.")
    positions = positions_of(activations, "checkpoint")

    @functools.wraps(fun)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        check_positions(positions, args, "checkpoint")
        closed = close(functools.partial(fun, **kwargs), args)
        owners = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
        coded = [
            i
            for i, (owner, leaf) in enumerate(zip(owners, closed.arguments, strict=True))
            if owner in positions and _can_be_coded(leaf)
        ]
        given = [closed.arguments[i] for i in coded]
        rest = [None if i in coded else x for i, x in enumerate(closed.arguments)]

        def run(activations: Any, others: Any) -> Any:
            constants, rest = others
            filled = iter(activations)
            return closed.run(constants, [next(filled) if x is None else x for x in rest])

        names = [name if len(coded) == 1 else f"{name} {i}" for i in range(len(coded))]
        outputs = coded_call(
            run, given, (closed.constants, rest), [codec] * len(coded), key, "checkpoint", names
        )
        return closed.unflatten(outputs)

    return checkpointed


def _can_be_coded(x: Any) -> bool:
    """Returns whether `x` is an array of floating point numbers with features, and not empty."""
    return jnp.ndim(x) > 0 and jnp.size(x) > 0 and jnp.issubdtype(jnp.result_type(x), jnp.floating)
