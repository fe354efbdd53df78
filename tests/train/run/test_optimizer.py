"""The optimizers of the programs: schedule, decay, dtypes of moments."""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import decoder, gradients

import actjax
from actjax.optim.states.stored import is_code
from train.run.optimizer import learning_rate_schedule, make_optimizer
from train.settings.config import Optimizer, OptimizerConfig, PretrainConfig
from train.settings.resolve import dimensions, resolve

FLOAT32 = OptimizerConfig(moment_dtype="float32")
CONFIG = dataclasses.replace(FLOAT32, learning_rate=1e-2, warmup_steps=4, weight_decay=0.0)
STEPS = 5


def train(optimizer, params, steps: int = STEPS, grads=gradients):
    """Returns the weights and the state after some steps with equal gradients."""

    def step(carry, _):
        params, state = carry
        return actjax.optim.apply(optimizer, grads(params), state, params), None

    first = params, actjax.optim.init(optimizer, params)
    return jax.lax.scan(step, first, length=steps)[0]


def schedule_of(config: OptimizerConfig, steps: int, count: int) -> np.ndarray:
    rates = jax.jit(jax.vmap(learning_rate_schedule(config, steps)))(np.arange(count))
    return np.asarray(rates)


def test_the_schedule_warms_up_and_ends_at_its_share():
    rates = schedule_of(CONFIG, 100, 101)
    assert rates[0] == pytest.approx(1e-2 / 4)
    assert rates.argmax() == 4
    assert rates[4] == pytest.approx(1e-2)
    assert rates[100] == pytest.approx(1e-3)
    assert (np.diff(rates[4:]) <= 0).all()


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_schedule_of_a_short_run_is_finite_and_positive(steps, warmup):
    config = OptimizerConfig(learning_rate=1e-2, warmup_steps=warmup)
    rates = schedule_of(config, steps, steps)
    assert np.all((rates > 0) & (rates <= np.float32(CONFIG.learning_rate)))


@pytest.fixture(scope="module")
def trained():
    """A decoder, trained in one program: by optimizer, its weights and the optimizer's state."""
    configs = {
        "float32": CONFIG,
        "decayed": dataclasses.replace(CONFIG, weight_decay=0.5),
        "bfloat16": dataclasses.replace(CONFIG, moment_dtype="bfloat16"),
    }
    rival = optax.adamw(learning_rate_schedule(CONFIG, 10), b1=0.9, b2=0.95, weight_decay=0.0)

    @jax.jit
    def run(model):
        def step(carry, _):
            model, state = carry
            updates, state = rival.update(gradients(model), state, model)
            return (optax.apply_updates(model, updates), state), None

        results = {name: train(make_optimizer(one, 10), model) for name, one in configs.items()}
        first = model, rival.init(model)
        return {**results, "optax": jax.lax.scan(step, first, length=STEPS)[0]}

    return {"start": (decoder(), None), **run(decoder())}


def test_matrices_decay_and_norms_do_not(trained):
    plain, decayed = trained["float32"][0], trained["decayed"][0]
    for get in (lambda m: m.norm, lambda m: m.layers.attention_norm, lambda m: m.layers.mlp_norm):
        np.testing.assert_array_equal(get(plain)[...], get(decayed)[...])
    for get in (lambda m: m.embedding, lambda m: m.layers.attention.q, lambda m: m.output):
        small, large = (np.linalg.norm(get(model)[...]) for model in (decayed, plain))
        assert small < large


def test_float32_moments_are_those_of_optax(trained):
    ours, theirs = (jax.tree.leaves(trained[name][0]) for name in ("float32", "optax"))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_bfloat16_moments_are_updated_in_float32(trained):
    start, wide, narrow = (
        np.asarray(trained[name][0].output[...]) for name in ("start", "float32", "bfloat16")
    )
    moments = [x for x in jax.tree.leaves(trained["bfloat16"][1]) if x.dtype.kind not in "iu"]
    assert {x.dtype.name for x in moments} == {"bfloat16"}
    # Each step rounds the moments once, with relative error 2^-9.
    assert np.abs(wide - narrow).max() < 0.05 * np.abs(wide - start).max()


