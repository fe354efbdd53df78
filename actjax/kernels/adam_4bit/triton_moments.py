"""Moments in 4 bits in programs in Triton, which take the halves of the bytes one after the other.

It is read by Triton, whose static branches end in `else`.
"""

import triton
import triton.language as tl


@triton.jit
def first_moment(codes, scale, row_scale, column_scale, g, HALF: tl.constexpr, B1, C1):
    """The new first moments of a half of the bytes, `B1 m + C1 g`."""
    index = codes << (28 - 4 * HALF) >> 28
    # The bits of 1.5 * 2^23 and a whole number.
    index = (index + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
    size = tl.abs(index)
    # As `four_bit.signed_level`.
    level = tl.maximum(size * 0.1, size * 0.2 - 0.4)
    sign = index.to(tl.uint32, bitcast=True) & 0x80000000
    level = (level.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return level * (B1 * scale) * _smaller(row_scale, column_scale) + C1 * g


@triton.jit
def second_moment(
    codes, row_scale, column_scale, g, HALF: tl.constexpr, B2, C2, SECOND: tl.constexpr
):  # fmt: skip
    """The second moments of a half of the bytes: new ones, or products of means.

    `SECOND` is "codes" for a moment in 4 bits, "means" for a factored one.
    """
    if SECOND == "codes":
        # The bits of 2^23 and a number below 16.
        index = (codes >> 4 * HALF & 15 | 0x4B000000).to(tl.float32, bitcast=True)
        level = B2 * 0.0625 * (index - 8388607.0)
        return level * _smaller(row_scale, column_scale) + C2 * (g * g)
    product = row_scale * column_scale
    # As `reference.product`: not a number either.
    return tl.where(product < float("inf"), product, float("inf"))


@triton.jit
def _smaller(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(size, AXIS: tl.constexpr):
    """The largest of magnitudes, or NaN if a number is."""
    # Integers are in the same order, and a maximum of them does not drop a NaN.
    return tl.max(size.to(tl.uint32, bitcast=True), AXIS).to(tl.float32, bitcast=True)


@triton.jit
def inverse_of(scale):
    """As `blockwise.inverse_of`."""
    return 4.0 / tl.maximum(scale, 2.0**-125, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def fraction_of_hash(x):
    """As `four_bit.fraction_of_hash`."""
    word = x.to(tl.uint32, bitcast=True)
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return (word >> 9 | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
