"""Optimizers that round bfloat16 weights: what they add, what they store, where they work."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import actjax
from actjax import optim
from actjax.optim.layers import take
from train.checkpoint import Checkpoints
from train.sharding import make_mesh, state_shardings

ADAMW = optax.adamw(1e-3, weight_decay=0.1)
WRAPPERS = {"stochastic": optim.stochastic_rounding, "compensated": optim.compensated}
wrappers = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


def parameters(seed: int = 0, dtype="bfloat16", scale: float = 1.0):
    """Returns three layers and two other weights; one is float32."""
    rng = np.random.default_rng(seed)
    shapes = {"layers": {"w": (3, 16, 24)}, "head": (24, 8), "norm": (8,)}
    params = jax.tree.map(
        lambda shape: jnp.asarray(scale * rng.normal(size=shape), dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return params | {"norm": params["norm"].astype(jnp.float32)}


GRADIENTS = [parameters(seed, scale=0.1) for seed in (1, 2, 3)]


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def widened(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def loop(tx, params, gradients=GRADIENTS):
    """Returns parameters and state after an optax loop over the gradients."""

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for grads in gradients:
        params, state = step(params, state, grads)
    return params, state


def apply_step(tx, **options):
    return jax.jit(functools.partial(optim.apply, tx, **options))


def applied(tx, params, gradients=GRADIENTS, step=None):
    """Returns parameters and state after `optim.apply` with each gradient."""
    state, step = jax.jit(functools.partial(optim.init, tx))(params), step or apply_step(tx)
    for grads in gradients:
        params, state = step(grads, state, params)
    return params, state


# Values.


def test_stochastic_rounding_is_unbiased_over_keys():
    tx, count = optim.stochastic_rounding(optax.sgd(1.0)), 2000
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=64), jnp.bfloat16)
    # From a thousandth of the spacing to several spacings.
    grads = jnp.asarray(rng.normal(size=64) * 10 ** rng.uniform(-5, -1, 64), jnp.float32)
    state = tx.init(weights)

    @jax.jit
    @jax.vmap
    def new(key):
        return tx.rounding.apply(grads, state._replace(key=jax.random.key_data(key)), weights)[0]

    samples = np.asarray(new(jax.random.split(jax.random.key(0), count)), np.float64)
    exact = np.asarray(weights, np.float64) - np.asarray(grads, np.float64)
    spacing = np.exp2(np.frexp(np.abs(exact))[1] - 8)
    share = np.abs(exact) / spacing % 1
    # Of rare events, the standard error of a few is not that of a normal distribution.
    standard_error = spacing * np.sqrt(np.maximum(share * (1 - share), 0.01) / count)
    assert np.all(np.abs(samples.mean(0) - exact) <= 5 * standard_error)
    np.testing.assert_array_equal(np.unique(np.abs(samples - exact) > spacing), False)


@wrappers
def test_small_updates_add_up_where_nearest_loses_them(wrap):
    # 4,096 updates of 2^-14 of the weight: rounded to nearest, none changes it.
    weights, update = jnp.ones(256, jnp.bfloat16), jnp.full(256, 2.0**-14)
    tx = wrap(optax.identity())

    @jax.jit
    def run():
        body = lambda c, _: (tx.rounding.apply(update, c[1], c[0])[:2], None)  # noqa: E731
        (weights_end, state), _ = jax.lax.scan(body, (weights, tx.init(weights)), None, 4096)
        nearest = lambda w, _: (optax.apply_updates(w, update), None)  # noqa: E731
        return weights_end, state, jax.lax.scan(nearest, weights, None, 4096)[0]

    new, state, nearest = run()
    assert np.all(np.asarray(nearest) == 1)
    error = np.asarray(new, np.float64) - 1.25
    # Each update is rounded with a variance below p (1 - p) of the spacing, 2^-7, squared. The
    # master has spacings of 2^-15, and the weight is the nearest to it.
    if tx.rounding.compensated:
        assert np.all(np.abs(error) <= 2**-8 + 5 * np.sqrt(4096) * 2**-16)
        master = np.asarray(tx.rounding.masters(state, new), np.float64)
        assert np.all(np.abs(master - 1.25) <= 5 * np.sqrt(4096) * 2**-16)
    else:
        deviation = np.sqrt(4096 * 2**-7 * (1 - 2**-7)) * 2**-7
        assert np.all(np.abs(error) <= 5 * deviation)
        assert abs(error.mean()) <= 5 * deviation / np.sqrt(256)


def test_the_master_follows_a_float32_weight():
    tx, params = optim.compensated(ADAMW), parameters()
    new, state = loop(tx, params)
    want, _ = loop(ADAMW, widened(params), widened(GRADIENTS))
    masters = jax.jit(tx.rounding.masters)(state, new)
    for got, w in zip(jax.tree.leaves(masters), jax.tree.leaves(want), strict=True):
        # Three sums, each rounded to 16 significant bits. A weight moves by 1e-3 in each step.
        bound = 3 * 2.0**-15 * (np.abs(np.asarray(w, np.float64)) + 3e-3)
        assert np.all(np.abs(np.asarray(got, np.float64) - np.asarray(w, np.float64)) <= bound)
    master, weight = (np.asarray(t["head"], np.float64) for t in (masters, new))
    nearest = np.asarray(masters["head"].astype(jnp.bfloat16), np.float64)
    # At a tie there are two.
    np.testing.assert_array_equal(np.abs(weight - master), np.abs(nearest - master))
    assert np.std(np.asarray(state.remainder["head"], np.float64)) > 64  # Of -128 to 127.


def test_float32_parameters_among_them_are_updated_as_in_optax():
    params = parameters()
    for wrap in WRAPPERS.values():
        ours, _ = loop(wrap(optax.adam(1e-3)), params)
        theirs, _ = loop(optax.adam(1e-3), widened(params))
        np.testing.assert_array_equal(ours["norm"], theirs["norm"])


def test_moments_are_float32_and_8_bit_moments_are_decoded_to_float32():
    params = parameters()
    state = jax.eval_shape(optim.stochastic_rounding(ADAMW).init, params)
    assert state.inner[0].nu["head"].dtype == jnp.float32
    stored = optim.stochastic_rounding(optim.eight_bit(ADAMW, min_size=8))
    assert jax.eval_shape(stored.init, params).inner.inner[0].nu["head"].dtype == jnp.float32


# Random numbers.


def test_steps_layers_weights_and_seeds_have_different_random_numbers():
    # Equal layers and gradients, so that only random numbers tell them apart.
    one = jnp.ones((16, 64), jnp.bfloat16)
    params = {"layers": {"a": jnp.stack([one] * 3), "b": jnp.stack([one] * 3)}, "head": one}
    grads = jax.tree.map(lambda x: jnp.full(x.shape, 2.0**-9), params)
    tx = optim.stochastic_rounding(optax.sgd(1.0))
    step = apply_step(tx)
    first, state = applied(tx, params, [grads], step)
    # The same weights again, at the next step.
    second, _ = step(grads, state, params)
    other, _ = applied(optim.stochastic_rounding(optax.sgd(1.0), seed=1), params, [grads])
    samples = [
        np.asarray(x).reshape(-1, one.size)
        for tree in (first, second, other)
        for x in jax.tree.leaves(tree)
    ]
    patterns = np.concatenate(samples) != 1
    assert len(patterns) == 3 * 7
    agreement = np.mean(patterns[:, None] == patterns[None], axis=-1)
    # Updates of half a spacing: independent patterns agree in a half of the 1,024 places.
    np.fill_diagonal(agreement, 0.5)
    assert np.abs(agreement - 0.5).max() < 5 * 0.5 / np.sqrt(one.size)
    assert_same_bits(applied(tx, params, [grads], step)[0], first)


def test_four_devices_round_as_one():
    params = {"layers": jnp.ones((2, 16, 64), jnp.bfloat16)}
    grads = jax.tree.map(lambda x: jnp.full(x.shape, 2.0**-9, jnp.float32), params)
    for wrap in WRAPPERS.values():
        tx = wrap(optax.sgd(1.0))
        state, step = jax.jit(functools.partial(optim.init, tx))(params), apply_step(tx)
        alone = step(grads, state, params)
        mesh = make_mesh("fsdp=4")
        for spec in ((None, "fsdp"), (None, None, "fsdp")):
            place = NamedSharding(mesh, PartitionSpec(*spec))
            put = functools.partial(jax.device_put, device=place)
            spread = jax.device_put(state, state_shardings(state, mesh))
            together = step(jax.tree.map(put, grads), spread, jax.tree.map(put, params))
            assert len(together[0]["layers"].sharding.device_set) == 4
            assert_same_bits(jax.device_get(together), jax.device_get(alone))


# Ways to apply it.


@wrappers
def test_an_optax_loop_and_apply_give_the_same_bits_for_each_layer(wrap):
    tx, params = wrap(ADAMW), parameters()
    first = jax.jit(functools.partial(optim.init, tx))(params)
    new, state = applied(tx, params)
    for i in range(3):
        layer, layer_state = {"layers": params["layers"]}, first.layers
        layer, layer_state = take(layer, i), take(layer_state, i)
        layer = layer | {"head": None, "norm": None}
        for grads in GRADIENTS:
            grads = take({"layers": grads["layers"]}, i) | {"head": None, "norm": None}
            updates, layer_state = jax.jit(tx.update)(grads, layer_state, layer)
            layer = optax.apply_updates(layer, updates)
        np.testing.assert_array_equal(layer["layers"]["w"], new["layers"]["w"][i])
        assert_same_bits(layer_state, take(state.layers, i))


def test_an_in_backward_step_gives_the_same_bits_as_apply():
    # The gradient of every weight is a sign, exactly, however it is computed.
    rng = np.random.default_rng(0)
    params = {"layers": jnp.asarray(rng.normal(size=(3, 256)), jnp.bfloat16)}
    params["head"] = jnp.asarray(rng.normal(size=256), jnp.bfloat16)
    signs = jnp.asarray(rng.choice([-1.0, 1.0], 256), jnp.bfloat16)
    tx = optim.compensated(optax.adam(1e-4))
    update = optim.in_backward(
        lambda p, x: x,
        lambda p, x, inputs, own: x + p,
        lambda p, x, inputs: jnp.sum(((x + p["head"]) * signs).astype(jnp.float32)),
        tx,
    )
    state = jax.jit(update.init)(params)
    ours, ours_state, *_ = jax.jit(update.step)(params, state, jnp.zeros(256, jnp.bfloat16))
    grads = jax.tree.map(lambda w: jnp.broadcast_to(signs, w.shape), params)
    theirs, theirs_state = applied(tx, params, [grads])
    assert_same_bits((ours, ours_state.optimizer), (theirs, theirs_state))
    assert np.mean(np.asarray(ours["head"]) != np.asarray(params["head"])) > 0.01


def test_factored_gradients_are_multiplied_out():
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(3, 16, 2)), rng.normal(size=(3, 2, 24))
    params = {"layers": {"w": parameters()["layers"]["w"]}}
    factored = actjax.LowRank(jnp.asarray(left, "float32"), jnp.asarray(right, "float32"))
    tx = optim.compensated(optax.sgd(1e-3))

    @jax.jit
    def both(params):
        state = optim.init(tx, params)
        gradients = factored, factored.dense()
        return [optim.apply(tx, {"layers": {"w": g}}, state, params) for g in gradients]

    (ours, state), (theirs, _) = both(params)
    got, want = (
        np.asarray(tx.rounding.masters(state.layers, p)["layers"]["w"]) for p in (ours, theirs)
    )
    np.testing.assert_allclose(got, want, rtol=2**-8)
    assert np.mean(got == want) > 0.9
    # In an optax loop as well.
    loose = jax.jit(tx.init)(params)
    updates, _ = jax.jit(tx.update)({"layers": {"w": factored}}, loose, params)
    assert updates["layers"]["w"].shape == (3, 16, 24)


def test_it_is_the_last_part_of_a_chain_and_takes_other_transforms_inside():
    params = parameters()
    mask = lambda p: jax.tree.map(lambda x: x.ndim > 1, p)  # noqa: E731
    for inner in (
        optim.eight_bit(ADAMW, min_size=8),
        optax.chain(optim.scale_by_adam_8bit(min_size=8), optax.scale(-1e-3)),
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
        optax.masked(ADAMW, mask),
        optax.chain(optax.clip_by_global_norm(1.0), ADAMW),
    ):
        tx = optim.stochastic_rounding(inner)
        state = jax.jit(tx.init)(params)
        updates, after = jax.jit(tx.update)(GRADIENTS[0], state, params)
        new = optax.apply_updates(params, updates)
        assert_same_bits(new, jax.jit(tx.rounding.apply)(GRADIENTS[0], state, params)[0])
        assert jax.eval_shape(tx.update, GRADIENTS[1], after, new)[1] == jax.eval_shape(
            lambda s: s, after
        )
    clipped = optax.chain(optax.clip(0.01), optim.stochastic_rounding(ADAMW))
    new, _ = loop(clipped, params)
    moved = np.asarray(new["head"], np.float64) - np.asarray(params["head"], np.float64)
    assert np.mean(moved != 0) > 0.1


def test_an_nnx_optimizer_rounds_the_weights_of_its_model():
    tx = optim.compensated(optax.sgd(2.0**-14))
    model = nnx.Linear(8, 16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    before = np.asarray(model.kernel[...], np.float64)
    grads = jax.tree.map(lambda w: jnp.ones_like(w), nnx.state(model, nnx.Param))
    step = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))
    for _ in range(64):
        step(model, optimizer, grads)
    assert model.kernel.dtype == jnp.bfloat16
    moved = np.asarray(model.kernel[...], np.float64) - before
    # 64 / 2^14, up to half a place of weights below 1.
    np.testing.assert_allclose(moved, -(2**-8), atol=2**-9 + 2**-12)


# Subspaces.

SUBSPACE = optim.subspace(
    optax.scale_by_adam(), 4, outer=optax.scale_by_learning_rate(0.1), gap=2,
    groups={"layers.w": "layers.w"},
)  # fmt: skip


@wrappers
def test_a_subspace_inside_is_refreshed_and_gives_its_bases(wrap):
    tx = wrap(SUBSPACE)
    assert isinstance(tx, optim.SubspaceTransformation)
    assert (tx.gap, tx.source) == (2, "gradient")
    params = parameters()

    def trained(tx, params):
        step = jax.jit(functools.partial(optim.apply, tx), static_argnames="refresh")
        state = jax.jit(functools.partial(optim.init, tx))(params)
        for i, grads in enumerate(GRADIENTS):
            params, state = step(grads, state, params, refresh=i % 2 == 0)
        return params, state

    ours, state = trained(tx, params)
    theirs, want = trained(SUBSPACE, params)
    # Bases depend on gradients alone; the plain subspace rounds to nearest.
    assert_same_bits(tx.bases(state).arrays, SUBSPACE.bases(want).arrays)
    got, nearest = (np.asarray(p["layers"]["w"], np.float64) for p in (ours, theirs))
    np.testing.assert_allclose(got, nearest, atol=1e-3, rtol=3 * 2**-7)
    # As a plain transform, it wants a refresh first.
    state = jax.jit(tx.init)(params)
    with pytest.raises(ValueError, match="never refreshed"):
        tx.update(GRADIENTS[0], state, params)
    state = jax.jit(tx.refresh)(GRADIENTS[0], state, params)
    jax.eval_shape(tx.update, GRADIENTS[0], state, params)


def test_some_layers_of_a_random_subspace_inside_are_redrawn():
    tx = optim.stochastic_rounding(optim.subspace(optax.scale_by_adam(), 4, source="random"))
    params = {"layers": parameters()["layers"]}
    state = jax.jit(functools.partial(optim.init, tx))(params)
    due = np.array([True, False, True])
    drawn = jax.jit(functools.partial(optim.redraw, tx))(state, params, due=due)
    (name,) = tx.bases(state).arrays
    old, new = (np.asarray(tx.bases(s).arrays[name], np.float32) for s in (state, drawn))
    np.testing.assert_array_equal(np.any(old != new, axis=(1, 2)), due)


# States.


def test_the_state_has_one_byte_for_each_weight_or_none():
    def nbytes(state) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))

    params, count = parameters(), 3 * 16 * 24 + 24 * 8
    sizes = {
        name: nbytes(jax.eval_shape(wrap(optax.sgd(1.0)).init, params))
        for name, wrap in WRAPPERS.items()
    }
    assert sizes == {"stochastic": 12, "compensated": 12 + count}
    for name, wrap in WRAPPERS.items():
        state = jax.eval_shape(functools.partial(optim.init, wrap(optax.sgd(1.0))), params)
        assert nbytes(state) == sizes[name] + 3 * 12
    assert state.layers.remainder["layers"]["w"].dtype == jnp.int8
    assert state.rest.remainder["norm"] is None


@wrappers
def test_a_run_continues_from_a_checkpoint_with_equal_bits(tmp_path, wrap):
    tx, params = wrap(ADAMW), parameters()
    step = apply_step(tx)
    half = applied(tx, params, GRADIENTS[:2], step)
    mesh = make_mesh("fsdp=4")
    saved = jax.device_put(half, state_shardings(half, mesh))
    first = Checkpoints(tmp_path, keep=1)
    first.save(2, saved, {}, {})
    first.close()
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), saved
    )
    again = Checkpoints(tmp_path, keep=1)
    restored, _ = again.restore(2, like, {})
    again.close()
    restored = jax.device_get(restored)
    assert_same_bits(restored, jax.device_get(half))
    assert_same_bits(step(GRADIENTS[2], *restored[::-1]), step(GRADIENTS[2], *half[::-1]))


@wrappers
def test_no_float32_copy_of_all_layers_exists(wrap):
    tx = wrap(ADAMW)
    sizes = []
    for count in (8, 24):
        params = {"layers": jax.ShapeDtypeStruct((count, 256, 256), "bfloat16")}
        state = jax.eval_shape(functools.partial(optim.init, tx), params)
        step = jax.jit(lambda p, s, g: optim.apply(tx, g, s, p), donate_argnums=(0, 1))
        stats = step.lower(params, state, params).compile().memory_analysis()
        sizes.append(stats.temp_size_in_bytes)
        donated = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state, params)))
        assert stats.alias_size_in_bytes >= donated
    one_layer = 256 * 256 * 4
    assert abs(sizes[1] - sizes[0]) < one_layer / 10
    # For one layer: gradient, weight and moments, the new ones, and the sum.
    assert sizes[0] < 9 * one_layer


# Arguments.


@wrappers
def test_weights_of_other_dtypes_are_refused(wrap):
    tx, wide = wrap(ADAMW), {"layers": np.ones((2, 4, 4), "float32")}
    for init in (tx.init, functools.partial(optim.init, tx)):
        message = rf"{tx.rounding.name} has no effect, because no weight is bfloat16 .*float32"
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(init, wide)
        with pytest.raises(ValueError, match="some weights are float16"):
            jax.eval_shape(init, wide | {"head": np.ones(3, "float16")})
        # The weights outside the layers may be in float32.
        jax.eval_shape(init, {"layers": jnp.ones((2, 4), jnp.bfloat16), "norm": np.ones(3)})


@wrappers
def test_it_must_be_the_outermost(wrap):
    tx, params = wrap(ADAMW), parameters()
    name = tx.rounding.name
    for wrapper, make in (
        ("eight_bit", optim.eight_bit),
        ("subspace", lambda tx: optim.subspace(tx, 2)),
        ("subspace", lambda tx: optim.subspace(optax.scale_by_adam(), 2, outer=tx)),
        ("stochastic_rounding", optim.stochastic_rounding),
        ("compensated", optim.compensated),
    ):
        with pytest.raises(ValueError, match=rf"` of {wrapper} rounds weights, which only the"):
            make(tx)
    with pytest.raises(ValueError, match="`tx` has stochastic_rounding or compensated inside"):
        jax.eval_shape(functools.partial(optim.init, optax.chain(optax.clip(1.0), tx)), params)
    state = jax.eval_shape(tx.init, params)
    with pytest.raises(ValueError, match=rf"{name} reads the weights that it rounds: call"):
        tx.update(GRADIENTS[0], state)


@wrappers
def test_bad_arguments_are_named(wrap):
    name = wrap(ADAMW).rounding.name
    for inner in (None, optax.adam, 1e-3):
        with pytest.raises(TypeError, match="`inner` must be an optax transform"):
            wrap(inner)
    for seed in (-1, 0.5, True):
        message = f"`seed` of {name} must be an integer >= 0, got {seed!r}."
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            wrap(ADAMW, seed=seed)
