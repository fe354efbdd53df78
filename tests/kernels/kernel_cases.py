"""What tests of kernels share: arguments, and how near to each other two results have to be."""

import jax.numpy as jnp
import numpy as np

from actjax.kernels.format import QuantizedCode

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
"""Widths that codes are cut into, as `pack` says."""

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


def random_code(codec, dtype, shape, *, outliers=0, centred=False, zero_row=False, seed=0):
    """A code of any bytes, that decodes to the same floats in whatever order that is computed.

    For scales are powers of two, and lowest values a whole number of scales: up to 4 bits, or
    without dither, all that is added is exact in float32. Numbers are up to 8, on both sides of 0.

    Args:
      codec: a `Quantized`, with scales in bfloat16 or float32.
      dtype: of what it decodes to.
      shape: likewise.
      outliers: number of channels that are kept whole.
      centred: whether levels by channel lie about numbers other than zero.
      zero_row: whether the first row is zero.
      seed: of the bytes.
    """
    rng, (*leading, features) = np.random.default_rng(seed), shape
    half = 2 ** (codec.bits - 1)
    by_channel = codec.scaling == "channel"
    scales = (features,) if by_channel else (*leading, -(-features // codec.group))
    scale = 2.0 ** rng.integers(-2, 3, scales) / half
    low = -scale * rng.integers(half, half + 2, scales)
    if zero_row:
        scale.reshape(-1, scales[-1])[0] = 0
    channels, seeds = None, None
    if outliers:
        channels = rng.permutation(features)[:outliers].astype(np.int32)
    if codec.rounding == "dither":
        seeds = rng.integers(0, 2**32, 2).astype(np.uint32)
    return QuantizedCode(
        planes=tuple(
            rng.integers(0, 256, (*leading, -(-features * width // 8))).astype(np.uint8)
            for width in PLANES[codec.bits]
        ),
        offset=_stored(np.where(scale > 0, low, 0), codec) if codec.format.affine else None,
        scale=_stored(scale, codec),
        centre=_stored(scale * rng.integers(-3, 4, scales), codec) if centred else None,
        outliers=rng.normal(size=(*leading, outliers)).astype(jnp.dtype(dtype))
        if outliers
        else None,
        channels=channels,
        seed=seeds,
        features=features,
        dtype=jnp.dtype(dtype),
        format=codec.format,
    )


def _stored(scale, codec):
    scale = scale.astype(jnp.dtype(codec.scale_dtype))
    return scale if codec.scale_dtype == "float32" else scale.view(np.uint16)
