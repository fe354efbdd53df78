"""The first state of a run, and where its arrays are."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from actjax.optim.states.host_states import HOST
from train.run.recipe import Recipe
from train.run.sharding import moments_on_host, state_shardings, with_sharding
from train.run.step import TrainState, init_state


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

    An array for the host is made on the device first: one such array exists there at a time.

    Args:
      recipe: the run.
      shardings: a sharding for each array.
      *models: the pretrained decoder, which is donated; nothing to draw one.
    """
    places, treedef = jax.tree.flatten(shardings)

    def arrays(indices: Sequence[int], *models: Any) -> list[jax.Array]:
        leaves = jax.tree.leaves(init_state(recipe, *models))
        return [leaves[i] for i in indices]

    made: dict[int, jax.Array] = {}
    for i in [i for i, place in enumerate(places) if place.memory_kind == HOST]:
        (array,) = jax.jit(functools.partial(arrays, [i]))(*models)
        made[i] = jax.device_put(array, places[i])
    others = [i for i in range(len(places)) if i not in made]
    rest = jax.jit(
        functools.partial(arrays, others),
        donate_argnums=tuple(range(len(models))),
        out_shardings=[places[i] for i in others],
    )
    made |= zip(others, rest(*models), strict=True)
    return jax.tree.unflatten(treedef, [made[i] for i in range(len(places))])
