import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG as MODEL
from tiny import batch as tokens_and_targets

from actjax import RandomizedSVD
from models import Storage
from train.config import PretrainConfig
from train.sharding import batch_sharding, make_mesh, state_shardings
from train.step import init_state, make_eval_step, make_train_step

CONFIG = PretrainConfig(batch_size=4, seq_len=16, compute_dtype="float32", steps=10)
LOSSY = Storage(mlp_in=RandomizedSVD(4))


def batch():
    tokens, targets = tokens_and_targets(rows=4, length=16)
    # The rows hold different numbers of tokens that count.
    mask = (jnp.arange(16) < jnp.array([16, 3, 9, 1])[:, None]).astype(jnp.float32)
    return {"inputs": tokens, "targets": targets, "mask": mask}


def after(config: PretrainConfig, storage: Storage = Storage(), steps: int = 3):
    step = jax.jit(make_train_step(config, storage))
    state, losses = init_state(config, MODEL), []
    for _ in range(steps):
        state, metrics = step(state, batch())
        losses.append(float(metrics["loss"]))
    return state, losses


def test_a_step_lowers_the_loss_and_counts():
    state, losses = after(CONFIG, steps=6)
    assert losses[-1] < losses[0]
    assert int(state.step) == 6


def test_the_same_run_gives_the_same_bits():
    one, other = after(CONFIG, LOSSY)[0], after(CONFIG, LOSSY)[0]
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_keys_differ_from_step_to_step_and_from_seed_to_seed():
    # At a learning rate of zero nothing but the keys changes.
    still = dataclasses.replace(
        CONFIG, optimizer=dataclasses.replace(CONFIG.optimizer, learning_rate=0.0, warmup_steps=1)
    )
    step = jax.jit(make_train_step(still, LOSSY))
    state, first = step(init_state(still, MODEL), batch())
    _, second = step(state, batch())
    assert first["loss"] == second["loss"]
    assert first["grad_norm"] != second["grad_norm"]


@pytest.mark.parametrize("count", [2, 4])
def test_accumulation_gives_the_gradient_of_the_whole_batch(count):
    whole, losses = after(CONFIG)
    parts, accumulated = after(dataclasses.replace(CONFIG, accumulate=count))
    np.testing.assert_allclose(accumulated, losses, rtol=1e-5)
    # Adam divides by the gradient's own size, so rounding shows relative to the learning rate.
    for a, b in zip(jax.tree.leaves(parts.model), jax.tree.leaves(whole.model), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-2 * CONFIG.optimizer.learning_rate)


def test_evaluation_sums_over_the_tokens_that_count():
    state = init_state(CONFIG, MODEL)
    data = batch()
    total = make_eval_step(dataclasses.replace(CONFIG, z_loss=1.0))(state.model, data)
    alone = [
        make_eval_step(CONFIG)(state.model, {k: v[i : i + 1] for k, v in data.items()})
        for i in range(4)
    ]
    np.testing.assert_allclose(total, sum(alone), rtol=1e-5)


def test_four_devices_give_the_loss_of_one():
    mesh = make_mesh("fsdp=4")
    state = init_state(CONFIG, MODEL)
    shardings = state_shardings(state, mesh)
    sharded = jax.device_put(state, shardings)
    data = jax.device_put(batch(), batch_sharding(mesh))
    losses = []
    with jax.set_mesh(mesh):
        step = jax.jit(make_train_step(CONFIG, LOSSY), out_shardings=(shardings, None))
        for _ in range(3):
            sharded, metrics = step(sharded, data)
            losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, after(CONFIG, LOSSY)[1], rtol=1e-5)
    same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), sharded, shardings)
    assert all(jax.tree.leaves(same))
