"""Arrays in 8 bits, in blocks with a scale each: how optimizer states are stored between steps.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022): 256 levels, spaced by
decades, which resolve small values relative to their size over seven orders of magnitude. The map
here has a closed form, without a table or a search: the bits of level `i` below its leading one are
the fraction within a decade, and their number selects the decade.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from actjax._math.division import inverse_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blockwise:
    """An array in 8 bits, in blocks along its last axis.

    Attributes:
      codes: levels, in the shape of the array, so that they are sharded and sliced like it; int8,
        or uint8 for an array without negative values.
      scales: largest magnitude of each block, [..., blocks], float32.
      dtype: dtype of the array. Static.
      block: values in a block; the last block of a row may be shorter. Static.
    """

    arrays: ClassVar = ("codes", "scales")

    codes: Any
    scales: Any
    dtype: Any = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})

    def decode(self) -> jax.Array:
        """Returns the array."""
        unit = jax.lax.platform_dependent(self.codes, cpu=_looked_up, default=_computed)
        return (unit * self._spread(self.scales, unit.shape)).astype(self.dtype)

    def encode(self, x: jax.Array) -> "Blockwise":
        """Returns another array of the same shape in the same form.

        Error: half the distance between two levels. In the top decade this is 0.70% of the largest
        magnitude of the block (0.35% if unsigned), and in each decade below a fifth of the decade
        above. In an unsigned array a negative value becomes zero, and a positive value never does:
        a second moment of zero would divide the first moment by `eps` alone.
        """
        unsigned = self.codes.dtype == jnp.uint8
        x = x.astype(jnp.float32)
        scales = self._largest(x)
        # Products: XLA for CPUs writes a quotient that is used twice to memory.
        factor, inverse = (self._spread(y, x.shape) for y in inverse_of(scales))
        index = dynamic_index(jnp.abs(x) * factor * inverse, decades(unsigned))
        if unsigned:
            index = jnp.where(x > 0, jnp.maximum(index, 1), index)
        signs = (x > 0).astype(index.dtype) if unsigned else jnp.sign(x)
        codes = (signs * index).astype(self.codes.dtype)
        return dataclasses.replace(self, codes=codes, scales=scales)

    def _largest(self, x: jax.Array) -> jax.Array:
        """Returns the largest magnitude of each block, [..., blocks]."""
        whole = x.shape[-1] // self.block * self.block
        blocks = x[..., :whole].reshape(*x.shape[:-1], -1, self.block)
        found = [largest_of_row(blocks)] if whole else []
        if whole < x.shape[-1]:
            found.append(largest_of_row(x[..., whole:])[..., None])
        return jnp.concatenate(found, axis=-1) if len(found) > 1 else found[0]

    def _spread(self, scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Returns the scale of each value."""
        return jnp.repeat(scales, self.block, axis=-1)[..., : shape[-1]]


def is_blockwise(x: Any) -> bool:
    """Returns whether `x` is a `Blockwise`: for `is_leaf` of `jax.tree` functions."""
    return isinstance(x, Blockwise)


