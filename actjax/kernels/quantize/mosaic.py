"""`quantize` for TPUs, by Mosaic. XLA's form moves 30 times the least bytes for 5461 features."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from actjax._math.precision import over
from actjax.formats import code as fmt
from actjax.formats import levels as normal
from actjax.kernels import lanes
from actjax.kernels.lanes import LANES, Group


def refuses(inputs: fmt.QuantizeInputs, *, format: fmt.Format) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    if inputs.channels is not None:
        return "takes no channels on TPUs"
    return lanes.refuses(format, inputs.x.dtype, inputs.x.shape)


def quantize(
    inputs: fmt.QuantizeInputs, *, format: fmt.Format, interpret: bool
) -> fmt.QuantizedCode:
    """As `actjax.kernels.quantize.api.quantize`."""
    blocks = Blocks.of(inputs.x)
    code = pl.pallas_call(
        functools.partial(_kernel, blocks.features),
        grid=blocks.grid,
        in_specs=[*blocks.inputs, blocks.matrix],
        out_specs=blocks.code,
        out_shape=blocks.code_shapes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="actjax_quantize",
    )(*arrays_of(inputs), lanes.matrix())
    return code_of(code, inputs, format)


def _kernel(features, x, mean, inverse, matrix, plane, scales) -> None:
    encode(features, lambda group: x[0, :, group.at], mean, inverse, matrix, plane, scales)


class Blocks(NamedTuple):
    """Blocks of some tokens of an activation [B, S, d], and of its code.

    Attributes:
      shape: shape of the activation.
      tokens: tokens of a block.
    """

    shape: tuple[int, int, int]
    tokens: int

    @classmethod
    def of(cls, x: jax.Array, **size: int) -> "Blocks":
        """Returns blocks of an activation; `size` as for `lanes.tokens_of`."""
        rows, length, features = x.shape
        return cls((rows, length, features), lanes.tokens_of(length, features, x.dtype, **size))

    @property
    def features(self) -> int:
        """Features of the activation."""
        return self.shape[2]

    @property
    def grid(self) -> tuple[int, int]:
        """Sequences, and blocks of each."""
        return self.shape[0], -(-self.shape[1] // self.tokens)

    @property
    def activation(self) -> pl.BlockSpec:
        """Blocks of the activation."""
        return self._of_tokens(lanes.padded(self.features))

    @property
    def inputs(self) -> list[pl.BlockSpec]:
        """Blocks of `arrays_of`."""
        by_row = pl.BlockSpec((1, 1, lanes.padded(self.features)), lambda b, i: (b, 0, 0))
        return [self.activation, by_row, by_row]

    @property
    def matrix(self) -> pl.BlockSpec:
        """The matrix of `lanes.matrix`."""
        return pl.BlockSpec((LANES, LANES), lambda b, i: (0, 0))

    @property
    def code(self) -> list[pl.BlockSpec]:
        """Blocks of a plane and of scales."""
        groups = fmt.group_count(self.features, LANES)
        return [self._of_tokens(lanes.padded(groups * LANES // 2)), self._of_tokens(LANES)]

    @property
    def code_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the plane and of the scales."""
        groups, tokens = fmt.group_count(self.features, LANES), self.shape[:2]
        return [
            jax.ShapeDtypeStruct((*tokens, groups * LANES // 2), jnp.uint8),
            jax.ShapeDtypeStruct((*tokens, groups), jnp.bfloat16),
        ]

    def _of_tokens(self, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, self.tokens, width), lambda b, i: (b, i, 0))


def arrays_of(inputs: fmt.QuantizeInputs) -> list[jax.Array]:
    """Returns the activation, the means of its channels, and the inverses of their spreads."""
    rows, _, features = inputs.x.shape
    spread = lanes.of_sequences(inputs.spread, rows, features, 1)
    return [inputs.x, lanes.of_sequences(inputs.mean, rows, features, 0), 1 / spread]


def code_of(
    arrays: Sequence[jax.Array], inputs: fmt.QuantizeInputs, format: fmt.Format
) -> fmt.QuantizedCode:
    """Returns the code that `encode` has written, without statistics."""
    plane, scales = arrays
    return fmt.QuantizedCode(
        planes=(plane,),
        scale=scales.view(jnp.uint16),
        features=inputs.x.shape[-1],
        dtype=jnp.dtype(inputs.x.dtype),
        format=format,
    )


def encode(
    features: int, read: Callable[[Group], jax.Array], mean, inverse, matrix, plane, scales
) -> None:
    """Writes the code of a block.

    Args:
      features: features of the activation.
      read: returns the numbers of a group, [tokens, 128]. Lanes beyond the row hold anything.
      mean: reference to the means of channels; this and the next as `Blocks.inputs`.
      inverse: to the inverses of their spreads.
      matrix: to the matrix.
      plane: to the bytes; this and the next as `Blocks.code`.
      scales: to the scales.
    """
    lane = lanes.lanes_like(plane.shape[1])
    stored, pending = jnp.zeros(lane.shape, jnp.float32), jnp.zeros(lane.shape, jnp.int32)
    for group in lanes.groups_of(features):
        values = read(group).astype(jnp.float32) - mean[0, :, group.at]
        values = jnp.where(lane < group.exist, values * inverse[0, :, group.at], 0)
        values = values.astype(jnp.bfloat16).astype(jnp.float32)
        codes, scale = _encoded(lanes.product(values, matrix[...]))
        stored = jnp.where(lane == group.index, scale, stored)
        codes = _packed(codes, lane, group)
        pending = jnp.where(lane < LANES // 2, pending, codes) if group.is_second else codes
        plane[0, :, group.bytes_at] = pending.astype(plane.dtype)
    scales[0] = stored.astype(scales.dtype)


def _encoded(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns codes, int32 [tokens, 128], and scales, [tokens, 1], of rotated values."""
    largest = jnp.max(jnp.abs(values), axis=1, keepdims=True)
    relative = over(values, largest)
    mean_square = jnp.sum(relative * relative, axis=1, keepdims=True) * np.float32(1 / LANES)
    scale = jnp.sqrt(mean_square) * largest
    return normal.code_of(over(values, scale), 4).astype(jnp.int32), scale


def _packed(codes: jax.Array, lane: jax.Array, group: Group) -> jax.Array:
    """Returns the bytes of a group in its half of the lanes: code j, and code j + 64 above it."""
    bytes_ = jnp.where(lane < LANES // 2, codes | pltpu.roll(codes, LANES // 2, 1) << 4, 0)
    return pltpu.roll(bytes_, LANES // 2, 1) if group.is_second else bytes_