def test_8_bit_moments_take_a_byte_and_stay_close():
    # 64 x 64 weights per layer: the least size that is compressed.
    params = {"layers": np.ones((2, 64, 64), np.float32), "norm": np.ones(8, np.float32)}
    optimizers = [
        make_optimizer(dataclasses.replace(CONFIG, moment_dtype=dtype), 10)
        for dtype in ("float32", "8bit")
    ]
    (wide, _), (narrow, state) = jax.jit(lambda x: [train(tx, x) for tx in optimizers])(params)
    sizes = {x.dtype.name: x.size for x in jax.tree.leaves(state) if x.shape[-2:] == (64, 64)}
    assert sizes == {"int8": 2 * 64 * 64, "uint8": 2 * 64 * 64}
    wide, narrow = (np.asarray(x["layers"]) for x in (wide, narrow))
    # Entries far below the largest of their block have larger errors; the mean error is 1%.
    assert np.abs(wide - narrow).mean() < 0.02 * np.abs(wide - 1).max()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("adamw", "4bit"), ("adafactor", "float32"), ("lion", "4bit"), ("sgd", "8bit")),
        ("muon", "4bit"),
    ],
)
def test_every_optimizer_moves_every_weight(name, dtype):
    rng = np.random.default_rng(0)
    shapes = {"layers": {"w": (2, 64, 96), "norm": (2, 64)}, "embedding": (64, 64)}
    params = jax.tree.map(
        lambda shape: np.float32(rng.normal(size=shape)),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    config = OptimizerConfig(1e-2, 1, moment_dtype=dtype, optimizer=name)
    moved, state = jax.jit(lambda x: train(make_optimizer(config, 10), x, steps=2))(params)
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(moved), strict=True):
        # Updates of these optimizers are about as large as the learning rate, or as the gradient.
        assert 1e-6 < np.abs(after - before).mean() < 0.1
    codes = [x for x in jax.tree.leaves(state, is_leaf=is_code) if is_code(x)]
    assert bool(codes) == (dtype in ("4bit", "8bit"))


def test_a_subspace_wraps_the_moments_and_not_the_decay():
    names = []

    def subspace(inner, outer):
        names.extend(["inner", "outer"])
        return actjax.optim.subspace(inner, 4, outer=outer)

    config = dataclasses.replace(FLOAT32, learning_rate=1e-2, warmup_steps=1, weight_decay=0.5)
    tx = make_optimizer(config, 10, subspace)
    params, zeros = {"w": np.ones((16, 8), np.float32)}, {"w": np.zeros((16, 8), np.float32)}

    @jax.jit
    def updates(params, zeros):
        return tx.update(zeros, tx.refresh(zeros, tx.init(params), params), params)[0]

    # With a zero gradient only decay changes the weights, in the full space.
    np.testing.assert_allclose(updates(params, zeros)["w"], -1e-2 * 0.5, rtol=1e-6)
    assert names == ["inner", "outer"]


def test_bfloat16_weights_learn_what_float32_weights_learn():
    # Five updates of 1e-5; weights of 0.02 are 1.2e-4 apart.
    config = dataclasses.replace(FLOAT32, learning_rate=1e-5, warmup_steps=1)
    rng = np.random.default_rng(0)
    start = (0.02 * rng.normal(size=(2, 64, 96))).astype(jnp.bfloat16)
    grads = {"layers": rng.normal(size=start.shape).astype(jnp.bfloat16)}
    plain = make_optimizer(config, 10)
    stochastic = make_optimizer(config, 10, None, "stochastic", seed=3)
    assert stochastic.rounding.seed == 3

    @jax.jit
    def moved(start):
        def change(tx, start):
            params, _ = train(tx, {"layers": start}, grads=lambda _: grads)
            return params["layers"].astype(jnp.float32) - start.astype(jnp.float32)

        wide = start.astype(jnp.float32)
        return change(plain, wide), change(stochastic, start), change(plain, start)

    want, got, nearest = map(np.asarray, moved(start))
    spacing = 2.0**-7 * (np.abs(np.float32(start)) + 5e-5)
    # Five roundings to one of two neighbors.
    assert np.all(np.abs(got - want) <= 5 * spacing)
    share, share_of_nearest = (np.vdot(x, want) / np.vdot(want, want) for x in (got, nearest))
    assert share_of_nearest < 0.25
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


@pytest.mark.parametrize("name", get_args(Optimizer))
def test_the_settings_of_every_optimizer_are_filled_in(name):
    config = PretrainConfig(model="llama_3m", optimizer=OptimizerConfig(optimizer=name))
    resolved = resolve(config, dimensions(config)).optimizer
    # They can be filled in again, as a saved run is.
    assert dataclasses.replace(resolved) == resolved
