"""Optimizer states in 8 bits between steps.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022): a moment is cut into blocks,
each with the scale of its largest entry, and mapped to 256 levels (`actjax.kernels.blockwise`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
import optax

from actjax.codecs.base import check_positive_integer
from actjax.kernels.blockwise import Blockwise, Map, blockwise_zeros
from actjax.optim.checks import check_transform
from actjax.optim.paths import map_state

FIRST_MOMENTS = ("mu", "trace", "m1", "m2")
"""Fields of optax states that are means of gradients."""
SECOND_MOMENTS = ("nu", "nu_max", "sum_of_squares", "e_g", "e_x")
"""Fields that are means of squares, never negative: the freed sign bit is one of precision."""
_KEPT = (optax.ScaleByRStdDevState, optax.ScaleBySM3State)
"""States with fields of these names that are something else: the first takes the square of one
from the other, and what is left is rounding; in the second `nu` is a momentum."""


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
