"""The ways to run a backward pass: what each takes, and how wrong its gradient is."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from actjax.choosing.allocate import error_of_bits, fewest_bits
from actjax.choosing.choice import (
    BITS,
    KEEP,
    Choice,
    Chooser,
    Tried,
    codable,
    rule_of,
    with_bits,
)
from actjax.choosing.measure import BoundLoss, worst_error
from actjax.codecs import Codec, Quantized
from actjax.codecs.levels import AnyLevels, Rounded
from actjax.residuals.candidates import Candidate, Recompute, Settings
from actjax.residuals.graph.products import product_flops
from actjax.residuals.residual_codecs import fitted

MEASURED_BITS = 4
"""Bits at which the error of each array is measured. The error at other bits follows from it."""
_MOST_MEASURED = 14
"""With more arrays than these, arrays of a kind are measured together, and the smallest kinds."""
_PARTS = 8
"""Parts of a function that may be computed again, each as well as all before it."""
_ROUNDS = 4
"""How often bits are chosen anew because the error of all together was far from the bound."""
_CLOSE = 0.8
"""Share of the bound at which an error is close enough to it."""
_TOP = 255.0
_KEPT_BITS = 32
"""Stands for an array that is kept, where bits are allocated."""
_SMALLER_HEAP = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
"""XLA's default schedule for CPUs runs what it can at once, and holds arrays for that, whatever the
program says. The other one tells what a program needs."""


ErrorAt = Callable[[Mapping[str, float]], float]
"""From the highest levels of arrays, by label, to the error of the gradient."""
Memory = Callable[..., int]
"""From a function and its arguments to the bytes of its temporaries."""


@dataclasses.dataclass(frozen=True)
class _Program:
    """A compiled gradient.

    Attributes:
      run: the compiled function.
      memory: bytes of its temporaries.
      products: operations of its matrix products.
    """

    run: Any
    memory: int
    products: float


class Alternatives:
    """Compiles and runs the gradient of a loss on one batch, in each way."""

    def __init__(
        self,
        loss: BoundLoss,
        codec: Quantized,
        memory: Memory | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Takes a loss with its arguments.

        Args:
          loss: the loss.
          codec: how arrays are stored; its bits are chosen.
          memory: tells what a gradient takes; None for what the compiler says here.
          say: called with what is done, before it is.
        """
        self._say = say
        self.gradient, self._leaves, self._codec = loss.gradient, loss.leaves, codec
        self._compile = functools.partial(_compiled, memory_of=memory)
        self._candidates = functools.cache(loss.candidates)
        self._forward_products = loss.products()
        self._exact: list[jax.Array] = []

    def choices(
        self, error: float, budget: int | None, remat: bool, offload: bool
    ) -> Iterator[Choice]:
        """Yields choices with what was measured of them, those first that compute least again.

        Args:
          error: the largest relative error of the gradient.
          budget: of the device's memory, in bytes; only for which of the ways are tried.
          remat: whether segments may be computed again.
          offload: whether codes may be kept on the host.
        """
        self._say("compiles the exact gradient")
        exact = self._compile(self.gradient(None), self._leaves)
        tried = Tried("exact", exact.memory, 0.0, 0.0)
        yield Choice("exact", {}, False, False, False, (tried,))
        self._exact_products = exact.products
        settings = Settings(_keep, remat=Recompute())
        if remat:
            self._say("compiles it with segments that are computed again")
        again = self._compile(self.gradient(settings), self._leaves) if remat else exact
        # The way that takes less memory computes the gradient that the others are compared with.
        self._exact = min((exact, again), key=lambda p: p.memory).run(self._leaves)
        if not _are_finite(self._exact):
            raise ValueError(
                "compress: the exact gradient of the measured batch is not finite, so no error can"
                " be measured against it: measure on a batch without nan and inf, after steps whose"
                " loss is finite."
            )
        yield self._with_codes("codes", None, error, False)
        if remat:
            tried = Tried("remat", again.memory, 0.0, self._recomputed(again))
            if budget is not None and again.memory <= budget:
                yield from self._in_part(budget, again.products)
            yield Choice("remat", {}, True, False, False, (tried,))
            yield self._with_codes("remat and codes", Recompute(codes=True), error, False)
        if offload and budget is not None:
            yield self._with_codes("codes on the host", None, error, True)
            if remat:
                yield self._with_codes("remat and codes on the host", Recompute(True), error, True)

    def untouched(self) -> float:
        """Returns the share of the parameters in arrays whose gradient is zero on the batch."""
        pairs = zip(self._exact, _are_touched(self._exact), strict=True)
        zero = sum(g.size for g, is_touched in pairs if not is_touched)
        return zero / sum(g.size for g in self._exact) if zero else 0.0

    def _in_part(self, budget: int, most: float) -> Iterator[Choice]:
        """Yields the way that computes least again within a budget, if it is less than `most`."""
        best: tuple[float, _Program] | None = None
        low, high = 0, _PARTS
        while high - low > 1:
            middle = (low + high) // 2
            settings = Settings(_keep, remat=Recompute(share=middle / _PARTS))
            program = self._compile(self.gradient(settings), self._leaves)
            if program.memory > budget:
                low = middle
                continue
            high = middle
            if program.products < most:
                best = middle / _PARTS, program
        if best is not None:
            share, program = best
            tried = Tried("remat in part", program.memory, 0.0, self._recomputed(program))
            yield Choice(tried.name, {}, True, False, False, (tried,), share)

    def arrays_of(self, choice: Choice) -> tuple[tuple[Candidate, int], ...]:
        """Returns the arrays that a choice stores, with the bytes that each takes in a layer."""
        result = []
        for what in self._candidates(choice.remat_settings):
            bits, nbytes = choice.bits.get(what.label, KEEP), what.nbytes
            if bits != KEEP:
                codec = with_bits(self._codec, bits)
                if fitted(codec, what.shape, what.dtype) is not None:
                    nbytes = codec.stored_bytes(codec.grouped_shape(what.shape), what.dtype)
            result.append((what, nbytes))
        return tuple(result)

    def _with_codes(
        self, name: str, remat: Recompute | None, error: float, offload: bool
    ) -> Choice:
        """Chooses bits for one way, and measures it."""
        bits = self._choose(codable(self._candidates(remat)), remat, error)
        while True:
            settings = Settings(rule_of(bits, self._codec, offload), remat=remat)
            self._say(f"compiles the chosen {name}")
            program = self._compile(self.gradient(settings), self._leaves)
            got = self._error(program.run(self._leaves))
            # The bits were chosen with codes of 8 bits in place of what is kept, and with uniform
            # levels, so the error may still be above the bound. Each round stores more exactly.
            if got <= error or not any(bits.values()):
                break
            bits = fewer_codes(bits)
        tried = Tried(name, program.memory, got, self._recomputed(program))
        return Choice(name, bits, remat is not None, remat is not None, offload, (tried,))

    def _choose(
        self, arrays: Sequence[Candidate], remat: Recompute | None, error: float
    ) -> Mapping[str, int]:
        """Returns bits for arrays, by the error of the gradient for each of them."""
        if not arrays:
            return {}
        groups = groups_of(arrays, _MOST_MEASURED)
        error_at = self._error_at_levels(groups, remat, AnyLevels)
        base, ruined = error_at({}), {}
        if not math.isfinite(base):
            ruined, groups = self._ruined(groups, remat)
            error_at = self._error_at_levels(groups, remat, AnyLevels)
            base = error_at({})
        chooser = Chooser(
            lambda: _sensitivities(groups, base, error_at),
            lambda sensitivity: _within(error, sensitivity, groups, error_at),
        )
        if groups:
            chooser.choose()
        return {**ruined, **chooser.bits}

    def _ruined(
        self, groups: Sequence[Sequence[Candidate]], remat: Recompute | None
    ) -> tuple[dict[str, int], list[Sequence[Candidate]]]:
        """Returns the arrays whose codes make the gradient NaN, as kept, and the other groups."""
        error_at = self._error_at_levels(groups, remat, Rounded)
        kept, others = {}, []
        exactly = {c.label: np.inf for group in groups for c in group}
        for group in groups:
            if math.isfinite(error_at(exactly | {c.label: _TOP for c in group})):
                others.append(group)
            else:
                kept |= dict.fromkeys((c.label for c in group), KEEP)
        return kept, others

    def _error_at_levels(
        self,
        groups: Sequence[Sequence[Candidate]],
        remat: Recompute | None,
        kind: Callable[[Any, Quantized], Codec],
    ) -> ErrorAt:
        """Returns a function from highest levels, by label, to the error of the gradient.

        Args:
          groups: the arrays that have codes; by default of 8 bits.
          remat: what is computed again.
          kind: the codec, from a level and the settings of the code.
        """
        number = {c.label: i for i, c in enumerate(itertools.chain.from_iterable(groups))}

        def gradient(tops: jax.Array, leaves: Any) -> list[jax.Array]:
            def rule(what: Candidate) -> Codec | None:
                i = number.get(what.label)
                return None if i is None else kind(tops[i], self._codec)

            return self.gradient(Settings(rule, remat=remat))(leaves)

        self._say(f"compiles codes of any bits, and measures {len(groups)} kinds of arrays")
        run = _compiled(gradient, np.zeros(len(number), np.float32), self._leaves).run

        def error_at(tops: Mapping[str, float]) -> float:
            levels = np.asarray([tops.get(label, _TOP) for label in number], np.float32)
            return self._error(run(levels, self._leaves))

        return error_at

    def _error(self, gradient: Sequence[jax.Array]) -> float:
        return float(worst_error(gradient, self._exact))

    def _recomputed(self, program: _Program) -> float:
        """Returns the products that are computed again, as a share of the forward pass."""
        again = max(0.0, program.products - self._exact_products)
        return round(again / max(self._forward_products, 1.0), 3)


