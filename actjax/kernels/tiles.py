"""What kernels over rows of grouped features share: tiles, packed slices and levels in registers.

A tile is [tokens, groups, lanes]: a group is handled as slices of it that lie side by side in its
bytes (see `actjax.kernels.packing`), so nothing ever moves between lanes. All blocks are powers of
two, as Triton wants them.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from actjax.kernels import format as fmt
from actjax.kernels.noise import halves, random_words
from actjax.kernels.packing import PLANES


@dataclasses.dataclass(frozen=True)
class Part:
    """Some groups of some tokens, each group cut into slices.

    Attributes:
      token: which tokens, [tokens, 1, 1].
      tokens: of the array, if a tile reaches beyond them.
      group: which groups, [1, groups, 1].
      groups: of this part, if a tile reaches beyond them.
      size: features of a group.
      start: first feature of this part.
      first: groups before this part.
      slices: number of slices of a group.
    """

    token: Any
    tokens: int | None
    group: Any
    groups: int | None
    size: int
    start: int
    first: int
    slices: int

    @property
    def width(self) -> int:
        """Features of a slice; the last of a group may have fewer."""
        return -(-self.size // self.slices)

    @property
    def lane(self) -> jax.Array:
        """Place within a slice, [1, 1, lanes]."""
        return _iota(pl.next_power_of_2(self.width), 2)

    def place(self, number: int) -> jax.Array:
        """Returns the places of a slice within its group, [1, 1, lanes]."""
        return number * self.width + self.lane

    def feature(self, number: int) -> jax.Array:
        """Returns the features of a slice, [1, groups, lanes]."""
        return self.start + self.group * self.size + self.place(number)

    def groups_exist(self) -> jax.Array | None:
        """Returns which tokens and groups of a tile there are; None for all."""
        tokens = None if self.tokens is None else self.token < self.tokens
        return both(tokens, None if self.groups is None else self.group < self.groups)

    def exists(self, number: int) -> jax.Array | None:
        """Returns which numbers of a slice there are; None for all."""
        end = min(self.width, self.size - number * self.width)
        whole = end == pl.next_power_of_2(self.width)
        return both(self.groups_exist(), None if whole else self.lane < end)


def load_row(ref: Any, part: Part, number: int, fill: float = 0) -> jax.Array:
    """Returns what an array [1, d] has for the features of a slice, [1, groups, lanes]."""
    mask = dataclasses.replace(part, tokens=None).exists(number)
    return load(ref, jnp.zeros((1, 1, 1), jnp.int32), part.feature(number), mask, fill)


def as_float(scale: jax.Array) -> jax.Array:
    """Returns scales as they are stored, in bits if of 16, as float32."""
    if scale.dtype != jnp.uint16:
        return scale
    return jax.lax.bitcast_convert_type(scale.astype(jnp.int32) << 16, jnp.float32)


def both(*masks: jax.Array | None) -> jax.Array | None:
    """Returns where all masks are true; None is true everywhere."""
    given = [mask for mask in masks if mask is not None]
    return functools.reduce(operator.and_, given) if given else None


def load(ref: Any, row: Any, column: Any, mask: Any, fill: float = 0) -> jax.Array:
    """Returns what stands at these places of an array of rows, `fill` where the mask is false."""
    shape = jnp.broadcast_shapes(row.shape, column.shape, () if mask is None else mask.shape)
    place = ref.at[jnp.broadcast_to(row, shape), jnp.broadcast_to(column, shape)]
    if mask is None:
        return plgpu.load(place)
    return plgpu.load(place, mask=jnp.broadcast_to(mask, shape), other=fill)


def store(ref: Any, row: Any, column: Any, value: jax.Array, mask: Any) -> None:
    """Writes to these places of an array of rows, where the mask is true."""
    shape = jnp.broadcast_shapes(row.shape, column.shape, () if mask is None else mask.shape)
    place = ref.at[jnp.broadcast_to(row, shape), jnp.broadcast_to(column, shape)]
    value = jnp.broadcast_to(value, shape).astype(ref.dtype)
    plgpu.store(place, value, mask=None if mask is None else jnp.broadcast_to(mask, shape))


def dot_precision(dtype: Any, interpret: bool) -> Any:
    """Returns how products of tiles of `dtype` keep all of its bits on the matrix units.

    Those round float32 to 11 bits: three products of parts make up for that.
    """
    if dtype != jnp.float32 or interpret:
        return jax.lax.Precision.HIGHEST
    return jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3


def _iota(size: int, axis: int) -> jax.Array:
    shape = [1, 1, 1]
    shape[axis] = size
    return jax.lax.broadcasted_iota(jnp.int32, tuple(shape), axis)


@dataclasses.dataclass(frozen=True)
class Grid:
    """How an array of grouped features is spread over programs.

    Attributes:
      rows: T.
      features: d.
      group: features of a group.
      tile_rows: tokens of a program.
      tile_groups: groups of a program.
    """

    rows: int
    features: int
    group: int
    tile_rows: int
    tile_groups: int

    @property
    def programs(self) -> tuple[int]:
        """Number of programs: of whole groups, neighbours in memory in a row, and of the rest."""
        rest = pl.cdiv(self.rows, self._rest_rows) if self.features % self.group else 0
        return (self._whole + rest,)

    def run(self, body: Callable[[Callable[[int], Part]], None]) -> None:
        """Runs a program: `body` is given what makes its `Part` from a number of slices."""
        program = pl.program_id(0)
        groups, rest = divmod(self.features, self.group)
        row, block = program // max(1, self._blocks), program % max(1, self._blocks)
        whole = functools.partial(
            Part,
            *self._tokens(row, self.tile_rows),
            block * self.tile_groups + _iota(self.tile_groups, 1),
            groups if groups % self.tile_groups else None,
            self.group,
            0,
            0,
        )
        left = functools.partial(
            Part,
            *self._tokens(program - self._whole, self._rest_rows),
            _iota(1, 1),
            None,
            rest,
            groups * self.group,
            groups,
        )
        if not rest:
            body(whole)
        elif not groups:
            body(left)
        else:
            pl.when(program < self._whole)(lambda: body(whole))
            pl.when(program >= self._whole)(lambda: body(left))

    @property
    def _blocks(self) -> int:
        return pl.cdiv(self.features // self.group, self.tile_groups)

    @property
    def _whole(self) -> int:
        return self._blocks * pl.cdiv(self.rows, self.tile_rows)

    @property
    def _rest_rows(self) -> int:
        """Tokens of a program for the rest: of as many numbers as one for whole groups."""
        return min(self.tile_rows * self.tile_groups, pl.next_power_of_2(self.rows))

    def _tokens(self, program: Any, tile: int) -> tuple[jax.Array, int | None]:
        token = program * tile + _iota(tile, 0)
        return token, self.rows if self.rows % tile else None


def grid_of(rows: int, features: int, group: int, numbers: int = 4096) -> Grid:
    """Returns a grid of programs for about so many numbers each."""
    whole = max(1, features // group)
    # Many groups, whose scales are written side by side, but few idle ones.
    sizes = [size for size in (16, 8, 4, 2, 1) if size * group <= numbers] or [1]
    busy = [size for size in sizes if -(-whole // size) * size <= 1.15 * whole]
    tile_groups = busy[0] if busy else sizes[-1]
    tile_rows = max(1, numbers // (tile_groups * pl.next_power_of_2(group)))
    return Grid(rows, features, group, min(tile_rows, pl.next_power_of_2(rows)), tile_groups)


def slice_count(bits: Sequence[int]) -> int:
    """Returns the number of slices of a group that suits codes of such bits.

    Those that share a byte of the narrowest plane, and two at least, which share random words.
    """
    return max([2, *(8 // width for one in bits for width in PLANES[one])])


def shifts(part: Part, seed: Any, features: int, group: int) -> Callable[[int], jax.Array]:
    """Returns a function from a slice to its random shifts: `actjax.kernels.noise.uniform`.

    Args:
      part: which numbers.
      seed: reference to the seed.
      features: d.
      group: features of a whole group.
    """
    words, per_group = fmt.noise_words(features, group), -(-group // 2)
    begin = part.token * words + (part.first + part.group) * per_group
    half, pairs = -(-part.size // 2), part.slices // 2

    def draw(place: jax.Array) -> tuple[jax.Array, jax.Array]:
        return halves(random_words((begin + place).astype(jnp.uint32), seed[0], seed[1]))

    drawn = functools.cache(lambda number: draw(part.place(number)))

    def shift(number: int) -> jax.Array:
        if part.slices % 2 == 0 and part.slices * part.width == part.size:
            # A slice of the first half, and the one as far into the second, share their words.
            return drawn(number % pairs)[number // pairs]
        place = part.place(number)
        low, high = draw(jnp.where(place < half, place, place - half))
        return jnp.where(place < half, low, high)

    return shift


def normal_values(codes: jax.Array, bits: int) -> jax.Array:
    """Returns the "normal" levels of codes, of scale 1, float32."""
    table = fmt.normal_levels(bits).astype(np.float32)
    value = jnp.full(codes.shape, table[0], jnp.float32)
    for code, level in enumerate(table[1:]):
        value = jnp.where(codes > code, level, value)
    return value


@dataclasses.dataclass(frozen=True)
class CodeRefs:
    """References to the arrays of a `QuantizedCode`, each of rows.

    Attributes:
      planes: [T, bytes] each.
      low: [T, groups], or None.
      step: [T, groups], or [1, d] by channel.
      outliers: [T, m], or None.
      position: of each feature, among outliers, or -1: [1, d], or None.
      seed: [2], or None.
      features: d.
      dtype: of the activation.
      format: what the bits mean.
    """

    planes: Any
    low: Any
    step: Any
    outliers: Any
    position: Any
    seed: Any
    features: int
    dtype: Any
    format: fmt.Format

    def decode(self, part: Part) -> list[jax.Array]:
        """Returns what each slice of a part stands for, rounded as the activation, in float32."""
        codes = self._codes(part)
        low = None if self.low is None else self._scale(part, self.low, 0)
        step = self._scale(part, self.step, 0)
        shift = None
        if self.seed is not None:
            shift = shifts(part, self.seed, self.features, self.format.group)
        values = []
        for number, code in enumerate(codes):
            if self.format.scaling == "channel":
                step = self._scale(part, self.step, number)
            value = self._value(code, low, step, None if shift is None else shift(number))
            value = self._with_outliers(part, number, value)
            # Rounded as in memory, so that what is computed from it is at what the code stands for.
            values.append(value.astype(self.dtype).astype(jnp.float32))
        return values

    def _scale(self, part: Part, ref: Any, number: int) -> jax.Array:
        """Returns the scales of a slice, float32, to broadcast against it."""
        if self.format.scaling == "channel":
            return as_float(load_row(ref, part, number))
        return as_float(load(ref, part.token, part.first + part.group, part.groups_exist()))

    def _value(self, code: jax.Array, low: Any, step: Any, shift: Any) -> jax.Array:
        if self.format.levels == "normal":
            return normal_values(code, self.format.bits) * step
        position = code.astype(jnp.float32)
        if shift is not None:
            position = position - shift
        if low is None:
            return (position - np.float32((2**self.format.bits - 1) / 2)) * step
        return position * step + low

    def _with_outliers(self, part: Part, number: int, value: jax.Array) -> jax.Array:
        if self.outliers is None:
            return value
        position = load_row(self.position, part, number, -1)
        mask = both(part.exists(number), position >= 0)
        whole = load(self.outliers, part.token, jnp.maximum(position, 0), mask)
        return jnp.where(position >= 0, whole.astype(jnp.float32), value)

    def _codes(self, part: Part) -> list[jax.Array]:
        """Returns the codes of each slice, int32."""
        codes: list[Any] = [0] * part.slices
        shift = 0
        for width, ref in zip(PLANES[self.format.bits], self.planes, strict=True):
            size = -(-part.size * width // 8)
            start = part.start * width // 8 + part.group * size
            aligned = size % part.width == 0

            @functools.cache
            def bytes_at(first: int, ref: Any = ref, start: Any = start) -> jax.Array:
                column = start + first + part.lane
                return load(ref, part.token, column, part.exists(0)).astype(jnp.int32)

            for number in range(part.slices):
                first = number * part.width
                if aligned:
                    byte, place = bytes_at(first % size), first // size * width
                else:
                    at = part.place(number)
                    byte = load(ref, part.token, start + at % size, part.exists(number))
                    byte, place = byte.astype(jnp.int32), at // size * width
                codes[number] = codes[number] | ((byte >> place) & (2**width - 1)) << shift
            shift += width
        return codes


@dataclasses.dataclass(frozen=True)
class ArrayRef:
    """A reference to an array of rows that is as it is, to be read like `CodeRefs`.

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
    """Returns the arrays of an operand as a kernel takes them, and what binds as many references.

    Args:
      x: an activation [..., d], or a code of it.
    """
    if not isinstance(x, fmt.QuantizedCode):
        return [rows(x)], ArrayRef
    arrays = {
        **{f"plane{i}": rows(plane) for i, plane in enumerate(x.planes)},
        "step": x.step[None] if x.format.scaling == "channel" else rows(x.step),
        **({} if x.low is None else {"low": rows(x.low)}),
        **({} if x.seed is None else {"seed": x.seed}),
    }
    if x.channels is not None:
        arrays["outliers"] = rows(x.outliers)
        arrays["position"] = positions(x.channels, x.features)

    def bind(*refs: Any) -> CodeRefs:
        given = dict(zip(arrays, refs, strict=True))
        planes = tuple(given[f"plane{i}"] for i in range(len(x.planes)))
        return CodeRefs(
            planes,
            given.get("low"),
            given["step"],
            given.get("outliers"),
            given.get("position"),
            given.get("seed"),
            x.features,
            x.dtype,
            x.format,
        )

    return list(arrays.values()), bind


