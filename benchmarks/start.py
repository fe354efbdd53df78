"""The first minutes of a large model: what a run says and when, and its memory against the plan.

`python -m benchmarks.start` trains `llama_1b` for three steps with a checkpoint, an evaluation and
an export, resumes it for one step more, and interrupts three other runs: after 10 s, after 60 s,
and in a step. It needs 12 GiB and takes 14 minutes on two cores. `--model llama_130m` is short.
"""

import contextlib
import dataclasses
import itertools
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from benchmarks import command, record
from benchmarks.tables import Cells, cell, print_cells

_ROOT = pathlib.Path(__file__).parents[1]
_PERIOD = 0.05
"""Seconds between two samples of the memory."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The runs."""

    model: str = "llama_1b"
    """Model."""
    batch_size: int = 1
    """Sequences of a step."""
    seq_len: int = 256
    """Tokens of a sequence."""
    results: pathlib.Path = record.RESULTS / "start.json"
    """File of the raw results."""


@dataclasses.dataclass
class Watched:
    """The output and the memory of a program over its time.

    Attributes:
      lines: its output, with the seconds since its start.
      resident: resident memory in bytes, with the seconds since its start.
      code: its exit code.
    """

    lines: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    resident: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    code: int | None = None

    @property
    def planned(self) -> int | None:
        """The bytes that the run says it takes; None if it ended before."""
        text = "\n".join(line for _, line in self.lines)
        total = re.search(r"memory of a step.*?\n\s*total\s+([\d,.]+)", text, re.DOTALL)
        return None if total is None else int(float(total[1].replace(",", "")) * 2**20)

    def peak(self, since: str = "", until: str = "") -> int | None:
        """Returns the most memory between the lines that contain two texts, in bytes."""
        begin, end = 0.0, float("inf")
        if since:
            begin = next((t for t, line in self.lines if since in line), end)
        if until:
            end = next((t for t, line in self.lines if until in line and t > begin), end)
        return max((size for t, size in self.resident if begin <= t <= end), default=None)


def watch(
    line: Sequence[str], when: Callable[[Watched], bool] = lambda _: False, **options: Any
) -> tuple[Watched, float | None]:
    """Runs a program to its end, and interrupts it once.

    Args:
      line: the command.
      when: whether to send SIGINT now.
      **options: for `subprocess.Popen`.

    Returns:
      Its output and memory, and the seconds from its start to SIGINT; None without one.
    """
    seen, began, sent = Watched(), time.monotonic(), None
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )

    def read() -> None:
        assert process.stdout is not None
        for text in process.stdout:
            seen.lines.append((time.monotonic() - began, text.rstrip()))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):
                seen.resident.append((time.monotonic() - began, watched.memory_info().rss))
            if sent is None and when(seen):
                sent = time.monotonic() - began
                process.send_signal(signal.SIGINT)
            time.sleep(_PERIOD)
    finally:
        process.kill()
        seen.code = process.wait()
        reader.join()
    return seen, sent


def after(seconds: float) -> Callable[[Watched], bool]:
    """Returns whether a program has run for some seconds."""
    return lambda seen: bool(seen.resident) and seen.resident[-1][0] >= seconds


def in_a_step(seen: Watched) -> bool:
    """Returns whether the second step has begun, some seconds ago."""
    ended = [t for t, line in seen.lines if line.startswith("step 1:")]
    return bool(ended) and seen.resident[-1][0] >= ended[0] + 2


def measure(config: Config) -> list[dict[str, Any]]:
    """Returns a row for each run."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="actjax-start-") as name:
        folder = pathlib.Path(name)
        (folder / "rare.yaml").write_text("eval_batches: 2\n")

        def run(title: str, flags: str, when: Callable[[Watched], bool] = lambda _: False) -> None:
            sizes = f"--batch-size {config.batch_size} --seq-len {config.seq_len}"
            shared = f"--model {config.model} {sizes} --data-dir {folder}/data --save-every 2"
            line = [sys.executable, "-m", "train.pretrain", *f"{shared} {flags}".split()]
            line += ["--config", str(folder / "rare.yaml")]
            environment = command.environment() | {
                "PYTHONPATH": str(_ROOT),
                "PYTHONUNBUFFERED": "1",
            }
            seen, sent = watch(line, when, cwd=_ROOT, env=environment)
            rows.append(row_of(title, seen, sent, name))
            print_cells(title, table(rows[-1:]))

        run("start to end", f"--out {folder}/run --steps 3")
        run("resumed", f"--out {folder}/run --steps 4 --resume")
        run("SIGINT after 10 s", f"--out {folder}/early", after(10))
        run("SIGINT after 60 s", f"--out {folder}/minute", after(60))
        run("SIGINT in step 2", f"--out {folder}/step", in_a_step)
    return rows


def row_of(title: str, seen: Watched, sent: float | None, folder: str) -> dict[str, Any]:
    """Returns a run as a row: its lines, and the most memory of each second, in MiB."""
    lines = [(t, line.replace(folder, "...")) for t, line in seen.lines if line.strip()]
    answers = [[round(t, 2), line] for t, line in lines if sent is not None and t >= sent]
    moments = {"start": ("", "is running"), "steps": ("is running", ""), "whole": ("", "")}
    seconds: dict[int, int] = {}
    for t, size in seen.resident:
        seconds[int(t)] = max(size, seconds.get(int(t), 0))
    return {
        "run": title,
        "planned": seen.planned,
        "peaks": {name: seen.peak(*between) for name, between in moments.items()},
        "code": seen.code,
        "seconds": round(seen.resident[-1][0], 1),
        "longest_silence": _longest_silence(seen),
        "sent": sent,
        "answers": answers,
        "lines": [f"{t:6.1f} s  {line}" for t, line in lines],
        "resident": " ".join(str(seconds.get(t, 0) // 2**20) for t in range(max(seconds) + 1)),
    }


def _longest_silence(seen: Watched) -> float:
    """Returns the longest time between two lines, in seconds."""
    times = [0.0, *(t for t, _ in seen.lines), seen.resident[-1][0]]
    return round(max(b - a for a, b in itertools.pairwise(times)), 1)


def table(rows: list[dict[str, Any]]) -> Cells:
    """Returns the memory of the runs in GiB, and how soon they answer."""
    cells = []
    for row in rows:
        planned, peak = row["planned"], row["peaks"]["whole"]
        first = row["answers"][0] if row["answers"] else None
        cells.append(
            {
                "run": row["run"],
                "planned": cell(planned, ".2f", 2**30),
                "at the start": cell(row["peaks"]["start"], ".2f", 2**30),
                "peak": cell(peak, ".2f", 2**30),
                "of the plan": "" if planned is None else f"{peak / planned:.2f}",
                "longest silence, s": f"{row['longest_silence']:.0f}",
                "answers in, s": "" if first is None else f"{first[0] - row['sent']:.1f}",
                "ends after, s": "" if first is None else f"{row['seconds'] - row['sent']:.1f}",
                "exit code": str(row["code"]),
            }
        )
    return cells


if __name__ == "__main__":
    command.run(Config, __doc__, measure, lambda config, rows: print_cells("all", table(rows)))
