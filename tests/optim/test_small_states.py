"""Optimizers with small states, ten steps beside oracles: plain, one layer at a time, in pieces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim.nearest import to_nearest
from optim.projected import normal
from optim.state_oracles import (
    AdamState,
    FactoredState,
    FiraState,
    adam_4bit_step,
    factored_adam_step,
    fira_step,
)

from actjax import LowRank, optim
from actjax.optim.projected.remainders import limit_growth
from actjax.optim.stepping import pieces

STEPS, LAYERS, SHAPE, RANK = 10, 3, (12, 20), 4
B1, B2, EPS = 0.9, 0.99, 1e-8


def gradients():
    """Returns a gradient [layers, d, n] for each step, whose entries differ by decades."""
    columns = np.logspace(0, -1.5, SHAPE[1])
    return [columns * normal(100 + t, LAYERS, *SHAPE) for t in range(STEPS)]


def plain_updates(tx, grads):
    """Returns the updates of each step [steps, layers, d, n], of a plain loop for each layer."""

    def of_layer(grads):
        params = {"layers": {"w": jnp.zeros(SHAPE)}}

        def step(state, g):
            updates, state = tx.update({"layers": {"w": g}}, state, params)
            return state, updates["layers"]["w"]

        return jax.lax.scan(step, tx.init(params), grads)[1]

    return jnp.swapaxes(jax.lax.map(of_layer, jnp.swapaxes(grads, 0, 1)), 0, 1)


def applied_updates(tx, grads):
    """Returns the updates of each step [steps, layers, d, n], of `apply` on stacked layers."""
    # Parameters are zero and stay so: the result of `apply` is the update.
    params = {"layers": {"w": jnp.zeros((LAYERS, *SHAPE))}}

    def step(state, g, refresh=False):
        new, state = optim.apply(tx, {"layers": {"w": g}}, state, params, refresh=refresh)
        return state, new["layers"]["w"]

    state = optim.init(tx, params)
    if not isinstance(tx, optim.SubspaceTransformation):
        return jax.lax.scan(step, state, grads)[1]
    state, first = step(state, grads[0], refresh=True)
    return jnp.concatenate([first[None], jax.lax.scan(step, state, grads[1:])[1]])


def run(tx):
    """Returns the updates of a plain loop and of `apply`, from one program."""

    @jax.jit
    def both(grads):
        return plain_updates(tx, grads), applied_updates(tx, grads)

    return map(np.asarray, both(np.stack(gradients())))


def expected(step, first):
    """Returns the updates of an oracle, `step(g, state, t, layer) -> update, state`."""
    results = np.zeros((STEPS, LAYERS, *SHAPE))
    for layer in range(LAYERS):
        state = first
        for t, g in enumerate(gradients()):
            results[t, layer], state = step(g[layer], state, t + 1, layer)
    return results


# Moments are rounded to levels in float32, a tie in a million numbers either way.
CASES = {
    "four_bit": (
        to_nearest(optim.four_bit(optax.scale_by_adam(B1, B2, EPS), min_size=1)),
        lambda g, s, t, _: adam_4bit_step(g, s, t, B1, B2, EPS),
        AdamState(),
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
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", CASES)
def test_ten_steps_equal_the_oracle(name):
    tx, step, first, tolerance = CASES[name]
    want = expected(step, first)
    for got in run(tx):
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


@pytest.mark.usefixtures("x64")
def test_ten_steps_of_fira_equal_the_oracle():
    groups = {"layers.w": "w"}
    inner = optax.scale_by_adam(B1, B2, EPS)
    make = functools.partial(optim.subspace, rank=RANK, gap=100, groups=groups)
    tx = make(inner, scale=0.5, remainder=optim.ScaledRemainder())
    # The basis is that of the first gradient, as the library takes it.
    plain, key = make(optax.scale(1.0)), jax.random.key(0)

    @jax.jit
    def bases(grads):
        def basis(layer):
            gradient = {"layers": {"w": layer[0]}}
            state = plain.subspace.init_from(gradient, layer[1])
            return plain.refresh(gradient, state, gradient).bases["w"]

        keys = jnp.stack([key] * LAYERS), jax.random.split(key, LAYERS)
        return [jax.lax.map(basis, (grads, k)) for k in keys]

    for got, basis in zip(run(tx), map(np.asarray, bases(gradients()[0])), strict=True):

        def step(g, state, t, layer, basis=basis):
            del t
            return fira_step(g, basis[layer], state, 0.5, B1, B2, EPS)

        want = expected(step, FiraState())
        # The norm of the last update is kept in float32: 6e-8 in each of ten steps.
        np.testing.assert_allclose(got, want, rtol=6e-7, atol=6e-7 * np.abs(want).max())


# Pieces of large matrices.


@pytest.mark.usefixtures("x64")
def test_a_large_matrix_is_updated_in_pieces_as_it_is_whole(monkeypatch):
    rng = np.random.default_rng(0)
    params = {"table": rng.normal(size=(24, 10)), "b": rng.normal(size=10)}
    grads = jax.tree.map(lambda x: np.stack([np.sin(t + 3 * x) for t in range(3)]), params)
    tx = optax.chain(optim.eight_bit(optax.scale_by_adam(), min_size=1), optax.scale(-0.1))

    def trained():
        @jax.jit
        def steps(params, grads):
            def step(carry, g):
                params, state = carry
                *carry, moved = optim.apply(tx, g, state, params, with_norm=True)
                return tuple(carry), moved

            carry, moved = jax.lax.scan(step, (params, optim.init(tx, params)), grads)
            return *carry, moved

        return jax.tree.map(np.asarray, steps(params, grads))

    uncut = trained()
    monkeypatch.setattr(pieces, "LARGEST", 70)
    cut = trained()
    assert set(cut[1].pieces) == {"table"}
    assert not uncut[1].pieces
    moments = cut[1].pieces["table"][0].inner.mu["table"]
    # The least number of equal pieces with at most 70 numbers: rows 0, 4, 8, ... are the first.
    assert moments.codes.shape == (4, 6, 10)
    np.testing.assert_array_equal(moments.codes[0], uncut[1].rest[0].inner.mu["table"].codes[::4])
    for name in params:
        np.testing.assert_allclose(cut[0][name], uncut[0][name], rtol=1e-12)
    np.testing.assert_allclose(cut[2], uncut[2], rtol=1e-6)


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
    uncut = temporaries()
    monkeypatch.setattr(pieces, "LARGEST", 2**17)
    assert temporaries() < uncut - 2048 * 512 // 2


def test_a_large_matrix_may_have_a_factored_gradient_and_a_transform_no_state(monkeypatch):
    factors = [(normal(0, 24, rank), normal(1, rank, 10)) for rank in (2, 6)]
    params = {"table": normal(2, 24, 10)}
    monkeypatch.setattr(pieces, "LARGEST", 70)

    @jax.jit
    def both(factors):
        results = []
        for tx in (optax.sgd(1.0), optax.adam(0.1)):
            state, plain_state = optim.init(tx, params), tx.init(params)
            for left, right in factors:
                updates, _ = tx.update({"table": left @ right}, plain_state, params)
                new, _ = optim.apply(tx, {"table": LowRank(left, right)}, state, params)
                results.append((new, optax.apply_updates(params, updates)))
        return results

    for new, plain in both(factors):
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


def test_large_matrices_that_only_the_end_reads_are_updated_before_the_layers(monkeypatch):
    params = {
        name: normal(i, *shape).astype("float32")
        for i, (name, shape) in enumerate(
            {"embedding": (12, 6), "head": (6, 12), "second": (6, 12), "unread": (12, 6)}.items()
        )
    }
    params["layers"] = {"w": normal(9, 2, 6, 6).astype("float32") / 4}
    ids = np.arange(8)

    def before(p, inputs):
        return p["embedding"][inputs]

    def after(p, x, _):
        return jnp.mean(jnp.tanh(x @ p["head"]) ** 2 + jnp.cos(x @ p["second"]))

    update = optim.in_backward(
        before, lambda w, x, *_: x + jnp.tanh(x @ w["w"]), after, optax.adam(0.1)
    )

    def stepped():
        return jax.jit(lambda p: update.step(p, update.init(p), ids))(params)

    uncut = stepped()
    monkeypatch.setattr(pieces, "LARGEST", 30)
    cut = stepped()
    assert set(cut[1].optimizer.pieces) == {"embedding", "head", "second", "unread"}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), cut[0], uncut[0])
    np.testing.assert_allclose(cut[1].grad_norm, uncut[1].grad_norm, rtol=1e-6)


def test_a_weight_whose_gradient_was_zero_is_not_limited_for_ever():
    limited = jax.jit(functools.partial(limit_growth, limit=1.01))
    zeros, ones = np.zeros((3, 2), "float32"), np.ones((3, 2), "float32")
    _, last = limited(zeros, np.float32(0))
    first, last = limited(ones, last)
    np.testing.assert_allclose(first, ones)
    second, last = limited(10 * ones, last)
    np.testing.assert_allclose(second, 1.01 * ones, rtol=1e-6)
    np.testing.assert_allclose(last, 1.01 * 6**0.5, rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda tx: tx, optim.four_bit], ids=["float32", "4 bits"])
def test_squares_that_overflow_give_no_update_and_a_nan_stays_visible(wrap):
    tx = wrap(optim.scale_by_factored_adam())
    huge = np.full((5, 7), 1e30, "float32")
    huge[0] = 1
    lost = huge.copy()
    lost[2, 3] = np.nan

    @jax.jit
    def updates(huge, lost):
        update, state = tx.update({"w": huge}, tx.init({"w": huge}))
        return update["w"], tx.update({"w": lost}, state)[0]["w"]

    first, second = updates(huge, lost)
    np.testing.assert_array_equal(first, 0)
    assert np.isnan(second[2, 3])
