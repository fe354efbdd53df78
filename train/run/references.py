"""Log-probabilities of preference pairs under the checkpoint, before all its weights are trained.

Adapters can be turned off, so that a step of adapters computes these itself.
"""

import functools
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from train.run import hosts
from train.run.loss import response_log_probs
from train.run.pretrained import read_model
from train.run.progress import saying
from train.run.recipe import Recipe
from train.run.sharding import batch_sharding
from train.run.state import shardings_of_run
from train.run.step import init_state
from train.text.packing import pack_pairs, pair_batches
from train.text.pairs import Pair


def with_references(
    pairs: Sequence[Pair],
    recipe: Recipe,
    mesh: Mesh,
    checkpoint: pathlib.Path,
    pad_id: int,
    console: Console,
) -> list[Pair]:
    """Returns pairs with the log-probabilities of their responses under a checkpoint.

    Args:
      pairs: the pairs.
      recipe: the run, whose batch size and dtypes are used.
      mesh: its devices.
      checkpoint: the checkpoint.
      pad_id: id of padding.
      console: where to say that this takes time.
    """
    config = recipe.config
    shapes = jax.eval_shape(functools.partial(init_state, recipe))
    model = read_model(checkpoint, recipe, shardings_of_run(recipe, shapes, mesh).model)
    rows = pack_pairs(pairs, config.seq_len)
    place = functools.partial(hosts.place, sharding=batch_sharding(mesh))
    sizes = {"batch_size": config.batch_size, "seq_len": config.seq_len, "pad_id": pad_id}
    log_probs = jax.jit(functools.partial(response_log_probs, config))
    said = f"computing the log-probabilities of {len(pairs):,} pairs under the checkpoint"
    with jax.set_mesh(mesh), saying(console, said):
        found = [
            np.asarray(log_probs(model, jax.tree.map(place, batch)))
            for batch in pair_batches(rows, **sizes)
        ]
    sums = np.concatenate(found)
    known = {
        id(pair): (float(sums[2 * line, place]), float(sums[2 * line + 1, place]))
        for line, row in enumerate(rows)
        for place, pair in enumerate(row)
    }
    return [pair._replace(reference=known[id(pair)]) for pair in pairs]
