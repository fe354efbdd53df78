"""The choice of bits for stored arrays, and of what is computed again."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from actjax.choosing.allocate import compression_variance
from actjax.codecs import Codec, Offloaded, Quantized
from actjax.residuals.candidates import LARGEST_OVER_SMALL, Candidate, Recompute, Settings
from actjax.residuals.function import compressed_function

KEEP = 0
"""Bits of an array that is stored exactly."""
BITS = (2, 3, 4, 5, 6, 8)
"""Bits that an array may have. One bit, the ends of a range, is worse than storing nothing."""
_SHARE = 100
"""A choice is due once the steps since the last one cost so many times as much as its gradients."""


class Chooser:
    """Chooses bits of stored arrays by the sensitivity of a gradient to each of them (GACT).

    It measures sensitivities, allocates bits, and holds both by label. `compress` measures once,
    within an error; `Controller` and `train.run.adapt` measure again at an interval, within bits on
    average.

    Attributes:
      sensitivity: `c_l` by label, as last measured; empty before.
      bits: by label; empty before the first choice. It can be set, to the bits of a checkpoint.
    """

    def __init__(
        self,
        measure: Callable[..., Mapping[str, float]],
        allocate: Callable[[Mapping[str, float]], Mapping[str, int]],
        *,
        every: int | None = None,
        early: Collection[int] = (),
        gain: float | None = None,
    ) -> None:
        """Takes both parts of a choice, and says when to repeat it.

        Args:
          measure: from the arguments of `choose` to sensitivities.
          allocate: from sensitivities to bits.
          every: steps between two choices. By default 100 times the number of gradients that a
            measurement takes, so that it takes less than 1% of the time.
          early: further numbers of steps after which a choice is due.
          gain: other bits are chosen only if they lower the variance by more than this factor; None
            for any other bits.
        """
        self._measure, self._allocate = measure, allocate
        self._every, self._early, self._gain = every, early, gain
        self.sensitivity: dict[str, float] = {}
        self.bits: dict[str, int] = {}

    @property
    def every(self) -> int:
        """Steps between two choices."""
        # Before the first measurement the number of arrays is not known.
        return self._every or _SHARE * (len(self.bits) + 1)

    def is_due(self, step: int) -> bool:
        """Returns whether to choose after `step` steps."""
        return step in self._early or step % self.every == 0

    def choose(self, *args: Any, **kwargs: Any) -> bool:
        """Measures and allocates; returns whether all sensitivities are finite.

        If one is not, nothing changes.

        Args:
          *args: arguments of the measurement.
          **kwargs: keyword arguments of the measurement.
        """
        measured = self._measure(*args, **kwargs)
        if not all(map(math.isfinite, measured.values())):
            return False
        self.sensitivity = dict(measured)
        bits = dict(self._allocate(measured))
        if not self._keeps(bits):
            self.bits = bits
        return True

    def _keeps(self, bits: Mapping[str, int]) -> bool:
        """Returns whether other bits gain too little to replace the present ones."""
        if self._gain is None or self.bits.keys() != bits.keys():
            return False
        present, other = (compression_variance(self.sensitivity, b) for b in (self.bits, bits))
        return present <= self._gain * other


@dataclasses.dataclass(frozen=True)
class Tried:
    """A way to run the backward pass, and its measurements.

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
    """The way that `actjax.compress` chose, and the bits of its codes.

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
        """The measurements of the chosen way."""
        return next(tried for tried in self.tried if tried.name == self.name)

    @property
    def remat_settings(self) -> Recompute | None:
        """The segments that are computed again; None for none."""
        return Recompute(self.codes_within, self.share) if self.remat else None

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
        tried = tuple(Tried(**entry) for entry in data["tried"])
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


def coded_function(
    fun: Callable[..., Any],
    bits: Mapping[str, int],
    codec: Quantized,
    *,
    remat: Recompute | None,
    offload: bool,
    caller: str,
    key: Any = None,
) -> Callable[..., Any]:
    """Returns a function whose backward pass reads codes.

    Args:
      fun: the function.
      bits: by label. An array without bits is stored exactly.
      codec: how arrays are stored.
      remat: what is computed again.
      offload: whether codes are kept in the memory of the host.
      caller: name for the warning.
      key: randomness of the codes; consumed.

    Raises:
      ValueError: when called, if bits were chosen for arrays that the function does not have, and
        it has others. (It may have fewer, where fewer arguments are differentiated.)
    """
    rule, seen = rule_of(bits, codec, offload), dict[str, Candidate]()

    def noting_rule(what: Candidate) -> Codec | None:
        seen[what.label] = what
        return rule(what)

    def coded(*args: Any, **kwargs: Any) -> Any:
        seen.clear()
        settings = Settings(noting_rule, remat=remat)
        output = compressed_function(fun, settings, key=key)(*args, **kwargs)
        lost = bits.keys() - seen.keys()
        others = {c.label for c in codable(list(seen.values()))} - bits.keys()
        if lost and others:
            raise ValueError(
                f"{caller}: {len(lost)} of the {len(bits)} arrays that bits were chosen for are not"
                f" in this function, such as {min(lost)!r}, and it has others, such as"
                f" {min(others)!r}. Labels name places in its code: it is not the one that was"
                " measured. Measure again."
            )
        return output

    return coded


def with_bits(codec: Quantized, bits: int) -> Quantized:
    """Returns a codec with other bits. Above 4 bits levels are uniform: no others are known."""
    return dataclasses.replace(codec, bits=bits, levels=codec.levels if bits <= 4 else "uniform")


def codable(arrays: Sequence[Candidate]) -> list[Candidate]:
    """Returns the arrays that are worth a code: no scalars, and none that is small."""
    largest = max((c.size * c.layers for c in arrays), default=0)
    return [c for c in arrays if c.shape and c.size * c.layers * LARGEST_OVER_SMALL >= largest]


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
