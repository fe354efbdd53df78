"""Tests of actjax/kernels/packing.py: codes of a few bits side by side in bytes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actjax.kernels.packing import BITS, pack, packed_bytes, unpack

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
"""Widths by the docstring: of 3 bits, two and one lie in planes of their own, low bits first."""

every = pytest.mark.parametrize("bits", PLANES)


def random_codes(bits, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, 2**bits, shape).astype(np.uint8)


@functools.partial(jax.jit, static_argnums=1)
def packed(codes, bits):
    return pack(codes, bits)


@functools.partial(jax.jit, static_argnums=1)
def round_trip(codes, bits):
    return unpack(pack(codes, bits), bits, codes.shape[-1])


def oracle(codes, bits):
    """The documented layout, one code after the other.

    With `w` bytes in a plane, bits of the code `f` lie in byte `f % w`, `f // w` places up.
    """
    planes, shift = [], 0
    for width in PLANES[bits]:
        size = -(-codes.shape[-1] * width // 8)
        plane = np.zeros((*codes.shape[:-1], size), int)
        for f in range(codes.shape[-1]):
            bits_of_plane = codes[..., f].astype(int) // 2**shift % 2**width
            plane[..., f % size] += bits_of_plane * 2 ** (f // size * width)
        planes.append(plane)
        shift += width
    return planes


def test_the_widths_are_those_documented():
    assert tuple(PLANES) == BITS


# Few lengths, since each shape is compiled: one, odd ones, whole bytes, and one more or less.
@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from(sorted(PLANES)),
    features=st.sampled_from([1, 2, 5, 8, 9, 33]),
    leading=st.sampled_from([(), (2, 3)]),
    seed=st.integers(0, 1000),
)
def test_codes_come_back(bits, features, leading, seed):
    codes = random_codes(bits, *leading, features, seed=seed)
    got = round_trip(codes, bits)
    assert got.dtype == jnp.uint8
    np.testing.assert_array_equal(got, codes)


@every
@pytest.mark.parametrize("code", [0, -1], ids=["lowest", "highest"])
def test_the_ends_of_the_range_come_back(bits, code):
    codes = np.full((2, 11), code % 2**bits, np.uint8)
    np.testing.assert_array_equal(round_trip(codes, bits), codes)


@every
@pytest.mark.parametrize("features", [1, 5, 9, 16, 33])
def test_bytes_are_laid_out_as_documented(bits, features):
    codes = random_codes(bits, 3, features)
    got, want = packed(codes, bits), oracle(codes, bits)
    assert len(got) == len(want)
    for plane, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(plane, expected)


def test_the_example_of_the_docstring():
    codes = random_codes(4, 7)
    (plane,) = pack(jnp.asarray(codes), 4)
    for j in range(3):
        assert int(plane[j]) == codes[j] | codes[j + 4] << 4
    # Nothing lies above the last of an odd number.
    assert int(plane[3]) == codes[3]


@every
def test_no_plane_takes_more_than_its_bits(bits):
    for features in (*range(1, 18), 63, 2047):
        shape = jax.ShapeDtypeStruct((3, features), jnp.uint8)
        planes = jax.eval_shape(lambda codes: pack(codes, bits), shape)
        sizes = [-(-features * p // 8) for p in PLANES[bits]]
        assert [(p.shape, p.dtype) for p in planes] == [((3, s), jnp.uint8) for s in sizes]
        assert packed_bytes(bits, features) == sum(sizes)


@every
def test_of_eight_features_nothing_is_padded(bits):
    for features in (8, 64, 2048):
        assert packed_bytes(bits, features) * 8 == bits * features


@every
def test_every_bit_of_every_byte_is_used(bits):
    # Two rows that differ in one bit of one code differ in one bit of their bytes.
    codes = random_codes(bits, 16)
    flipped = np.stack(
        [codes ^ (np.arange(16) == f) * 2**b for f in range(16) for b in range(bits)]
    )
    rows = np.concatenate(packed(flipped.astype(np.uint8), bits), axis=-1)
    one = np.concatenate(packed(codes, bits), axis=-1)
    changed = np.unpackbits(rows ^ one, axis=-1)
    np.testing.assert_array_equal(changed.sum(-1), 1)
    np.testing.assert_array_equal(changed.sum(0), 1)


@pytest.mark.parametrize("bits", [1, 3])
def test_transformations_of_jax_change_nothing(bits):
    codes = jnp.asarray(random_codes(bits, 4, 3, 9))
    want = packed(codes, bits)
    eager = pack(codes, bits)
    mapped = jax.vmap(packed, (0, None))(codes, bits)
    _, scanned = jax.lax.scan(lambda _, c: (None, pack(c, bits)), None, codes)
    for got in (eager, mapped, scanned):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(unpack(eager, bits, 9), codes)
