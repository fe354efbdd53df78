"""Operands of kernels: activations, or codes that are decoded in registers.

They are read in the tiles of `actjax.kernels.tiles`. Slices of a group that share bytes share a
load.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from actjax.formats import code as fmt
from actjax.formats.levels import normal_levels
from actjax.formats.noise import halves, random_words
from actjax.formats.packing import PLANES
from actjax.formats.rotation import signs_row
from actjax.kernels import butterflies
from actjax.kernels.layers import rows, value_of
from actjax.kernels.tiles import Part, as_float, both, load, load_row, load_sequence


def shifts(part: Part, seed: Any, features: int, group: int) -> Callable[[int], jax.Array]:
    """Returns a function from a slice to its random shifts, those of
    `actjax.formats.noise.uniform`.

    Args:
      part: the numbers to shift.
      seed: reference to the seed, uint32 [2].
      features: d.
      group: features of a whole group.
    """
    words, per_group = fmt.noise_words(features, group), -(-group // 2)
    begin = part.token * words + part.group * per_group
    pairs = part.slices // 2

    def draw(place: jax.Array) -> tuple[jax.Array, jax.Array]:
        return halves(random_words((begin + place).astype(jnp.uint32), seed[0], seed[1]))

    drawn = functools.cache(lambda number: draw(part.place(number)))

    def shift(number: int) -> jax.Array:
        # A slice of the first half shares its words with the slice at the same place of the second.
        return drawn(number % pairs)[number // pairs]

    return shift


@dataclasses.dataclass(frozen=True)
class CodeRefs:
    """References to the arrays of a `QuantizedCode`, as arrays of rows.

    Attributes:
      planes: [T, bytes] each.
      scale: [T, groups].
      features: d.
      dtype: dtype of the activation.
      format: meaning of the bits.
      offset: [T, groups], or None.
      mean: a row for each sequence, [N, d]; or None.
      spread: as `mean`; None with it.
      outliers: [T, m], or None.
      position: index of each feature among the outliers, -1 for other features, [1, d]; or None.
      signs: signs of the rotation, as `actjax.formats.rotation.signs_row`; or None.
      levels: the levels of the codes, [1, 2^bits]; None if they are uniform.
      seed: [2], or None.
    """

    planes: Any
    scale: Any
    features: int
    dtype: Any
    format: fmt.Format
    offset: Any = None
    mean: Any = None
    spread: Any = None
    outliers: Any = None
    position: Any = None
    signs: Any = None
    levels: Any = None
    seed: Any = None

    def decode(self, part: Part) -> list[jax.Array]:
        """Returns the values of each slice of a part, rounded to the dtype of `x`, in float32."""
        values = self._levels(part)
        if self.signs is not None:
            values = butterflies.rotate_slices_back(part, values, self.signs)
        decoded = []
        for number, value in enumerate(values):
            if self.mean is not None:
                spread, mean = (
                    as_float(load_sequence(ref, part, number, self.planes[0].shape[0]))
                    for ref in (self.spread, self.mean)
                )
                value = value * spread + mean
            value = self._with_outliers(part, number, value)
            # Rounded as in memory, so that gradients are those at the decoded activation.
            decoded.append(value.astype(self.dtype).astype(jnp.float32))
        return decoded

    def _levels(self, part: Part) -> list[jax.Array]:
        """Returns the values of the codes of each slice, float32."""
        offset = None if self.offset is None else self._of_groups(part, self.offset)
        scale, shift = self._of_groups(part, self.scale), None
        if self.seed is not None:
            shift = shifts(part, self.seed, self.features, self.format.group)
        return [
            self._value(code, offset, scale, None if shift is None else shift(number))
            for number, code in enumerate(self._codes(part))
        ]

    def _of_groups(self, part: Part, ref: Any) -> jax.Array:
        """Returns the scales or offsets of the groups, float32 [tokens, groups, 1]."""
        return as_float(load(ref, part.token, part.group, part.groups_exist()))

    def _value(self, code: jax.Array, offset: Any, scale: Any, shift: Any) -> jax.Array:
        if self.format.levels == "normal":
            # Registers cannot be indexed, but the cache answers such loads.
            level = load(self.levels, jnp.zeros((1, 1, 1), jnp.int32), code, None)
            return level.astype(jnp.float32) * scale
        position = code.astype(jnp.float32)
        if shift is not None:
            position = position - shift
        return position * scale + offset

    def _with_outliers(self, part: Part, number: int, value: jax.Array) -> jax.Array:
        if self.outliers is None:
            return value
        position = load_row(self.position, part, number, -1)
        mask = both(part.exists(number), position >= 0)
        outlier = load(self.outliers, part.token, jnp.maximum(position, 0), mask)
        return jnp.where(position >= 0, outlier.astype(jnp.float32), value)

    def _codes(self, part: Part) -> list[jax.Array]:
        """Returns the codes of each slice, int32."""
        codes: list[Any] = [0] * part.slices
        shift = 0
        for width, ref in zip(PLANES[self.format.bits], self.planes, strict=True):
            size = part.size * width // 8

            @functools.cache
            def bytes_at(first: int, ref: Any = ref, start: Any = part.group * size) -> jax.Array:
                column = start + first + part.lane
                return load(ref, part.token, column, part.groups_exist()).astype(jnp.int32)

            for number in range(part.slices):
                first = number * part.width
                byte, place = bytes_at(first % size), first // size * width
                codes[number] = codes[number] | ((byte >> place) & (2**width - 1)) << shift
            shift += width
        return codes


@dataclasses.dataclass(frozen=True)
class ArrayRef:
    """A reference to an array of rows that is not encoded, with the methods of `CodeRefs`.

    Attributes:
      array: [T, d].
    """

    array: Any

    def decode(self, part: Part) -> list[jax.Array]:
        """Returns each slice of a part, float32."""
        return [
            load(self.array, part.token, part.feature(i), part.exists(i)).astype(jnp.float32)
            for i in range(part.slices)
        ]


def operands(
    x: fmt.QuantizedCode | jax.Array,
) -> tuple[list[jax.Array], Callable[..., CodeRefs | ArrayRef]]:
    """Returns the arrays of an operand, and a function from their references to an object to read.

    Args:
      x: an activation [..., d], or a code of it.
    """
    if not isinstance(x, fmt.QuantizedCode):
        return [rows(x)], ArrayRef
    by_row = {name: getattr(x, name) for name in ("scale", "offset", "mean", "spread")}
    arrays = {
        **{f"plane{i}": rows(plane) for i, plane in enumerate(x.planes)},
        **{name: rows(y) for name, y in by_row.items() if y is not None},
        **({} if x.seed is None else {"seed": value_of(x.seed)}),
    }
    if x.channels is not None:
        arrays["outliers"] = rows(x.outliers)
        arrays["position"] = positions(value_of(x.channels), x.features)
    if x.format.rotate:
        arrays["signs"] = signs_row(x.format.group)
    if x.format.levels == "normal":
        arrays["levels"] = jnp.asarray(normal_levels(x.format.bits)[None])

    def bind(*refs: Any) -> CodeRefs:
        named = dict(zip(arrays, refs, strict=True))
        planes = tuple(named.pop(f"plane{i}") for i in range(len(x.planes)))
        return CodeRefs(planes, features=x.features, dtype=x.dtype, format=x.format, **named)

    return list(arrays.values()), bind


def positions(channels: jax.Array, features: int) -> jax.Array:
    """Returns the index of each feature in `channels`, -1 if it is not there, int32 [1, d]."""
    count = jnp.arange(channels.shape[0], dtype=jnp.int32)
    return jnp.full((1, features), -1, jnp.int32).at[0, channels].set(count)
