"""Progress of a run on the terminal."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Self

import rich.progress
from rich.console import Console

_SHOWN = {
    "validation_loss": "held-out loss {:.4f}",
    "perplexity": "perplexity {:,.2f}",
    "bits_per_byte": "{:.3f} bits per byte",
    "reward_accuracy": "accuracy of the reward {:.3f}",
    "reward_margin": "margin {:.3f}",
}


_SILENT = 60
"""Seconds without a line after which a step gets one, also between those of `--log-every`."""


class Progress:
    """A progress bar with loss, tokens/s and time left; lines of text without a terminal."""

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
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("step"),
            rich.progress.MofNCompleteColumn(),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TextColumn("loss {task.fields[loss]}"),
            rich.progress.TextColumn("{task.fields[speed]}"),
            rich.progress.TextColumn("left"),
            rich.progress.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=start, loss="-", speed="-")
        self._logged, self._since, self._pause = start, time.perf_counter(), 0.0

    def log(self, step: int, loss: float) -> float:
        """Shows a loss, and returns the tokens per second since the last call without pauses."""
        now = time.perf_counter()
        speed = (step - self._logged) * self._tokens / (now - self._since - self._pause)
        self._logged, self._since, self._pause = step, now, 0.0
        shown = self._show(speed)
        self._bar.update(self._task, completed=step, loss=f"{loss:.3f}", speed=shown)
        if not self._console.is_terminal:
            self._console.print(f"step {step}: loss {loss:.4f}, {shown}")
        return speed

    def is_silent(self) -> bool:
        """Returns whether the last line is long ago, as where a step takes minutes."""
        return time.perf_counter() - self._since > _SILENT

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
