"""Training with moments in few bits: close to Adam, and divergent on a linear map."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from actjax.optim import eight_bit, four_bit
from actjax.optim.states.codes import decoded

RATE = 1e-2


def on_linear_map(x, unsigned, block):
    """Returns `x` [..., n] rounded to evenly spaced levels in blocks along its last axis."""
    top = 255 if unsigned else 127
    blocks = x.reshape(*x.shape[:-1], -1, min(block, x.shape[-1]))
    scales = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    scales = jnp.where(scales > 0, scales, 1)
    return (jnp.round(blocks / scales * top) * (scales / top)).reshape(x.shape)


def adam_on_linear_map(block=256):
    """Returns Adam whose moments are rounded to a linear map after each step."""
    adam = optax.scale_by_adam()

    def update(updates, state, params=None):
        updates, state = adam.update(updates, state, params)
        mu, nu = on_linear_map(state.mu, False, block), on_linear_map(state.nu, True, block)
        return updates, state._replace(mu=mu, nu=nu)

    return optax.chain(
        optax.GradientTransformation(adam.init, update), optax.scale_by_learning_rate(RATE)
    )


def least_squares(seed, decades):
    """Returns features [64, 256] whose columns decay over some decades, and targets [64, 16].

    The gradients of one block differ by as many decades, and second moments by twice as many.
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(64, 256)) * np.logspace(0, -decades, 256)
    y = x @ rng.normal(size=(256, 16))
    return x.astype("float32"), y.astype("float32")


@functools.cache
def losses_of(tx):
    """Returns a function from features and targets to the losses of 120 steps from zero weights."""

    @jax.jit
    def losses(x, y):
        def step(carry, _):
            w, state = carry
            value, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w.T - y) ** 2))(w)
            updates, state = tx.update(grads, state, w)
            return (optax.apply_updates(w, updates), state), value

        w = jnp.zeros((16, 256))
        return jax.lax.scan(step, (w, tx.init(w)), length=120)[1]

    return losses


EXACT = optax.adam(RATE)
DYNAMIC, SHORT_BLOCKS = eight_bit(EXACT), eight_bit(EXACT, block=64)
LINEAR, FOUR_BITS = adam_on_linear_map(), four_bit(EXACT, min_size=1)


@pytest.mark.parametrize("tx", [DYNAMIC, SHORT_BLOCKS], ids=["256", "64"])
@pytest.mark.parametrize("decades", [0, 1.5])
def test_training_in_8_bits_stays_close_to_adam(decades, tx):
    problem = least_squares(0, decades)
    want, got = (np.asarray(losses_of(t)(*problem)) for t in (EXACT, tx))
    assert want[-1] < 0.04 * want[0]
    np.testing.assert_allclose(got, want, rtol=0.2)


@pytest.mark.parametrize("decades", [0, 1.5])
def test_training_in_4_bits_stays_close_to_adam(decades):
    problem = least_squares(0, decades)
    want, got = (np.asarray(losses_of(tx)(*problem)) for tx in (EXACT, FOUR_BITS))
    # No second moment is zero, so that no step is long, as on a linear map with a zero.
    assert got.argmax() == 0
    assert max(want[-1], got[-1]) < 0.04 * want[0]


def test_a_linear_map_diverges_where_the_dynamic_map_does_not():
    for seed in range(3):
        problem = least_squares(seed, 1.5)
        linear, dynamic = (np.asarray(losses_of(tx)(*problem)) for tx in (LINEAR, DYNAMIC))
        assert dynamic.argmax() == 0
        assert dynamic[-1] < 0.04 * dynamic[0]
        assert linear[-1] > 5 * linear[0]
        # It also fails if all features have the same scale.
        problem = least_squares(seed, 0)
        linear, dynamic = (np.asarray(losses_of(tx)(*problem)) for tx in (LINEAR, DYNAMIC))
        assert dynamic[-1] < 0.01 * dynamic[0]
        assert linear[-1] > 20 * dynamic[-1]


def test_a_linear_map_loses_second_moments_and_keeps_the_first():
    # It diverges because the step of a lost second moment is `mu / (sqrt(1 - b2) |g| + eps)`
    # instead of `mu / |g|`.
    g = np.logspace(0, -2, 4096, dtype="float32")[None]
    dynamic = eight_bit(EXACT, block=4096)

    @jax.jit
    def moments(g):
        linear = adam_on_linear_map(4096)
        states = linear.update(g, linear.init(g))[1], decoded(dynamic.update(g, dynamic.init(g))[1])
        return states[0][0], states[1].inner[0]

    on_linear, on_dynamic = (
        [(np.asarray(moment) == 0).mean() for moment in (state.mu, state.nu)]
        for state in moments(g)
    )
    # Half a level is 1 / 254 of the largest `g`, and 1 / 510 of the largest `g²`.
    np.testing.assert_allclose(on_linear, (0, 1 - np.log10(510) / 4), atol=1e-3)
    assert on_dynamic == [0, 0]
