"""Records of a run: metrics.jsonl, a picture of the loss, and the boards that show metrics."""

import contextlib
import json
import pathlib
from collections.abc import Iterable
from typing import Any, Self

from models.plain_files import check_plain
from train.run.boards import open_boards


class Recorder:
    """Appends metrics to the files of a run. A context manager that draws the picture on exit.

    `metrics.jsonl` holds one JSON object per line, each with `step`. Lines of training have `loss`
    (nats per token), `grad_norm`, `update_norm`, `learning_rate`, `tokens_per_second` and
    `tflop_per_second` (`train.run.utilization`), and in float16 `loss_scale`, `skipped` and
    `skipped_in_a_row` (steps); lines of evaluation have `validation_loss`, `perplexity` and
    `bits_per_byte`.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        title: str,
        start: int = 0,
        *,
        writes: bool = True,
        log_to: Iterable[str] = ("tensorboard",),
    ):
        """Opens the files, and removes lines that a killed run wrote after step `start`.

        Args:
          directory: folder of the run.
          title: title of the picture.
          start: last step done.
          writes: whether to write; of several processes one does.
          log_to: names of the boards that show the metrics too.

        Raises:
          ValueError: a damaged file, or a board that cannot be opened.
        """
        self._writes = writes
        if not writes:
            return
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._title = directory, title
        # A run that starts over records step 0 again.
        done = start if start > 0 else -1
        self._lines = [r for r in read_metrics(directory / "metrics.jsonl") if r["step"] <= done]
        lines = "".join(json.dumps(line) + "\n" for line in self._lines)
        (directory / "metrics.tmp").write_text(lines, encoding="utf-8")
        (directory / "metrics.tmp").replace(directory / "metrics.jsonl")
        self._boards = open_boards(log_to, directory, done)
        self._file = (directory / "metrics.jsonl").open("a", encoding="utf-8")

    def record(self, step: int, **metrics: float) -> None:
        """Writes one line. Values must be finite: JSON has no NaN."""
        if not self._writes:
            return
        line = {"step": step, **metrics}
        self._lines.append(line)
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        for board in self._boards:
            board.record(step, metrics)

    def draw(self) -> None:
        """Writes `loss.png`."""
        if self._writes:
            draw_loss(self._lines, self._directory / "loss.png", self._title)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._writes:
            return
        # After an error, another one would hide it.
        with contextlib.suppress(*(() if kind is None else (OSError,))):
            self._file.close()
            for board in self._boards:
                board.close(failed=kind is not None)
            self.draw()


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the lines of a metrics file without a torn last line; none if there is no file.

    Raises:
      OSError: the file cannot be read.
      ValueError: another line is damaged.
    """
    if not path.exists():
        return []
    check_plain(path, most=None)
    lines = path.read_text(encoding="utf-8").splitlines()
    complete = []
    for i, line in enumerate(lines):
        try:
            record = json.loads(line)
            is_record = isinstance(record, dict) and isinstance(record.get("step"), int)
        except (ValueError, RecursionError):
            record, is_record = {}, False
        if is_record and all(isinstance(value, int | float) for value in record.values()):
            complete.append(record)
        elif i < len(lines) - 1:  # A kill can tear only the last line.
            raise ValueError(
                f"{path}, line {i + 1} is not JSON, or no record of metrics: {line[:80]!r}."
                " Correct or remove it."
            )
    return complete


def draw_loss(lines: list[dict[str, Any]], path: pathlib.Path, title: str) -> None:
    """Draws training and held-out loss against steps.

    Args:
      lines: as `read_metrics` returns them.
      path: a PNG file.
      title: title of the picture.
    """
    # Without pyplot, which has global state and may need a display.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    training = [(r["step"], r["loss"]) for r in lines if "loss" in r]
    heldout = [(r["step"], r["validation_loss"]) for r in lines if "validation_loss" in r]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if training:
        axes.plot(*zip(*training, strict=True), color="tab:blue", alpha=0.35, label="training")
        steps, losses = zip(*training, strict=True)
        # A line with one point is invisible.
        marker = "o" if len(steps) == 1 else None
        label = "training, smoothed"
        axes.plot(steps, _smooth(losses), marker=marker, color="tab:blue", label=label)
    if heldout:
        label = f"held out (last: {heldout[-1][1]:.3f})"
        axes.plot(*zip(*heldout, strict=True), "o-", color="tab:orange", label=label)
    axes.set(xlabel="step", ylabel="loss, nats per token", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if training or heldout:
        axes.legend()
    figure.savefig(path, dpi=120)


def _smooth(values: tuple[float, ...]) -> list[float]:
    """Returns the exponential moving average over a twentieth of the values, but at least two.

    It is corrected for its start, so that its first value is the first of the values.
    """
    span = max(2, len(values) // 20)
    decay, total, weight, smooth = 1 - 1 / span, 0.0, 0.0, []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        smooth.append(total / weight)
    return smooth
