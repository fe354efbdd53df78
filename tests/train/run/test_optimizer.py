"""The optimizers of the programs: schedule, decay, dtypes of moments."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import decoder, gradients

import actjax
from actjax.optim.states.stored import is_code
from train.run.optimizer import learning_rate_schedule, make_optimizer
from train.settings.config import OptimizerConfig

FLOAT32 = OptimizerConfig(moment_dtype="float32")
CONFIG = dataclasses.replace(FLOAT32, learning_rate=1e-2, warmup_steps=4)


def trained(optimizer, model, steps: int = 5):
    state = jax.jit(functools.partial(actjax.optim.init, optimizer))(model)

    @jax.jit
    def step(model, state):
        return actjax.optim.apply(optimizer, gradients(model), state, model)

    for _ in range(steps):
        model, state = step(model, state)
    return model, state


def test_the_schedule_warms_up_and_ends_at_its_share():
    schedule = learning_rate_schedule(CONFIG, 100)
    rates = np.array([schedule(step) for step in range(101)])
    assert rates[0] == pytest.approx(1e-2 / 4)
    assert rates.argmax() == 4
    assert rates[4] == pytest.approx(1e-2)
    assert rates[100] == pytest.approx(1e-3)
    assert (np.diff(rates[4:]) <= 0).all()


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_schedule_of_a_short_run_is_finite_and_positive(steps, warmup):
    config = OptimizerConfig(learning_rate=1e-2, warmup_steps=warmup)
    schedule = learning_rate_schedule(config, steps)
    assert all(0 < schedule(step) <= CONFIG.learning_rate for step in range(steps))


def test_matrices_decay_and_norms_do_not():
    model = decoder()
    plain, _ = trained(make_optimizer(dataclasses.replace(FLOAT32, weight_decay=0.0), 10), model)
    decayed, _ = trained(make_optimizer(dataclasses.replace(FLOAT32, weight_decay=0.5), 10), model)
    for get in (lambda m: m.norm, lambda m: m.layers.attention_norm, lambda m: m.layers.mlp_norm):
        np.testing.assert_array_equal(get(plain)[...], get(decayed)[...])
    for get in (lambda m: m.embedding, lambda m: m.layers.attention.q, lambda m: m.output):
        assert jnp.linalg.norm(get(decayed)[...]) < jnp.linalg.norm(get(plain)[...])


def test_float32_moments_are_those_of_optax():
    model = decoder()
    rival = optax.adamw(learning_rate_schedule(CONFIG, 10), b1=0.9, b2=0.95, weight_decay=0.0)
    ours, _ = trained(make_optimizer(dataclasses.replace(CONFIG, weight_decay=0.0), 10), model)
    state = rival.init(model)
    for _ in range(5):
        updates, state = rival.update(gradients(model), state, model)
        model = optax.apply_updates(model, updates)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(model), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_bfloat16_moments_are_updated_in_float32():
    model = decoder()
    wide, _ = trained(make_optimizer(CONFIG, 10), model)
    config = OptimizerConfig(1e-2, 4, moment_dtype="bfloat16")
    narrow, state = trained(make_optimizer(config, 10), model)
    moments = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in moments} == {jnp.dtype(jnp.bfloat16)}
    moved = jnp.abs(wide.output[...] - model.output[...]).max()
    # Each step rounds the moments once, with relative error 2^-9.
    assert jnp.abs(wide.output[...] - narrow.output[...]).max() < 0.05 * moved


def test_8_bit_moments_take_a_byte_and_stay_close():
    # 64 x 64 weights per layer: the least size that is compressed.
    params = {"layers": jnp.ones((2, 64, 64)), "norm": jnp.ones(8)}
    wide, _ = trained(make_optimizer(CONFIG, 10), params)
    config = OptimizerConfig(1e-2, 4, moment_dtype="8bit")
    narrow, state = trained(make_optimizer(config, 10), params)
    sizes = {x.dtype.name: x.size for x in jax.tree.leaves(state) if x.shape[-2:] == (64, 64)}
    assert sizes == {"int8": 2 * 64 * 64, "uint8": 2 * 64 * 64}
    moved = jnp.abs(wide["layers"] - 1).max()
    # Entries far below the largest of their block have larger errors; the mean error is 1%.
    assert jnp.abs(wide["layers"] - narrow["layers"]).mean() < 0.02 * moved


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("adamw", "4bit"), ("adafactor", "float32"), ("lion", "4bit"), ("sgd", "8bit")),
        ("muon", "4bit"),
    ],
)
def test_every_optimizer_moves_every_weight(name, dtype):
    rng = np.random.default_rng(0)
    shapes = {"layers.w": (2, 64, 96), "layers.norm": (2, 64), "embedding": (64, 64)}
    weights = {k: jnp.asarray(rng.normal(size=shape), "float32") for k, shape in shapes.items()}
    params = {
        "layers": {"w": weights["layers.w"], "norm": weights["layers.norm"]},
        "embedding": weights["embedding"],
    }
    config = OptimizerConfig(1e-2, 1, moment_dtype=dtype, optimizer=name)
    moved, state = trained(make_optimizer(config, 10), params, steps=2)
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(moved), strict=True):
        change = np.abs(np.asarray(after - before))
        # Updates of these optimizers are about as large as the learning rate, or as the gradient.
        assert 1e-6 < change.mean() < 0.1
    codes = [x for x in jax.tree.leaves(state, is_leaf=is_code) if is_code(x)]
    assert bool(codes) == (dtype in ("4bit", "8bit"))


def test_a_subspace_wraps_the_moments_and_not_the_decay():
    made = {}

    def subspace(inner, outer):
        made.update(inner=inner, outer=outer)
        return actjax.optim.subspace(inner, 4, outer=outer)

    params = {"w": jnp.ones((16, 8))}
    config = dataclasses.replace(FLOAT32, learning_rate=1e-2, warmup_steps=1, weight_decay=0.5)
    tx = make_optimizer(config, 10, subspace)
    zeros = {"w": jnp.zeros((16, 8))}
    updates, _ = tx.update(zeros, tx.refresh(zeros, tx.init(params), params), params)
    # With a zero gradient only decay changes the weights, in the full space.
    np.testing.assert_allclose(updates["w"], -1e-2 * 0.5, rtol=1e-6)
    assert set(made) == {"inner", "outer"}


def test_bfloat16_weights_learn_what_float32_weights_learn():
    # Five updates of 1e-5; weights of 0.02 are 1.2e-4 apart.
    config = dataclasses.replace(FLOAT32, learning_rate=1e-5, warmup_steps=1)
    rng = np.random.default_rng(0)
    start = jnp.asarray(0.02 * rng.normal(size=(2, 64, 96)), jnp.bfloat16)
    grads = {"layers": jnp.asarray(rng.normal(size=start.shape), jnp.bfloat16)}

    def moved(tx, dtype):
        @jax.jit
        def run(params):
            state = actjax.optim.init(tx, params)
            for _ in range(5):
                params, state = actjax.optim.apply(tx, grads, state, params)
            return params["layers"].astype(jnp.float32) - start.astype(jnp.float32)

        return np.asarray(run({"layers": start.astype(dtype)}))

    want = moved(make_optimizer(config, 10), jnp.float32)
    tx = make_optimizer(config, 10, None, "stochastic", seed=3)
    assert tx.rounding.seed == 3
    got = moved(tx, jnp.bfloat16)
    spacing = 2.0**-7 * (np.abs(np.asarray(start, np.float32)) + 5e-5)
    # Five roundings to one of two neighbours.
    assert np.all(np.abs(got - want) <= 5 * spacing)
    share, nearest = (
        np.vdot(x, want) / np.vdot(want, want)
        for x in (got, moved(make_optimizer(config, 10), jnp.bfloat16))
    )
    assert nearest < 0.25
    # Five roundings, each with a variance of at most a quarter of the spacing squared.
    deviation = (5 / 4) ** 0.5 * np.linalg.norm(spacing * want) / np.vdot(want, want)
    assert abs(share - 1) < 5 * deviation < 0.2


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((2048, 5461), 256),  # Rows can be divided.
        ((5461, 2048), 32),  # 64 blocks in a row.
        ((2736, 1024), 32),  # 16 devices can divide the rows, 32 the columns.
        ((1708, 640), 256),  # Shorter blocks do not help.
        ((8192,), 128),
    ],
)
def test_blocks_of_eight_bit_moments_can_be_divided_over_many_devices(shape, block):
    tx = make_optimizer(OptimizerConfig(1e-2, 4, moment_dtype="8bit"), 10)
    state = jax.eval_shape(tx.init, jax.ShapeDtypeStruct(shape, "float32"))
    mu, *_ = (x for x in jax.tree.leaves(state, is_leaf=is_code) if is_code(x))
    assert mu.block == block
    assert mu.scales.shape[-1] == -(-shape[-1] // block)
