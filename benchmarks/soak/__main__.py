"""A long run under random kills, beside the same run unbroken.

`python -m benchmarks.soak` trains `llama_3m` for 10,000 steps with the default method, once
unbroken and once under forty signals, SIGKILL or SIGTERM, at random moments: while it starts (reads
text, compiles, restores), between steps, and while a checkpoint is written. Each time the same
command is started again with `--resume`. Then it compares the two: arrays of the last checkpoint
bit for bit, recorded losses, and files. The unbroken run writes down its memory every second, which
must stay flat. All of this on one process, and on two that train together. Exits with 1 on any
difference.

`--steps 200 --kills 4 --save-every 20 --processes 1` is short. A soak that was stopped goes on with
the unbroken runs of this commit that are complete in `--folder`.
"""

import dataclasses
import json
import pathlib
import shutil
import signal
import sys
import tempfile
import time
from typing import Any

from benchmarks import command, record
from benchmarks.soak import verdict
from benchmarks.soak.lives import Folders, Life, drawn
from benchmarks.tables import print_table
from train.settings.config import DataConfig, PretrainConfig
from train.settings.resolve import dimensions, resolve


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    model: str = "llama_3m"
    """Preset of the model."""
    method: str = "lean"
    """Method of `train.pretrain`."""
    steps: int = 10_000
    """Steps of a run."""
    kills: int = 40
    """Signals."""
    processes: tuple[int, ...] = (1, 2)
    """Numbers of processes of a run. The kills are drawn anew for each."""
    batch_size: int = 4
    """Sequences of a step."""
    seq_len: int = 32
    """Tokens of a sequence."""
    vocab_size: int = 8192
    """Vocabulary of the tokenizer."""
    save_every: int = 250
    """Steps between two checkpoints."""
    seed: int = 0
    """Seed of the kills."""
    folder: pathlib.Path = pathlib.Path(tempfile.gettempdir(), "actjax-soak")
    """Where the runs write."""
    add: bool = False
    """Keep the rows of other numbers of processes in `--results`."""
    results: pathlib.Path = record.RESULTS / "soak.json"

    def __post_init__(self) -> None:
        for name, least in (("steps", 200), ("kills", 0), ("save_every", 1), ("seed", 0)):
            if getattr(self, name) < least:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"`{flag}` must be at least {least}, got {getattr(self, name)}.")
        if not self.processes or min(self.processes) < 1:
            raise ValueError(
                f"`--processes` must be numbers of at least 1, got {self.processes or 'none'}."
            )
        if len(set(self.processes)) < len(self.processes):
            raise ValueError(f"`--processes` names a number twice: {self.processes}.")
        # They refuse what the runs would refuse.
        run = PretrainConfig(
            model=self.model,
            method=self.method,
            steps=self.steps,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            data=DataConfig(vocab_size=self.vocab_size),
        )
        resolve(run, dimensions(run))
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"`--folder` {self.folder} is a file: name a folder.")


_OF_A_ROW = ("model", "method", "batch_size", "seq_len", "vocab_size", "save_every", "seed")
"""Settings that a row has too, since rows of several calls may be in one file."""


def measure(config: Config) -> list[dict[str, Any]]:
    """Returns one row for each number of processes. The file has each as soon as it is known."""
    rows = [
        row
        for row in record.rows_to_keep(config.results, config.add)
        if row["processes"] not in config.processes
    ]
    for processes in config.processes:
        unbroken, seconds = _unbroken(config, processes)
        broken = Folders(_emptied(config.folder / f"broken-{processes}"))
        lives = _lives(config, broken, processes, start=seconds["start"])
        signals = [life["signal"] for life in lives if life["signal"]]
        row = {
            "processes": processes,
            "steps": config.steps,
            "commit": record.environment()["commit"],
            "settings": {name: getattr(config, name) for name in _OF_A_ROW},
            "kills": {name: signals.count(name) for name in ("SIGKILL", "SIGTERM")},
            "moments": {
                name: sum(life["moment"] == name for life in lives)
                for name in ("start", "step", "save")
            },
            "seconds_unbroken": seconds["whole"],
            "seconds_broken": sum(life["seconds"] for life in lives),
            "differences": verdict.differences(unbroken, broken),
            "leftovers": verdict.leftovers(unbroken, broken),
            "memory": verdict.memory(unbroken, processes, config.steps),
            "lives": lives,
        }
        rows.append({**row, "faults": faults(row, config)})
        rows.sort(key=lambda row: row["processes"])
        record.write(config, rows)
    return rows


