"""Optimizer states in 8 bits between steps.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022): a moment is cut into blocks,
each with the scale of its largest entry, and mapped to 256 levels that lie densest, in proportion,
over seven orders of magnitude. The map here is a closed form (no table, no search): level `i` has
the p bits below its leading one for a fraction, and p for a decade.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
import optax

from actjax.codecs.base import check_positive_integer
from actjax.optim.checks import check_transform
from actjax.optim.paths import map_state

Map = Literal["dynamic", "linear"]

FIRST_MOMENTS = ("mu", "trace", "m1", "m2")
"""Fields of optax states that are means of gradients."""
SECOND_MOMENTS = ("nu", "nu_max", "sum_of_squares", "e_g", "e_x")
"""Fields that are means of squares, never negative: the freed sign bit is one of precision."""
_KEPT = (optax.ScaleByRStdDevState, optax.ScaleBySM3State)
"""States with fields of these names that are something else: the first takes the square of one
from the other, and what is left is rounding; in the second `nu` is a momentum."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blockwise:
    """An array in 8 bits, in blocks along its last axis.

    Attributes:
      codes: of the shape of the array, so that it is sharded and sliced alike; int8, or uint8 if
        there are no negative values.
      scales: largest magnitude of each block, [..., blocks], float32.
      dtype: of the array. Static.
      block: values in a block; the last block of a row may be shorter. Static.
      levels: "dynamic" or "linear". Static.
    """

    codes: Any
    scales: Any
    dtype: Any = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})
    levels: Map = dataclasses.field(metadata={"static": True})

    def decode(self) -> jax.Array:
        """Returns the array."""
        unsigned = self.codes.dtype == jnp.uint8
        index = self.codes.astype(jnp.float32)
        unit = jnp.sign(index) * _LEVELS[self.levels][1](jnp.abs(index), unsigned)
        return (unit * self._spread(self.scales, unit.shape)).astype(self.dtype)

    def encode(self, x: jax.Array) -> "Blockwise":
        """Returns another array of the same shape in the same form.

        Error of the dynamic map: half the distance between two levels, which is 0.70% of the
        largest magnitude of the block (0.35% if unsigned) in the top decade; in each decade below
        a fifth of that above. In an unsigned array what is negative becomes zero, and what is
        positive never does: a second moment of zero would divide the first by nothing.
        """
        unsigned = self.codes.dtype == jnp.uint8
        x = x.astype(jnp.float32)
        scales = self._largest(jnp.abs(x))
        divisor = self._spread(jnp.where(scales > 0, scales, 1), x.shape)
        index = _LEVELS[self.levels][0](jnp.abs(x) / divisor, unsigned)
        if unsigned and self.levels == "dynamic":
            index = jnp.where(x > 0, jnp.maximum(index, 1), index)
        signs = (x > 0).astype(index.dtype) if unsigned else jnp.sign(x)
        codes = (signs * index).astype(self.codes.dtype)
        return dataclasses.replace(self, codes=codes, scales=scales)

    def _largest(self, x: jax.Array) -> jax.Array:
        blocks = -(-x.shape[-1] // self.block)
        padding = blocks * self.block - x.shape[-1]
        if padding:
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
        return jnp.max(x.reshape(*x.shape[:-1], blocks, self.block), axis=-1)

    def _spread(self, scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Returns the scale of each value."""
        return jnp.repeat(scales, self.block, axis=-1)[..., : shape[-1]]


def blockwise_zeros(
    shape: Sequence[int], dtype: Any, *, unsigned: bool, block: int = 256, levels: Map = "dynamic"
) -> Blockwise:
    """Returns zeros of a shape in 8 bits; `.encode(x)` brings an array into that form.

    Storage: a byte a value, and 4 bytes a block. A block ends with its row, so narrow arrays have
    small ones.
    """
    block = min(block, shape[-1])
    codes = jnp.zeros(shape, jnp.uint8 if unsigned else jnp.int8)
    scales = jnp.zeros((*shape[:-1], -(-shape[-1] // block)), jnp.float32)
    return Blockwise(codes, scales, jnp.dtype(dtype), block, levels)


def is_blockwise(x: Any) -> bool:
    """Returns whether `x` is a `Blockwise`: for `is_leaf` of `jax.tree` functions."""
    return isinstance(x, Blockwise)


class EightBitState(NamedTuple):
    """State of `eight_bit`.

    Attributes:
      inner: that of the inner transform, its large arrays `Blockwise`.
    """

    inner: Any


def eight_bit(
    inner: optax.GradientTransformation,
    *,
    block: int = 256,
    min_size: int = 4096,
    signed: Sequence[str] = FIRST_MOMENTS,
    unsigned: Sequence[str] = SECOND_MOMENTS,
    levels: Map = "dynamic",
) -> optax.GradientTransformationExtraArgs:
    """Wraps a transform so that its large moments are kept in 8 bits between steps.

    The update itself is computed in the dtype of the moments; only what lives between steps is
    small: plain arrays that orbax saves, into a state of the same transform, and a mesh shards like
    the parameters. Applied to a whole tree at once, decoded moments of a whole leaf may exist; with
    `actjax.optim.apply` those of one layer.

    Moments are known by the names that optax gives them, as in Adam and what is built on it, Lion,
    momentum, RMSProp, Adagrad, Adadelta, Muon, AdEMAMix. All else stays as it is, since 8 bits
    cannot hold it: weights that a transform keeps (schedule-free, Prodigy), sums of gradients
    (`optax.MultiSteps`), differences (Adan), the centred RMSProp, SM3.

    Args:
      inner: any optax transform. With a subspace, that goes around: `subspace(eight_bit(...), k)`.
      block: values that share a scale.
      min_size: arrays of fewer elements stay as they are.
      signed: names of the fields whose arrays are moments with a sign.
      unsigned: names of those whose arrays are never negative.
      levels: "dynamic"; "linear" is there to be compared with, and diverges on second moments.

    Raises:
      TypeError: `inner` is no transform.
      ValueError: a block or size below one, or unknown levels.
    """
    check_transform("inner", inner)
    check_positive_integer("eight_bit", "block", block)
    check_positive_integer("eight_bit", "min_size", min_size)
    if levels not in get_args(Map):
        raise ValueError(f"`levels` of eight_bit must be one of {get_args(Map)}, got {levels!r}.")
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> EightBitState:
        def compress(fields: list[str], _: str | None, x: Any) -> Any:
            if isinstance(x, _KEPT) or x.ndim == 0 or x.size < min_size:
                return x
            is_unsigned = any(field in unsigned for field in fields)
            is_moment = is_unsigned or any(field in signed for field in fields)
            if not is_moment or not jnp.issubdtype(x.dtype, jnp.floating):
                return x
            zeros = blockwise_zeros(
                x.shape, x.dtype, unsigned=is_unsigned, block=block, levels=levels
            )
            # Behind a barrier, or XLA computes the codes of all these zeros while it compiles.
            return zeros.encode(jax.lax.optimization_barrier(x))

        state = inner.init(params)
        return EightBitState(map_state(compress, state, params, lambda x: isinstance(x, _KEPT)))

    def update(
        updates: optax.Updates, state: EightBitState, params: Any = None, **extra: Any
    ) -> tuple[optax.Updates, EightBitState]:
        updates, new = inner.update(updates, decoded(state.inner), params, **extra)
        return updates, EightBitState(encoded_like(state.inner, new))

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))


def decoded(state: Any) -> Any:
    """Returns a state with every `Blockwise` as an array."""
    return map_blockwise(lambda x: x, state)


def encoded_like(old: Any, new: Any) -> Any:
    """Returns the arrays of `new` in the form that those of `old` have."""
    return jax.tree.map(
        lambda a, b: a.encode(b) if is_blockwise(a) else b, old, new, is_leaf=is_blockwise
    )


def map_blockwise(fun: Callable[[Any], Any], state: Any) -> Any:
    """Maps over the arrays of a state, `Blockwise` ones decoded."""
    return jax.tree.map(
        lambda x: fun(x.decode() if is_blockwise(x) else x), state, is_leaf=is_blockwise
    )


def _dynamic_index(size: jax.Array, unsigned: bool) -> jax.Array:
    """Returns the nearest level of magnitudes in [0, 1].

    Level `2^p + j`, `0 <= j < 2^p`, is `10^(p - top) (0.1 + 0.9 (j + 1) / 2^p)`: each decade has
    twice as many levels as the one below, the last 64 or 128. Level 0 is 0, the highest is 1.
    """
    top = _top(unsigned)
    # What is further below the last decade than this is nearest to 0 all the same.
    size = jnp.maximum(size, 10 ** -(top + 2))
    decade = jnp.clip(jnp.floor(-jnp.log10(size)), 0, top)
    levels = jnp.exp2(top - decade)
    fraction = (size * jnp.power(10.0, decade) - 0.1) / 0.9
    # At the foot of a decade this rounds to -1: the highest level of the decade below.
    index = levels + jnp.round(fraction * levels - 1)
    # The only level of the last decade is its head, and below that comes 0.
    index = jnp.where(decade == top, jnp.round(size * 10**top), index)
    return jnp.minimum(index, 2 * jnp.exp2(top) - 1)


def _dynamic_level(index: jax.Array, unsigned: bool) -> jax.Array:
    power = jnp.floor(jnp.log2(jnp.maximum(index, 1)))
    levels = jnp.exp2(power)
    level = jnp.power(10.0, power - _top(unsigned)) * (0.1 + 0.9 * (index - levels + 1) / levels)
    return jnp.where(index > 0, level, 0)


def _top(unsigned: bool) -> float:
    return 7.0 if unsigned else 6.0


def _linear_index(size: jax.Array, unsigned: bool) -> jax.Array:
    return jnp.round(size * (255 if unsigned else 127))


def _linear_level(index: jax.Array, unsigned: bool) -> jax.Array:
    return index / (255 if unsigned else 127)


_LEVELS: dict[str, tuple[Callable, Callable]] = {
    "dynamic": (_dynamic_index, _dynamic_level),
    "linear": (_linear_index, _linear_level),
}
