"""Tests of actjax/ops/linear.py: everything is exact but `dw`, which carries the codec's error."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap_codecs import Coarse, CoarseRandom
from ops.helpers import (
    KEY,
    assert_close,
    assert_equal,
    normal,
    ones,
)

from actjax import (
    Exact,
    RandomProjection,
    linear,
    qkv_projection,
)

LOSSY = (Coarse(),)


def value_and_pullback(fun, cotangents, *arguments):
    """Returns the value of a function and the cotangents of its arguments."""
    values, pullback = jax.vjp(fun, *arguments)
    return values, pullback(cotangents)


# Values.


def test_value_is_the_product_bit_for_bit():
    cases = [(Exact(), "bfloat16"), *((codec, "float32") for codec in (Exact(), *LOSSY))]

    @jax.jit
    def run(inputs):
        found = []
        for codec, dtype in cases:
            x, w = inputs[dtype]
            fun = lambda x, w=w, codec=codec: linear(x, w, codec=codec, key=KEY)  # noqa: E731
            found.append((jax.vjp(fun, x)[0], x @ w))
        return found

    dtypes = "float32", "bfloat16"
    inputs = {d: (normal(0, 2, 6, 8, dtype=d), normal(1, 8, 5, dtype=d)) for d in dtypes}
    for (codec, dtype), (y, want) in zip(cases, run(inputs), strict=True):
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, want, err_msg=str(codec))


def test_any_number_of_leading_axes(x64):
    w, leads = normal(1, 6, 5), ((), (4,), (2, 4), (2, 3, 4))
    inputs = [(normal(0, *lead, 6), normal(2, *lead, 5)) for lead in leads]

    @jax.jit
    def run(inputs, w):
        found = []
        for x, dz in inputs:
            for codec in (Exact(), Coarse()):
                fun = lambda x, w, codec=codec: linear(x, w, codec=codec, key=KEY)  # noqa: E731
                x_hat = codec.decode(codec.encode(x, KEY))
                found.append(((x, dz, x_hat), value_and_pullback(fun, dz, x, w)))
        return found

    found, w = jax.tree.map(np.asarray, (run(inputs, w), w))
    for (x, dz, x_hat), got in found:
        dw = x_hat.reshape(-1, 6).T @ dz.reshape(-1, 5)
        # Sums of up to 24 terms of size 1 and more, in another order: some 1e-16 each.
        assert_close(got, (x @ w, (dz @ w.T, dw)), 1e-12, 1e-13)


def test_several_weights_give_a_tuple_of_products():
    x, ws, b = normal(0, 6, 8), [normal(i, 8, n) for i, n in enumerate((5, 1, 3))], normal(2, 1)

    @jax.jit
    def run(x, ws, b):
        bias = [None, b, None]
        products = [x @ w for w in ws]
        products[1] += b
        one = linear(x, (ws[1],), bias=(None,)), linear(x, ws[1]), linear(x, ws[1], bias=b)
        return [linear(x, kind(ws), bias=bias) for kind in (tuple, list)], products, one

    found, products, one = run(x, ws, b)
    for ys in found:
        assert isinstance(ys, tuple)
        assert_equal(list(ys), products)
    (first,), alone, biased = one
    np.testing.assert_array_equal(first, alone)
    np.testing.assert_array_equal(biased, products[1])


def test_qkv_projection_is_linear_with_three_weights():
    x, ws = normal(0, 6, 8), tuple(normal(i, 8, n) for i, n in enumerate((8, 4, 4), 1))
    options = {"bias": (normal(4, 8), None, normal(5, 4)), "codec": CoarseRandom(), "key": KEY}

    @jax.jit
    def run(x, ws):
        funs = (
            lambda x, ws: qkv_projection(x, *ws, **options),
            lambda x, ws: linear(x, ws, **options),
        )
        found = []
        for fun in funs:
            y, pullback = jax.vjp(fun, x, ws)
            found.append((y, pullback(y)))
        return found

    assert_equal(*run(x, ws))


# Gradients.


def test_weight_gradient_is_unbiased_if_the_codec_is(x64):
    x, w, dz = normal(0, 7, 6), normal(1, 6, 3), normal(2, 7, 3)

    @jax.jit
    def samples():
        def sample(key):
            run = lambda w: linear(x, w, codec=RandomProjection(3), key=key)  # noqa: E731
            return jax.vjp(run, w)[1](dz)[0]

        return jax.vmap(sample)(jax.random.split(KEY, 2000))

    found = np.asarray(samples())
    standard_error = found.std(0) / np.sqrt(2000)
    assert standard_error.min() > 0  # Each key draws other numbers.
    error = np.abs(found.mean(0) - np.asarray(x).T @ np.asarray(dz))
    assert np.all(error <= 5 * standard_error)


# Precision.


def test_sums_are_taken_in_float32():
    # 4096 ones: a bfloat16 sum stops at 256, where adding one rounds back.
    bf16 = lambda *shape: ones(*shape, dtype=jnp.bfloat16)  # noqa: E731

    @jax.jit
    def run(tall, wide, flat, dz):
        value = linear(wide, tall)
        dx = jax.vjp(lambda x: linear(x, tall.T), flat)[1](wide)[0]
        fun = lambda w, b: linear(tall, w, bias=b)  # noqa: E731
        return value, dx, *jax.vjp(fun, flat.T, wide[:, 0])[1](dz)

    for array in run(bf16(4096, 2), bf16(3, 4096), bf16(3, 2), bf16(4096, 3)):
        assert array.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.float32(array), 4096)


def test_dx_of_several_weights_is_rounded_once():
    # 256 + 1 + 1 is 258; rounded to bfloat16 after each term, where numbers are 2 apart, it is 256.
    ws = tuple(np.full((1, 1), value, jnp.bfloat16) for value in (256, 1, 1))
    one = ones(1, 1, dtype=jnp.bfloat16)
    run = jax.jit(lambda x, ws, dzs: jax.vjp(lambda x: linear(x, ws), x)[1](dzs))
    (dx,) = run(one, ws, (one,) * 3)
    assert dx == 258


def test_bias_is_added_before_rounding():
    # 256 + 1 + 1 in float32 is 258; rounded after the product, 256 + 1 would be 256 again.
    x, w = ones(1, 2, dtype=jnp.bfloat16), np.asarray([[256], [1]], jnp.bfloat16)
    y = jax.jit(lambda x, w, b: linear(x, w, bias=b))(x, w, ones(1, dtype=jnp.bfloat16))
    assert y[0, 0] == 258


X, W = ones(6, 8), ones(8, 5)
