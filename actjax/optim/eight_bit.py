"""Optimizer states stored in 8 bits between steps.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022): a moment is cut into blocks,
each with the scale of its largest entry, and mapped to 256 levels (`actjax.kernels.blockwise`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from actjax._core.flax import in_structure_of, register_fields, without_variables
from actjax.codecs.base import check_positive_integer
from actjax.kernels.blockwise import Blockwise, blockwise_zeros, is_blockwise
from actjax.optim.checks import check_inner
from actjax.optim.moments import FIRST_MOMENTS, SECOND_MOMENTS
from actjax.optim.paths import map_state

_KEPT = (optax.ScaleByRStdDevState, optax.ScaleBySM3State)
"""States that use these field names for something else. The first subtracts the square of one field
from the other, which leaves only rounding errors of 8 bits; in the second `nu` is a momentum."""


class EightBitState(NamedTuple):
    """State of `eight_bit`.

    Attributes:
      inner: state of the inner transform, with `Blockwise` in the place of its large moments.
    """

    inner: Any


BlockOf = Callable[[tuple[int, ...]], int]
"""From the shape of a moment to the number of values that share a scale."""


def eight_bit(
    inner: optax.GradientTransformation,
    *,
    block: int | BlockOf = 256,
    min_size: int = 4096,
    signed: Sequence[str] = FIRST_MOMENTS,
    unsigned: Sequence[str] = SECOND_MOMENTS,
) -> optax.GradientTransformationExtraArgs:
    """Wraps a transform so that its large moments are stored in 8 bits between steps.

    The update is computed in the dtype of the moments; only the state between steps is small. It
    consists of plain arrays, which orbax saves and restores into a state of the same transform, and
    which a mesh shards like the parameters. Applied to a whole tree at once, the decoded moments of
    a whole leaf may exist; with `actjax.optim.apply`, only those of one layer.

    The names of their fields in optax's states identify moments: those of Adam and its variants,
    Lion, momentum, RMSProp, Adagrad, Adadelta, Muon and AdEMAMix. All other arrays stay as they
    are, because 8 bits cannot represent them: weights that a transform keeps (schedule-free,
    Prodigy), sums of gradients (`optax.MultiSteps`), differences (Adan), the centered RMSProp, SM3.

    Args:
      inner: any optax transform. `subspace`, `stochastic_rounding` and `compensated` go around this
        one: `subspace(eight_bit(...), k)`.
      block: values that share a scale, or a function from the shape of a moment to this number.
      min_size: arrays with fewer elements stay as they are.
      signed: names of the fields that hold moments with a sign.
      unsigned: names of the fields that hold moments without negative values; the sign bit becomes
        a bit of precision.

    Raises:
      TypeError: `inner` is not a transform.
      ValueError: a block or size below one, or an `inner` that rounds weights.
    """
    check_inner("eight_bit", "inner", inner)
    if not callable(block):
        check_positive_integer("eight_bit", "block", block)
    check_positive_integer("eight_bit", "min_size", min_size)
    inner = optax.with_extra_args_support(inner)

    def compress(fields: list[str], _: str | None, x: Any) -> Any:
        if isinstance(x, _KEPT) or x.ndim == 0 or x.size < min_size:
            return x
        is_unsigned = any(field in unsigned for field in fields)
        is_moment = is_unsigned or any(field in signed for field in fields)
        if not is_moment or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        size = block(x.shape) if callable(block) else block
        check_positive_integer("eight_bit", "block", size)
        register_fields(Blockwise, "codes", "scales")
        zeros = blockwise_zeros(x.shape, x.dtype, unsigned=is_unsigned, block=size)
        # Without the barrier, XLA computes the codes of these constants while it compiles.
        return zeros.encode(jax.lax.optimization_barrier(x))

    def init(params: optax.Params) -> EightBitState:
        params = without_variables(params)
        state = inner.init(params)
        return EightBitState(map_state(compress, state, params, lambda x: isinstance(x, _KEPT)))

    def update(
        updates: optax.Updates, state: EightBitState, params: Any = None, **extra: Any
    ) -> tuple[optax.Updates, EightBitState]:
        own = without_variables(updates), decoded(state.inner), without_variables(params)
        changes, new = inner.update(*own, **extra)
        return in_structure_of(changes, updates), EightBitState(encoded_like(state.inner, new))

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))


def decoded(state: Any) -> Any:
    """Returns a state with every `Blockwise` as an array."""
    return jax.tree.map(lambda x: x.decode() if is_blockwise(x) else x, state, is_leaf=is_blockwise)


def encoded_like(old: Any, new: Any) -> Any:
    """Returns the arrays of `new` in the form of those in `old`."""
    return jax.tree.map(
        lambda a, b: a.encode(b) if is_blockwise(a) else b, old, new, is_leaf=is_blockwise
    )
