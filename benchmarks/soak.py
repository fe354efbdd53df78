"""A long run under random kills, compared with the same run unbroken.

`python -m benchmarks.soak` trains `llama_3m` for 10,000 steps with the default method, once
unbroken and once under forty signals, SIGKILL or SIGTERM, at random moments: while it starts,
between steps, and while a checkpoint is written. Each time the same command is started again with
`--resume`. Then it compares the two: arrays of the last checkpoint bit for bit, recorded losses,
and files. Exits with 1 on any difference. `--steps 200 --kills 3 --save-every 20` is short.
"""

import dataclasses
import json
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from benchmarks import command, record
from benchmarks.tables import Cells, print_cells
from train.run.metrics import read_metrics

_ROOT = pathlib.Path(__file__).parents[1]
_PATIENCE = 30.0
"""Seconds that a run has to end after a signal. A scheduler would then kill it."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The run and its kills."""

    steps: int = 10_000
    """Steps of a run."""
    kills: int = 40
    """Signals."""
    vocab_size: int = 8192
    """Vocabulary of the tokenizer."""
    save_every: int = 250
    """Steps between two checkpoints."""
    seed: int = 0
    """Seed of the kills."""
    results: pathlib.Path = record.RESULTS / "soak.json"
    """File of the raw results."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 200), ("kills", 0), ("save_every", 1), ("seed", 0)):
            if getattr(self, name) < least:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"`{flag}` must be at least {least}, got {getattr(self, name)}.")


@dataclasses.dataclass(frozen=True)
class Kill:
    """When and how a run is killed: by SIGKILL or SIGTERM, `delay` seconds after a moment.

    The moment is the `start`, unless the first step comes earlier; the record of a `step`; or the
    begin of the first checkpoint after it, `save`.
    """

    signal: signal.Signals
    moment: str
    step: int
    delay: float


def drawn(count: int, steps: int, start: float, seed: int) -> list[Kill]:
    """Returns random kills in order; `start`: seconds from a start to the first step."""
    rng = np.random.default_rng(seed)
    kills = []
    # None of the last steps: a run goes on for up to a second before it is killed.
    for step in sorted(rng.integers(0, min(int(0.8 * steps), steps - 100), count)):
        moment = str(rng.choice(["start", "step", "step", "save"]))
        longest = {"start": start, "step": 1.0, "save": 0.05}[moment]
        kind = signal.Signals(int(rng.choice([signal.SIGKILL, signal.SIGTERM])))
        kills.append(Kill(kind, moment, int(step), float(rng.uniform(0, longest))))
    return kills


class Life:
    """One start of a run in a folder, which ends by itself or by a signal."""

    def __init__(self, config: Config, root: pathlib.Path) -> None:
        (root / "tmp").mkdir(parents=True, exist_ok=True)
        self.root, self.began = root, time.monotonic()
        self._metrics, self._log = root / "run" / "metrics.jsonl", root / "log.txt"
        self._former = self._metrics.stat().st_ino if self._metrics.exists() else None
        # Evaluated and drawn now and then, as any run is.
        flags = (
            "--resume --model llama_3m --method lean --batch-size 4 --seq-len 32"
            f" --steps {config.steps} --vocab-size {config.vocab_size}"
            f" --save-every {config.save_every} --log-every 10"
            f" --eval-every {config.steps // 10}"
        )
        (root / "rare.yaml").write_text("eval_batches: 2\n")
        folders = ["--out", str(root / "run"), "--data-dir", str(root / "data")]
        folders += ["--config", str(root / "rare.yaml")]
        line = [sys.executable, "-m", "train.pretrain", *flags.split(), *folders]
        variables = {
            "PYTHONPATH": str(_ROOT),
            "TMPDIR": str(root / "tmp"),
            "JAX_COMPILATION_CACHE_DIR": str(root / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        environment = command.environment() | variables
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                line, cwd=_ROOT, env=environment, stdout=log, stderr=log
            )

    def __enter__(self) -> "Life":
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.wait()

    def wait(self, until: Callable[[], bool]) -> bool:
        """Waits for a condition; returns False if the program ends before."""
        while not until():
            if self.process.poll() is not None:
                return False
            time.sleep(0.002)
        return True

    def has_done(self, step: int) -> bool:
        """Whether a step after `step` is recorded. Lines of former lives do not count."""
        begun = self._metrics.exists() and self._metrics.stat().st_ino != self._former
        return begun and _last_step(self._metrics) > step

    def end(self, kill: Kill | None) -> dict[str, Any]:
        """Ends the program by a kill, or waits for its own end; returns its state."""
        reached = kill is not None and self._reach(kill)
        if kill is not None and reached:
            self.process.send_signal(kill.signal)
        try:
            code = self.process.wait(_PATIENCE if reached else None)
        except subprocess.TimeoutExpired:
            code = None
        return {
            "moment": kill.moment if kill and reached else "end",
            "signal": kill.signal.name if kill and reached else None,
            "step": _last_step(self._metrics),
            "code": code,
            "seconds": round(time.monotonic() - self.began, 2),
            "output": self._log.read_text(errors="replace").replace(sys.prefix, "")[-2000:],
        }

    def _reach(self, kill: Kill) -> bool:
        """Waits for the moment of a kill; returns False if the program ends before."""
        began = self.began
        if kill.moment != "start":
            saves = self.root / "run" / "checkpoints"
            if not self.wait(lambda: self.has_done(kill.step)):
                return False
            if kill.moment == "save" and not self.wait(lambda: any(saves.glob("*tmp*"))):
                return False
            began = time.monotonic()
        # With compiled programs a start takes less than the first one, to which the delay refers.
        early = kill.moment == "start"
        return self.wait(
            lambda: time.monotonic() > began + kill.delay or (early and self.has_done(-1))
        )


def _last_step(path: pathlib.Path) -> int:
    """Returns the last recorded step of a run; -1 if there is none."""
    if not path.exists():
        return -1
    lines = path.read_bytes()[-2000:].split(b'{"step": ')
    return int(lines[-1].split(b",")[0]) if len(lines) > 1 and b"," in lines[-1] else -1


def measure(config: Config) -> list[dict[str, Any]]:
    """Returns one row: the kills, and what differs after them."""
    with tempfile.TemporaryDirectory(prefix="actjax-soak-") as folder:
        unbroken, broken = pathlib.Path(folder, "unbroken"), pathlib.Path(folder, "broken")
        with Life(config, unbroken) as life:
            life.wait(lambda: life.has_done(0))
            start = time.monotonic() - life.began
            first = life.end(None)
        print(f"unbroken: {first['seconds']:.0f} s, code {first['code']}", flush=True)
        lives = []
        for kill in [*drawn(config.kills, config.steps, start, config.seed), None]:
            with Life(config, broken) as life:
                lives.append(ending := life.end(kill))
            shown = {name: x for name, x in ending.items() if name != "output"}
            print(f"{len(lives)} of {config.kills + 1}: {shown}", flush=True)
        signals, moments = ([life[name] for life in lives] for name in ("signal", "moment"))
        row = {
            "processes": 1,
            "steps": config.steps,
            "commit": record.environment()["commit"],
            "kills": {name: signals.count(name) for name in ("SIGKILL", "SIGTERM")},
            "moments": {name: moments.count(name) for name in ("start", "step", "save")},
            "seconds_unbroken": first["seconds"],
            "seconds_broken": sum(ending["seconds"] for ending in lives),
            "differences": differences(unbroken, broken),
            "leftovers": sorted(_names(broken) - _names(unbroken)),
        }
    return [row | {"faults": faults_of(row, [first, *lives], config.kills)}]


def faults_of(row: dict[str, Any], lives: list[dict[str, Any]], kills: int) -> list[str]:
    """Returns the faults of a row and its starts, each in a line.

    SIGTERM must end a run after a save, or at once before its first step.
    """
    faults = [f"differs: {name}" for name in row["differences"]]
    faults += [f"left over: {name}" for name in row["leftovers"]]
    allowed = {"SIGKILL": (-signal.SIGKILL,), "SIGTERM": (0, -signal.SIGTERM), None: (0,)}
    faults += [
        f"start {i} ended with {life['code']}: {life['output'][-300:]}"
        for i, life in enumerate(lives)
        if life["code"] not in allowed[life["signal"]] or "Traceback" in life["output"]
    ]
    if (count := sum(row["kills"].values())) != kills:
        faults.append(f"{count} of {kills} kills met a run that was still alive")
    return faults


def differences(unbroken: pathlib.Path, killed: pathlib.Path) -> list[str]:
    """Returns the differences of a killed run: arrays, losses, and files that are missing."""
    (step, arrays), (other_step, other_arrays) = map(_last_state, (unbroken, killed))
    if step != other_step or arrays.keys() != other_arrays.keys():
        return [f"checkpoints of step {step} and {other_step}, or with other arrays"]
    differing = [name for name, x in arrays.items() if x.tobytes() != other_arrays[name].tobytes()]
    logs = [_losses(root) for root in (unbroken, killed)]
    differing += [f"the recorded losses ({len(logs[0])} and {len(logs[1])})"] * (logs[0] != logs[1])
    return differing + [f"missing: {name}" for name in sorted(_names(unbroken) - _names(killed))]


def _last_state(root: pathlib.Path) -> tuple[int, dict[str, np.ndarray]]:
    folder = root / "run" / "checkpoints"
    step = max(int(path.name) for path in folder.iterdir() if path.name.isdigit())
    path = (folder / str(step) / "state").absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
            checkpointer.metadata(path).item_metadata.tree,
        )
        leaves = jax.tree_util.tree_flatten_with_path(checkpointer.restore(path, like))[0]
    return step, {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def _losses(root: pathlib.Path) -> list[str]:
    lines = read_metrics(root / "run" / "metrics.jsonl")
    return [
        json.dumps({k: v for k, v in x.items() if not k.endswith("_per_second")}) for x in lines
    ]


def _names(root: pathlib.Path) -> set[str]:
    """Returns the paths of all files, without the parts of names that differ in any two runs."""
    paths = (path for part in ("run", "data", "tmp") for path in (root / part).rglob("*"))
    names = {str(path.relative_to(root)) for path in paths}
    # SIGTERM saves between two regular checkpoints, so only their number is compared.
    count = len([name for name in names if re.fullmatch(r"run/checkpoints/\d+", name)])
    names = {re.sub(r"^run/checkpoints/\d+", "run/checkpoints/*", name) for name in names}
    # Every start begins a file of TensorBoard. Files of arrays have random names.
    names = {re.sub(r"(events\.out\.tfevents)\..*", r"\1", name) for name in names}
    names = {re.sub(r"(/d/)[0-9a-f]{16,}", r"\1*", name) for name in names}
    return names | {f"run/checkpoints, {count} of them"}


def table(rows: list[dict[str, Any]]) -> Cells:
    """Returns the kills, and the differences after them."""
    return [
        {
            "processes": str(row["processes"]),
            "steps": f"{row['steps']:,}",
            "commit": row["commit"],
            **{name: str(count) for name, count in row["kills"].items()},
            "at start / step / save": " / ".join(str(n) for n in row["moments"].values()),
            "differences": str(len(row["differences"])),
            "left over": str(len(row["leftovers"])),
            "minutes, unbroken / killed": " / ".join(
                f"{row[f'seconds_{which}'] / 60:.1f}" for which in ("unbroken", "broken")
            ),
        }
        for row in rows
    ]


def main() -> None:
    """Reads the command line, runs, prints and writes. Exits with 1 on a fault."""
    config = command.settings(Config, __doc__)
    # As an exception: a program that runs ends with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rows = measure(config)
    record.write(config, rows)
    print_cells(f"llama_3m, lean, seed {config.seed}", table(rows))
    print("\n".join(fault for row in rows for fault in row["faults"]))
    sys.exit(any(row["faults"] for row in rows))


if __name__ == "__main__":
    main()
