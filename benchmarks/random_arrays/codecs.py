"""The codecs, with every option of each, and the shapes that they meet."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np

import actjax
from actjax.codecs.base import Codec, FactoredCodec, token_count
from actjax.kernels.packing import BITS

SHAPES: tuple[tuple[int, ...], ...] = (
    *((5, 3), (13, 37), (2, 3, 5, 8), (32, 128), (3, 130), (1, 1), (1, 9), (9, 1), (11,)),
    *((1, 1000), (600, 2), (0, 8), (4, 0), (2, 0, 8), (1, 2, 1, 6)),
)
"""Shapes of activations: small and odd, of several axes, of one token or feature, long, empty.

One has 4,096 numbers: XLA for CPUs may drop a NaN from the maximum of so many."""
DTYPES = ("float32", "bfloat16", "float16")
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "bits": BITS,
    "group": (128, 4, 6, 32, 1),
    "rounding": ("nearest", "stochastic", "dither"),
    "outlier_fraction": (0.0, 0.1),
    "scaling": ("group", "channel"),
    "scale_dtype": ("bfloat16", "float32"),
    "levels": ("uniform", "normal"),
    "rotate": (False, True),
    "balance": (False, True),
}
"""Options of `Quantized`."""
CALIBRATIONS = ("fit", "over_range", "least_error")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A codec to test.

    Attributes:
      codec: the codec. Its ranks are lowered to what a shape allows.
      calibration: how `Calibrated` gets its statistics, of normal numbers; None for no calibration.
    """

    codec: Codec
    calibration: str | None = None

    @property
    def name(self) -> str:
        """The codec as a constructor call."""
        if self.calibration is None:
            return repr(self.codec)
        return f"Calibrated.{self.calibration}({self.codec!r})"

    @property
    def kind(self) -> str:
        """The class of the codec."""
        return type(self.codec).__name__ if self.calibration is None else "Calibrated"

    def made(self, shape: tuple[int, ...], sample: jax.Array) -> Codec:
        """Returns the codec for a shape.

        Args:
          shape: of the activation.
          sample: of the same shape, to calibrate on.
        """
        codec = fitted(self.codec, shape)
        if self.calibration is None:
            return codec
        return getattr(actjax.Calibrated, self.calibration)(codec, _known(self, sample))


def _known(entry: Entry, sample: jax.Array) -> Any:
    return actjax.ChannelRange.of(sample) if entry.calibration == "over_range" else sample


def fitted(codec: Codec, shape: tuple[int, ...]) -> Codec:
    """Returns a codec with its ranks lowered to what a shape allows; unchanged if none fits."""
    limit = min(token_count(shape), shape[-1])
    if isinstance(codec, actjax.Offloaded):
        return dataclasses.replace(codec, codec=fitted(codec.codec, shape))
    if isinstance(codec, actjax.PointApproximation) and codec.points and limit:
        return dataclasses.replace(codec, points=min(codec.points, token_count(shape)))
    if isinstance(codec, actjax.RandomProjection | actjax.RandomizedSVD) and limit:
        return dataclasses.replace(codec, rank=min(codec.rank, limit))
    return codec


def _factored() -> list[Codec]:
    """Returns the codecs of thin factors and of few tokens."""
    return [
        *(actjax.RandomProjection(rank) for rank in (3, 1, 2, 4)),
        *(
            actjax.RandomizedSVD(rank, power_iterations=i % 3)
            for i, rank in enumerate((3, 1, 4, 2))
        ),
        actjax.PointApproximation(ratio=1 / 4),
        actjax.PointApproximation(ratio=1.0),
        actjax.PointApproximation(points=1),
        actjax.PointApproximation(points=4, tolerance=0.8),
    ]


LEAST_QUANTIZED = 48
"""Codecs of few bits among which are enough of each kind for `Calibrated`."""


def quantized(rng: np.random.Generator, count: int) -> list[actjax.Quantized]:
    """Returns codecs of few bits in which every two values of two options come together.

    Further ones are drawn at random.
    """
    every = [
        codec
        for values in itertools.product(*_OPTIONS.values())
        if (codec := _allowed(dict(zip(_OPTIONS, values, strict=True)))) is not None
    ]
    pairs = [_pairs(codec) for codec in every]
    left, chosen = set().union(*pairs), []
    while left and len(chosen) < count:
        gains = [len(one & left) for one in pairs]
        best = int(rng.choice(np.flatnonzero(np.asarray(gains) == max(gains))))
        chosen.append(every[best])
        left -= pairs[best]
    return chosen + [every[int(i)] for i in rng.integers(len(every), size=count - len(chosen))]


def _allowed(options: dict[str, Any]) -> actjax.Quantized | None:
    try:
        return actjax.Quantized(**options)
    except ValueError:
        return None


def _pairs(codec: actjax.Quantized) -> set[tuple[Any, ...]]:
    values = [(name, getattr(codec, name)) for name in _OPTIONS]
    return set(itertools.combinations(values, 2))


def entries(rng: np.random.Generator, count: int) -> list[Entry]:
    """Returns every codec to test.

    Args:
      rng: chooses options of `Quantized`.
      count: number of `Quantized`.
    """
    few = quantized(rng, count)
    balanced = [codec for codec in few if codec.balance]
    by_channel = [codec for codec in few if codec.scaling == "channel" and not codec.rotate]
    calibrated = [
        Entry(codec, calibration)
        for calibration, codec in zip(CALIBRATIONS * 2, balanced[:3] + by_channel[:3], strict=True)
    ]
    within = (actjax.Exact(), few[0], actjax.RandomizedSVD(2), actjax.PointApproximation(points=3))
    return [
        Entry(actjax.Exact()),
        *map(Entry, _factored()),
        *map(Entry, few),
        *calibrated,
        *(Entry(actjax.Offloaded(codec)) for codec in within),
    ]


def innermost(codec: Any) -> Any:
    """Returns the codec of the numbers themselves."""
    return innermost(codec.codec) if isinstance(codec, actjax.Offloaded) else codec


def is_factored(codec: Any) -> bool:
    """Returns whether a codec stores thin factors or few tokens."""
    return isinstance(innermost(codec), FactoredCodec)
