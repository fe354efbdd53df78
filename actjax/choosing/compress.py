"""Any model in one call: what its backward pass stores is measured, chosen and shown."""

import dataclasses
import functools
import math
import re
import time
import warnings
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import jax
from jax.core import Tracer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from actjax.choosing.alternatives import Alternatives, Memory
from actjax.choosing.choice import KEEP, Choice, coded_function, preferred
from actjax.choosing.measure import BoundLoss
from actjax.codecs import Quantized
from actjax.explain import as_text, bytes_text
from actjax.residuals.candidates import Candidate
from actjax.residuals.checks import check_function

DEFAULT_ERROR = 0.05
"""Relative error of the gradient that a budget alone allows."""
_MOST_UNTOUCHED = 0.25
"""Share of the parameters without a gradient above which a measurement says too little."""
_UNITS = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 1e3, "MB": 1e6, "GB": 1e9}


def compress(
    fun: Callable[..., Any],
    budget: str | float | None = None,
    error: float | None = None,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    codec: Quantized = Quantized(4),
    remat: bool = True,
    offload: bool = False,
    memory: Memory | None = None,
    verbose: bool = True,
) -> "Compressed":
    """Returns a loss whose backward pass takes less memory, as measured on a batch.

        small = actjax.compress(loss, error=0.05).measure(params, batch)
        value, grads = jax.jit(jax.value_and_grad(small))(params, batch)

    For each array that the backward pass needs it decides whether to keep it, to store it in 2 to 8
    bits, or to rebuild it; and for the whole function whether segments of it, such as layers, are
    computed again. It measures how much the gradient changes with the error of each array (GACT;
    Liu et al., 2022, section 4), chooses bits that meet the bound with few bytes, and compiles and
    runs the gradient in each of these ways: exactly; with codes; with segments computed again
    (Chen et al., 2016), with a budget as few as it needs; with both, where what is computed again
    is stored as codes too (GACT's level CB1). Of the ways within the limits it takes, with a
    budget, the one that computes least again; without one, the one that takes the least memory (or
    5% more, if it computes less again).
    `print(small)` shows what it chose and why.

    The value is exact. Left alone are arguments, integers, booleans (a bit each), what a custom
    backward pass of others reads, the results of while loops, arrays that are small, and those
    whose code would not be smaller.

    Arguments may be Flax nnx modules (their state is kept), linen variables, Equinox modules and
    other pytrees; leaves that are not arrays are static. Once it has measured, it is an ordinary
    function: it works under `jit`, `value_and_grad`, `nnx.value_and_grad`, `vmap` and `scan`. It
    has first derivatives in reverse mode only.

    The measurement runs at the first call with arrays, or when `measure` is called, and again
    whenever `measure` is called. It takes one gradient for each array (or, with more than 14, for
    each kind of array: those whose names differ only in numbers), and holds them in 8 bits. Where
    a last layer or an adapter starts at zero, so do most gradients: a warning says to measure again
    after some steps.

    Args:
      fun: a loss: returns a scalar, or a scalar and auxiliary data.
      budget: the most bytes that the gradient may take besides its arguments and results, such as
        "4GiB" or 2**32, as XLA's memory analysis of the compiled gradient tells.
      error: the largest relative error of the gradient on the measured batch: of the whole,
        `‖g - g_exact‖ / ‖g_exact‖`, and of its arrays, each over its own norm, as Adam sees them
        (the root mean square over all parameters). If only a budget is given, 0.05.
      argnums: arguments whose gradient is measured. For an nnx module: its `nnx.Param`s.
      has_aux: whether `fun` returns auxiliary data.
      codec: how arrays are stored; its bits are chosen.
      remat: whether segments may be computed again.
      offload: whether codes may be kept in the memory of the host, if a budget needs it.
      memory: a function from another function and its arguments to the bytes of its temporaries,
        for a choice that is meant for another device, such as a GPU that is not in this machine. By
        default what the compiler says for the default device. (On a CPU with the schedule that
        holds least: see `xla_cpu_scheduler_type`.)
      verbose: whether to print the choice after a measurement.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: neither `budget` nor `error`, or one out of range; when measured: `fun` does not
        return a scalar, or nothing meets the limits.
    """
    check_function(fun, "compress")
    if budget is None and error is None:
        raise ValueError(
            "compress needs `budget`, such as '4GiB', or `error`, such as 0.05, or both."
        )
    if error is not None:
        is_number = isinstance(error, Real) or getattr(error, "shape", None) == ()
        if isinstance(error, bool) or not is_number or not 0 < error < 1:
            raise ValueError(
                f"`error` of compress must be a number between 0 and 1, got {error!r}."
            )
        error = float(error)
    if memory is not None and not callable(memory):
        raise TypeError(
            "`memory` of compress must be a function from a function and its arguments to bytes,"
            f" got {memory!r}."
        )
    for name, flag in {"has_aux": has_aux, "remat": remat, "offload": offload}.items():
        if not isinstance(flag, bool):
            raise TypeError(f"`{name}` of compress must be True or False, got {flag!r}.")
    if not isinstance(codec, Quantized) or codec.balance or codec.scaling != "group":
        raise TypeError(
            "`codec` of compress must be an actjax.Quantized with scaling='group' and without"
            f" balance, got {codec!r}."
        )
    if codec.needs_key:
        raise ValueError(
            f"`codec` of compress must not draw random numbers, got {codec!r}: use"
            " rounding='nearest', or actjax.Controller, which takes a key in each step."
        )
    limit = None if budget is None else parse_bytes(budget)
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in positions):
        raise TypeError(f"`argnums` of compress must be integers, got {argnums!r}.")
    return Compressed(fun, limit, error, positions, has_aux, codec, remat, offload, memory, verbose)


