"""Arrays whose last axis is short: codes must be smaller than they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from residuals.residual_helpers import held_bytes, normal

from actjax import Quantized, compress_residuals, explain
from actjax.residuals.graph.storing import Form
from actjax.residuals.residual_codecs import Reshaped, fitted, in_bits


def coded(bits):
    """Returns `exp`, which stores its value in a code."""
    return compress_residuals(jnp.exp, lambda _: Quantized(bits), rebuild=False)


@pytest.mark.parametrize(
    ("shape", "bits"), [((1024, 1), 1), ((1024, 1), 8), ((2, 4, 32, 16, 2), 2), ((64, 3, 5), 4)]
)
def test_scales_take_at_most_a_quarter_of_a_code(shape, bits):
    x, codec = normal(0, *shape), Quantized(bits)
    held = held_bytes(coded(bits), x)
    # Tokens are padded to whole bytes: here less than the rest.
    assert held <= 1.5 * x.size * bits / 8
    assert held == codec.stored_bytes(codec.grouped_shape(shape), "float32")


def test_the_gradient_is_that_of_the_reshaped_array():
    codec = Quantized(4)

    @jax.jit
    def both(x):
        # Both columns of a token are in one group, of all tokens.
        decoded = codec.decode(codec.encode(jnp.exp(x).reshape(-1)))
        return jax.grad(lambda x: coded(4)(x).sum())(x).reshape(-1), decoded

    np.testing.assert_array_equal(*both(normal(0, 64, 2)))


def test_an_array_smaller_than_its_code_stays():
    fun, x = coded(8), np.asarray([0.5, -2], jnp.bfloat16)
    both = jax.jit(lambda x: (jax.grad(lambda x: fun(x).sum())(x), jnp.exp(x)))
    np.testing.assert_array_equal(*both(x))
    assert "its code would be larger" in str(explain(fun, x))


def test_booleans_of_a_short_axis_take_a_bit_each():
    x = normal(0, 512, 2)
    # `where` stores the condition.
    fun = compress_residuals(lambda x: jnp.where(x > 0, x, 0.1 * x), Quantized(4), rebuild=False)
    assert held_bytes(fun, x) == x.size // 8


@pytest.mark.parametrize(
    ("shape", "bits"), [((3, 5, 7), 3), ((9, 2), 8), ((1, 1), 4), ((8,), 2), ((2, 0), 4)]
)
def test_arrays_and_masks_come_back_in_their_shape(shape, bits):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    stored, mask = fitted(Quantized(bits), shape, "float32"), in_bits(shape)

    @jax.jit
    def there_and_back(x):
        decoded = None if stored is None else stored.decode(stored.encode(x))
        return decoded, mask.decode(mask.encode(x > 0))

    decoded, positive = there_and_back(x)
    np.testing.assert_array_equal(positive, x > 0)
    if decoded is not None:
        assert decoded.shape == shape
        if x.size:
            step = (x.max() - x.min()) / (2**bits - 1)
            # Half a step, and offsets in bfloat16.
            assert np.abs(decoded - x).max() <= 0.5 * step + 2.0**-8 * np.abs(x).max()


def test_channels_and_balanced_arrays_keep_their_axes():
    for codec in (Quantized(4, scaling="channel"), Quantized(4, balance=True)):
        assert codec.grouped_shape((64, 2)) == (64, 2)
        assert not isinstance(fitted(codec, (64, 2), "float32"), Reshaped)


@pytest.mark.parametrize("lowest", [-1e9, -np.inf])
@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_that_stand_for_infinity_are_stored_apart(lowest, bits):
    x = np.random.default_rng(0).standard_normal((16, 128)).astype("float32")
    mask = np.tri(16, 128, 3, dtype=bool)
    codec = fitted(Quantized(bits), x.shape, "float32", Form(limit=1e6))
    decoded = jax.jit(lambda x: codec.decode(codec.encode(x)))(np.where(mask, x, lowest))
    np.testing.assert_array_equal(decoded[~mask], np.float32(lowest))
    ordinary = np.where(mask, x, np.nan)
    steps = (np.nanmax(ordinary, 1) - np.nanmin(ordinary, 1)) / (2**bits - 1)
    # Half a step, and offsets in bfloat16.
    bounds = 0.5 * steps + 2.0**-8 * np.nanmax(np.abs(ordinary), 1)
    assert (np.abs(decoded - x) <= bounds[:, None])[mask].all()


def test_the_reciprocal_of_a_divisor_has_the_error_of_a_code():
    x = np.exp(np.random.default_rng(1).standard_normal((16, 128))).astype("float32")
    x[3, 5] = 1e-12  # As where a sum is empty: nothing reads this quotient.
    codec = fitted(Quantized(8), x.shape, "float32", Form(is_reciprocal=True))
    decoded = np.asarray(jax.jit(lambda x: codec.decode(codec.encode(x)))(x))
    wrong = np.abs(1 / decoded - 1 / x)
    wrong[3, 5] = 0
    reciprocals = np.where(x < 1e-6, np.nan, 1 / x)
    steps = (np.nanmax(reciprocals, 1) - np.nanmin(reciprocals, 1)) / 255
    # Half a step, and offsets in bfloat16.
    assert (wrong.max(1) <= 0.5 * steps + 2.0**-8 * np.nanmax(reciprocals, 1)).all()
    np.testing.assert_allclose(decoded[3, 5], 1e-12, rtol=1e-5)


def test_nan_is_stored_apart():
    x = np.random.default_rng(2).standard_normal((4, 64)).astype("float32")
    x[1, 3], x[2] = np.nan, np.nan
    stored = fitted(Quantized(8), x.shape, "float32", Form(may_be_nan=True))
    decoded = np.asarray(jax.jit(lambda x: stored.decode(stored.encode(x)))(x))
    np.testing.assert_array_equal(np.isnan(decoded), np.isnan(x))
    steps = (np.fmax(np.nanmax(x[:2], 1), 0) - np.fmin(np.nanmin(x[:2], 1), 0)) / 255
    # Half a step, and offsets in bfloat16.
    bounds = (0.5 * steps + 2.0**-8 * np.nanmax(np.abs(x[:2]), 1))[:, None]
    assert (np.abs(decoded[:2] - x[:2]) <= bounds)[~np.isnan(x[:2])].all()
