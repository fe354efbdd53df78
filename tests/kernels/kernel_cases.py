"""Arguments of kernels for tests, and comparisons of results."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh

from actjax.formats.code import QuantizedCode

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
"""Widths of the planes of a code, as documented by `pack`."""

TINY = 2.0**-24
"""Relative rounding of an operation in float32."""


def gpu_named():
    """Context in which JAX 0.12 lowers kernels for a GPU: it wants to know which."""
    if jax.__version_info__ < (0, 12):
        return contextlib.nullcontext()
    h100 = AbstractDevice(device_kind="NVIDIA H100", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("gpu",), abstract_device=h100))


def f64(x):
    return np.asarray(x, np.float64)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def assert_near(got, want, slack):
    """Asserts that two arrays agree up to float32 arithmetic, and in 16 bits up to a unit in the
    last place.

    Args:
      got: computed in float32, then rounded to its dtype.
      want: computed in the same way, or in float64.
      slack: allowed difference before that last rounding; broadcasts against both.
    """
    unit = 0.0
    if got.dtype.itemsize == 2:
        info = jnp.finfo(got.dtype)
        # Subnormal numbers are multiples of the smallest one.
        unit = float(info.eps) * abs(f64(want)) + float(info.smallest_subnormal)
    got, want = f64(got), f64(want)
    assert np.isfinite(want).all()
    excess = abs(got - want) - (slack + unit)
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert np.all(excess <= 0), (worst, got[worst], want[worst], excess[worst])


def assert_same(got, want, slack):
    """As `assert_near` for two arrays of one dtype; in 16 bits, nearly all entries must be equal.

    Numbers that differ by `slack` before rounding seldom round to different numbers: with a
    probability of about the slack over the distance between two numbers of the dtype.
    """
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert_near(got, want, slack)
    if got.dtype.itemsize == 2:
        assert np.mean(f64(got) != f64(want)) <= 0.01


def random_code(codec, dtype, shape, *, outliers=0, zero_row=False, seed=0):
    """Returns a code of random bytes that decodes to the same floats in any order of operations.

    Scales and spreads are powers of two, offsets and means whole multiples of powers of two. Up to
    4 bits, or without dither, all sums are exact in float32, rotated ones too in blocks of a power
    of four. Numbers are up to 8, of both signs, before they are rotated.

    Args:
      codec: a `Quantized`, with scales in bfloat16 or float32; rotated without dither.
      dtype: dtype of the decoded array.
      shape: shape of the decoded array.
      outliers: number of channels that are stored whole.
      zero_row: whether the first row is zero.
      seed: seed of the bytes.
    """
    rng, (*leading, features) = np.random.default_rng(seed), shape
    half, padded = 2 ** (codec.bits - 1), features + -features % codec.group
    scales = (*leading, -(-features // codec.group))
    scale = 2.0 ** rng.integers(-2, 3, scales) / half
    low = -scale * rng.integers(half, half + 2, scales)
    mean = rng.integers(-20, 20, features) / 4
    spread = 2.0 ** rng.integers(-4, 1, features)
    if zero_row:
        scale.reshape(-1, scales[-1])[0] = 0
    channels, seeds = None, None
    if outliers:
        channels = rng.permutation(features)[:outliers].astype(np.int32)
    if codec.rounding == "dither":
        seeds = rng.integers(0, 2**32, 2).astype(np.uint32)
    return QuantizedCode(
        planes=tuple(
            rng.integers(0, 256, (*leading, -(-padded * width // 8))).astype(np.uint8)
            for width in PLANES[codec.bits]
        ),
        scale=_stored(scale, codec),
        features=features,
        dtype=jnp.dtype(dtype),
        format=codec.format,
        offset=_stored(np.where(scale > 0, low, 0), codec) if codec.levels == "uniform" else None,
        mean=_stored(mean, codec) if codec.balance else None,
        spread=_stored(spread, codec) if codec.balance else None,
        outliers=rng.normal(size=(*leading, outliers)).astype(jnp.dtype(dtype))
        if outliers
        else None,
        channels=channels,
        seed=seeds,
    )


def _stored(scale, codec):
    scale = scale.astype(jnp.dtype(codec.scale_dtype))
    return scale if codec.scale_dtype == "float32" else scale.view(np.uint16)
