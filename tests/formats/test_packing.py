"""Tests of actjax/formats/packing.py: codes of a few bits packed into bytes."""

import jax
import jax.numpy as jnp
import numpy as np

from actjax.formats.packing import BITS, pack, packed_bytes, unpack

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
"""Widths of the planes, as documented, low bits first: 3 bits are a plane of two and one of one."""


@jax.jit
def packed_and_back(codes):
    """Returns the planes of codes, by their bits, and what is unpacked of them."""
    planes = {bits: [pack(x, bits) for x in xs] for bits, xs in codes.items()}
    return planes, {
        bits: [unpack(plane, bits, x.shape[-1]) for plane, x in zip(planes[bits], xs, strict=True)]
        for bits, xs in codes.items()
    }


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
    return tuple(planes)


def test_codes_come_back_and_bytes_are_laid_out_as_documented():
    assert tuple(PLANES) == BITS
    rng = np.random.default_rng(0)
    # One feature, an odd number, whole bytes, and one more; the first and last rows are the ends.
    codes = {
        bits: [rng.integers(0, 2**bits, (5, 3, n)).astype(np.uint8) for n in (1, 5, 16, 33)]
        for bits in BITS
    }
    for bits, arrays in codes.items():
        for array in arrays:
            array[0], array[-1] = 0, 2**bits - 1
    planes, back = packed_and_back(codes)
    for bits, arrays in codes.items():
        jax.tree.map(np.testing.assert_array_equal, back[bits], arrays)
        assert {array.dtype for array in back[bits]} == {np.dtype("uint8")}
        want = [oracle(array, bits) for array in arrays]
        jax.tree.map(np.testing.assert_array_equal, planes[bits], want)
    # The example of the docstring: above the last of an odd number of codes there are zeros.
    (plane,), codes = planes[4][1], codes[4][1]
    np.testing.assert_array_equal(plane[..., :2], codes[..., :2] | codes[..., 3:] << 4)
    np.testing.assert_array_equal(plane[..., 2], codes[..., 2])


def test_no_plane_takes_more_than_its_bits():
    for features in (*range(1, 18), 63, 64, 2047):
        codes = jax.ShapeDtypeStruct((3, features), jnp.uint8)
        for bits, widths in PLANES.items():
            planes = jax.eval_shape(lambda codes, bits=bits: pack(codes, bits), codes)
            sizes = [-(-features * width // 8) for width in widths]
            assert [(p.shape, p.dtype) for p in planes] == [((3, s), jnp.uint8) for s in sizes]
            assert packed_bytes(bits, features) == sum(sizes)
            # Eight features need no padding.
            assert features % 8 or packed_bytes(bits, features) * 8 == bits * features


def test_transformations_of_jax_change_nothing():
    x = np.random.default_rng(0).integers(0, 8, (4, 3, 9)).astype(np.uint8)
    three = lambda codes: pack(codes, 3)  # noqa: E731
    run = jax.jit(lambda x: (three(x), jax.vmap(three)(x), jax.lax.map(three, x)))
    want, *others = run(x)
    for got in others:
        jax.tree.map(np.testing.assert_array_equal, got, want)