def parse_bytes(budget: str | float) -> int:
    """Returns a number of bytes.

    Args:
      budget: a number, or text such as "4GiB" or "500 MB".

    Raises:
      ValueError: it is not a positive number of bytes.
    """
    if not isinstance(budget, str):
        if isinstance(budget, bool) or not budget > 0:
            raise ValueError(f"`budget` must be a positive number of bytes, got {budget!r}.")
        return int(budget)
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([KMG]?i?B)?\s*", budget, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"`budget` must be like '4GiB', '500MB' or 2**32, got {budget!r}.")
    return int(float(match[1]) * _UNITS[(match[2] or "B").upper()])


class Compressed:
    """A loss whose backward pass takes less memory; what `actjax.compress` returns.

    Attributes:
      choice: what was chosen; None before the first measurement. It can be set, to a choice that a
        checkpoint held.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        budget: int | None,
        error: float | None,
        argnums: tuple[int, ...],
        has_aux: bool,
        codec: Quantized,
        remat: bool,
        offload: bool,
        memory: Memory | None,
        verbose: bool,
    ) -> None:
        """Takes the arguments of `compress`, which checks them."""
        functools.update_wrapper(self, fun)
        self._fun, self._argnums, self._has_aux = fun, argnums, has_aux
        self._budget, self._error = budget, DEFAULT_ERROR if error is None else error
        self._codec, self._remat, self._offload = codec, remat, offload
        self._memory, self._verbose = memory, verbose
        self._arrays: tuple[tuple[Candidate, int], ...] = ()
        self.choice: Choice | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the loss returns.

        Raises:
          ValueError: nothing was measured yet, and the arguments have no values to measure on.
        """
        if self.choice is None:
            arguments = jax.tree.map(_without_derivative, (args, kwargs))
            if any(isinstance(x, Tracer) for x in jax.tree.leaves(arguments)):
                raise ValueError(
                    "compress chooses by a measurement, which needs arrays, and this call is within"
                    " jit (or another transformation): call `.measure(...)` before, with the"
                    " arguments of one call, such as parameters and a batch."
                )
            self.measure(*arguments[0], **arguments[1])
        choice = self.choice
        assert choice is not None
        if not choice.bits and not choice.remat:
            return self._fun(*args, **kwargs)
        run = coded_function(
            self._fun,
            choice.bits,
            self._codec,
            remat=choice.remat_settings,
            offload=choice.offload,
            caller="compress",
        )
        return run(*args, **kwargs)

    def measure(self, *args: Any, **kwargs: Any) -> "Compressed":
        """Measures and chooses, and returns the function itself.

        Args:
          *args: arguments of one call, such as parameters and a batch. Nothing is written into nnx
            modules.
          **kwargs: keyword arguments of that call.

        Raises:
          ValueError: the loss is not a scalar; its gradient is not finite on this batch; or nothing
            meets the limits: the message says what each way takes.
        """
        if self._verbose:
            Console().print(
                "actjax.compress measures: it compiles up to seven gradients, which takes minutes"
                " for a large model in a Python loop."
            )
        start = time.perf_counter()

        def say(what: str) -> None:
            if self._verbose:
                Console().print(f"{time.perf_counter() - start:5.0f} s: {what}", highlight=False)

        loss = BoundLoss(functools.partial(self._fun, **kwargs), args, self._argnums, self._has_aux)
        ways = Alternatives(loss, self._codec, self._memory, say)
        limits = self._budget, self._error
        choices = []
        for choice in ways.choices(self._error, self._budget, self._remat, self._offload):
            choices.append(choice)
            # With a budget the ways come in the order in which they are preferred.
            if self._budget is not None and preferred([choice.chosen], *limits) is not None:
                break
        tried = tuple(c.chosen for c in choices)
        best = preferred(tried, *limits)
        if best is None:
            raise ValueError(_nothing_fits(tried, *limits))
        chosen = next(c for c in choices if c.name == best.name)
        chosen = dataclasses.replace(chosen, tried=tried)
        self.choice, self._arrays = chosen, ways.arrays_of(chosen)
        untouched = ways.untouched() if chosen.bits else 0.0
        if untouched > _MOST_UNTOUCHED:
            warnings.warn(
                f"compress: the gradient of {_percent(untouched)} of the parameters is zero on this"
                " batch, as where a last layer or an adapter starts at zero. The bits were chosen"
                " without them: call `measure` again after some steps.",
                stacklevel=2,
            )
        if self._verbose:
            out = Console()
            # Rich takes a file to be 80 columns wide, which breaks the labels into pieces.
            has_width = out.is_terminal or out.is_jupyter
            (out if has_width else Console(width=160)).print(self)
        return self

    def __rich__(self) -> Any:
        """Returns the choice as tables."""
        if self.choice is None:
            return f"actjax.compress of {getattr(self, '__name__', self._fun)}: not measured yet"
        return _tables(self.choice, self._arrays)

    def __str__(self) -> str:
        return as_text(self.__rich__(), 200)


