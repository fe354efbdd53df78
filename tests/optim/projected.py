"""Helpers of the tests of `subspace`."""

from typing import Any

import jax
import numpy as np
import optax

from actjax import optim

ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}
RATE = 0.1


def outer(weight_decay: float = 0.0) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(weight_decay), optax.scale_by_learning_rate(RATE))


def subspace(rank: int, **options: Any) -> optim.SubspaceTransformation:
    weight_decay = options.pop("weight_decay", 0.0)
    return optim.subspace(optax.scale_by_adam(**ADAM), rank, outer=outer(weight_decay), **options)


def first_state(tx: optim.SubspaceTransformation, params: Any) -> optim.SubspaceState:
    """Returns the first state as `actjax.optim.init` makes it: its bases are used as they are."""
    key = jax.random.key(tx.subspace.seed)
    return tx.subspace.init_from(params, key)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)
