"""What `actjax.compress` decides: for each array its bits, and what is computed again."""

import dataclasses
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from actjax.codecs import Codec, Offloaded, Quantized
from actjax.transforms.bits import best_allocations, error_of_bits
from actjax.transforms.candidates import LARGEST_OVER_SMALL, Candidate, Remat

KEEP = 0
"""Bits of an array that is stored exactly."""
BITS = (2, 3, 4, 5, 6, 8)
"""Bits that an array may have. One bit, the ends of a range, is worse than storing nothing."""
_KEPT_BITS = 32
"""What a number that is kept takes, where bits are allocated."""
MEASURED_BITS = 4
"""Bits at which the error of each array is measured. The error at other bits follows from it."""


@dataclasses.dataclass(frozen=True)
class Tried:
    """A way to run the backward pass, and what was measured of it.

    Attributes:
      name: "exact", "codes", "remat in part", "remat", "remat and codes".
      memory: bytes of the temporaries of the compiled gradient.
      error: relative error of the gradient; NaN if it was not measured.
      recomputed: matrix products that are computed again, as a share of those of the forward pass.
    """

    name: str
    memory: int
    error: float
    recomputed: float


@dataclasses.dataclass(frozen=True)
class Choice:
    """What `actjax.compress` chose.

    Attributes:
      name: the chosen way, one of `tried`.
      bits: by the label of each array that the rule decides on; `KEEP` where it is stored exactly.
      remat: whether segments of the program are computed again in the backward pass.
      codes_within: whether arrays that are computed again are stored as codes too.
      offload: whether codes are kept in the memory of the host.
      tried: what was measured of all ways that were tried.
      share: how much of what the function computes is computed again, if `remat`.
    """

    name: str
    bits: Mapping[str, int]
    remat: bool
    codes_within: bool
    offload: bool
    tried: tuple[Tried, ...]
    share: float = 1.0

    @property
    def chosen(self) -> Tried:
        """What was measured of the chosen way."""
        return next(one for one in self.tried if one.name == self.name)

    def rule(self, codec: Quantized) -> Callable[[Candidate], Codec | None]:
        """Returns the rule of `compress_residuals`.

        Args:
          codec: how arrays are stored. An array without bits is stored exactly.
        """
        return rule_of(self.bits, codec, self.offload)

    @property
    def remat_settings(self) -> Remat | None:
        """The same for `compress_residuals`."""
        return Remat(self.codes_within, self.share) if self.remat else None

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain data, for a checkpoint or JSON."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Choice":
        """Inverse of `to_dict`.

        Raises:
          ValueError: the data are not those of a choice.
        """
        names = {field.name for field in dataclasses.fields(Choice)}
        if set(data) != names:
            raise ValueError(f"a Choice has the entries {sorted(names)}, got {sorted(data)}.")
        tried = tuple(Tried(**one) for one in data["tried"])
        return Choice(**{**data, "bits": dict(data["bits"]), "tried": tried})


def rule_of(
    bits: Mapping[str, int], codec: Quantized, offload: bool = False
) -> Callable[[Candidate], Codec | None]:
    """Returns the rule that stores each array in bits by its label, or exactly if it has none."""

    def rule(what: Candidate) -> Codec | None:
        number = bits.get(what.label, KEEP)
        if number == KEEP:
            return None
        stored = with_bits(codec, number)
        return Offloaded(stored) if offload else stored

    return rule


class Labels:
    """A rule that takes note of the arrays it is asked about."""

    def __init__(self, rule: Callable[[Candidate], Codec | None], known: Collection[str]) -> None:
        """Takes a rule, and the labels that bits were chosen for."""
        self._rule, self._known = rule, set(known)
        self._seen: set[str] = set()

    def __call__(self, what: Candidate) -> Codec | None:
        """Returns what the rule says."""
        self._seen.add(what.label)
        return self._rule(what)

    def check(self, where: str) -> None:
        """Warns if bits were chosen for arrays that the function, now traced, does not have."""
        lost = self._known - self._seen
        if self._seen and lost:
            warnings.warn(
                f"{where}: {len(lost)} of the {len(self._known)} arrays that bits were chosen for"
                f" are not in this function, such as {min(lost)!r}. Labels name places in its code:"
                " the code, or the shapes of the arguments, differ from what was measured. Measure"
                " again.",
                stacklevel=3,
            )


def with_bits(codec: Quantized, bits: int) -> Quantized:
    """Returns a codec with other bits. Above 4 bits levels are uniform: no others are known."""
    return dataclasses.replace(codec, bits=bits, levels=codec.levels if bits <= 4 else "uniform")


def fewer_codes(bits: Mapping[str, int]) -> dict[str, int]:
    """Returns bits with a smaller error: one step more for each array."""
    steps = (*BITS, KEEP)
    return {
        name: steps[min(steps.index(number) + 1, len(steps) - 1)] for name, number in bits.items()
    }


def codable(found: Sequence[Candidate]) -> list[Candidate]:
    """Returns the arrays that are worth a code: no scalars, and none that is small."""
    largest = max((c.size * c.layers for c in found), default=0)
    return [c for c in found if c.shape and c.size * c.layers * LARGEST_OVER_SMALL >= largest]


def groups_of(found: Sequence[Candidate], most: int) -> list[list[Candidate]]:
    """Returns arrays that are measured together: each alone if there are at most `most`.

    Otherwise arrays that differ only in the numbers of their label, which are those of layers, are
    one group.
    """
    if len(found) <= most:
        return [[c] for c in found]
    groups: dict[Any, list[Candidate]] = {}
    for c in found:
        kind = re.sub(r"\d+", "*", c.scope), c.name, c.shape
        groups.setdefault(kind, []).append(c)
    return list(groups.values())


def fewest_bits(
    variances: Mapping[str, float], sizes: Mapping[str, int], bound: float
) -> dict[str, int]:
    """Returns bits for each array that store few bytes within a bound of the variance.

    The variance of array l is `variances[l] S(b) / S(4)`, and next to none if it is kept.

    Args:
      variances: squared error of the gradient by each array at `MEASURED_BITS`.
      sizes: numbers of elements.
      bound: the largest sum of variances.
    """
    at_one = {name: v / error_of_bits(MEASURED_BITS) for name, v in variances.items()}
    found = best_allocations(at_one, sizes, (*BITS, _KEPT_BITS))
    meets = found.variances * found.unit <= bound
    # Fewest bits come first. If nothing meets the bound, the last one has the least variance.
    bits = found.bits(int(meets.argmax()) if meets.any() else len(meets) - 1)
    return {name: KEEP if n == _KEPT_BITS else n for name, n in bits.items()}


def preferred(tried: Sequence[Tried], budget: float | None, error: float | None) -> Tried | None:
    """Returns the best of several ways; None if none is within the limits.

    With a budget, of the ways that fit: the one that computes least again, then the most exact.
    Without: of those within 5% of the least memory, likewise.

    Args:
      tried: the ways.
      budget: the most memory, in bytes; None for no limit.
      error: the largest error; None for no limit.
    """
    good = [t for t in tried if error is None or t.error <= error]
    if budget is not None:
        good = [t for t in good if t.memory <= budget]
    elif good:
        least = min(t.memory for t in good)
        good = [t for t in good if t.memory <= 1.05 * least]
    return min(good, key=lambda t: (t.recomputed, t.error), default=None)
