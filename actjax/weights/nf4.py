"""Frozen weights in 4-bit NormalFloat with double-quantized scales (QLoRA).

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (2023), section 3: 16 levels that
are quantiles of the normal distribution, a scale for each block of 64 weights, and these scales
themselves in 8 bits, a scale for 256 of them: 4.13 bits a weight.
"""

import dataclasses
import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from actjax.kernels.blockwise import Blockwise, blockwise_zeros
from actjax.weights.base import Weight
from actjax.weights.frozen import FrozenWeight

BLOCK = 64
"""Weights that share a scale: inputs of one output."""
_SCALE_BLOCK = 256


@functools.cache
def levels() -> np.ndarray:
    """Returns the 16 levels of NF4 in [-1, 1], ascending, float32 (QLoRA, appendix E).

    Quantiles of the normal distribution at even distances, eight below zero and nine above with
    zero in both, divided by the largest. The outermost is between those of 15 and of 16 values.
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
    """A weight [d, n] in 4-bit NormalFloat. Has no gradient.

    Storage: half a byte a weight, each column filled up to 64; a byte for each of the
    ceil(d / 64) n scales, 4 bytes for 256 of them, and 4 bytes.
    Error: at most 0.152 of the largest weight of a block, half the widest gap, and the 8-bit error
    of that scale.

    Attributes:
      codes: two to a byte, [blocks, 32, n] uint8: rows i and i + 32 of a block.
      scales: largest magnitudes of the blocks less their mean, in 8 bits, [blocks * n].
      mean: of the largest magnitudes, float32.
      features: d. Static.
      dtype: of the weight when it is read. Static.
    """

    codes: Any
    scales: Blockwise
    mean: Any
    features: int = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def quantize(cls, weight: jax.Array) -> "NF4Weight":
        """Returns a weight [d, n] in 4 bits; all NaN where a number in it is not finite.

        Raises:
          ValueError: another shape.
          TypeError: no floating point numbers.
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
        # XLA's maximum may pass over a NaN, and where there is one no code is of anything.
        mean = jnp.where(jnp.isfinite(weight).all(), largest.mean(), jnp.nan)
        like = blockwise_zeros((largest.size,), "float32", unsigned=False, block=_SCALE_BLOCK)
        scales = like.encode((largest - mean).reshape(-1))
        # By the scales as they will be read: what was largest is then not at the last level, but
        # the error of all others is less.
        unit = blocks / _nonzero(_largest(scales, mean, n))[:, None]
        middles = (levels()[1:] + levels()[:-1]) / 2
        codes = jnp.searchsorted(jnp.asarray(middles), unit).astype(jnp.uint8)
        first, second = jnp.split(codes, 2, axis=1)
        return cls(first | second << 4, scales, mean, d, jnp.dtype(weight.dtype))

    def __repr__(self) -> str:
        # Of a tree of something else than arrays there is no shape.
        return f"NF4Weight{list(self.shape) if hasattr(self.codes, 'shape') else ''}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, with axes that were stacked before [d, n]."""
        return (*self.codes.shape[:-3], self.features, self.codes.shape[-1])

    @property
    def ndim(self) -> int:
        """Axes of the weight."""
        return len(self.shape)

    @property
    def T(self) -> jax.Array:  # noqa: N802
        """The transpose, as an array."""
        return self.astype(self.dtype).T

    def __getitem__(self, index: Any) -> "NF4Weight":
        # `param[...]` is how nnx reads the value of a variable.
        if index is not Ellipsis:
            raise TypeError(f"{self!r} has no items: use `.astype(dtype)` for the array.")
        return self

    def opened(self) -> FrozenWeight:
        return FrozenWeight(self)

    def astype(self, dtype: Any) -> jax.Array:
        """Returns the weight as an array [d, n]."""
        n = self.codes.shape[-1]
        codes = jnp.concatenate([self.codes & 15, self.codes >> 4], axis=1)
        largest = _largest(self.scales, self.mean, n)
        unit = jnp.take(jnp.asarray(levels()), codes.astype(jnp.int32), mode="clip")
        return (unit * largest[:, None]).reshape(-1, n)[: self.features].astype(dtype)


def _largest(scales: Blockwise, mean: jax.Array, n: int) -> jax.Array:
    """Returns the scale of each block, [blocks, n]."""
    return (scales.decode() + mean).reshape(-1, n)


def _nonzero(x: jax.Array) -> jax.Array:
    return jnp.where(x == 0, 1, x)
