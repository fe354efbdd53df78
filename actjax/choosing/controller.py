"""GACT's controller: bits of each stored array, chosen again as training goes on."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from actjax.choosing.allocate import allocate_bits
from actjax.choosing.choice import BITS, Chooser, codable, coded_function, with_bits
from actjax.choosing.measure import BoundLoss, Sensitivity
from actjax.codecs import Codec, Quantized
from actjax.residuals.candidates import Candidate, Recompute, Settings
from actjax.residuals.checks import check_function

Level = Literal["L1", "L2", "CB1"]
_GAIN = 1.1
"""Bits are kept if others would not lower the variance by more than this factor."""


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
        run = coded_function(
            functools.partial(self.fun, **kwargs),
            dict(self.bits),
            self.codec,
            remat=_remat(self.level),
            offload=self.level == "L2",
            caller="Controller",
            key=code_key,
        )
        return run(*args)


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
            key, step_key = jax.random.split(key)
            controller.step(params, batch, key=step_key)
            value, grads = gradient(controller.stored, params, batch, step_key)

    Codes are rounded stochastically, as the paper has it, so that to first order the gradient is
    unbiased. Arrays that are small stay exact. Under a `lax.scan` all layers of an array have the
    same bits, since one program runs them.

    Attributes:
      arrays: the stored arrays that have bits, by label; empty before the first measurement.
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
        self._fun, self._has_aux, self._codec = fun, has_aux, codec
        self._level: Level = level
        self._argnums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        self._average, self._choices = average_bits, tuple(sorted(choices))
        self._chooser = Chooser(self._measure, self._allocate, every=every, gain=_GAIN)
        self._shapes: Any = None
        self._sensitivity: Sensitivity | None = None
        self.arrays: dict[str, Candidate] = {}
        self.steps = 0

    @property
    def stored(self) -> Stored:
        """The loss with the present bits. Before the first measurement all arrays are exact."""
        bits = tuple(sorted(self.bits.items()))
        return Stored(self._fun, bits, self._level, self._codec)

    @property
    def sensitivity(self) -> dict[str, float]:
        """The measured `c_l`, by label; empty before the first measurement."""
        return self._chooser.sensitivity

    @property
    def bits(self) -> dict[str, int]:
        """Bits of each array, by its label."""
        return dict(self._chooser.bits)

    @property
    def every(self) -> int:
        """Steps between measurements."""
        return self._chooser.every

    def step(self, *args: Any, key: jax.Array, **kwargs: Any) -> bool:
        """Counts a step, measures if it is due, and returns whether the bits changed.

        Args:
          *args: arguments of the loss in this step: arrays, outside of jit.
          key: randomness of the measurement.
          **kwargs: further arguments of the loss.
        """
        due = not self.sensitivity or self._chooser.is_due(self.steps)
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
        before = self.bits
        if not self._chooser.choose(key, args, kwargs):
            warnings.warn(
                "Controller: the gradient of this batch is not finite, so nothing was measured: the"
                " bits stay as they are.",
                stacklevel=2,
            )
        return self.bits != before

    def _measure(
        self, key: jax.Array, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, float]:
        """Returns the sensitivity of each array."""
        loss = BoundLoss(functools.partial(self._fun, **kwargs), args, self._argnums, self._has_aux)
        shapes = [(jnp.shape(x), jnp.result_type(x)) for x in loss.leaves]
        # A compiled measurement holds the values of keyword arguments.
        if self._sensitivity is None or self._shapes != shapes or kwargs:
            self._sensitivity, self._shapes = self._measurement(loss), shapes
        return self._sensitivity(key, loss.leaves)

    def _measurement(self, loss: BoundLoss) -> Sensitivity:
        """Returns the measurement for all arrays of a loss; it is compiled once."""
        remat = _remat(self._level)
        self.arrays = {c.label: c for c in codable(loss.candidates(remat))}
        if not self.arrays:
            raise ValueError(
                "Controller: the backward pass stores no array that a code could make smaller."
            )

        def gradient(codecs: Mapping[str, Codec], keys: Any, leaves: Any) -> Any:
            return loss.gradient(Settings(lambda c: codecs.get(c.label), remat=remat), keys)(leaves)

        # The same bits for all arrays: to first order the sensitivity does not depend on them.
        bits = max(n for n in self._choices if n <= self._average)
        return Sensitivity(gradient, dict.fromkeys(self.arrays, with_bits(self._codec, bits)))

    def _allocate(self, sensitivity: Mapping[str, float]) -> dict[str, int]:
        sizes = {label: c.size * c.layers for label, c in self.arrays.items()}
        return allocate_bits(sensitivity, sizes, self._average, self._choices)

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
        self._chooser.sensitivity = {name: float(c) for name, c in state["sensitivity"].items()}
        self._chooser.bits = {name: int(n) for name, n in state["bits"].items()}


def _remat(level: Level) -> Recompute | None:
    return Recompute(codes=True) if level == "CB1" else None
