"""How near to each other two results of the same operations in float32 have to be."""

import jax.numpy as jnp
import numpy as np

TINY = 2.0**-24
"""What an operation of float32 rounds by, of its result."""


def f64(x):
    return np.asarray(x, np.float64)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def assert_near(got, want, slack):
    """Holds two arrays of a dtype to what float32 adds, and in 16 bits to a unit of the last place.

    Args:
      got: computed in float32, then rounded to its dtype.
      want: likewise, or in float64.
      slack: by how much the two may differ before that last rounding, broadcast against both.
    """
    unit = 0.0
    if got.dtype.itemsize == 2:
        info = jnp.finfo(got.dtype)
        # Of numbers below the normal ones all are multiples of the smallest.
        unit = float(info.eps) * abs(f64(want)) + float(info.smallest_subnormal)
    got, want = f64(got), f64(want)
    assert np.isfinite(want).all()
    excess = abs(got - want) - (slack + unit)
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert np.all(excess <= 0), (worst, got[worst], want[worst], excess[worst])


def assert_same(got, want, slack):
    """As `assert_near`, of two arrays of one dtype; in 16 bits nearly all are to be equal.

    What differs by `slack` before it is rounded to a dtype seldom rounds to another number there:
    with a probability of about the slack over the distance of two such numbers.
    """
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert_near(got, want, slack)
    if got.dtype.itemsize == 2:
        assert np.mean(f64(got) != f64(want)) <= 0.01
