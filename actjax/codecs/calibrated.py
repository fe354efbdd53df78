"""Quantising with scales that were measured before, once for many steps."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from actjax.codecs.base import Codec
from actjax.codecs.quantized import Quantized
from actjax.kernels.format import QuantizedCode


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Calibrated(Codec, holds_arrays=True):
    """A `Quantized` by channel whose scales and outlier channels are given as arrays.

    A pytree, and not static: scales are data that a training state holds and refreshes. No pass
    over `x` is needed to find them, and no reduction over the devices that its tokens lie on.

    Storage: that of `codec` without its scales and the indices of outlier channels.
    Error: that of `codec`; what lies outside the range it was calibrated on saturates.
    Unbiased within that range if `codec` is.
    Source: HyC-LoRA (2025), section on the calibration of intra-operator scales.

    Attributes:
      codec: how numbers are stored. Static.
      step: scales of the channels, [d].
      channels: which are stored whole, [m]; None if none are.
    """

    codec: Quantized = dataclasses.field(metadata={"static": True})
    step: Any
    channels: Any

    @classmethod
    def fit(cls, codec: Quantized, x: jax.Array) -> "Calibrated":
        """Returns `codec` with the scales and outlier channels of `x` [..., d].

        Raises:
          ValueError: `codec` does not scale by channel.
        """
        if codec.scaling != "channel":
            raise ValueError(
                f"`codec` of Calibrated must have scaling='channel', got {codec}: scales of groups"
                " belong to one token."
            )
        channels = codec.outlier_channels(x)
        return cls(codec, codec.fit_channels(x, channels), channels)

    def __repr__(self) -> str:
        return f"Calibrated({self.codec!r})"

    @property
    def biased(self) -> bool:
        """As in `Codec`."""
        return self.codec.biased

    @property
    def needs_key(self) -> bool:
        """As in `Codec`."""
        return self.codec.needs_key

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> QuantizedCode:
        if x.shape[-1:] != self.step.shape:
            raise ValueError(
                f"`x` has {x.shape[-1:]} channels, but the calibration is of {self.step.shape}."
            )
        code = self.codec.encode_with(x, key, self.channels, self.step)
        return dataclasses.replace(code, channels=None)

    def decode(self, code: QuantizedCode) -> jax.Array:
        return self.codec.decode(dataclasses.replace(code, step=self.step, channels=self.channels))

    def weight_grad(self, code: QuantizedCode, dz: jax.Array) -> jax.Array:
        return self.codec.weight_grad(
            dataclasses.replace(code, step=self.step, channels=self.channels), dz
        )

    def stored_bytes(self, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> int:
        scales = self.step.size * self.step.dtype.itemsize
        indices = 0 if self.channels is None else self.channels.size * self.channels.dtype.itemsize
        return self.codec.stored_bytes(shape, dtype) - scales - indices
