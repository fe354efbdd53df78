"""Optimizers with small states, ten steps beside oracles: plain, one layer at a time, in pieces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim.projected import normal
from optim.state_oracles import (
    ApolloState,
    FactoredState,
    FourBitState,
    GrowthState,
    InnerAdam,
    adam_4bit_step,
    apollo_step,
    factored_adam_step,
    fira_step,
    frugal_step,
    lion_step,
    momentum_step,
    muon_step,
)

from actjax import LowRank, optim
from actjax.optim import pieces
from actjax.optim.bases import random_basis
from actjax.optim.remainders import limit_growth

STEPS, LAYERS, SHAPE, RANK = 10, 3, (12, 20), 4
B1, B2, EPS = 0.9, 0.99, 1e-8
NEAREST = functools.partial(optim.four_bit, min_size=1, rounding="nearest")


def gradients():
    """Returns a gradient [layers, d, n] for each step, whose entries differ by decades."""
    columns = np.logspace(0, -1.5, SHAPE[1])
    return [columns * normal(100 + t, LAYERS, *SHAPE) for t in range(STEPS)]


def run(tx, stacked, grads=None):
    """Returns the updates of each step [steps, layers, d, n], of a plain loop or of `apply`."""
    grads = gradients() if grads is None else grads
    zeros = np.zeros((LAYERS, *SHAPE))

    @jax.jit
    def updates(grads):
        found = []
        if stacked:
            params = {"layers": {"w": jnp.asarray(zeros)}}
            state = optim.init(tx, params)
            is_subspace = isinstance(tx, optim.SubspaceTransformation)
            for t, g in enumerate(grads):
                refresh = is_subspace and t % tx.gap == 0
                new, state = optim.apply(tx, {"layers": {"w": g}}, state, params, refresh=refresh)
                found.append(new["layers"]["w"])
            return jnp.stack(found)
        for layer in range(LAYERS):
            params = {"layers": {"w": jnp.asarray(zeros[layer])}}
            state, own = tx.init(params), []
            for g in grads:
                u, state = tx.update({"layers": {"w": g[layer]}}, state, params)
                own.append(u["layers"]["w"])
            found.append(jnp.stack(own))
        return jnp.stack(found, axis=1)

    # Parameters are zero and stay so: what `apply` returns is the update.
    return np.asarray(updates([jnp.asarray(g) for g in grads]))


def expected(step, first):
    """Returns the updates of an oracle, `step(g, state, t, layer) -> update, state`."""
    found = np.zeros((STEPS, LAYERS, *SHAPE))
    for layer in range(LAYERS):
        state = first
        for t, g in enumerate(gradients()):
            found[t, layer], state = step(g[layer], state, t + 1, layer)
    return found


def matrices(params):
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), params)


# What rounds to levels does so in float32, a tie in a million numbers either way.
CASES = {
    "four_bit": (
        NEAREST(optax.scale_by_adam(B1, B2, EPS)),
        lambda g, s, t, _: adam_4bit_step(g, s, t, B1, B2, EPS),
        FourBitState(),
        1e-4,
    ),
    "four_bit, published": (
        NEAREST(optax.scale_by_adam(B1, B2, EPS), first_moment="published"),
        lambda g, s, t, _: adam_4bit_step(g, s, t, B1, B2, EPS, published=True),
        FourBitState(),
        1e-4,
    ),
    "factored": (
        optim.scale_by_factored_adam(B1, B2, EPS),
        lambda g, s, t, _: factored_adam_step(g, s, t, B1, B2, EPS),
        FactoredState(),
        1e-9,
    ),
    "factored without a first moment": (
        optim.scale_by_factored_adam(0.0, B2, EPS),
        lambda g, s, t, _: factored_adam_step(g, s, t, 0.0, B2, EPS),
        FactoredState(),
        1e-9,
    ),
    "lion": (
        optax.scale_by_lion(B1, B2),
        lambda g, s, t, _: lion_step(g, s, B1, B2),
        np.zeros(SHAPE),
        1e-9,
    ),
    "momentum": (
        optax.trace(B1),
        lambda g, s, t, _: momentum_step(g, s, B1),
        np.zeros(SHAPE),
        1e-9,
    ),
    "muon": (
        optax.contrib.scale_by_muon(beta=0.95, weight_dimension_numbers=matrices),
        lambda g, s, t, _: muon_step(g, s, t, 0.95),
        np.zeros(SHAPE),
        # Newton and Schulz's iteration five times, beside a singular value decomposition.
        1e-6,
    ),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stacked", [False, True], ids=["plain", "apply"])
@pytest.mark.parametrize("name", CASES)
def test_ten_steps_equal_the_oracle(name, stacked):
    tx, step, first, tolerance = CASES[name]
    got, want = run(tx, stacked), expected(step, first)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stacked", [False, True], ids=["plain", "apply"])
@pytest.mark.parametrize("name", ["fira", "frugal"])
def test_ten_steps_with_a_remainder_equal_the_oracle(name, stacked):
    remainder = {"fira": optim.ScaledRemainder(), "frugal": optim.SignedRemainder(0.5)}[name]
    groups = {"layers.w": "w"}
    inner = optax.scale_by_adam(B1, B2, EPS)
    tx = optim.subspace(inner, RANK, scale=0.5, gap=100, groups=groups, remainder=remainder)
    got = run(tx, stacked)
    # The basis is that of the first gradient, as the library takes it.
    plain = optim.subspace(optax.scale(1.0), RANK, gap=100, groups=groups)
    first = [{"layers": {"w": jnp.asarray(gradients()[0][layer])}} for layer in range(LAYERS)]
    key = jax.random.key(0)
    keys = list(jax.random.split(key, LAYERS)) if stacked else [key] * LAYERS
    bases = []
    for g, own in zip(first, keys, strict=True):
        state = plain.subspace.init_from(g, own)
        bases.append(np.asarray(plain.refresh(g, state, g).bases["w"]))

    def step(g, state, t, layer):
        del t
        growth, adam = state
        if adam is None:
            adam = InnerAdam(B1, B2, EPS)
        if name == "fira":
            update, growth = fira_step(g, bases[layer], growth, adam, 0.5)
        else:
            update, _ = frugal_step(g, bases[layer], adam, 0.5, 0.25)
        return update, (growth, adam)

    want = expected(step, (GrowthState(), None))
    # The norm of the last update is kept in float32: 6e-8 in each of ten steps.
    np.testing.assert_allclose(got, want, rtol=6e-7, atol=6e-7 * np.abs(want).max())


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stacked", [False, True], ids=["plain", "apply"])
@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_ten_steps_of_apollo_equal_the_oracle(granularity, stacked):
    rank = RANK if granularity == "channel" else 1
    inner = optax.scale_by_adam(B1, B2, EPS)
    tx = optim.apollo(inner, rank, gap=4, scale=2.0, granularity=granularity)
    got = run(tx, stacked)

    def projection(t):
        import zlib

        key = jax.random.fold_in(jax.random.key(0), (t - 1) // 4)
        key = jax.random.fold_in(key, zlib.crc32(b"layers.w"))
        return np.asarray(random_basis(key, (SHAPE[0], rank)), np.float64)

    def step(g, state, t, _):
        options = {"scale": 2.0, "granularity": granularity}
        return apollo_step(g, projection(t), state, t, B1, B2, EPS, **options)

    want = expected(step, ApolloState())
    np.testing.assert_allclose(got, want, rtol=6e-7, atol=6e-7 * np.abs(want).max())


# Pieces of large matrices.


@pytest.mark.usefixtures("x64")
def test_a_large_matrix_is_updated_in_pieces_as_it_is_whole(monkeypatch):
    rng = np.random.default_rng(0)
    params = {"table": rng.normal(size=(24, 10)), "b": rng.normal(size=10)}
    grads = [jax.tree.map(lambda x, t=t: np.sin(t + 3 * x), params) for t in range(3)]
    tx = optax.chain(optim.eight_bit(optax.scale_by_adam(), min_size=1), optax.scale(-0.1))

    def trained():
        @jax.jit
        def steps(params, grads):
            state = optim.init(tx, params)
            for g in grads:
                params, state, moved = optim.apply(tx, g, state, params, with_norm=True)
            return params, state, moved

        return jax.tree.map(np.asarray, steps(params, grads))

    whole = trained()
    monkeypatch.setattr(pieces, "LARGEST", 70)
    cut = trained()
    assert set(cut[1].pieces) == {"table"}
    assert not whole[1].pieces
    moments = cut[1].pieces["table"][0].inner.mu["table"]
    # The least number of equal pieces with at most 70 numbers: rows 0, 4, 8, ... are the first.
    assert moments.codes.shape == (4, 6, 10)
    np.testing.assert_array_equal(moments.codes[0], whole[1].rest[0].inner.mu["table"].codes[::4])
    for name in params:
        np.testing.assert_allclose(cut[0][name], whole[0][name], rtol=1e-12)
    np.testing.assert_allclose(cut[2], whole[2], rtol=1e-6)


def test_no_array_of_a_large_matrix_exists_in_its_update(monkeypatch):
    params = {"table": jax.ShapeDtypeStruct((2048, 512), "float32")}
    tx = optax.chain(optim.scale_by_adam_8bit(), optax.scale(-1e-3))

    def temporaries():
        state = jax.eval_shape(functools.partial(optim.init, tx), params)
        step = jax.jit(lambda p, s, g: optim.apply(tx, g, s, p), donate_argnums=(0, 1))
        stats = step.lower(params, state, params).compile().memory_analysis()
        # Weight and moments are written in place.
        assert stats.alias_size_in_bytes >= 2048 * 512 * (4 + 2)
        return stats.temp_size_in_bytes

    # Codes of one piece instead of all: both moments, once each.
    whole = temporaries()
    monkeypatch.setattr(pieces, "LARGEST", 2**17)
    assert temporaries() < whole - 2048 * 512 // 2


@pytest.mark.parametrize("rank", [2, 3, 6])
@pytest.mark.parametrize("tx", [optax.sgd(1.0), optax.adam(0.1)], ids=["sgd", "adam"])
def test_a_large_matrix_may_have_a_factored_gradient_and_a_transform_no_state(
    monkeypatch, rank, tx
):
    left, right = normal(0, 24, rank), normal(1, rank, 10)
    params = {"table": normal(2, 24, 10)}
    plain = optax.apply_updates(
        params, tx.update({"table": left @ right}, tx.init(params), params)[0]
    )
    monkeypatch.setattr(pieces, "LARGEST", 70)
    factored = {"table": LowRank(jnp.asarray(left), jnp.asarray(right))}
    new, _ = jax.jit(lambda g: optim.apply(tx, g, optim.init(tx, params), params))(factored)
    np.testing.assert_allclose(new["table"], plain["table"], rtol=1e-5, atol=1e-5)


def test_pieces_are_equal_and_few():
    assert pieces.count_pieces((32_000, 4096)) == 8
    assert pieces.count_pieces((4096, 128_256)) == 32
    for shape in ((32_000, 512), (5000,), (2, 4096, 4096)):
        assert pieces.count_pieces(shape) == 1
    # A prime number of rows has no equal pieces but single rows.
    assert pieces.count_pieces((50_021, 4096)) == 1
    matrix = np.arange(24).reshape(6, 4)
    np.testing.assert_array_equal(pieces.stacked(matrix, 3)[1], matrix[1::3])


@pytest.mark.parametrize("clip_by", ["estimate", "layer_norm"])
def test_large_matrices_that_only_the_end_reads_are_updated_before_the_layers(monkeypatch, clip_by):
    params = {
        name: jnp.asarray(normal(i, *shape), "float32")
        for i, (name, shape) in enumerate(
            {"embedding": (12, 6), "head": (6, 12), "second": (6, 12), "unread": (12, 6)}.items()
        )
    }
    params["layers"] = {"w": jnp.asarray(normal(9, 2, 6, 6), "float32") / 4}
    ids = jnp.arange(8)

    def before(p, inputs):
        return p["embedding"][inputs]

    def after(p, x, _):
        return jnp.mean(jnp.tanh(x @ p["head"]) ** 2 + jnp.cos(x @ p["second"]))

    clip = 1e9 if clip_by == "layer_norm" else np.inf
    update = optim.in_backward(
        before, lambda w, x, *_: x + jnp.tanh(x @ w["w"]), after, optax.adam(0.1),
        clip=clip, clip_by=clip_by,
    )  # fmt: skip

    def stepped():
        state = update.init(params)
        return jax.jit(update.step)(params, state, ids)

    whole = stepped()
    monkeypatch.setattr(pieces, "LARGEST", 30)
    cut = stepped()
    assert set(cut[1].optimizer.pieces) == {"embedding", "head", "second", "unread"}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), cut[0], whole[0])
    np.testing.assert_allclose(cut[1].grad_norm, whole[1].grad_norm, rtol=1e-6)


# Growth of remainders.


def test_a_weight_whose_gradient_was_zero_is_not_limited_for_ever():
    zeros, ones = jnp.zeros((3, 2)), jnp.ones((3, 2))
    _, last = limit_growth(zeros, jnp.zeros(()), 1.01)
    first, last = limit_growth(ones, last, 1.01)
    np.testing.assert_allclose(first, ones)
    second, last = limit_growth(10 * ones, last, 1.01)
    np.testing.assert_allclose(second, 1.01 * ones, rtol=1e-6)
    np.testing.assert_allclose(last, 1.01 * 6**0.5, rtol=1e-6)


@pytest.mark.parametrize(
    "tx",
    [
        optim.scale_by_factored_adam(),
        optim.scale_by_adam_8bit(min_size=1),
        optim.scale_by_adam_4bit(min_size=1, rounding="nearest"),
    ],
    ids=["factored", "8bit", "4bit"],
)
def test_factored_gradients_are_multiplied_out_in_a_plain_loop(tx):
    params = {"w": jnp.zeros((6, 8))}
    left, right = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(6, 2), (2, 8)]))
    gradient = {"w": LowRank(left, right)}
    got, _ = jax.jit(tx.update)(gradient, tx.init(params))
    want, _ = jax.jit(tx.update)({"w": left @ right}, tx.init(params))
    np.testing.assert_allclose(got["w"], want["w"], rtol=1e-5)


# Arguments.


def test_a_learning_rate_whose_sign_would_be_lost_is_refused():
    for inner in (optax.adam(1e-2), optim.eight_bit(optax.sgd(0.1)), optax.adamw(1e-2)):
        for make in (
            lambda inner=inner: optim.apollo(inner, 4),
            lambda inner=inner: optim.subspace(inner, 4, remainder=optim.ScaledRemainder()),
            lambda inner=inner: jax.eval_shape(
                lambda: optim.subspace(inner, 4, remainder=optim.SignedRemainder()).init(
                    {"w": jnp.ones((8, 8))}
                )
            ),
        ):
            with pytest.raises(ValueError, match=r"`inner` of .* has a learning rate: it turns"):
                make()
    optim.subspace(optax.adam(1e-2), 4)
    # Not on one matrix, and so not tried.
    labels = optax.partition({"a": optax.adam(1e-2)}, {"x": "a"})
    optim.apollo(labels, 4)
    decay = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1))
    params = {"w": jnp.ones((8, 8))}
    tx = optim.apollo(decay, 4)
    tx.update(params, tx.init(params), params)


def test_bad_arguments_are_named():
    adam = optax.scale_by_adam()
    for make, message in (
        (lambda: optim.four_bit(adam, group=3), "`group` of four_bit must be even"),
        (lambda: optim.four_bit(adam, rounding="up"), "`rounding` of four_bit must be one of"),
        (lambda: optim.four_bit(adam, first_moment="x"), "`first_moment` of four_bit must be one"),
        (lambda: optim.scale_by_factored_adam(b2=1.0), r"`b2` of scale_by_factored_adam must be"),
        (lambda: optim.scale_by_factored_adam(eps_squared=0), "`eps_squared` .* above 0, got 0"),
        (lambda: optim.apollo(adam, 0), "`rank` of apollo must be an integer >= 1"),
        (lambda: optim.apollo(adam, limit=0.5), "`limit` of apollo must be a number above 1"),
        (lambda: optim.apollo(adam, granularity="row"), "`granularity` of apollo must be one of"),
        (lambda: optim.clip_by_global_norm(-1), "`max_norm` of clip_by_global_norm must be"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    params = {"w": np.zeros((6, 4)), "b": np.zeros(4)}
    for tx, message in (
        (optim.apollo(adam, 5), r"`rank` 5 of apollo is above 4, the smaller side of `w`"),
        (optim.apollo(adam, 2, weights=lambda *_: True), r"chooses `b` of shape \(4,\): no matrix"),
        (
            optim.scale_by_factored_adam(factored={"w": True, "b": True}),
            r"`factored` .* names `b` of shape \(4,\): .* which a vector or a scalar lacks",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(tx.init, params)
    with pytest.raises(TypeError, match=r"`state` of to_host must be what .* got dict"):
        optim.to_host({})


@pytest.mark.parametrize("wrap", [lambda tx: tx, optim.four_bit], ids=["float32", "4 bits"])
def test_squares_that_overflow_give_no_update_and_a_nan_stays_visible(wrap):
    tx = wrap(optim.scale_by_factored_adam())
    huge = jnp.full((5, 7), 1e30).at[0].set(1.0)
    update, state = jax.jit(tx.update)({"w": huge}, tx.init({"w": huge}))
    np.testing.assert_array_equal(update["w"], 0)
    update, _ = jax.jit(tx.update)({"w": huge.at[2, 3].set(jnp.nan)}, state)
    assert np.isnan(update["w"][2, 3])
