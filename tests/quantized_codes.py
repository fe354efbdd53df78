"""Codes of `actjax.Quantized` in NumPy, for tests/codecs/test_quantized*.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actjax.formats.packing import unpack

KEY = jax.random.key(5)
KEYS = 2000
BITS = (1, 2, 3, 4, 5, 6, 8)
ROUNDINGS = ("nearest", "stochastic", "dither")
TINY = 2.0**-24
"""Relative rounding of an operation in float32."""

drawing = pytest.mark.parametrize("rounding", ["stochastic", "dither"])


@functools.partial(jax.jit, static_argnums=0)
def coded(codec, x, key=KEY):
    """Returns the code of `x`, its integers, and the decoded numbers."""
    code = codec.encode(x, key)
    return code, unpack(code.planes, codec.bits, code.features, codec.group), codec.decode(code)


def round_trip(codec, x):
    return f64(coded(codec, x)[2])


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def f64(x):
    return np.asarray(x, np.float64)


def scales(codec, code):
    """Returns the stored offsets, or None, and the stored scales, [..., groups] or [d]."""
    offset = None if codec.scaling == "channel" else code.offset
    stored = (None if s is None else np.asarray(s) for s in (offset, code.scale))
    return tuple(None if s is None else f64(s.view(jnp.dtype(codec.scale_dtype))) for s in stored)


def levels_of(codec, code):
    """Returns for each number the lowest level of its group or channel, and the scale."""
    low, scale = scales(codec, code)
    if codec.scaling == "channel":
        return -scale * (2**codec.bits - 1) / 2, scale
    return tuple(np.repeat(s, codec.group, -1)[..., : code.features] for s in (low, scale))


def arithmetic(codec, low, scale):
    """Returns the error that float32 arithmetic adds.

    Encoding rounds a difference, a quotient, half the range of a channel, and the sum with a shift,
    which is a multiple of 2^-23. Decoding rounds a difference, a product and a sum. Each operand is
    at most `2^bits` levels, the last also the lowest level.
    """
    return TINY * (8 * 2**codec.bits * scale + abs(low))


@functools.cache
def many_keys():
    return jax.random.split(KEY, KEYS)


@functools.partial(jax.jit, static_argnums=0)
def draws(codec, x, keys):
    """Returns the scales, and the decoded numbers for each key before they are rounded to
    bfloat16."""

    def draw(key):
        code = codec.encode(x, key)
        decoded = codec.decode(dataclasses.replace(code, dtype=jnp.dtype("float32")))
        return dataclasses.replace(code, planes=None, seed=None), decoded

    codes, decoded = jax.vmap(draw)(keys)
    # The scales do not depend on the key.
    return jax.tree.map(lambda leaf: leaf[0], codes), decoded
