"""Optimizer states stored in 4 bits between steps.

Li et al., "Memory Efficient Optimizers with 4-bit States" (2023, arXiv 2309.01507): see
`actjax.formats.four_bit` for the two forms of a moment.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optax

from actjax.codecs.base import check_positive_integer
from actjax.formats.four_bit import GROUP, rank_one_zeros, signed_zeros
from actjax.optim.checks import check_inner
from actjax.optim.states.stored import FIRST_MOMENTS, SECOND_MOMENTS, Code, store_moments


class FourBitState(NamedTuple):
    """State of `four_bit`.

    Attributes:
      inner: state of the inner transform, with `SignedFourBit` in the place of its large first
        moments and `RankOneFourBit` in that of its large second moments.
    """

    inner: Any


GroupOf = Callable[[tuple[int, ...]], int]
"""From the shape of a moment to the number of values that share a scale."""


def four_bit(
    inner: optax.GradientTransformation,
    *,
    group: int | GroupOf = GROUP,
    min_size: int = 4096,
    signed: Sequence[str] = FIRST_MOMENTS,
    unsigned: Sequence[str] = SECOND_MOMENTS,
) -> optax.GradientTransformationExtraArgs:
    """Wraps a transform so that the large moments of matrices are stored in 4 bits between steps.

    It is used as `eight_bit`, whose documentation says which arrays are moments. Both moments are
    divided by the smaller of the largest magnitudes of their row and of their column. First moments
    get signed levels, with a scale for each group too. Second moments get the levels 1/16 to 1,
    without zero. Both are rounded stochastically: rounded to nearest, as published, moments that
    move slowly would stay where they are. Vectors stay as they are.

    Args:
      inner: any optax transform. `subspace` and `stochastic_rounding` go around this
        one.
      group: values of a first moment that share a scale, an even number, or a function from the
        shape of a moment to this number. A mesh can divide columns between groups only.
      min_size: arrays with fewer elements stay as they are.
      signed: names of the fields that hold moments with a sign.
      unsigned: names of the fields that hold moments without negative values.

    Raises:
      TypeError: `inner` is not a transform.
      ValueError: a group that is odd or below two, a size below one, or an `inner` that rounds
        weights.
    """
    check_inner("four_bit", "inner", inner)
    if not callable(group):
        _check_group(group)
    check_positive_integer("four_bit", "min_size", min_size)

    def zeros_of(shape: tuple[int, ...], dtype: Any, is_unsigned: bool) -> Code | None:
        if len(shape) < 2:
            return None
        size = group(shape) if callable(group) else group
        _check_group(size)
        make = rank_one_zeros if is_unsigned else signed_zeros
        return make(shape, dtype, size)

    return store_moments(
        inner, zeros_of, FourBitState, min_size=min_size, signed=signed, unsigned=unsigned
    )


def _check_group(group: Any) -> None:
    check_positive_integer("four_bit", "group", group, minimum=2)
    if group % 2:
        raise ValueError(f"`group` of four_bit must be even, as a byte holds two: got {group}.")
