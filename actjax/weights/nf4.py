"""Frozen weights in 4-bit NormalFloat with double-quantized scales (QLoRA).

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (2023), section 3: 16 levels, which
are quantiles of the normal distribution; a scale for each block of 64 weights; the scales in 8
bits, with a scale for each 256 of them. Together 4.13 bits per weight.
"""

import dataclasses
import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from actjax._shards import gathered
from actjax.formats.blockwise import Blockwise, blockwise_zeros
from actjax.weights.base import Weight
from actjax.weights.frozen import FrozenWeight

BLOCK = 64
"""Number of weights that share a scale; they belong to inputs of one output."""
_SCALE_BLOCK = 256


@functools.cache
def levels() -> np.ndarray:
    """Returns the 16 levels of NF4 in [-1, 1], ascending, float32 (QLoRA, appendix E).

    They are quantiles of the normal distribution at equally spaced probabilities, eight up to zero
    and nine from zero on, divided by the largest. The outermost probability is the mean of those
    for 15 and for 16 levels.
    """
    offset = 1 - (1 / 30 + 1 / 32) / 2
    quantile = statistics.NormalDist().inv_cdf
    above = [quantile(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    values = np.sort([*above, *below, 0.0])
    return (values / values.max()).astype(np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class NF4Weight(Weight):
    """A weight [d, n] in 4-bit NormalFloat. It has no gradient.

    Storage: half a byte per weight, with each column padded to a multiple of 64; a byte for each of
    the ceil(d / 64) n scales, 4 bytes for each 256 of them, and 4 bytes.
    Error: at most 0.152 of the largest weight of a block, half the widest gap between levels, plus
    the 8-bit error of its scale.

    Attributes:
      codes: [blocks, 32, n] uint8; a byte holds rows i and i + 32 of a block.
      scales: largest magnitudes of the blocks minus their mean, in 8 bits, [blocks * n].
      mean: mean of the largest magnitudes, float32.
      features: d. Static.
      dtype: dtype of the decoded weight. Static.
    """

    codes: Any
    scales: Blockwise
    mean: Any
    features: int = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def quantize(cls, weight: jax.Array) -> "NF4Weight":
        """Returns a weight [d, n] in 4 bits. If a number is not finite, all of it decodes to NaN.

        Raises:
          ValueError: the weight is empty, or not a matrix.
          TypeError: the weight is not floating point.
        """
        shape = jnp.shape(weight)
        if len(shape) != 2:
            raise ValueError(f"`weight` of NF4Weight must be [d, n], got {shape}.")
        if 0 in shape:
            raise ValueError(f"`weight` of NF4Weight must not be empty, got {shape}.")
        if not jnp.issubdtype(weight.dtype, jnp.floating):
            raise TypeError(f"`weight` of NF4Weight must be floating point, got {weight.dtype}.")
        d, n = weight.shape
        blocks = jnp.pad(weight.astype(jnp.float32), ((0, -d % BLOCK), (0, 0)))
        blocks = blocks.reshape(-1, BLOCK, n)
        largest = jnp.abs(blocks).max(1)
        # The maximum of XLA may ignore a NaN. With one, every code would be meaningless.
        mean = jnp.where(jnp.isfinite(weight).all(), largest.mean(), jnp.nan)
        like = blockwise_zeros((largest.size,), "float32", unsigned=False, block=_SCALE_BLOCK)
        scales = like.encode((largest - mean).reshape(-1))
        # Weights are divided by the decoded scales: the largest weight is then not at the last
        # level, but the error of all others is smaller.
        stored = _largest(scales, mean, n)
        unit = blocks / jnp.where(stored == 0, 1, stored)[:, None]
        middles = (levels()[1:] + levels()[:-1]) / 2
        codes = jnp.searchsorted(jnp.asarray(middles), unit).astype(jnp.uint8)
        first, second = jnp.split(codes, 2, axis=1)
        return cls(first | second << 4, scales, mean, d, jnp.dtype(weight.dtype))

    def __repr__(self) -> str:
        # In a tree of other leaves than arrays there is no shape.
        return f"NF4Weight{list(self.shape) if hasattr(self.codes, 'shape') else ''}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight: stacked axes, if any, before [d, n]."""
        return (*self.codes.shape[:-3], self.features, self.codes.shape[-1])

    @property
    def ndim(self) -> int:
        """Number of axes of the weight."""
        return len(self.shape)

    @property
    def T(self) -> jax.Array:  # noqa: N802
        """The transpose, as an array."""
        return self.astype(self.dtype).T

    def __getitem__(self, index: Any) -> "NF4Weight":
        # `param[...]` is how nnx reads the value of a variable.
        if index is not Ellipsis:
            raise TypeError(f"{self!r} cannot be indexed: call `.astype(dtype)` for the array.")
        return self

    def without_variables(self) -> FrozenWeight:
        return FrozenWeight(self)

    def astype(self, dtype: Any) -> jax.Array:
        """Returns the weight as an array [d, n].

        On several devices that share the inputs, the codes are gathered, and each device decodes
        them: XLA would gather what they decode to, four times as many bytes.
        """
        n = self.codes.shape[-1]
        packed = gathered(self.codes, axes=(0, 1))
        codes = jnp.concatenate([packed & 15, packed >> 4], axis=1)
        scales = jax.tree.map(lambda x: gathered(x, axes=(0,)), self.scales)
        largest = _largest(scales, self.mean, n)
        unit = jnp.take(jnp.asarray(levels()), codes.astype(jnp.int32), mode="clip")
        return (unit * largest[:, None]).reshape(-1, n)[: self.features].astype(dtype)


def _largest(scales: Blockwise, mean: jax.Array, n: int) -> jax.Array:
    """Returns the scale of each block, [blocks, n]."""
    return (scales.decode() + mean).reshape(-1, n)
