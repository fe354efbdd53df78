"""Bits for each stored array, within a budget of bits or within an error.

GACT (Liu et al., 2022): to first order the variance that compression adds to the gradient is a sum
over the stored tensors, `Σ_l c_l S(b_l)` with `S(b) = (2^b - 1)^-2` (Theorem 2), so `c_l`, the
sensitivity of the gradient to tensor l, is the only quantity to measure
(`actjax.choosing.measure`).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from actjax.formats.packing import BITS


def error_of_bits(bits: int) -> float:
    """Returns `S(b) = (2^b - 1)^-2`, proportional to the squared error of uniform levels."""
    return (2.0**bits - 1) ** -2


def compression_variance(sensitivity: Mapping[str, float], bits: Mapping[str, int]) -> float:
    """Returns `Σ c_l S(b_l)`, the variance that compression adds to the gradient (Theorem 2).

    Args:
      sensitivity: `c_l`, by name.
      bits: bits of each tensor, by name.
    """
    return sum(c * error_of_bits(bits[name]) for name, c in sensitivity.items())


def allocate_bits(
    sensitivity: Mapping[str, float],
    sizes: Mapping[str, int],
    average_bits: float,
    choices: Sequence[int] = BITS,
) -> dict[str, int]:
    """Returns bits for each tensor that make `Σ c_l S(b_l)` small within a budget.

    Tensor by tensor, of all allocations so far those are followed that no other one beats in both
    bits and error; if there are more than 4,096, one for each of 4,096 ranges of bits. The result
    is the best one for a few tensors, and close to it for many. (GACT and ActNN, Chen et al., 2021,
    are greedy: where one step of a large tensor is a good part of the budget, that was up to 1.6
    times the best sum.)

    Args:
      sensitivity: `c_l`, by name.
      sizes: number of elements, by name.
      average_bits: the budget in bits per element, without scales.
      choices: the allowed numbers of bits. 16 or 32 stand for a tensor that is kept exactly in its
        dtype: their `S(b)` is next to nothing.

    Raises:
      ValueError: names that differ, or a budget below the fewest bits.
    """
    steps = sorted(choices)
    if sensitivity.keys() != sizes.keys():
        raise ValueError(
            "`sensitivity` and `sizes` must have the same names, got"
            f" {sorted(sensitivity)} and {sorted(sizes)}."
        )
    if average_bits < steps[0]:
        raise ValueError(
            f"`average_bits` must be at least {steps[0]}, the least of {steps}, got {average_bits}."
        )
    spare = (average_bits - steps[0]) * sum(sizes.values())
    best = best_allocations(sensitivity, sizes, steps, spare)
    return best.bits(int(np.argmin(best.variances)))


def fewest_bits(
    sensitivity: Mapping[str, float],
    sizes: Mapping[str, int],
    bound: float,
    choices: Sequence[int] = BITS,
) -> dict[str, int]:
    """Returns bits for each tensor that take few bits in all and keep `Σ c_l S(b_l)` in a bound.

    If nothing meets the bound, the result is the allocation with the least sum.

    Args:
      sensitivity: `c_l`, by name.
      sizes: number of elements, by name.
      bound: the largest `Σ c_l S(b_l)`.
      choices: the allowed numbers of bits, as for `allocate_bits`.
    """
    best = best_allocations(sensitivity, sizes, sorted(choices))
    meets = best.variances * best.unit <= bound
    # Fewest bits come first, and the last one has the least variance.
    return best.bits(int(meets.argmax()) if meets.any() else len(meets) - 1)


@dataclasses.dataclass(frozen=True)
class Allocations:
    """The allocations that no other one beats in both bits and variance, fewest bits first.

    Attributes:
      variances: `Σ c_l S(b_l)`, over the largest `c_l`.
      unit: the largest `c_l`, or 1.
      names: of the tensors.
      steps: numbers of bits.
      history: for each tensor, and each allocation up to it, the one before and its step.
    """

    variances: np.ndarray
    unit: float
    names: tuple[str, ...]
    steps: tuple[int, ...]
    history: list[tuple[np.ndarray, np.ndarray]]

    def bits(self, number: int) -> dict[str, int]:
        """Returns the bits of each tensor in one of the allocations."""
        bits = {}
        for name, (before, step) in zip(reversed(self.names), reversed(self.history), strict=True):
            bits[name] = self.steps[step[number]]
            number = before[number]
        return {name: bits[name] for name in self.names}


def best_allocations(
    sensitivity: Mapping[str, float],
    sizes: Mapping[str, int],
    steps: Sequence[int],
    spare: float = math.inf,
) -> Allocations:
    """Returns the best allocations of bits; see `allocate_bits`.

    Args:
      sensitivity: `c_l`, by name.
      sizes: number of elements, by name.
      steps: the allowed numbers of bits, ascending.
      spare: the most bits above the fewest.
    """
    # Relative to the largest, so that no variance underflows.
    largest = max(sensitivity.values(), default=0.0)
    unit = largest if 0 < largest < math.inf else 1.0
    errors = np.array([error_of_bits(bits) for bits in steps])
    used, total = np.zeros(1), np.zeros(1)
    history = []
    for name, size in sizes.items():
        spent = (used[:, None] + size * (np.array(steps) - steps[0])).ravel()
        sums = (total[:, None] + sensitivity[name] / unit * errors).ravel()
        chosen = _best_of_each_use(spent, sums, spare)
        used, total = spent[chosen], sums[chosen]
        history.append(np.divmod(chosen, len(steps)))
    return Allocations(total, unit, tuple(sizes), tuple(steps), history)


_MOST_ALLOCATIONS = 4096
"""How many allocations are followed at once."""


def _best_of_each_use(used: np.ndarray, total: np.ndarray, spare: float) -> np.ndarray:
    """Returns the positions of allocations that no other one beats in both bits and error.

    Args:
      used: bits above the fewest.
      total: errors.
      spare: the most bits.
    """
    order = np.lexsort((total, used))
    order = order[used[order] <= spare * (1 + 1e-12)]
    least = np.minimum.accumulate(total[order])
    order = order[np.concatenate(([True], least[1:] < least[:-1]))]
    if len(order) <= _MOST_ALLOCATIONS:
        return order
    # The last of neighbors in bits has the least error.
    place = used[order] * (_MOST_ALLOCATIONS - 1) // used[order[-1]]
    last = np.append(place[1:] != place[:-1], True)
    last[0] = True
    return order[last]