def _sensitivities(
    groups: Sequence[Sequence[Candidate]], base: float, error_at: ErrorAt
) -> dict[str, float]:
    """Returns the squared error of the gradient by each array, over `S(b)`.

    It is measured with one group in `MEASURED_BITS` bits and all others in 8, and divided among the
    arrays of the group by their size.

    Args:
      groups: the arrays.
      base: the error with all groups in 8 bits.
      error_at: from highest levels to the error.
    """
    sensitivity = {}
    for group in groups:
        error = error_at(dict.fromkeys((c.label for c in group), 2.0**MEASURED_BITS - 1))
        # Rounding leaves more than zero of the difference of nearly equal numbers.
        square = max(error**2 - base**2, 1e-6 * base**2, 1e-30) if math.isfinite(error) else 1.0
        total = sum(c.size * c.layers for c in group)
        for c in group:
            share = c.size * c.layers / total
            sensitivity[c.label] = square * share / error_of_bits(MEASURED_BITS)
    return sensitivity


def _within(
    error: float,
    sensitivity: Mapping[str, float],
    groups: Sequence[Sequence[Candidate]],
    error_at: ErrorAt,
) -> dict[str, int]:
    """Returns few bits whose errors together stay within `error`, as measured."""
    sizes = {c.label: c.size * c.layers for group in groups for c in group}
    bits: dict[str, int] = {}
    within: dict[str, int] = {}
    scale = 1.0
    for _ in range(_ROUNDS):
        scaled = {name: c * scale for name, c in sensitivity.items()}
        chosen = fewest_bits(scaled, sizes, error**2, (*BITS, _KEPT_BITS))
        before, bits = bits, {name: KEEP if n == _KEPT_BITS else n for name, n in chosen.items()}
        if bits == before:
            break
        measured = error_at({name: 2.0**n - 1 for name, n in bits.items() if n != KEEP})
        if measured <= error:
            # Errors that partly cancel leave room for fewer bits.
            within = bits
            if measured > _CLOSE * error:
                break
        elif within or not math.isfinite(measured):
            break
        scale *= max((measured / error) ** 2 * 1.05, 1e-2)
    return within or bits


