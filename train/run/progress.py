"""Progress of a run on the terminal."""

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar

import rich.progress
from rich.console import Console

T = TypeVar("T")

_SHOWN = {
    "validation_loss": "held-out loss {:.4f}",
    "perplexity": "perplexity {:,.2f}",
    "bits_per_byte": "{:.3f} bits per byte",
    "reward_accuracy": "accuracy of the reward {:.3f}",
    "reward_margin": "margin {:.3f}",
}

_SILENT = 30
"""Seconds after which work says that it goes on, and without a line after which a step gets one."""


@contextlib.contextmanager
def saying(
    console: Console, what: str, *, first: bool = True, more: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """Context of work that may take minutes: prints what it is, and how long it has taken so far.

    Args:
      console: where to print.
      what: the work.
      first: whether to say it when the work begins, and not only when it takes long.
      more: returns what else there is to say about it by now.
    """
    if first:
        console.print(what, style="dim")
    began, done = time.perf_counter(), threading.Event()

    def say() -> None:
        while not done.wait(_SILENT):
            seconds = time.perf_counter() - began
            console.print(f"{what}: {more()}{seconds:.0f} s so far", style="dim")

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def tracked(items: Sequence[T], name: str, console: Console) -> Iterator[T]:
    """Yields items, and shows how many are done: a bar on a terminal, else lines now and then."""
    if console.is_terminal:
        yield from rich.progress.track(items, name, console=console, transient=True)
        return
    done = 0
    with saying(console, name, first=False, more=lambda: f"{done:,} of {len(items):,}, "):
        for done, item in enumerate(items):  # noqa: B007
            yield item


class Progress:
    """A progress bar with loss, tokens/s and time left; lines of text without a terminal.

    The time left is that of the steps so far, with all that was done between them.
    """

    def __init__(
        self,
        console: Console,
        start: int,
        steps: int,
        tokens: int,
        show: Callable[[float], str] = "{:,.0f} tokens/s".format,
    ):
        """Args:
        console: where to draw.
        start: last step done.
        steps: last step of the run.
        tokens: tokens of a step.
        show: from tokens per second to a text.
        """
        self._console, self._tokens, self._show = console, tokens, show
        self._start, self._steps = start, steps
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("step"),
            rich.progress.MofNCompleteColumn(),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TextColumn("loss {task.fields[loss]}"),
            rich.progress.TextColumn("{task.fields[speed]}"),
            rich.progress.TextColumn("{task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
        )
        empty: dict[str, Any] = {"loss": "-", "speed": "-", "left": ""}
        self._task = self._bar.add_task("", total=steps, completed=start, **empty)
        self._began = time.perf_counter()
        self._logged, self._since, self._pause = start, self._began, 0.0

    def log(self, step: int, loss: float) -> float:
        """Shows a loss, and returns the tokens per second since the last call without pauses."""
        now = time.perf_counter()
        speed = (step - self._logged) * self._tokens / (now - self._since - self._pause)
        self._logged, self._since, self._pause = step, now, 0.0
        shown, left = self._show(speed), ""
        if step < self._steps:
            left = _left((now - self._began) / (step - self._start) * (self._steps - step))
        fields: dict[str, Any] = {"loss": f"{loss:.3f}", "speed": shown, "left": left}
        self._bar.update(self._task, completed=step, **fields)
        if not self._console.is_terminal:
            parts = [f"loss {loss:.4f}", shown, *([left] if left else [])]
            self._console.print(f"step {step}: {', '.join(parts)}")
        return speed

    def is_due(self, step: int) -> bool:
        """Returns whether a step gets a line because the last one is long ago."""
        return step > self._logged and time.perf_counter() - self._since > _SILENT

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time inside from the speed."""
        begin = time.perf_counter()
        yield
        self._pause += time.perf_counter() - begin

    def say(self, step: int, report: dict[str, float]) -> None:
        """Prints an evaluation above the bar."""
        parts = [_SHOWN[name].format(value) for name, value in report.items() if name in _SHOWN]
        self._bar.console.print(f"step {step}: {', '.join(parts)}", highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _left(seconds: float) -> str:
    """Returns a time such as "2 h 5 min left, ends Tue 14:05", with the day if it is another."""
    hours, minutes = divmod(round(seconds / 60), 60)
    shown = f"{hours} h {minutes} min" if hours else f"{minutes} min"
    shown = f"{seconds:.0f} s" if seconds < 60 else shown
    now = datetime.datetime.now()
    end = now + datetime.timedelta(seconds=seconds)
    day = "" if end.date() == now.date() else "%a " if (end - now).days < 6 else "%b %d, "
    return f"{shown} left, ends {end:{day}%H:%M}"
