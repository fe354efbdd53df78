"""Training with moments in few bits stays close to Adam."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from actjax.optim import eight_bit, four_bit

RATE = 1e-2


def least_squares(seed, decades):
    """Returns features [64, 256] whose columns decay over some decades, and targets [64, 16].

    The gradients of one block differ by as many decades, and second moments by twice as many.
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(64, 256)) * np.logspace(0, -decades, 256)
    y = x @ rng.normal(size=(256, 16))
    return x.astype("float32"), y.astype("float32")


def losses_of(tx, x, y):
    """Returns the losses of 120 steps from zero weights."""

    def step(carry, _):
        w, state = carry
        value, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w.T - y) ** 2))(w)
        updates, state = tx.update(grads, state, w)
        return (optax.apply_updates(w, updates), state), value

    w = jnp.zeros((16, 256))
    return jax.lax.scan(step, (w, tx.init(w)), length=120)[1]


EXACT = optax.adam(RATE)
SMALL = {
    "8 bits": eight_bit(EXACT),
    "4 bits": four_bit(EXACT, min_size=1),
}


@functools.cache
def losses():
    """Returns the losses [seeds, steps] of each transform on columns of one size and of many."""
    problems = [least_squares(seed, decades) for decades in (0, 1.5) for seed in range(2)]
    return jax.jit(
        lambda x, y: {
            name: jax.lax.map(lambda xy, tx=tx: losses_of(tx, *xy), (x, y))
            for name, tx in {"exact": EXACT, **SMALL}.items()
        }
    )(*map(np.stack, zip(*problems, strict=True)))


@pytest.mark.parametrize("name", SMALL)
def test_training_in_few_bits_stays_close_to_adam(name):
    want, got = np.asarray(losses()["exact"]), np.asarray(losses()[name])
    assert (want[:, -1] < 0.04 * want[:, 0]).all()
    if name == "4 bits":
        # No second moment is zero, so that no step is long.
        assert (got.argmax(1) == 0).all()
        assert (got[:, -1] < 0.04 * want[:, 0]).all()
    else:
        np.testing.assert_allclose(got, want, rtol=0.2)
