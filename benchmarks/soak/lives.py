"""The lives of a run: each is one start of its processes, which ends by itself or by a signal."""

import dataclasses
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import command

REPOSITORY = pathlib.Path(__file__).parents[2]
PATIENCE = 30.0
"""Seconds that the processes of a life have to end after a signal. A scheduler would then kill."""
FORCED = -99
"""Exit code of a process that did not end within `PATIENCE`."""


@dataclasses.dataclass(frozen=True)
class Kill:
    """When and how a life ends.

    Attributes:
      signal: SIGKILL or SIGTERM.
      moment: `start`, `delay` seconds after the start, or before the first step if that comes
        earlier; `step`, `delay` seconds after `step` was recorded; or `save`, `delay` seconds after
        the first checkpoint that is begun after `step`.
      step: see `moment`.
      delay: seconds.
      process: index of the process that gets the signal; None for all of them.
    """

    signal: signal.Signals
    moment: str
    step: int
    delay: float
    process: int | None


@dataclasses.dataclass
class Folders:
    """Where the files of a run are.

    Attributes:
      root: holds all others.
    """

    root: pathlib.Path

    def __post_init__(self) -> None:
        for folder in (self.root, self.temporary, self.cache):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def out(self) -> pathlib.Path:
        """Folder of the run."""
        return self.root / "run"

    @property
    def data(self) -> pathlib.Path:
        """Prepared text and tokenizer."""
        return self.root / "data"

    @property
    def temporary(self) -> pathlib.Path:
        """Temporary files of the processes."""
        return self.root / "tmp"

    @property
    def cache(self) -> pathlib.Path:
        """Compiled programs."""
        return self.root / "cache"


def drawn(count: int, steps: int, start: float, processes: int, seed: int) -> list[Kill]:
    """Returns random kills in the order of their steps: half of them SIGKILL.

    Args:
      count: how many.
      steps: steps of the run.
      start: seconds from the start of a program to its first step.
      processes: number of processes.
      seed: of the draw.
    """
    rng = np.random.default_rng(seed)
    kills = []
    # None of the last steps: a run goes on for up to a second before it is killed.
    for step in sorted(rng.integers(0, min(int(0.8 * steps), steps - 100), count)):
        moment = str(rng.choice(["start", "step", "step", "save"]))
        longest = {"start": start, "step": 1.0, "save": 0.05}[moment]
        whom = int(rng.integers(processes + 1))
        kills.append(
            Kill(
                signal.Signals(int(rng.choice([signal.SIGKILL, signal.SIGTERM]))),
                moment,
                int(step),
                float(rng.uniform(0, longest)),
                whom if whom < processes else None,
            )
        )
    return kills