def _without_derivative(x: Any) -> Any:
    """Returns the value of an array that is being differentiated."""
    return jax.lax.stop_gradient(x) if isinstance(x, Tracer) else x


def _nothing_fits(tried: Sequence[Any], budget: int | None, error: float) -> str:
    ways = "; ".join(f"{t.name}: {bytes_text(t.memory)}, error {_percent(t.error)}" for t in tried)
    limit = "" if budget is None else f"`budget` of {bytes_text(budget)} and "
    return (
        f"compress: nothing meets the {limit}`error` of {_percent(error)}. Measured: {ways}. Raise"
        " one of the limits, make the batch smaller, or run layers in a lax.scan."
    )


def _tables(choice: Choice, arrays: Sequence[tuple[Candidate, int]]) -> Table:
    outer = Table.grid()
    ways = Table(box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("way", "memory", "gradient error", "computed again"):
        ways.add_column(name, justify="left" if name == "way" else "right")
    for t in choice.tried:
        style = "bold" if t.name == choice.name else ""
        again = "none" if not t.recomputed else f"{_percent(t.recomputed)} of the forward pass"
        ways.add_row(Text(t.name, style), bytes_text(t.memory), _percent(t.error), again)
    outer.add_row(ways)
    if choice.bits:
        outer.add_row(_arrays_table(choice, arrays))
    return outer


def _arrays_table(choice: Choice, arrays: Sequence[tuple[Candidate, int]]) -> Table:
    """Returns a row for each kind of array: those that differ only in numbers of their scope."""
    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    kinds: dict[Any, list[tuple[Candidate, int]]] = {}
    for what, stored in arrays:
        scope = re.sub(r"\d+", "*", what.scope)
        kinds.setdefault((scope, what.name, what.dtype, what.shape), []).append((what, stored))
    rows = []
    for (scope, name, dtype, shape), members in kinds.items():
        exact = sum(c.nbytes * c.layers for c, _ in members)
        stored = sum(n * c.layers for c, n in members)
        count = sum(c.layers for c, _ in members)
        how = sorted({choice.bits.get(c.label, KEEP) for c, _ in members})
        bits = ", ".join(str(n) for n in how if n != KEEP)
        words = ([f"{bits} bits"] if bits else []) + (["exact"] if KEEP in how else [])
        size = f"{dtype}[{','.join(map(str, shape))}]"
        label = ": ".join(filter(None, (scope, name))) or members[0][0].primitive
        rows.append((label, size, count, exact, stored, words))
    table.add_column("stored for the backward pass", "total", overflow="fold")
    table.add_column("array")
    table.add_column("times", justify="right")
    for i, name in ((3, "exact"), (4, "stored")):
        table.add_column(
            name, bytes_text(sum(row[i] for row in rows)), justify="right", no_wrap=True
        )
    table.add_column("as")
    for name, size, count, exact, stored, words in sorted(rows, key=lambda row: -row[3]):
        sizes = bytes_text(exact), bytes_text(stored)
        # `Text`, since names of a user may look like rich's markup and emoji.
        table.add_row(*map(Text, (name, size, str(count), *sizes, " or ".join(words))))
    return table


def _percent(share: float) -> str:
    if math.isnan(share):
        return "not measured"
    return f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.2g}%"
