"""Rematerialization from codes: a function runs again in the backward pass on decoded arguments.

`jax.checkpoint` stores the arguments of a function and recomputes the rest. A code of an argument
takes a fraction of that memory; the recomputation then starts from the decoded argument, as GACT
(Liu et al., 2022, section 5.5) does with checkpointed segments.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from actjax._core.coded_call import coded_call
from actjax.codecs import Codec, Quantized
from actjax.residuals.arrays_alone import open_function
from actjax.residuals.checks import check_function, check_positions, positions_of
from actjax.residuals.chunks import InChunks
from actjax.residuals.graph.programs import close
from actjax.residuals.graph.variables import is_floating


def checkpoint(
    fun: Callable[..., Any],
    codec: Codec = Quantized(4),
    *,
    activations: int | Sequence[int] = 0,
    key: jax.Array | None = None,
    chunk: int | None = None,
    axis: int = 0,
    name: str = "checkpoint",
) -> Callable[..., Any]:
    """Returns `fun` with a backward pass that stores only codes of its activations.

    Like `jax.checkpoint(fun)`, but `codec` stores the activations, and the backward pass decodes
    them. The value is exact. The gradient is the gradient of `fun` at the decoded activations.
    Unlike with a linear operator, the error of the codec also reaches the layers before `fun`.

        def layer(x, weights): ...
        x = actjax.checkpoint(layer, Quantized(4))(x, weights)

    Works under `jit`, `lax.scan` and `vmap`, may close over arrays, and may be nested. `fun` may
    write into Flax nnx modules among its arguments, such as the statistics of a batch norm.

    A function that treats the tokens of a long sequence separately, such as a feed-forward network,
    can run on a chunk of them at a time. Its intermediate arrays are then those of one chunk, in
    both passes. A function that mixes tokens, such as attention, gives wrong results without an
    error: each chunk would see only its own tokens.

        mlp = actjax.checkpoint(mlp, Exact(), chunk=8192, axis=1)  # x [B, S, d]

    Gradients of weights are summed over the chunks in float32.

    Args:
      fun: a function of arrays and pytrees of them. Leaves that are not arrays, such as Python
        numbers, are static. Arrays in keyword arguments are closed over.
      codec: how each activation is stored. With `Exact()` this is `jax.checkpoint`.
      activations: positions of the arguments whose floating point arrays, except scalars, are
        stored as codes. Other arguments, and arrays that `fun` closes over, are stored unchanged;
        weights that stay alive anyway cost nothing.
      key: randomness of the encoding; consumed. Required if `codec.needs_key`.
      chunk: length of a chunk along `axis`; None for one chunk. The last one may be shorter. Under
        a mesh, no device axis may divide `axis`, or the devices wait for each other.
      axis: the axis of all activations and outputs that is cut into chunks, counted from the first.
      name: name of the stored activations in `actjax.explain`.

    Raises:
      TypeError: `fun` is not a function, `codec` is not a codec, `activations` are not positions,
        or `chunk` or `axis` is no integer.
      ValueError: `chunk` or `axis` is out of range; when called: a position without an argument, a
        missing key, or activations or outputs without `axis`, or with other lengths along it.
    """
    check_function(fun, "checkpoint")
    if chunk is not None:
        _check_integer("chunk", chunk, least=1)
    _check_integer("axis", axis, least=0)
    if not isinstance(codec, Codec):
        raise TypeError(f"`codec` of checkpoint must be an actjax.Codec, got {codec!r}.")
    positions = positions_of(activations, "checkpoint")

    @functools.wraps(fun)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        check_positions(positions, args, "checkpoint")
        opened = open_function(functools.partial(fun, **kwargs), args, "checkpoint")
        leaves, treedef = jax.tree.flatten(opened.args)
        owners = [i for i, arg in enumerate(opened.args) for _ in jax.tree.leaves(arg)]
        coded = [
            i
            for i, (owner, leaf) in enumerate(zip(owners, leaves, strict=True))
            if owner in positions and is_floating(leaf) and leaf.ndim > 0 and leaf.size > 0
        ]
        coded_leaves = [leaves[i] for i in coded]
        size = _chunk_size(coded_leaves, chunk, axis)
        if size is not None:
            for i in coded:
                leaves[i] = jax.lax.slice_in_dim(leaves[i], 0, size, axis=axis)
        closed = close(opened.fun, jax.tree.unflatten(treedef, leaves))
        uncoded = [None if i in coded else x for i, x in enumerate(closed.arguments)]
        # Constants that are not traced need no gradient. JAX must not try to compute one: operators
        # with their own backward pass, such as products with NF4 weights, capture such constants.
        traced = [x for x in closed.constants if isinstance(x, Tracer)]
        known = [None if isinstance(x, Tracer) else x for x in closed.constants]
        jaxpr = closed.jaxpr  # `run` outlives this trace and must not keep the tracers of `closed`.

        def run(activations: Any, others: Any) -> Any:
            traced, uncoded = others
            program = core.ClosedJaxpr(jaxpr, _filled(known, traced))
            return core.jaxpr_as_fun(program)(*_filled(uncoded, activations))

        names = [name if len(coded) == 1 else f"{name} {i}" for i in range(len(coded))]
        outputs = coded_call(
            run if size is None else InChunks(run, size, axis),
            coded_leaves,
            (traced, uncoded),
            [codec] * len(coded),
            key,
            "checkpoint",
            names,
        )
        return opened.finish(closed.unflatten(outputs))

    return checkpointed


def _check_integer(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` of checkpoint must be an integer, got {value!r}.")
    if value < least:
        raise ValueError(f"`{name}` of checkpoint must be at least {least}, got {value}.")


def _chunk_size(activations: Sequence[Any], chunk: int | None, axis: int) -> int | None:
    """Returns the length of a chunk; None if the activations are one chunk."""
    if chunk is None or not activations:
        return None
    shapes = [jnp.shape(x) for x in activations]
    if any(len(shape) <= axis or shape[axis] != shapes[0][axis] for shape in shapes):
        raise ValueError(
            f"activations of checkpoint are cut into chunks along `axis` {axis}, so they must have"
            f" this axis, of one length: got shapes {', '.join(map(str, shapes))}."
        )
    return chunk if chunk < shapes[0][axis] else None


def _filled(places: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Returns `places` with the values, in order, in place of None."""
    left = iter(values)
    return [next(left) if x is None else x for x in places]
