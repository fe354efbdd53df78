"""Arrays in 8 bits, in blocks with a scale each: how optimizer states are stored between steps.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022): 256 levels, spaced by
decades, which resolve small values relative to their size over seven orders of magnitude. The map
here has a closed form, without a table or a search: the bits of level `i` below its leading one are
the fraction within a decade, and their number selects the decade.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp


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

    @property
    def shape_of_blocks(self) -> tuple[int, ...]:
        """[..., blocks]; [..., 1] if the last block of a row is shorter.

        Devices can divide the codes as they divide this.
        """
        whole = self.codes.shape[-1] % self.block == 0
        return self.scales.shape if whole else (*self.codes.shape[:-1], 1)

    def decode(self) -> jax.Array:
        """Returns the array."""
        unsigned = self.codes.dtype == jnp.uint8
        index = self.codes.astype(jnp.float32)
        unit = dynamic_level(jnp.abs(index), decades(unsigned))
        unit = unit if unsigned else jnp.where(self.codes < 0, -unit, unit)
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
        scales = largest_of_blocks(x, self.block)
        size = times_inverse(jnp.abs(x), self._spread(inverse_of(scales), x.shape))
        index = dynamic_index(size, decades(unsigned))
        if unsigned:
            index = jnp.where(x > 0, jnp.where(index > 1, index, 1), 0)
        else:
            index = jnp.where(x < 0, -index, index)
        codes = index.astype(self.codes.dtype)
        return dataclasses.replace(self, codes=codes, scales=scales)

    def _spread(self, scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Returns the scale of each value."""
        # Not `jnp.repeat`, which asks for a sharding on a mesh of explicit axes.
        shape_of_blocks = (*scales.shape, self.block)
        spread = jax.lax.broadcast_in_dim(scales, shape_of_blocks, range(scales.ndim))
        return spread.reshape(*scales.shape[:-1], -1)[..., : shape[-1]]


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


def inverse_of(scale: jax.Array) -> jax.Array:
    """Returns `4 / scale`, for `times_inverse`; scales below `2^-125` count as that."""
    return 4 / jnp.maximum(scale, 2.0**-125)


def times_inverse(x: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns `x / scale` for an inverse from `inverse_of`, which neither over- nor underflows.

    XLA for CPUs writes quotients that are used twice to memory, but not products.
    """
    return x * inverse * 0.25


def largest_of_blocks(x: jax.Array, block: int) -> jax.Array:
    """Returns the largest magnitude of each block of the last axis, [..., blocks]."""
    whole = x.shape[-1] - x.shape[-1] % block
    maxima = []
    if whole:
        maxima.append(largest_of_row(x[..., :whole].reshape(*x.shape[:-1], -1, block)))
    if whole < x.shape[-1]:
        maxima.append(largest_of_row(x[..., whole:])[..., None])
    return jnp.concatenate(maxima, axis=-1)


def largest_of_row(x: jax.Array) -> jax.Array:
    """Returns the largest magnitude along the last axis; NaN if there is one.

    XLA for CPUs fuses the computation of `x` into maxima of at most 32 integers, so that `x` is not
    written to memory. Longer maxima, and those of floats, it computes from arrays.
    """
    return jax.lax.bitcast_convert_type(_largest_of_row(_magnitude_bits(x)), jnp.float32)


def _largest_of_row(bits: jax.Array) -> jax.Array:
    width = bits.shape[-1]
    if width <= 32:
        return jnp.max(bits, axis=-1)
    steps = min(32, width // 32)
    whole = width - width % (steps * 32)
    maxima = bits[..., :whole].reshape(*bits.shape[:-1], -1, steps, 32).max(axis=-2)
    # Without the barrier, XLA makes one maximum of both.
    maxima = jax.lax.optimization_barrier(maxima.reshape(*bits.shape[:-1], -1))
    largest = _largest_of_row(maxima)
    if whole < width:
        largest = jnp.maximum(largest, _largest_of_row(bits[..., whole:]))
    return largest


def largest_of_column(x: jax.Array) -> jax.Array:
    """Returns the largest magnitude along the last axis but one, as `largest_of_row`."""
    return jnp.max(largest_of_steps(x), axis=-2)


STEP = 16
"""Rows of which `largest_of_steps` takes the maximum: as many as XLA for CPUs unrolls."""


def largest_of_steps(x: jax.Array) -> jax.Array:
    """Returns the largest magnitudes of every `STEP` rows, [..., steps, n]."""
    bits, (rows, columns) = _magnitude_bits(x), x.shape[-2:]
    whole = rows - rows % STEP
    maxima = []
    if whole:
        steps = bits[..., :whole, :].reshape(*x.shape[:-2], -1, STEP, columns)
        maxima.append(jnp.max(steps, axis=-2))
    if whole < rows:
        maxima.append(jnp.max(bits[..., whole:, :], axis=-2, keepdims=True))
    return jax.lax.bitcast_convert_type(jnp.concatenate(maxima, axis=-2), jnp.float32)


def _magnitude_bits(x: jax.Array) -> jax.Array:
    """Returns magnitudes as integers, which are in the same order."""
    return jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)


def dynamic_index(size: jax.Array, top: int) -> jax.Array:
    """Returns the nearest level of magnitudes in [0, 1] as an index.

    Level `2^p + j`, `0 <= j < 2^p`, is `10^(p - top) (0.1 + 0.9 (j + 1) / 2^p)`: each decade has
    twice as many levels as the decade below, the top decade `2^top`. Level 0 is 0, the highest
    level is 1.

    Args:
      size: the magnitudes, float32.
      top: decades below the top one.
    """
    # The smallest of the lines through the indices of a decade, the steeper the smaller the size:
    # on a CPU a logarithm and a power take many times longer. Below the lowest line only 0 remains.
    index = size * 10.0**top
    for power in range(1, top + 1):
        levels = 2**power
        line = size * (10.0 ** (top - power) / 0.9 * levels) + (levels - 1 - levels / 9)
        index = jnp.where(line < index, line, index)
    index = jnp.floor(index + 0.5)
    return jnp.where(index < 2 * 2**top, index, 2 * 2**top - 1)


def dynamic_level(index: jax.Array, top: int) -> jax.Array:
    """Returns the magnitude of levels, which are whole numbers; arguments as `dynamic_index`."""
    # The largest of the lines through the levels of a decade, the steeper the larger the index.
    level = index * 10.0**-top
    for power in range(1, top + 1):
        end, levels = 10.0 ** (power - top), 2**power
        line = (index - (levels - 1)) * (0.9 * end / levels) + 0.1 * end
        level = jnp.where(line > level, line, level)
    return level


def decades(unsigned: bool) -> int:
    """Returns the decades below the top one in 8 bits: one more if no bit holds a sign."""
    return 7 if unsigned else 6