def blockwise_zeros(
    shape: Sequence[int], dtype: Any, *, unsigned: bool, block: int = 256
) -> Blockwise:
    """Returns zeros of a shape in 8 bits; `.encode(x)` brings an array into this form.

    Storage: one byte per value and 4 bytes per block. No block crosses the end of a row, so narrow
    arrays have small blocks.
    """
    block = min(block, shape[-1])
    codes = jnp.zeros(shape, jnp.uint8 if unsigned else jnp.int8)
    scales = jnp.zeros((*shape[:-1], -(-shape[-1] // block)), jnp.float32)
    return Blockwise(codes, scales, jnp.dtype(dtype), block)


def _computed(codes: jax.Array) -> jax.Array:
    """Returns the levels of codes."""
    index, top = codes.astype(jnp.float32), decades(codes.dtype == jnp.uint8)
    return jnp.sign(index) * dynamic_level(jnp.abs(index), top)


def _looked_up(codes: jax.Array) -> jax.Array:
    """Returns the levels of codes by a table, which takes a third of the time on a CPU."""
    table = jnp.asarray(_table(codes.dtype == jnp.uint8))
    return look_up(table, jax.lax.bitcast_convert_type(codes, jnp.uint8))


def look_up(table: jax.Array, index: jax.Array) -> jax.Array:
    """Returns entries of a table, without a check of the index."""
    return table.at[index.astype(jnp.int32)].get(mode="promise_in_bounds")


@functools.cache
def _table(unsigned: bool) -> np.ndarray:
    """Returns the level of each byte, float32 [256]."""
    top = decades(unsigned)
    sizes = [0.0, *(10.0 ** (p - top) * (0.1 + 0.9 * (j + 1) / 2**p)
                    for p in range(top + 1) for j in range(2**p))]  # fmt: skip
    # In two's complement, -128 does not occur.
    levels = sizes if unsigned else [*sizes, 0.0, *(-size for size in sizes[:0:-1])]
    return np.asarray(levels, np.float32)


def largest_of_row(x: jax.Array) -> jax.Array:
    """Returns the largest magnitude along the last axis; NaN if there is one.

    XLA for CPUs fuses the computation of `x` into steps of at most 32 integers, so that `x` is not
    written to memory. It cuts longer maxima into steps which it does not fuse, nor those of floats.
    """
    bits = _bits(x)
    while (width := bits.shape[-1]) > 32:
        steps = min(32, -(-width // 32))
        bits = _padded(bits, -1, steps * 32)
        bits = jnp.max(bits.reshape(*bits.shape[:-1], -1, steps, 32), axis=-2)
        # Without the barrier, XLA makes one step of both.
        bits = jax.lax.optimization_barrier(bits.reshape(*bits.shape[:-2], -1))
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=-1), jnp.float32)


def largest_of_column(x: jax.Array) -> jax.Array:
    """Returns the largest magnitude along the last axis but one, as `largest_of_row`."""
    bits = _bits(x)
    while bits.shape[-2] > 16:
        bits = _padded(bits, -2, 16)
        bits = jnp.max(bits.reshape(*bits.shape[:-2], -1, 16, bits.shape[-1]), axis=-2)
        bits = jax.lax.optimization_barrier(bits)
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=-2), jnp.float32)


def _bits(x: jax.Array) -> jax.Array:
    """Returns magnitudes as integers, which are in the same order."""
    return jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)


def _padded(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Returns an array with zeros after the end of an axis, up to a multiple of `size`."""
    missing = -x.shape[axis] % size
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths) if missing else x


def dynamic_index(size: jax.Array, top: int, offset: jax.typing.ArrayLike = 0.5) -> jax.Array:
    """Returns the nearest level of magnitudes in [0, 1], or one of the two neighbours at random.

    Level `2^p + j`, `0 <= j < 2^p`, is `10^(p - top) (0.1 + 0.9 (j + 1) / 2^p)`: each decade has
    twice as many levels as the decade below, the top decade `2^top`. Level 0 is 0, the highest
    level is 1.

    Args:
      size: the magnitudes, float32.
      top: decades below the top one.
      offset: uniform in [0, 1) for stochastic rounding, which keeps the mean: the levels between
        two decades are as far apart as those above them.
    """
    # Within a decade the index is linear in the size. Comparisons find the decade: on a CPU a
    # logarithm and a power take many times longer.
    slope, intercept = (jnp.float32(x) for x in _line(0, top))
    for decade in range(1, top + 1):
        is_below = size < 10**-decade
        below = _line(decade, top)
        slope = jnp.where(is_below, below[0], slope)
        intercept = jnp.where(is_below, below[1], intercept)
    # At the lower end of a decade this is the highest level of the decade below.
    index = jnp.floor(size * slope + intercept + offset)
    return jnp.minimum(index, 2 * 2**top - 1)


def _line(decade: int, top: int) -> tuple[float, float]:
    """Returns slope and intercept of the index of a size in a decade below the top one."""
    if decade == top:
        # The lowest decade has one level, at its upper end; below it only 0 remains.
        return 10.0**top, 0.0
    levels = 2 ** (top - decade)
    return 10**decade / 0.9 * levels, levels - 1 - levels / 9


def dynamic_level(index: jax.Array, top: int) -> jax.Array:
    """Returns the magnitude of levels, which are whole numbers; arguments as `dynamic_index`."""
    inverse, end = jnp.float32(1), jnp.float32(10**-top)
    for power in range(1, top + 1):
        is_above = index >= 2**power
        inverse = jnp.where(is_above, 2**-power, inverse)
        end = jnp.where(is_above, 10 ** (power - top), end)
    level = end * (0.1 + 0.9 * ((index + 1) * inverse - 1))
    return jnp.where(index > 0, level, 0)


def decades(unsigned: bool) -> int:
    """Returns the decades below the top one in 8 bits: one more if no bit holds a sign."""
    return 7 if unsigned else 6
