"""States of all transforms in the formats of Flax, Equinox, orbax and pickle.

It takes 10 s of processor time.
"""

import io
import pickle

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState

from actjax import optim

RNG = np.random.default_rng(0)
PARAMS = {
    "layers": {"w": jnp.asarray(RNG.normal(size=(2, 32, 32)), "bfloat16")},
    "head": jnp.asarray(RNG.normal(size=(32, 16)), "bfloat16"),
}
ADAM = optax.scale_by_adam()
TRANSFORMS = {
    "eight_bit": optim.eight_bit(ADAM, min_size=64, block=16),
    "scale_by_adam_8bit": optim.scale_by_adam_8bit(min_size=64, block=16),
    "four_bit": optim.four_bit(ADAM, min_size=64, group=16),
    "scale_by_adam_4bit": optim.scale_by_adam_4bit(min_size=64, group=16),
    "scale_by_factored_adam": optim.scale_by_factored_adam(),
    "scale_by_factored_adam_4bit": optim.scale_by_factored_adam_4bit(min_size=64, group=16),
    "subspace": optim.subspace(ADAM, 2),
    "subspace, random": optim.subspace(ADAM, 2, source="random"),
    "subspace, remainder": optim.subspace(ADAM, 2, remainder=optim.ScaledRemainder()),
    "subspace, 8 bits": optim.subspace(optim.scale_by_adam_8bit(min_size=16, block=16), 2, bits=8),
    "stochastic_rounding": optim.stochastic_rounding(optax.adam(1e-3)),
    "clip_by_global_norm": optax.chain(optim.clip_by_global_norm(0.5), optax.sgd(1e-3)),
}


def taken(name):
    """Returns the state of a transform after a step."""
    tx = TRANSFORMS[name]
    return tx.update(PARAMS, tx.init(PARAMS), PARAMS)[1]


@pytest.fixture(scope="module")
def states():
    return jax.jit(lambda: {name: taken(name) for name in TRANSFORMS})()


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_state_is_read_as_it_was_written(name, states):
    state, file = states[name], io.BytesIO()
    assert_same(flax.serialization.from_bytes(state, flax.serialization.to_bytes(state)), state)
    eqx.tree_serialise_leaves(file, state)
    file.seek(0)
    assert_same(eqx.tree_deserialise_leaves(file, state), state)
    assert_same(pickle.loads(pickle.dumps(state)), state)
    train_state = TrainState(0, None, PARAMS, TRANSFORMS[name], state)
    restored = flax.serialization.from_bytes(train_state, flax.serialization.to_bytes(train_state))
    assert_same(restored.opt_state, state)


def test_orbax_restores_all_states(tmp_path, states):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "states", {str(i): x for i, x in enumerate(states.values())})
        checkpointer.wait_until_finished()
        like = {str(i): jax.eval_shape(lambda x=x: x) for i, x in enumerate(states.values())}
        restored = checkpointer.restore(tmp_path / "states", like)
    for i, state in enumerate(states.values()):
        assert_same(restored[str(i)], state)


def test_every_transform_is_in_the_table():
    made = {name for name in vars(optim) if name.startswith(("scale_by", "eight", "four", "subsp"))}
    assert made <= {name.partition(",")[0] for name in TRANSFORMS}
