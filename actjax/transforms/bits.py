"""Bits for each stored tensor: measured sensitivities, and allocation within a budget.

GACT (Liu et al., 2022): to first order the variance that compression adds to the gradient is a sum
over the stored tensors, `Σ_l c_l S(b_l)` with `S(b) = (2^b - 1)^-2` (Theorem 2), so `c_l`, the
sensitivity of the gradient to tensor l, is the only quantity to measure.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from actjax.codecs import Codec, Quantized
from actjax.kernels.packing import BITS

Gradient = Callable[..., Any]
"""From `{name: codec}`, `{name: key}` and further arguments to a gradient, a pytree of arrays."""


def error_of_bits(bits: int) -> float:
    """Returns `S(b) = (2^b - 1)^-2`, proportional to the squared error of uniform levels."""
    return (2.0**bits - 1) ** -2


def sensitivity(
    gradient: Gradient,
    codecs: Mapping[str, Quantized],
    key: jax.Array,
    *args: Any,
    samples: int = 4,
) -> dict[str, float]:
    """Returns `c_l` for each stored tensor: the variance it adds to the gradient, over `S(b_l)`.

    GACT's Algorithm 1: `½ ‖g_0 - g_1‖² / S(b_l)` for two gradients that differ only in the random
    rounding of tensor l. It takes `samples (L + 1)` gradients for L tensors and includes every
    effect of the error.

    Args:
      gradient: the gradient on a batch, a function of `{name: codec}`, `{name: key}` and `args`. It
        passes codecs and keys to the operators, or to `compress_residuals`, that store these
        tensors. It is jitted here.
      codecs: how each tensor is stored. The measurement uses uniform levels and stochastic
        rounding, which the theory assumes, instead of those of the codec.
      key: randomness of the estimate; consumed.
      *args: further arguments of `gradient`, such as parameters and a batch.
      samples: number of estimates to average.

    Raises:
      ValueError: no samples, or no codecs.
      TypeError: a codec that is not a `Quantized`.
    """
    if samples < 1 or not codecs:
        raise ValueError(
            f"`samples` must be at least 1 and `codecs` not empty, got {samples} and {codecs}."
        )
    for name, codec in codecs.items():
        if not isinstance(codec, Quantized):
            raise TypeError(f"`codecs` of sensitivity must be Quantized, got {codec!r} for {name}.")
    return Sensitivity(gradient, codecs)(key, *args, samples=samples)


class Sensitivity:
    """As `sensitivity`; it is compiled once for all calls."""

    def __init__(self, gradient: Gradient, codecs: Mapping[str, Quantized]) -> None:
        """As `sensitivity`."""
        random = {
            name: dataclasses.replace(codec, rounding="stochastic", levels="uniform")
            for name, codec in codecs.items()
        }
        self._run = _algorithm_1(gradient, random)
        self._errors = {name: error_of_bits(codec.bits) for name, codec in codecs.items()}

    def __call__(self, key: jax.Array, *args: Any, samples: int = 1) -> dict[str, float]:
        """As `sensitivity`."""
        totals = dict.fromkeys(self._errors, 0.0)
        for own in jax.random.split(key, samples):
            for name, variance in self._run(own, *args).items():
                totals[name] += float(variance) / self._errors[name] / samples
        return totals


def _algorithm_1(gradient: Gradient, codecs: dict[str, Quantized]) -> Callable[..., Any]:
    run = jax.jit(lambda keys, *args: gradient(codecs, keys, *args))

    def measure(key: jax.Array, *args: Any) -> dict[str, jax.Array]:
        first, second = (_keys(codecs, k) for k in jax.random.split(key))
        base = run(first, *args)
        # In sequence: at most two gradients exist at once.
        return {
            name: _distance(base, run({**first, name: second[name]}, *args)) / 2 for name in codecs
        }

    return measure


def _keys(codecs: Mapping[str, Codec], key: jax.Array) -> dict[str, jax.Array]:
    return dict(zip(codecs, jax.random.split(key, len(codecs)), strict=True))


def _distance(a: Any, b: Any) -> jax.Array:
    """Returns the squared distance of two gradients, in float32."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    wide = ((x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in pairs)
    return sum((jnp.sum((x - y) ** 2) for x, y in wide), jnp.zeros(()))


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
    found = best_allocations(sensitivity, sizes, steps, spare)
    return found.bits(int(np.argmin(found.variances)))


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
        found = {}
        for name, (before, step) in zip(reversed(self.names), reversed(self.history), strict=True):
            found[name] = self.steps[step[number]]
            number = before[number]
        return {name: found[name] for name in self.names}


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
        more = (used[:, None] + size * (np.array(steps) - steps[0])).ravel()
        sums = (total[:, None] + sensitivity[name] / unit * errors).ravel()
        chosen = _best_of_each_use(more, sums, spare)
        used, total = more[chosen], sums[chosen]
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
    # Of neighbours in bits the last, which has the least error.
    place = used[order] * (_MOST_ALLOCATIONS - 1) // used[order[-1]]
    last = np.append(place[1:] != place[:-1], True)
    last[0] = True
    return order[last]


def compression_variance(sensitivity: Mapping[str, float], bits: Mapping[str, int]) -> float:
    """Returns `Σ c_l S(b_l)`, the variance that compression adds to the gradient (Theorem 2).

    Args:
      sensitivity: `c_l`, by name.
      bits: bits of each tensor, by name.
    """
    return sum(c * error_of_bits(bits[name]) for name, c in sensitivity.items())


def sampling_variance(gradients: Sequence[Any]) -> float:
    """Returns the variance of the mean of gradients of independent batches.

    Args:
      gradients: two or more pytrees of arrays.

    Raises:
      ValueError: fewer than two gradients.
    """
    count = len(gradients)
    if count < 2:
        raise ValueError(f"`gradients` must be two or more, got {count}.")
    mean = jax.tree.map(lambda *g: sum(g) / count, *gradients)
    spread = sum(float(_distance(g, mean)) for g in gradients)
    return spread / (count * (count - 1))
