"""The format of quantized numbers: their settings, their arrays, and the order of their groups."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from actjax._shards import Dims
from actjax.formats.packing import PLANES

Rounding = Literal["nearest", "stochastic", "dither"]
Scaling = Literal["group", "channel"]
Levels = Literal["uniform", "normal"]
ScaleDtype = Literal["bfloat16", "float32"]


@dataclasses.dataclass(frozen=True)
class Format:
    """How numbers are stored. `actjax.Quantized` documents, checks and sets each field.

    Groups are whole: the features of a token are filled up to a multiple of `group`, as `grouped`
    does it, and the code holds the numbers that were added.
    """

    bits: int
    group: int
    rounding: Rounding
    scale_dtype: ScaleDtype
    levels: Levels
    rotate: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizeInputs:
    """An activation, and arrays that its encoding needs.

    Attributes:
      x: [..., d], floating point. A number that is not finite spoils its group.
      seed: seed of the random numbers, uint32 [2]; None for rounding to the nearest.
      channels: channels to store whole, int32 [m], distinct, in [0, d); None for none.
      mean: stored means of the channels of each sequence, [..., d] for x [..., S, d], which are
        subtracted first; None for nothing. Not in the code.
      spread: stored positive numbers that the channels are then divided by, as `mean`; with it.
    """

    x: Any
    seed: Any = None
    channels: Any = None
    mean: Any = None
    spread: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedCode:
    """Numbers in a few bits each, with what is needed to decode them.

    Scales and offsets of 16 bits are held as the bits of their dtype, in uint16.

    Attributes:
      planes: packed bytes of each group, as returned by `actjax.formats.packing.pack`.
      scale: distance between two levels, or the unit of uneven levels, [..., groups].
      features: d. Static.
      dtype: dtype of the activation. Static.
      format: meaning of the bits. Static.
      offset: value of the code 0, [..., groups]; None with "normal" levels.
      mean: what was subtracted from each channel before anything else, by sequence: [..., d] for
        [..., S, d]; None for nothing.
      spread: what each channel was then divided by, in the shape of `mean`; None with it.
      outliers: channels that are stored whole, [..., m]; None if there are none.
      channels: indices of these channels, int32 [m].
      seed: seed of the dither, uint32 [2]; None without dither.
    """

    planes: Any
    scale: Any
    features: int = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})
    format: Format = dataclasses.field(metadata={"static": True})
    offset: Any = None
    mean: Any = None
    spread: Any = None
    outliers: Any = None
    channels: Any = None
    seed: Any = None

    def dims(self, features: str | None = "features") -> "QuantizedCode":
        """Returns the `Dims` of the arrays: tokens, and features if they are in whole groups.

        Args:
          features: name of the axis of features; None if it cannot be split.
        """
        if self.outliers is not None or not is_in_groups(self.features, self.format):
            features = None
        tokens = token_names(self.planes[0].ndim - 1)
        by_token, by_sequence = Dims((*tokens, features)), Dims((*tokens[:-1], features))
        arrays = {
            "planes": tuple(by_token for _ in self.planes),
            "offset": by_token,
            "scale": by_token,
            "mean": by_sequence,
            "spread": by_sequence,
            "outliers": Dims((*tokens, None)),
            "channels": Dims((None,)),
            "seed": Dims((None,)),
        }
        present = {name: dims for name, dims in arrays.items() if getattr(self, name) is not None}
        return dataclasses.replace(self, **present)

    def of_part(self) -> "QuantizedCode":
        """Returns the code of some whole groups, whose arrays this one holds, with `features`."""
        if not is_in_groups(self.features, self.format):
            return self
        features = self.planes[0].shape[-1] * 8 // PLANES[self.format.bits][0]
        return dataclasses.replace(self, features=features)


def token_names(count: int) -> tuple[str, ...]:
    """Returns the names of the axes before the features, for `Dims`."""
    return tuple(f"tokens{i}" for i in range(count))


def is_in_groups(features: int, format: Format) -> bool:
    """Returns whether features are whole groups of whole bytes, which can be taken apart."""
    bytes_are_whole = all(format.group * width % 8 == 0 for width in PLANES[format.bits])
    return features % format.group == 0 and bytes_are_whole


def group_count(features: int, group: int) -> int:
    """Returns the number of groups; the last one is filled up."""
    return -(-features // group)


def grouped(x: jax.Array, format: Format) -> jax.Array:
    """Returns `x` [..., d] as [..., groups, group].

    The last group is filled up with zeros, or for uniform levels, whose range it must not widen,
    with its last number.
    """
    groups = group_count(x.shape[-1], format.group)
    if missing := groups * format.group - x.shape[-1]:
        fill = "edge" if format.levels == "uniform" and not format.rotate else "constant"
        x = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, missing),), mode=fill)
    return x.reshape(*x.shape[:-1], groups, format.group)


def joined(groups: jax.Array, features: int | None = None) -> jax.Array:
    """Returns [..., groups, group] as [..., d], the inverse of `grouped`; None for all numbers."""
    *lead, count, size = groups.shape
    return groups.reshape(*lead, count * size)[..., :features]