def faults(row: dict[str, Any], config: Config) -> list[str]:
    """Returns what is wrong in a row: each in a line."""
    found = [f"differs: {name}" for name in row["differences"]]
    found += [f"left over: {name}" for name in row["leftovers"]]
    found += [
        f"memory of the {x['memory']} of process {x['process']} grew by {x['growth']:.1%}"
        for x in row["memory"]
        if x["growth"] is not None and not x["growth"] <= verdict.MOST_GROWTH
    ]
    found += [
        f"life {i} ended with {life['codes']}: {life.get('output', [''])[0][-300:]}"
        for i, life in enumerate(row["lives"])
        if "output" in life or not _as_signalled(life)
    ]
    if (count := sum(row["kills"].values())) != config.kills:
        found.append(f"{count} of {config.kills} kills met a run that was still alive")
    return found


def _as_signalled(life: dict[str, Any]) -> bool:
    """Whether the processes that got a signal ended as it tells them to.

    SIGTERM ends a run after a save, or at once before its first step. Processes that lost another
    one may end in any way, or wait for it until they are killed.
    """
    allowed = {"SIGKILL": (-signal.SIGKILL,), "SIGTERM": (0, -signal.SIGTERM), None: (0,)}
    one, codes = life["process"], life["codes"]
    return all(code in allowed[life["signal"]] for code in (codes if one is None else [codes[one]]))


def _arguments(config: Config) -> list[str]:
    names = ("model", "method", "steps", "batch_size", "seq_len", "vocab_size", "save_every")
    settings = {name: getattr(config, name) for name in names}
    # Evaluated and drawn now and then, as any run is.
    settings |= {"log_every": 10, "eval_every": max(10, config.steps // 10), "eval_batches": 2}
    pairs = (("--" + name.replace("_", "-"), str(value)) for name, value in settings.items())
    return [part for pair in pairs for part in pair]


def _unbroken(config: Config, processes: int) -> tuple[Folders, dict[str, float]]:
    """Returns the folders of the unbroken run, and its seconds: of its start and of all of it."""
    root = config.folder / f"unbroken-{processes}"
    done = root / "done.json"
    # Another version, flag or commit may compute other bits.
    where = {key: value for key, value in record.environment().items() if key != "date"}
    made = {"arguments": _arguments(config), "environment": where}
    if done.exists():
        found = json.loads(done.read_text())
        if found["made"] == made:
            return Folders(root), found["seconds"]
    folders, began = Folders(_emptied(root)), time.monotonic()
    print(f"{processes} x, unbroken: prepares text and compiles", flush=True)
    with Life(_arguments(config), folders, processes, watch=True) as life:
        life.wait_for_step(0)
        start = time.monotonic() - began
        for tenth in range(1, 10):
            if life.wait_for_step(tenth * config.steps // 10):
                minutes = (time.monotonic() - began) / 60
                print(f"{processes} x, unbroken: {tenth}0% in {minutes:.1f} minutes", flush=True)
        ending = life.end(None)
    if any(ending["codes"]):
        sys.exit(f"the unbroken run ended with {ending['codes']}:\n{ending['output'][0]}")
    seconds = {"start": start, "whole": time.monotonic() - began}
    done.write_text(json.dumps({"made": made, "seconds": seconds}))
    return folders, seconds


def _lives(config: Config, folders: Folders, processes: int, start: float) -> list[dict[str, Any]]:
    """Starts the run, kills it, starts it again, and so on to its own end."""
    kills = drawn(config.kills, config.steps, start, processes, config.seed)
    lives = []
    for kill in [*kills, None]:
        began = time.monotonic()
        with Life([*_arguments(config), "--resume"], folders, processes) as life:
            ending = life.end(kill)
        lives.append({**ending, "seconds": round(time.monotonic() - began, 2)})
        print(f"{processes} x, {len(lives)} of {len(kills) + 1}: {_line(ending)}", flush=True)
    return lives


def _line(ending: dict[str, Any]) -> str:
    if ending["signal"] is None:
        return f"ended by itself with {ending['codes']} at step {ending['step']}"
    whom = "all" if ending["process"] is None else f"process {ending['process']}"
    return (
        f"{ending['signal']} to {whom} ({ending['moment']}) at step {ending['step']},"
        f" codes {ending['codes']} after {ending['end']:.1f} s"
    )


def _emptied(folder: pathlib.Path) -> pathlib.Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    """Prints what was killed, and what was equal after it."""
    cells = verdict.table(rows)
    title = f"{config.model}, {config.method}, seed {config.seed}"
    print_table(title, list(cells[0]), (list(row.values()) for row in cells))
    for row in rows:
        for fault in row["faults"]:
            print(f"{row['processes']} x: {fault}")


def main() -> None:
    """Reads the command line, runs, prints and writes. Exits with 1 on a fault."""
    config = command.settings(Config, __doc__)
    # As an exception: a life that is under way ends with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rows = measure(config)
    show(config, rows)
    sys.exit(any(row["faults"] for row in rows))


if __name__ == "__main__":
    main()
