"""Optimizer states stored in 8 bits between steps.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022): a moment is cut into blocks,
each with the scale of its largest entry, and mapped to 256 levels (`actjax.formats.blockwise`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optax

from actjax.codecs.base import check_positive_integer
from actjax.formats.blockwise import Blockwise, blockwise_zeros
from actjax.optim.checks import check_inner
from actjax.optim.states.stored import FIRST_MOMENTS, SECOND_MOMENTS, store_moments


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
      inner: any optax transform. `subspace` and `stochastic_rounding` go around this
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

    def zeros_of(shape: tuple[int, ...], dtype: Any, is_unsigned: bool) -> Blockwise:
        size = block(shape) if callable(block) else block
        check_positive_integer("eight_bit", "block", size)
        return blockwise_zeros(shape, dtype, unsigned=is_unsigned, block=size)

    return store_moments(
        inner, zeros_of, EightBitState, min_size=min_size, signed=signed, unsigned=unsigned
    )