def group_of(x: fmt.QuantizedCode | jax.Array) -> int:
    """Returns the features of a group of an operand: of an array, the most up to 128 that divide d.

    A power of two.
    """
    if isinstance(x, fmt.QuantizedCode):
        return x.format.group
    return min(128, x.shape[-1] & -x.shape[-1]) or 1


def rows(x: jax.Array) -> jax.Array:
    """Returns `x` [..., d] as [T, d]."""
    return x.reshape(-1, x.shape[-1])


def positions(channels: jax.Array, features: int) -> jax.Array:
    """Returns the place of each feature among `channels`, -1 if it is none of them: [1, d]."""
    count = jnp.arange(channels.shape[0], dtype=jnp.int32)
    return jnp.full((1, features), -1, jnp.int32).at[0, channels].set(count)


def refuses_operand(x: fmt.QuantizedCode | jax.Array, shape: Sequence[int]) -> str | None:
    """Returns why tiles cannot hold an operand of some shape; None if they can."""
    if isinstance(x, fmt.QuantizedCode):
        return refuses(x.format, x.dtype, shape)
    if group_of(x) < 16:
        return f"takes a multiple of 16 features, got {shape[-1]}"
    return _refuses_array(x.dtype, shape)


def refuses(format: fmt.Format, dtype: Any, shape: Sequence[int]) -> str | None:
    """Returns why tiles cannot hold activations of a shape, stored in a format; None if they can.

    Args:
      format: how numbers are stored.
      dtype: of the activation.
      shape: of the activation, [..., d].
    """
    if format.group < 16 or format.group & (format.group - 1) or format.group > 1024:
        return f"takes groups of 16, 32, ... 1024 features, got group={format.group}"
    if format.scale_dtype == "float16":
        return "takes scales in bfloat16 or float32, got scale_dtype='float16'"
    if format.rotate:
        return "does not rotate, got rotate=True"
    return _refuses_array(dtype, shape)


def _refuses_array(dtype: Any, shape: Sequence[int]) -> str | None:
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"takes floating point numbers of 16 or 32 bits, got {dtype}"
    return f"takes arrays that are not empty, got shape {tuple(shape)}" if 0 in shape else None