def fewer_codes(bits: Mapping[str, int]) -> dict[str, int]:
    """Returns bits with a smaller error: one step more for each array."""
    steps = (*BITS, KEEP)
    return {
        name: steps[min(steps.index(number) + 1, len(steps) - 1)] for name, number in bits.items()
    }


def groups_of(arrays: Sequence[Candidate], most: int) -> list[list[Candidate]]:
    """Returns arrays that are measured together: each alone if there are at most `most`.

    Otherwise arrays that differ only in the numbers of their label, which are those of layers, are
    one group; and so are the smallest kinds, if there are more than `most`.
    """
    if len(arrays) <= most:
        return [[c] for c in arrays]
    kinds: dict[Any, list[Candidate]] = {}
    for c in arrays:
        kind = re.sub(r"\d+", "*", c.scope), c.name, c.primitive, c.shape
        kinds.setdefault(kind, []).append(c)
    groups = sorted(kinds.values(), key=lambda g: -sum(c.size * c.layers for c in g))
    if len(groups) <= most:
        return groups
    return [*groups[: most - 1], list(itertools.chain.from_iterable(groups[most - 1 :]))]


@jax.jit
def _are_finite(gradient: Sequence[jax.Array]) -> jax.Array:
    return jnp.all(jnp.stack([jnp.isfinite(g).all() for g in gradient]))


@jax.jit
def _are_touched(gradient: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns for each array whether it has a number that is not zero."""
    return [jnp.any(g) for g in gradient]


def _keep(_: Candidate) -> None:
    """A rule that keeps everything."""


def _compiled(fun: Callable[..., Any], *args: Any, memory_of: Memory | None = None) -> _Program:
    options: Any = _SMALLER_HEAP if jax.default_backend() == "cpu" else None
    with jax.disable_jit(False):
        traced = jax.jit(fun).trace(*args)
        compiled = traced.lower().compile(options)
    if memory_of is None:
        analysis: Any = compiled.memory_analysis()
        memory = analysis.temp_size_in_bytes
    else:
        memory = memory_of(fun, *args)

    def run(*args: Any) -> Any:
        with jax.disable_jit(False):
            return compiled(*args)

    return _Program(run, memory, product_flops(traced.jaxpr.jaxpr))
