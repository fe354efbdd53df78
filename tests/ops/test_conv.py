"""Tests of actjax/ops/conv.py: everything is exact but `dw`, which carries the codec's error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from cheap_codecs import Spanned
from flax import nnx
from jaxprs import nbytes
from ops.helpers import (
    BF16,
    KEY,
    assert_close,
    assert_equal,
    normal,
    of_all_sizes,
    ones,
    pullback,
)

from actjax import (
    Exact,
    Quantized,
    conv,
    value_and_grad,
)

DITHER = Quantized(2, group=4, rounding="dither", scale_dtype="float32")
JOINED = Quantized(4)
"""Joins positions where channels are few."""

# Shapes of input and weight, settings, and the same settings as the oracle takes them.
SETTINGS = {
    "no axes": ((3, 4), (4, 5), {}, ((), (), (), 1)),
    "one axis": (
        (2, 7, 6), (4, 6, 5), {"padding": [(5, 7)], "strides": 3}, ((3,), ((5, 7),), (1,), 1),
    ),
    "causal, depthwise": (
        (2, 7, 6), (4, 1, 12), {"padding": [(3, 0)], "feature_group_count": 6},
        ((1,), ((3, 0),), (1,), 6),
    ),
    "cropped": ((2, 7, 4), (2, 4, 3), {"padding": [(-1, -2)]}, ((1,), ((-1, -2),), (1,), 1)),
    "same": ((2, 5, 4, 6), (3, 2, 6, 4), {}, ((1, 1), ((1, 1), (0, 1)), (1, 1), 1)),
    "same lower": (
        (2, 5, 4, 6), (3, 2, 6, 4), {"padding": "SAME_LOWER"},
        ((1, 1), ((1, 1), (1, 0)), (1, 1), 1),
    ),
    "patches": (
        (2, 6, 4, 3), (2, 2, 3, 5), {"padding": "VALID", "strides": 2},
        ((2, 2), ((0, 0), (0, 0)), (1, 1), 1),
    ),
    "groups, strides, dilation": (
        (2, 9, 8, 6), (3, 2, 3, 4),
        {"strides": (2, 3), "dilation": (2, 1), "feature_group_count": 2, "padding": "SAME"},
        ((2, 3), ((2, 2), (0, 0)), (2, 1), 2),
    ),
    "three axes": (
        (2, 4, 3, 2, 2), (2, 1, 2, 2, 3), {"strides": (1, 2, 1)},
        ((1, 2, 1), ((0, 1), (0, 0), (0, 1)), (1, 1, 1), 1),
    ),
}  # fmt: skip


# Values and gradients.


def drawn_case(seed):
    """Returns shapes and settings as `SETTINGS` has them."""
    rng = np.random.default_rng(seed)
    axes, groups, channels, outputs = 1 + seed % 2, *map(int, rng.integers(1, (4, 3, 3)))
    draw = lambda low, high: tuple(map(int, rng.integers(low, high + 1, axes)))  # noqa: E731
    window, strides, dilation = draw(1, 3), draw(1, 3), draw(1, 2)
    reach = [(n - 1) * d + 1 for n, d in zip(window, dilation, strict=True)]
    padding = tuple(zip(draw(0, 4), draw(0, 4), strict=True))
    spatial = [n + r for n, r in zip(draw(0, 4), reach, strict=True)]
    x, w = (seed % 3, *spatial, channels * groups), (*window, channels, outputs * groups)
    options = {"strides": strides, "padding": padding, "dilation": dilation}
    return x, w, options | {"feature_group_count": groups}, (strides, padding, dilation, groups)


def test_value_and_gradients_agree_with_the_oracle(x64):
    cases = [*SETTINGS.values(), *map(drawn_case, range(8))]
    inputs = [(normal(0, *x), normal(1, *w)) for x, w, _, _ in cases]

    @jax.jit
    def run(inputs):
        results = []
        for (x, w), (_, _, options, _) in zip(inputs, cases, strict=True):
            z, pull = jax.vjp(functools.partial(conv, **options), x, w)
            results.append((z, pull(jnp.cos(z))))
        return results

    for (x, w), (z, got), (*_, settings) in zip(inputs, run(inputs), cases, strict=True):
        assert {a.dtype for a in (z, *got)} == {jnp.dtype("float64")}
        # Sums of up to 60 terms of size 1 to 10, in another order: some 1e-16 each.
        assert_close(z, oracles.conv(x, w, *settings), 1e-12, 1e-13)
        assert_close(got, oracles.conv_vjp(x, w, np.cos(z), *settings), 1e-12, 1e-12)


def test_the_value_is_that_of_jax_bit_for_bit_with_any_codec():
    codecs = Exact(), JOINED
    shape, window, numbers = (2, 5, 4, 6), (3, 2, 6, 4), ("NHWC", "HWIO", "NHWC")

    @jax.jit
    def run(x, w):
        plain = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
        values = []
        for codec in codecs:
            fun = functools.partial(conv, codec=codec, key=KEY)
            values += [fun(x, w), jax.vjp(fun, x, w)[0]]
        return plain, values

    for dtype in ("float32", "bfloat16"):
        plain, values = run(normal(0, *shape, dtype=dtype), normal(1, *window, dtype=dtype))
        for z in values:
            assert z.dtype == dtype
            np.testing.assert_array_equal(z, plain)


def test_a_factored_codec_gives_the_exact_dx_and_dw_at_the_decoded_input(x64):
    x, w, codec = normal(0, 2, 4, 3, 8), normal(1, 2, 2, 4, 6), Spanned(3)
    dz, settings = normal(2, 2, 4, 3, 6), ((1, 1), ((0, 1), (0, 1)), (1, 1), 2)

    @jax.jit
    def run(x, w):
        fun = functools.partial(conv, feature_group_count=2, codec=codec, key=KEY)
        return *jax.vjp(fun, x, w)[1](dz), codec.decode(codec.encode(x))

    dx, dw, x_hat = run(x, w)
    assert not np.array_equal(x, x_hat)
    # Sums of up to 24 terms of size 1 and more, in another order: some 1e-16 each.
    assert_close(dx, oracles.conv_vjp(x, w, dz, *settings)[0], 1e-12, 1e-13)
    assert_close(dw, oracles.conv_vjp(x_hat, w, dz, *settings)[1], 1e-11, 1e-12)


def test_the_weight_gradient_is_unbiased_if_the_codec_is(x64):
    x, w, count = normal(0, 2, 5, 4), normal(1, 2, 4, 3), 2000
    dz, settings = normal(2, 2, 4, 3), ((1,), ((0, 0),), (1,), 1)

    @jax.jit
    def samples(codec):
        def sample(key):
            fun = lambda w: conv(x, w, padding="VALID", codec=codec, key=key)  # noqa: E731
            return jax.vjp(fun, w)[1](dz)[0]

        return jax.vmap(sample)(jax.random.split(KEY, count))

    exact = oracles.conv_vjp(x, w, dz, *settings)[1]
    drawn = np.asarray(samples(DITHER))
    standard_error = drawn.std(0) / np.sqrt(count)
    assert standard_error.min() > 0  # Each key draws other numbers.
    assert np.all(np.abs(drawn.mean(0) - exact) <= 5 * standard_error)


# Precision.


def test_sums_are_taken_in_float32():
    # 4096 ones: a bfloat16 sum stops at 256, where adding one rounds back.
    bf16 = functools.partial(ones, dtype=jnp.bfloat16)

    @jax.jit
    def run(wide, long, w):
        value = conv(wide, w)
        dx = jax.vjp(lambda x: conv(x, jnp.swapaxes(w, 1, 2)), wide[..., :1])[1](wide)[0]
        fun = lambda w: conv(long, w)  # noqa: E731
        return value, dx, jax.vjp(fun, w[:, :1])[1](long)[0]

    for array in run(bf16(2, 3, 4096), bf16(2, 2048, 1), bf16(1, 4096, 1)):
        assert array.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.float32(array), 4096)


def test_a_wider_weight_is_cast_on_the_fly_and_results_are_rounded_once():
    x, w = normal(0, 2, 5, 4, 6, dtype=jnp.bfloat16), normal(1, 3, 2, 6, 4)
    settings = SETTINGS["same"][3]

    @jax.jit
    def run(x, w):
        z, pull = jax.vjp(conv, x, w)
        return z, *pull(z)

    z, dx, dw = run(x, w)
    assert (z.dtype, dx.dtype, dw.dtype) == ("bfloat16", "bfloat16", "float32")
    assert nbytes(pullback(conv, x, w)) == x.nbytes + w.nbytes  # No copy of w in bfloat16.
    cast = np.asarray(w).astype(jnp.bfloat16)
    want_dx, want_dw = oracles.conv_vjp(x, cast, z, *settings)
    # One rounding to bfloat16; float32 inside errs by some 40 x 6e-8 of terms of size 10.
    for got, want in ((z, oracles.conv(x, cast, *settings)), (dx, want_dx), (dw, want_dw)):
        np.testing.assert_allclose(np.float64(got), want, rtol=1.01 * BF16, atol=1e-4)


@jax.jit
@jax.vmap
def without_padding(x, w, dz):
    """Returns value and gradients of each example."""
    z, pull = jax.vjp(lambda x, w: conv(x, w, padding="VALID"), x, w)
    return z, *pull(dz)


def test_numbers_of_any_size_give_what_the_oracle_gives():
    shapes, settings = ((1, 3, 2), (2, 2, 2), (1, 2, 2)), ((1,), ((0, 0),), (1,))
    drawn = [of_all_sizes(i, 50, *shape, largest=40) for i, shape in enumerate(shapes)]
    # An operand below the smallest normal number may be flushed to zero before it is multiplied.
    drawn = [np.where(np.abs(a) < 2.0**-100, 0, a) for a in drawn]
    for dtype, rounding in (("float32", 2.0**-24), ("bfloat16", BF16)):
        arrays = [a.astype(dtype) for a in drawn]
        for x, w, dz, *got in zip(*arrays, *without_padding(*arrays), strict=True):
            want, terms = (
                (oracles.conv(x, w, *settings), *oracles.conv_vjp(x, w, dz, *settings))
                for x, w, dz in ((x, w, dz), [np.abs(np.float64(a)) for a in (x, w, dz)])
            )
            # Sums of at most four terms in float32, and one rounding to the dtype.
            for a, b, size in zip(got, want, terms, strict=True):
                bound = 4 * 2.0**-24 * size + 1.01 * rounding * np.abs(b)
                # Numbers below the smallest normal one may be flushed to zero.
                assert np.all(np.abs(np.float64(a) - b) <= bound + 8 * 2.0**-126)


# Memory.


def test_positions_are_joined_where_channels_are_few():
    # A position alone would take as many bytes as in bfloat16: two, and four of its scale.
    x = normal(0, 2, 8, 8, 3, dtype=jnp.bfloat16)
    held = nbytes(pullback(lambda x, w: conv(x, w, codec=JOINED), x, normal(1, 3, 3, 3, 4)))
    # 8 x 3 numbers are filled up to a group of 32.
    groups, bits = 2 * 8, 32 * 4
    assert held - 4 * 3 * 3 * 3 * 4 == groups * (bits // 8 + 2 * 2)


def test_weights_may_be_nnx_variables_and_are_dense_in_value_and_grad():
    x, w = normal(0, 2, 5, 4), normal(1, 2, 4, 3)

    @jax.jit
    def run(x, w):
        loss = lambda w: jnp.sum(jnp.sin(conv(x, w, codec=Spanned(2), key=KEY)))  # noqa: E731
        both = conv(x, nnx.Param(w)), conv(x, w)
        return both, value_and_grad(loss)(w), jax.value_and_grad(loss)(w)

    (variable, array), ours, plain = run(x, w)
    np.testing.assert_array_equal(variable, array)
    assert_equal(ours, plain)
