"""Tests of actjax/ops/linear.py: everything is exact but `dw`, which carries the codec's error."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.helpers import (
    KEY,
    assert_close,
    assert_equal,
    assert_gradients_are_differences,
    assert_raises,
    normal,
    ones,
)

from actjax import (
    Exact,
    PointApproximation,
    RandomizedSVD,
    RandomProjection,
    linear,
    qkv_projection,
)

LOSSY = (RandomProjection(3), RandomizedSVD(3), PointApproximation(0.5))


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
            for codec in (Exact(), RandomProjection(1)):
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
    options = {"bias": (normal(4, 8), None, normal(5, 4)), "codec": RandomProjection(3), "key": KEY}

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


@pytest.mark.parametrize("codec", LOSSY, ids=repr)
def test_gradients_are_those_at_the_decoded_input(codec, x64):
    x, bias = normal(0, 2, 5, 6), (normal(1, 4), None, normal(2, 3))
    ws, dzs = (
        tuple(normal(i, *lead, n) for i, n in enumerate((4, 2, 3))) for lead in ((6,), (2, 5))
    )

    @jax.jit
    def run(x, ws, bias):
        fun = lambda *args: linear(*args[:2], bias=args[2], codec=codec, key=KEY)  # noqa: E731
        return *jax.vjp(fun, x, ws, bias)[1](dzs), codec.decode(codec.encode(x, KEY))

    # The backward pass draws the key's numbers again, in the same dtype: equal numbers.
    dx, dws, dbs, x_hat = run(x, ws, bias)
    want_dx = sum(np.asarray(dz) @ np.asarray(w).T for w, dz in zip(ws, dzs, strict=True))
    assert_close(dx, want_dx, 1e-12, 1e-13)
    # Sums of ten terms of size 1 and more, in another order: some 1e-16 each.
    assert_close(dws, tuple(np.einsum("bsd,bsn->dn", x_hat, dz) for dz in dzs), 1e-11, 1e-12)
    assert dbs[1] is None
    for db, dz in ((dbs[0], dzs[0]), (dbs[2], dzs[2])):
        assert_close(db, np.asarray(dz).sum((0, 1)), 1e-12, 1e-13)


def test_exact_codec_passes_finite_differences(x64):
    fun = lambda x, w, b: linear(x, w, bias=b)  # noqa: E731
    assert_gradients_are_differences(fun, normal(0, 2, 3, 5), normal(1, 5, 4), normal(2, 4))


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


# Errors.

X, W = ones(6, 8), ones(8, 5)


def test_errors_name_the_argument_and_its_value():
    transposed, short, integers = ones(5, 8), ones(7, 5), ones(6, 8, dtype=np.int32)
    assert_raises({
        "transposed weight": (
            lambda: linear(X, transposed),
            ValueError,
            "`w` must be [d, n] with d = (8,) features of `x`: got x(6, 8) @ w(5, 8)."
            " Did you pass it transposed?",
        ),
        "weight of other features": (
            lambda: linear(X, (W, short)),
            ValueError,
            "`w[1]` must be [d, n] with d = (8,) features of `x`: got x(6, 8) @ w[1](7, 5).",
        ),
        "weight of three axes": (
            lambda: linear(X, ones(1, 8, 5)), ValueError, "`w` must be [d, n]",
        ),
        "scalar input": (lambda: linear(ones(), W), ValueError, "got x() @ w(8, 5)"),
        "bias of other outputs": (
            lambda: linear(X, W, bias=ones(8)),
            ValueError,
            "the bias of `w`(8, 5) must be (5,), got (8,).",
        ),
        "no weight": (lambda: linear(X, ()), ValueError, "`w` is an empty tuple"),
        "bias count": (
            lambda: linear(X, (W, W), bias=(None,)),
            ValueError,
            "`bias` has 1 entries for 2 weights",
        ),
        "no key": (
            lambda: linear(X, W, codec=RandomProjection(3)),
            ValueError,
            "`codec` RandomProjection(rank=3) draws random numbers, but got key=None: pass `key`",
        ),
        "codec class": (
            lambda: linear(X, W, codec=Exact),
            TypeError,
            "`codec` must be an actjax.Codec (an instance, not the class)",
        ),
        "codec name": (lambda: linear(X, W, codec="exact"), TypeError, "got 'exact'"),
        "integer input": (
            lambda: linear(integers, W),
            TypeError,
            "`x` must be a floating point array, got int32: cast it",
        ),
        "a list as input": (lambda: linear([1.0], W), TypeError, "got list"),
        **{
            f"weight {dtype}": (
                lambda w=w: linear(X, w), TypeError, "`w` must be a floating point array",
            )
            for dtype, w in (
                ("float", 3.0), ("int", ones(8, 4, dtype=np.int32)),
                ("8 bits", ones(8, 4, dtype="float8_e4m3fn")),
            )
        },
        "a number as bias": (
            lambda: linear(X, W, bias=3),
            TypeError,
            "`bias` must be a floating point array, got int",
        ),
        "integer bias": (
            lambda: linear(X, (W, W), bias=(None, ones(5, dtype=np.int32))),
            TypeError,
            "`bias[1]` must be a floating point array, got int32",
        ),
    })  # fmt: skip


def test_a_rank_above_the_dimensions_is_an_error_of_the_backward_pass_only():
    for codec in (RandomProjection(7), RandomizedSVD(7)):
        jax.eval_shape(lambda x, codec=codec: linear(x, W, codec=codec, key=KEY), X)
        message = re.escape(f"`rank` 7 of {codec} is above min(T, d) = 6")
        fun = lambda x, codec=codec: linear(x, W, codec=codec, key=KEY).sum()  # noqa: E731
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(jax.grad(fun), X)


def test_no_hint_of_a_transposed_weight_where_it_would_not_fit():
    with pytest.raises(ValueError) as error:
        linear(X, ones(7, 5))
    assert "transposed" not in str(error.value)
