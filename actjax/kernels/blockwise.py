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

    def decode(self) -> jax.Array:
        """Returns the array."""
        unsigned = self.codes.dtype == jnp.uint8
        index = self.codes.astype(jnp.float32)
        unit = jnp.sign(index) * dynamic_level(jnp.abs(index), decades(unsigned))
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
        scales = self._largest(jnp.abs(x))
        divisor = self._spread(jnp.where(scales > 0, scales, 1), x.shape)
        index = dynamic_index(jnp.abs(x) / divisor, decades(unsigned))
        if unsigned:
            index = jnp.where(x > 0, jnp.maximum(index, 1), index)
        signs = (x > 0).astype(index.dtype) if unsigned else jnp.sign(x)
        codes = (signs * index).astype(self.codes.dtype)
        return dataclasses.replace(self, codes=codes, scales=scales)

    def _largest(self, x: jax.Array) -> jax.Array:
        """Returns the largest value of each block, [..., blocks]."""
        whole = x.shape[-1] // self.block * self.block
        blocks = x[..., :whole].reshape(*x.shape[:-1], -1, self.block)
        largest = [jnp.max(blocks, axis=-1)] if whole else []
        if whole < x.shape[-1]:
            largest.append(jnp.max(x[..., whole:], axis=-1, keepdims=True))
        return jnp.concatenate(largest, axis=-1)

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
    # Comparisons: on a CPU a logarithm and a power take many times longer.
    levels, inverse = jnp.float32(2**top), jnp.float32(1)
    for decade in range(1, top + 1):
        is_below = size < 10**-decade
        levels = jnp.where(is_below, 2 ** (top - decade), levels)
        inverse = jnp.where(is_below, 10**decade, inverse)
    fraction = (size * inverse - 0.1) / 0.9
    # At the lower end of a decade this rounds to -1: the highest level of the decade below.
    index = levels + jnp.floor(fraction * levels - 1 + offset)
    # The lowest decade has one level, at its upper end; below it only 0 remains.
    index = jnp.where(levels == 1, jnp.floor(size * 10**top + offset), index)
    return jnp.minimum(index, 2 * 2**top - 1)


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
