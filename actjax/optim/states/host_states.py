"""Optimizer states in the memory of the host, of which a device holds those of one layer.

A step that gets a state with arrays in host memory keeps them there: it fetches the state of a
layer while the layer's gradient is computed, and writes it back after the update. Nothing else in
the step changes. The bus moves each state twice in a step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from actjax._core.paths import path_name
from actjax._host import is_on_host, reads_wrong
from actjax.optim.layers import LayerwiseState
from actjax.optim.states.stored import FIRST_MOMENTS, SECOND_MOMENTS

HOST = "pinned_host"
"""Name of the memory that a device can copy from and to while it computes."""
_MOVED = {*FIRST_MOMENTS, *SECOND_MOMENTS}
"""Fields of states that are only read in an update; others, such as bases, are read before."""
_SMALL = {"scales", "rows", "columns"}
"""Parts of codes that stay: each would be a transfer, and all are 2% of the codes."""


def to_host(state: Any, *, smallest: int = 2**20) -> Any:
    """Returns the state of `actjax.optim.init` or `in_backward` with large moments on the host.

    It moves one array after the other. The moments of layers are moved, and those of matrices that
    are updated in pieces (`actjax.optim.stepping.pieces`). Give the state to a jitted step that
    returns parameters and state in the order of its arguments: the moments stay where they are.
    Donate both or neither: JAX may give the buffer of a moment on the host to a result on the
    device.

        state = actjax.optim.to_host(actjax.optim.init(tx, params))

    Where a device shares the memory of the host, as a CPU does, nothing is saved.

    Args:
      state: a `LayerwiseState` or an `InBackwardState`, of arrays, or of shapes with shardings.
      smallest: bytes of the smallest array that is moved.

    Raises:
      TypeError: another state.
      ValueError: a device without memory of the host that it can reach, or arrays without sharding.
    """
    if hasattr(state, "optimizer") and hasattr(state, "_replace"):
        return state._replace(optimizer=to_host(state.optimizer, smallest=smallest))
    if not isinstance(state, LayerwiseState):
        raise TypeError(
            "`state` of to_host must be what `actjax.optim.init` or `in_backward(...).init`"
            f" returned, got {type(state).__name__}."
        )

    def move(path: Any, x: Any) -> Any:
        names = path_name(path).split(".")
        size = x.size * jnp.dtype(x.dtype).itemsize
        if x.ndim < 2 or size < smallest or not _MOVED & set(names) or names[-1] in _SMALL:
            return x
        sharding = host_sharding(x.sharding)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.device_put(x, sharding)

    layers, pieces = (
        jax.tree_util.tree_map_with_path(move, part) for part in (state.layers, state.pieces)
    )
    return state._replace(layers=layers, pieces=pieces)


def host_sharding(sharding: Any) -> Any:
    """Returns the same division over devices, in the memory of the host.

    Raises:
      ValueError: a device has no such memory.
    """
    if sharding is None:
        raise ValueError("shapes need shardings to be placed on the host.")
    if sharding.memory_kind == HOST:
        return sharding
    devices = sharding.device_set
    # A device that is only compiled for has no memories. Its sharding would lose the kind of memory
    # without an error, unless its mesh is abstract.
    is_concrete = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    if is_concrete and not any(device.addressable_memories() for device in devices):
        mesh = sharding.mesh.abstract_mesh
        return NamedSharding(mesh, sharding.spec, memory_kind=HOST)
    for device in devices:
        kinds = sorted(memory.kind for memory in device.addressable_memories())
        if HOST not in kinds:
            raise ValueError(
                f"optimizer states cannot be kept on the host: {device.device_kind} reaches the"
                f" memories {', '.join(kinds) or 'none'}, and not {HOST}. Keep them on the device,"
                " in fewer bits (actjax.optim.four_bit)."
            )
    return sharding.with_memory_kind(HOST)


def read_before_writing(states: Any, *others: Any) -> tuple[Any, ...]:
    """Returns its arguments; all of them exist before what comes after reads one.

    If stacks on the host were written before the slices among `others` are read, XLA would copy the
    whole stacks. Without arrays on the host this does nothing.
    """
    if not any(map(is_on_host, jax.tree.leaves(states))):
        return states, *others
    return jax.lax.optimization_barrier((states, *others))


def downwards(count: int, body: Callable[[Any, Any], Any], carry: Any, *stacks: Any) -> Any:
    """Returns the carry of a loop `carry = body(i, carry)` over `i = count - 1, ..., 0`.

    Args:
      count: number of iterations.
      body: its body.
      carry: what it starts with.
      *stacks: what is read at `i`, some of it perhaps on the host.
    """
    on_host = any(map(is_on_host, jax.tree.leaves(stacks)))
    if not (on_host and reads_wrong()):
        return jax.lax.fori_loop(0, count, lambda n, c: body(count - 1 - n, c), carry)
    # A loop that counts down has no index that is computed from its counter.
    start = jnp.asarray(count - 1, jnp.int32), carry
    return jax.lax.while_loop(lambda c: c[0] >= 0, lambda c: (c[0] - 1, body(*c)), start)[1]
