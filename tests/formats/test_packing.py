"""Tests of actjax/formats/packing.py: codes of a few bits packed into bytes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actjax.formats.packing import BITS, pack, packed_bytes, unpack

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
"""Widths of the planes, as documented, low bits first: 3 bits are a plane of two and one of one."""

every = pytest.mark.parametrize("bits", PLANES)


def random_codes(bits, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, 2**bits, shape).astype(np.uint8)


@jax.jit
def packed_and_back(codes):
    """Returns the planes of codes, by their bits, and what is unpacked of them."""
    planes = {bits: pack(x, bits) for bits, x in codes.items()}
    return planes, {bits: unpack(planes[bits], bits, x.shape[-1]) for bits, x in codes.items()}


def oracle(codes, bits):
    """Returns the documented layout, one code after the other.

    With `w` bytes in a plane, the bits of code `f` are in byte `f % w`, at position `f // w`.
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


# Few shapes, since each is compiled: one feature, an odd number, whole bytes, and one more.
LENGTHS = (1, 5, 16, 33)


@settings(max_examples=20, deadline=None)
@given(
    features=st.sampled_from(LENGTHS),
    seed=st.integers(0, 1000),
    end=st.sampled_from([None, 0, -1]),
)
def test_codes_come_back_and_bytes_are_laid_out_as_documented(features, seed, end):
    codes = {bits: random_codes(bits, 2, 3, features, seed=seed) for bits in PLANES}
    if end is not None:
        # The lowest or the highest code.
        codes = {bits: np.full_like(x, end % 2**bits) for bits, x in codes.items()}
    planes, back = packed_and_back(codes)
    for bits, want in codes.items():
        assert back[bits].dtype == jnp.uint8
        np.testing.assert_array_equal(back[bits], want)
        for plane, expected in zip(planes[bits], oracle(want, bits), strict=True):
            np.testing.assert_array_equal(plane, expected)


def test_the_example_of_the_docstring():
    codes = random_codes(4, 7)
    (plane,) = np.asarray(packed_and_back({4: codes})[0][4])
    for j in range(3):
        assert int(plane[j]) == codes[j] | codes[j + 4] << 4
    # Above the last of an odd number of codes there are zeros.
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
def test_eight_features_need_no_padding(bits):
    for features in (8, 64, 2048):
        assert packed_bytes(bits, features) * 8 == bits * features


def test_every_bit_of_every_byte_is_used():
    # Rows that differ in one bit of one code differ in one bit of their bytes.
    codes = {}
    for bits in PLANES:
        first = random_codes(bits, 16)
        flipped = [first ^ (np.arange(16) == f) * 2**b for f in range(16) for b in range(bits)]
        codes[bits] = np.stack([first, *flipped]).astype(np.uint8)
    for planes in packed_and_back(codes)[0].values():
        rows = np.concatenate([np.asarray(plane) for plane in planes], axis=-1)
        changed = np.unpackbits(rows[1:] ^ rows[0], axis=-1)
        np.testing.assert_array_equal(changed.sum(-1), 1)
        np.testing.assert_array_equal(changed.sum(0), 1)


def test_transformations_of_jax_change_nothing():
    codes = {bits: random_codes(bits, 4, 3, 9) for bits in (1, 3)}
    want, back = packed_and_back(codes)

    @jax.jit
    def transformed(codes):
        return [
            (
                jax.vmap(functools.partial(pack, bits=bits))(x),
                jax.lax.scan(lambda _, c, bits=bits: (None, pack(c, bits)), None, x)[1],
                want[bits],
            )
            for bits, x in codes.items()
        ]

    for mapped, scanned, expected in transformed(codes):
        for got in (mapped, scanned):
            jax.tree.map(np.testing.assert_array_equal, got, expected)
    jax.tree.map(np.testing.assert_array_equal, back, codes)
