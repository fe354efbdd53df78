"""GACT's controller: bits of each stored array, chosen again as training goes on."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from actjax.codecs import Codec, Offloaded, Quantized
from actjax.transforms.bits import Sensitivity, allocate_bits, compression_variance
from actjax.transforms.candidates import Candidate, Remat, Settings
from actjax.transforms.checks import check_function
from actjax.transforms.choice import BITS, Labels, codable
from actjax.transforms.measuring import Loss
from actjax.transforms.residuals import compressed_function

Level = Literal["L1", "L2", "CB1"]
_GAIN = 1.1
"""Bits are kept if others would not lower the variance by more than this factor."""
_SHARE = 100
"""A measurement is due once the steps since the last one cost so many times as much."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A loss with a way to store what its backward pass needs; changes only if the bits do.

    It is hashable, so it can be a static argument of a jitted training step, which is then compiled
    again when the bits change.

    Attributes:
      fun: the loss.
      bits: labels of arrays and their bits. Arrays without bits are stored exactly.
      level: as for `Controller`.
      codec: as for `Controller`.
    """

    fun: Callable[..., Any]
    bits: tuple[tuple[str, int], ...]
    level: Level
    codec: Quantized

    def __call__(self, *args: Any, code_key: jax.Array, **kwargs: Any) -> Any:
        """Returns what the loss returns.

        Args:
          *args: arguments of the loss.
          code_key: randomness of the codes; consumed. Another one in each step.
          **kwargs: further arguments of the loss.
        """
        codecs = {label: _codec(self.codec, bits, self.level) for label, bits in self.bits}
        rule = Labels(lambda c: codecs.get(c.label), codecs)
        settings = Settings(rule, remat=_remat(self.level))
        fun = functools.partial(self.fun, **kwargs)
        output = compressed_function(fun, settings, key=code_key)(*args)
        rule.check("Controller")
        return output


class Controller:
    """Stores what the backward pass of a loss needs in few bits, more of them where it matters.

    GACT (Liu et al., 2022), Algorithm 1 and section 4.2: the sensitivity of the gradient to each
    stored array is measured on a batch, as the distance of two gradients that differ in the random
    numbers of its code only; `actjax.allocate_bits` then makes the variance of the gradient small
    for so many bits on average. Measured again every `every` steps.

        controller = actjax.Controller(loss, average_bits=4)

        @functools.partial(jax.jit, static_argnums=0)
        def gradient(stored, params, batch, key):
            return jax.value_and_grad(functools.partial(stored, code_key=key))(params, batch)

        for batch in batches:
            key, own = jax.random.split(key)
            controller.step(params, batch, key=own)
            value, grads = gradient(controller.stored, params, batch, own)

    Codes are rounded stochastically, as the paper has it, so that to first order the gradient is
    unbiased. Arrays that are small stay exact. Under a `lax.scan` all layers of an array have the
    same bits, since one program runs them.

    Attributes:
      stored: the loss with the present bits. Before the first measurement all arrays have the
        highest choice that `average_bits` pays for.
      arrays: the stored arrays that have bits, by label; empty before the first measurement.
      sensitivity: the measured `c_l`, by label; empty before the first measurement.
      steps: calls of `step` so far.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        average_bits: float = 4.0,
        *,
        level: Level = "L1",
        every: int | None = None,
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        codec: Quantized = Quantized(4, rounding="stochastic"),
        choices: Sequence[int] = BITS,
    ) -> None:
        """Takes a loss.

        Args:
          fun: a loss, as for `actjax.compress`.
          average_bits: bits of a number on average, without scales.
          level: GACT's optimization level (its Table 1): "L1", codes; "L2", codes that are kept in
            the memory of the host; "CB1", segments of the program are computed again in the
            backward pass, and what they compute is stored as codes, too. (GACT's CB2 is CB1 with
            another attention: use `actjax.attention` in the model, and "CB1".)
          every: steps between measurements. By default 100 times the number of gradients that a
            measurement takes, so that it takes less than 1% of the time.
          argnums: arguments whose gradient is measured.
          has_aux: whether `fun` returns auxiliary data.
          codec: how arrays are stored; its bits are chosen. With stochastic rounding.
          choices: the allowed numbers of bits.

        Raises:
          TypeError: an argument has the wrong type.
          ValueError: an argument out of range.
        """
        check_function(fun, "Controller")
        if level not in get_args(Level):
            hint = (
                " For CB2 use actjax.attention in the model, and 'CB1'." if level == "CB2" else ""
            )
            raise ValueError(f"`level` must be one of {get_args(Level)}, got {level!r}.{hint}")
        if not isinstance(codec, Quantized) or codec.rounding != "stochastic":
            raise ValueError(
                "`codec` of Controller must be an actjax.Quantized with rounding='stochastic', got"
                f" {codec!r}."
            )
        if every is not None and (isinstance(every, bool) or every < 1):
            raise ValueError(f"`every` must be a number of steps, at least 1, got {every!r}.")
        if not min(choices) <= average_bits <= max(choices):
            raise ValueError(
                f"`average_bits` must be between {min(choices)} and {max(choices)}, the choices,"
                f" got {average_bits!r}."
            )
        self._fun, self._every, self._has_aux = fun, every, has_aux
        self._argnums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        self._average, self._choices = average_bits, tuple(sorted(choices))
        self.arrays: dict[str, Candidate] = {}
        self._shapes: Any = None
        self._compiled: tuple[Any, Sensitivity] | None = None
        self.stored = Stored(fun, (), level, codec)
        self.sensitivity: dict[str, float] = {}
        self.steps = 0

    @property
    def bits(self) -> dict[str, int]:
        """Bits of each array, by its label."""
        return dict(self.stored.bits)

    @property
    def every(self) -> int:
        """Steps between measurements."""
        if self._every is not None:
            return self._every
        # Before the first measurement the number of arrays is not known.
        return _SHARE * (len(self.bits) + 1)

    def step(self, *args: Any, key: jax.Array, **kwargs: Any) -> bool:
        """Counts a step, measures if it is due, and returns whether the bits changed.

        Args:
          *args: arguments of the loss in this step: arrays, outside of jit.
          key: randomness of the measurement.
          **kwargs: further arguments of the loss.
        """
        due = not self.sensitivity or self.steps % self.every == 0
        self.steps += 1
        return self.measure(*args, key=key, **kwargs) if due else False

    def measure(self, *args: Any, key: jax.Array, **kwargs: Any) -> bool:
        """Measures sensitivities, allocates bits, and returns whether the bits changed.

        Takes one gradient for each array and one more, at the highest of the choices that
        `average_bits` pays for; two gradients exist at once. It is compiled once for arguments of
        the same shapes. Where the gradient is not finite the bits stay, with a warning.

        Args:
          *args: arguments of the loss.
          key: randomness; consumed.
          **kwargs: further arguments of the loss.
        """
        stored = self.stored
        loss = Loss(functools.partial(self._fun, **kwargs), args, self._argnums, self._has_aux)
        shapes = [(jnp.shape(x), jnp.result_type(x)) for x in loss.leaves]
        if self._shapes != shapes:
            found = codable(loss.candidates(_remat(stored.level)))
            self.arrays, self._shapes = {c.label: c for c in found}, shapes
        if not self.arrays:
            raise ValueError(
                "Controller: the backward pass stores no array that a code could make smaller."
            )
        # The same bits for all, whatever they have now: it is compiled once. To first order the
        # sensitivity does not depend on them.
        bits = dict.fromkeys(self.arrays, max(n for n in self._choices if n <= self._average))
        if self._compiled is None or self._compiled[0] != (bits, shapes):
            self._compiled = (bits, shapes), self._measurement(loss, bits)
        found = self._compiled[1](key, loss.leaves)
        if not all(map(math.isfinite, found.values())):
            warnings.warn(
                "Controller: the gradient of this batch is not finite, so nothing was measured: the"
                " bits stay as they are.",
                stacklevel=2,
            )
            return False
        self.sensitivity = found
        self._allocate()
        return self.stored != stored

    def _measurement(self, loss: Loss, bits: Mapping[str, int]) -> Sensitivity:
        """Returns a measurement at the given bits; it is compiled once for equal bits."""
        stored = self.stored
        codecs = {label: dataclasses.replace(stored.codec, bits=n) for label, n in bits.items()}

        def gradient(codecs: Mapping[str, Codec], keys: Any, leaves: Any) -> Any:
            settings = Settings(lambda c: codecs.get(c.label), remat=_remat(stored.level))
            return loss.gradient(settings, keys)(leaves)

        return Sensitivity(gradient, codecs)

    def _allocate(self) -> None:
        sizes = {label: c.size * c.layers for label, c in self.arrays.items()}
        bits = allocate_bits(self.sensitivity, sizes, self._average, self._choices)
        # Other bits compile the training step again: only for a gain above the noise.
        variance = functools.partial(compression_variance, self.sensitivity)
        if self.bits.keys() == bits.keys() and variance(self.bits) <= _GAIN * variance(bits):
            return
        self.stored = dataclasses.replace(self.stored, bits=tuple(sorted(bits.items())))

    def state(self) -> dict[str, Any]:
        """Returns steps, bits and sensitivities as plain data, for a checkpoint."""
        return {
            "steps": self.steps,
            "bits": self.bits,
            "sensitivity": dict(self.sensitivity),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state` returned: the same bits, and the next measurement when due.

        Raises:
          ValueError: the data are not those of a state.
        """
        if set(state) != {"steps", "bits", "sensitivity"}:
            raise ValueError(
                "`state` of Controller must have 'steps', 'bits' and 'sensitivity', got"
                f" {sorted(state)}."
            )
        self.steps = int(state["steps"])
        self.sensitivity = {name: float(c) for name, c in state["sensitivity"].items()}
        bits = {name: int(n) for name, n in state["bits"].items()}
        self.stored = dataclasses.replace(self.stored, bits=tuple(sorted(bits.items())))


def _remat(level: Level) -> Remat | None:
    return Remat(codes=True) if level == "CB1" else None


def _codec(codec: Quantized, bits: int, level: Level) -> Codec:
    stored = dataclasses.replace(codec, bits=bits)
    return Offloaded(stored) if level == "L2" else stored