class Life:
    """The processes of one start of a run. A context manager that leaves none of them behind."""

    def __init__(
        self, arguments: Sequence[str], folders: Folders, processes: int, watch: bool = False
    ) -> None:
        """Starts the processes.

        Args:
          arguments: of `train.pretrain`, without folders.
          folders: where the files go.
          processes: number of processes.
          watch: whether the processes write down their memory, in `root/memory-INDEX.txt`.
        """
        self.folders, self.began = folders, time.monotonic()
        self._metrics, self._former = folders.out / "metrics.jsonl", None
        if self._metrics.exists():
            self._former = self._metrics.stat().st_ino
        module = "benchmarks.soak.watched" if watch else "train.pretrain"
        port = _free_port()
        self._logs = [folders.root / f"log-{i}.txt" for i in range(processes)]
        self._processes = []
        for i, log in enumerate(self._logs):
            watched = [str(folders.root / f"memory-{i}.txt")] if watch else []
            several = processes > 1
            line = [sys.executable, "-m", module, *watched, *arguments]
            line += ["--out", str(folders.out), "--data-dir", str(folders.data)]
            line += ["--distributed"] if several else []
            joined = {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": str(processes),
                "JAX_PROCESS_ID": str(i),
            }
            variables = {
                **command.environment(),
                **(joined if several else {}),
                "PYTHONPATH": str(REPOSITORY),
                "TMPDIR": str(folders.temporary),
                "JAX_COMPILATION_CACHE_DIR": str(folders.cache),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
            with log.open("w", encoding="utf-8") as file:
                self._processes.append(
                    subprocess.Popen(line, cwd=REPOSITORY, env=variables, stdout=file, stderr=file)
                )

    def __enter__(self) -> "Life":
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def ended(self) -> bool:
        """Whether any of the processes has ended."""
        return any(process.poll() is not None for process in self._processes)

    def wait_for_step(self, step: int) -> bool:
        """Waits until a step after `step` is recorded; False if a process ends before.

        Lines of former lives do not count: a life begins a new file, without lines that a kill left
        after the checkpoint.
        """
        while not self._has_begun() or _last_step(self.folders.out) <= step:
            if self.ended():
                return False
            time.sleep(0.02)
        return True

    def _has_begun(self) -> bool:
        return self._metrics.exists() and self._metrics.stat().st_ino != self._former

    def wait_for_save(self) -> bool:
        """Waits until a checkpoint is being written; False if a process ends before."""
        while not any((self.folders.out / "checkpoints").glob("*tmp*")):
            if self.ended():
                return False
            time.sleep(0.001)
        return True

    def end(self, kill: Kill | None) -> dict[str, Any]:
        """Ends the processes by a kill, or waits for their own end without one.

        Returns:
          What became of them: `moment`, `signal`, `process`, `step` last recorded, `codes`, the
          seconds that they took to `end` after the signal, and the tails of their `output` where
          they did not end as they should.
        """
        reached = kill is not None and self._reach(kill)
        signalled = time.monotonic()
        if kill is not None and reached:
            every = range(len(self._processes))
            for i in every if kill.process is None else [kill.process]:
                self._processes[i].send_signal(kill.signal)
        codes = [self._code(i, signalled if reached else None) for i in range(len(self._logs))]
        ending: dict[str, Any] = {
            "moment": kill.moment if kill and reached else "end",
            "signal": kill.signal.name if kill and reached else None,
            "process": kill.process if kill and reached else None,
            "step": _last_step(self.folders.out),
            "codes": codes,
            "end": round(time.monotonic() - signalled, 2) if reached else None,
        }
        texts = [log.read_text(encoding="utf-8", errors="replace") for log in self._logs]
        if any("Traceback" in texts[i] for i in judged(ending)) or (not reached and any(codes)):
            ending["output"] = [text.replace(sys.prefix, "")[-2000:] for text in texts]
        return ending

    def _reach(self, kill: Kill) -> bool:
        """Waits for the moment of a kill; False if a process ends before."""
        if kill.moment == "start":
            began = self.began
        else:
            waits = [self.wait_for_save] if kill.moment == "save" else []
            if not self.wait_for_step(kill.step) or not all(wait() for wait in waits):
                return False
            began = time.monotonic()
        while time.monotonic() < began + kill.delay:
            # With compiled programs a start takes less than the first one, which the delay is of.
            if kill.moment == "start" and self._has_begun():
                break
            if self.ended():
                return False
            time.sleep(0.001)
        return True

    def _code(self, i: int, signalled: float | None) -> int:
        if signalled is None:
            return self._processes[i].wait()
        try:
            return self._processes[i].wait(max(0.0, signalled + PATIENCE - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._processes[i].kill()
            self._processes[i].wait()
            return FORCED


def judged(ending: dict[str, Any]) -> Sequence[int]:
    """Returns which processes must end without a traceback.

    Not those that have lost another one: orbax, for example, prints one if that was during a save.
    """
    codes, one = ending["codes"], ending["process"]
    return range(len(codes)) if one is None or codes[one] >= 0 else [one]


def _last_step(out: pathlib.Path) -> int:
    """Returns the last recorded step of a run; -1 if there is none."""
    path = out / "metrics.jsonl"
    if not path.exists():
        return -1
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2000))
        lines = file.read().split(b'{"step": ')
    return int(lines[-1].split(b",")[0]) if len(lines) > 1 and b"," in lines[-1] else -1


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]
