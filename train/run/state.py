"""The first state of a run, and where its arrays are."""

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval
from jax.sharding import Mesh

from actjax.optim.states.host_states import HOST
from train.run.recipe import Recipe
from train.run.sharding import moments_on_host, state_shardings, with_sharding
from train.run.step import TrainState, init_state

_TOGETHER = 2**26
"""Bytes of the arrays that one program makes. Small models are made in one, which begins sooner."""


def shardings_of_run(recipe: Recipe, shapes: TrainState, mesh: Mesh) -> TrainState:
    """Returns where each array of the training state is.

    Raises:
      ValueError: states are to be kept on the host, and a device reaches no memory there.
    """
    shardings = state_shardings(shapes, mesh)
    if not recipe.config.optimizer.offload_states:
        return shardings
    placed = moments_on_host(jax.tree.map(with_sharding, shapes.optimizer, shardings.optimizer))
    return dataclasses.replace(shardings, optimizer=jax.tree.map(lambda x: x.sharding, placed))


def first_state(recipe: Recipe, shardings: TrainState, *models: Any) -> TrainState:
    """Returns the state before the first step, where `shardings` says.

    Large arrays are made one at a time, and those whose programs take most memory first, while
    there are few others: one program for all would take more than a step does. An array for the
    host is made on the device, where one such array exists at a time.

    Args:
      recipe: the run.
      shardings: a sharding for each array.
      *models: the pretrained decoder, whose arrays are those of the state; nothing to draw one.
    """
    places, treedef = jax.tree.flatten(shardings)
    given = jax.tree.leaves(models)
    init, shapes = jax.make_jaxpr(functools.partial(init_state, recipe), return_shape=True)(*models)
    made = _given(init.jaxpr, given)
    missing = [(i, x) for i, x in enumerate(jax.tree.leaves(shapes)) if i not in made]
    on_host = {i for i, _ in missing if places[i].memory_kind == HOST}
    programs = []
    for indices in _groups(missing, on_host):
        wanted = [i in indices for i in range(len(places))]
        part, _ = partial_eval.dce_jaxpr(init.jaxpr, wanted, instantiate=True)
        stays = not on_host.issuperset(indices)
        targets = [places[i] for i in indices] if stays else None
        fun = core.jaxpr_as_fun(core.ClosedJaxpr(part, init.consts))
        program = jax.jit(fun, out_shardings=targets).lower(*given).compile()
        stats: Any = program.memory_analysis()
        programs.append((stays, -stats.temp_size_in_bytes, indices, program))
    # Those for the host while the device has nothing else, then by workspace.
    for _, _, indices, program in sorted(programs, key=lambda x: x[:3]):
        for i, array in zip(indices, program(*given), strict=True):
            made[i] = jax.device_put(array, places[i]) if i in on_host else array
            # Programs on the host would run side by side.
            jax.block_until_ready(made[i])
            del array  # From the device, if it is for the host.
    return jax.tree.unflatten(treedef, [made[i] for i in range(len(places))])


def _given(init: core.Jaxpr, given: Sequence[jax.Array]) -> dict[int, jax.Array]:
    """Returns, by its index in the state, each array that the state takes as it was given."""
    arrays = {id(x): array for x, array in zip(init.invars, given, strict=True)}
    # An array that the state has twice is copied.
    return {i: arrays.pop(id(x)) for i, x in enumerate(init.outvars) if id(x) in arrays}


def _groups(leaves: Sequence[tuple[int, Any]], alone: Collection[int]) -> list[list[int]]:
    """Returns the indices of arrays that one program makes: of many small ones, or of one."""
    groups, size = list[list[int]](), math.inf
    for i, x in leaves:
        one = math.prod(x.shape) * x.dtype.itemsize
        if size + one > _TOGETHER or i in alone:
            groups.append([])
            size = 0
        size += math.inf if i in alone else one
        groups[-1].append(i)
    return groups
