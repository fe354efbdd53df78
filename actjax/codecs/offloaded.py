"""Storing a code in the memory of the host, so that it takes no memory of the device."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from actjax._host import check_reads
from actjax.codecs.base import Code, Codec, FactoredCodec
from actjax.codecs.exact import Exact


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codec"], meta_fields=[])
@dataclasses.dataclass(frozen=True, repr=False)
class Offloaded(Codec, holds_arrays=True):
    """Keeps the code of another codec in host memory between the passes.

    The code crosses the bus instead of the activation: four bits move a quarter of the bytes of
    bfloat16. XLA copies while the device computes if its scheduler is set to (on GPUs
    `--xla_gpu_enable_latency_hiding_scheduler=true`). Where host and device share one memory, as on
    a CPU, it saves nothing.

    Raises:
      RuntimeError: a version of jaxlib that would read other arrays back on a GPU.

    Storage: that of `codec`, on the host.
    Error: that of `codec`.
    Devices: exchange what they do for `codec`.
    Biased: if `codec` is. Unbiased if `codec` is.
    Source: GACT (Liu et al., 2022), section 5.4.

    Attributes:
      codec: the codec whose code is kept. If it holds arrays, as `Calibrated` does, they stay on
        the device.
    """

    codec: Codec = Exact()

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec) or isinstance(self.codec, Offloaded):
            raise TypeError(
                f"`codec` of Offloaded must be an actjax.Codec that stays on the device, got"
                f" {self.codec!r}."
            )

    @property
    def biased(self) -> bool:
        """As in `Codec`."""
        return self.codec.biased

    @property
    def needs_key(self) -> bool:
        """As in `Codec`."""
        return self.codec.needs_key

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> Code:
        check_reads()
        return _move(self.codec.encode(x, key), jax.memory.Space.Host)

    def decode(self, code: Code) -> jax.Array:
        return self.codec.decode(_fetch(code))

    def weight_grad(self, code: Code, dz: jax.Array) -> jax.Array:
        return self.codec.weight_grad(_fetch(code), dz)

    def gradient_rank(self, shape: Sequence[int]) -> int | None:
        return self.codec.gradient_rank(shape)

    def left(self, code: Code) -> jax.Array:
        """As `FactoredCodec.left`, if `codec` is a `FactoredCodec`."""
        return self._factored.left(_fetch(code))

    def right(self, code: Code, dz: jax.Array) -> jax.Array:
        """As `FactoredCodec.right`, if `codec` is a `FactoredCodec`."""
        return self._factored.right(_fetch(code), dz)

    @property
    def _factored(self) -> FactoredCodec:
        assert isinstance(self.codec, FactoredCodec)
        return self.codec

    def stored_bytes(self, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> int:
        return self.codec.stored_bytes(shape, dtype)


def _fetch(code: Any) -> Any:
    return _move(code, jax.memory.Space.Device)


def _move(code: Any, space: Any) -> Any:
    # One array at a time: for several, `device_put` requires equal mapped axes under `vmap`.
    return jax.tree.map(lambda x: jax.device_put(x, space), code)
