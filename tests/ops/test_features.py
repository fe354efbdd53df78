"""The argument `features` of linear operators and SwiGLU: inputs that end in padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.helpers import KEY, normal

import actjax
from actjax import Exact, PointApproximation, Quantized, RandomizedSVD, RandomProjection

FEATURES, WIDTH = 21, 24
PLAIN = Quantized(4, group=8)
"""A code that decodes zeros as other numbers."""


def padded(seed, *shape, axis=-1):
    """Returns random numbers with zeros from `FEATURES` on along an axis of `WIDTH`."""
    x = np.array(normal(seed, *shape))
    np.moveaxis(x, axis, -1)[..., FEATURES:] = 0
    return jnp.asarray(x)


def gradients(fun, *args):
    """Returns the value and the cotangents of the arguments, for a random cotangent."""

    @jax.jit
    def run(*args):
        y, pull = jax.vjp(fun, *args)
        return y, pull(normal(9, *y.shape))

    return run(*args)


@pytest.mark.parametrize(
    "codec",
    [PLAIN, Quantized(4, group=8, scaling="channel"), RandomizedSVD(3), RandomProjection(3),
     PointApproximation(points=3), Exact()],
    ids=lambda codec: type(codec).__name__,
)  # fmt: skip
def test_rows_of_the_weight_gradient_are_zero_and_all_else_is_as_without(codec):
    x, w = padded(0, 2, 6, WIDTH), normal(1, WIDTH, 5)

    def run(features):
        fun = lambda x, w: actjax.linear(x, w, codec=codec, key=KEY, features=features)  # noqa: E731
        return gradients(fun, x, w)

    (y, (dx, dw)), (plain_y, (plain_dx, plain_dw)) = run(FEATURES), run(None)
    np.testing.assert_array_equal(y, plain_y)
    np.testing.assert_array_equal(dx, plain_dx)
    np.testing.assert_allclose(dw[:FEATURES], plain_dw[:FEATURES], rtol=1e-6, atol=1e-6)
    assert not np.any(dw[FEATURES:])


def test_the_left_factor_of_a_gradient_is_zero_too():
    x, w = padded(0, 2, 6, WIDTH), normal(1, WIDTH, 5)

    @jax.jit
    def run(w):
        def loss(w):
            y = actjax.linear(x, w, codec=RandomProjection(3), key=KEY, features=FEATURES)
            return jnp.sum(y**2)

        return actjax.value_and_grad(loss)(w)[1]

    gradient = run(w)
    assert isinstance(gradient, actjax.LowRank)
    assert np.any(gradient.left[:FEATURES])
    assert not np.any(gradient.left[FEATURES:])


def test_adapters_have_zero_gradients_in_the_padding():
    gate, up = padded(0, 2, 6, WIDTH), padded(1, 2, 6, WIDTH)
    w, b = padded(2, WIDTH, 5, axis=0), normal(4, 2, 5)

    def run(a):
        adapted = actjax.LoRA(w, a, b, key=KEY, dropout=0.5)
        return actjax.swiglu_linear(gate, up, adapted, codec=PLAIN, features=FEATURES)

    _, (da,) = gradients(run, padded(3, WIDTH, 2, axis=0))
    assert np.any(da[:FEATURES])
    assert not np.any(da[FEATURES:])


@pytest.mark.parametrize("codec", [PLAIN, (PLAIN, Exact()), Exact()], ids=["codes", "one", "exact"])
def test_swiglu_is_zero_in_the_padding(codec):
    """Also where `gate`, `up` and the cotangent are not zero there."""
    gate, up, w = normal(0, 2, 6, WIDTH), normal(1, 2, 6, WIDTH), normal(2, WIDTH, 5)
    options = {"codec": codec, "features": FEATURES}
    y, cotangents = gradients(lambda *x: actjax.swiglu(*x, **options), gate, up)
    plain, _ = gradients(lambda *x: actjax.swiglu(*x, codec=codec), gate, up)
    np.testing.assert_array_equal(y[..., :FEATURES], plain[..., :FEATURES])
    for x in (y, *cotangents):
        assert np.any(x[..., :FEATURES])
        assert not np.any(x[..., FEATURES:])
    z, (dgate, dup, dw) = gradients(lambda *x: actjax.swiglu_linear(*x, **options), gate, up, w)
    np.testing.assert_allclose(z, y @ w, rtol=1e-5, atol=1e-5)
    for x in (dgate, dup, dw.T):
        assert np.any(x[..., :FEATURES])
        assert not np.any(x[..., FEATURES:])
