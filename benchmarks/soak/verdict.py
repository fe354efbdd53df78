"""What must be equal in a run that was killed and in one that was not."""

import json
import math
import pathlib
import re
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from benchmarks.soak.lives import Folders
from benchmarks.tables import Cells, cell
from train.run.metrics import read_metrics

MOST_GROWTH = 0.05
"""A memory leaks if its largest use grows by more from the first half of a run to the second."""
LEAST_STEPS = 1000
"""Steps below which the memory of a run is not judged: it still fills its caches."""


def differences(one: Folders, other: Folders) -> list[str]:
    """Returns what differs between the ends of two runs: arrays, bits for bit, losses, and files.

    Of files: those that `other` does not have. `leftovers` are those that it has and `one` has not.
    """
    states = [_last_state(folders.out) for folders in (one, other)]
    (step, arrays), (other_step, other_arrays) = states
    if step != other_step or arrays.keys() != other_arrays.keys():
        return [f"checkpoints of step {step} and {other_step}, or with other arrays"]
    found = [name for name, x in arrays.items() if x.tobytes() != other_arrays[name].tobytes()]
    logs = [_losses(folders.out) for folders in (one, other)]
    found += [f"the recorded losses ({len(logs[0])} and {len(logs[1])})"] * (logs[0] != logs[1])
    return found + [f"missing: {name}" for name in _superfluous(other, one)]


def leftovers(one: Folders, other: Folders) -> list[str]:
    """Returns the files of a run that the unbroken run `one` does not have, and temporary files.

    Every start of a run begins a file of TensorBoard, which reads all of them: these do not count.
    """
    return _superfluous(one, other) + [
        f"tmp/{path.name}" for path in sorted(other.temporary.iterdir())
    ]


def _superfluous(one: Folders, other: Folders) -> list[str]:
    """Returns the files of the run and of the prepared text that `one` does not have."""
    pairs = ((one.out, other.out), (one.data, other.data))
    return [f"{b.name}/{name}" for a, b in pairs for name in sorted(_names(b) - _names(a))]


def memory(folders: Folders, processes: int, steps: int) -> list[dict[str, Any]]:
    """Returns, for each process and for host and device, bytes early, late, and the growth.

    Early and late are the largest samples of the two halves of the run. Most samples fall into a
    step, where one state, two or none may be alive. All three are None for a run of fewer than
    `LEAST_STEPS`.
    """
    rows = []
    for i in range(processes):
        path = folders.root / f"memory-{i}.txt"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        samples = np.array([[float(x) for x in line.split()] for line in lines]).reshape(-1, 2)
        half = len(samples) // 2
        for j, name in enumerate(("host", "device")):
            row: dict[str, Any] = {"process": i, "memory": name, "samples": len(samples)}
            rows.append(row | {"early": None, "late": None, "growth": None})
            if steps >= LEAST_STEPS and len(samples) > 1:
                early, late = float(samples[:half, j].max()), float(samples[half:, j].max())
                growth = late / early - 1 if early else (math.inf if late else 0.0)
                rows[-1] = row | {"early": early, "late": late, "growth": growth}
    return rows


def table(rows: list[dict[str, Any]]) -> Cells:
    """Returns what was killed and what was equal after it, a row for each number of processes."""
    return [
        {
            "processes": str(row["processes"]),
            "steps": f"{row['steps']:,}",
            "commit": row["commit"],
            **{name: str(count) for name, count in row["kills"].items()},
            "at start / step / save": " / ".join(str(n) for n in row["moments"].values()),
            "differences": str(len(row["differences"])),
            "left over": str(len(row["leftovers"])),
            "growth of host / device memory": " / ".join(
                _growth(row["memory"], name) for name in ("host", "device")
            ),
            "minutes, unbroken / killed": " / ".join(
                f"{row[f'seconds_{which}'] / 60:.1f}" for which in ("unbroken", "broken")
            ),
        }
        for row in rows
    ]


def _growth(rows: list[dict[str, Any]], name: str) -> str:
    """Returns the largest growth of a memory over processes."""
    values = [row["growth"] for row in rows if row["memory"] == name]
    return "too short" if None in values else cell(max(map(float, values)), "+.1%")


def _last_state(out: pathlib.Path) -> tuple[int, dict[str, np.ndarray]]:
    steps = [int(p.name) for p in (out / "checkpoints").iterdir() if p.name.isdigit()]
    folder = out / "checkpoints" / str(max(steps)) / "state"
    with ocp.StandardCheckpointer() as checkpointer:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        metadata = checkpointer.metadata(folder.absolute()).item_metadata
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), metadata.tree
        )
        state = checkpointer.restore(folder.absolute(), like)
    paths = jax.tree_util.tree_flatten_with_path(state)[0]
    return max(steps), {jax.tree_util.keystr(path): np.asarray(x) for path, x in paths}


def _losses(out: pathlib.Path) -> list[str]:
    lines = read_metrics(out / "metrics.jsonl")
    kept = [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]
    return [json.dumps(line) for line in kept]


def _names(folder: pathlib.Path) -> set[str]:
    """Returns the paths of all files, without what differs between any two runs in their names."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    checkpoints = {name for name in names if re.fullmatch(r"checkpoints/\d+", name)}
    # SIGTERM saves between two regular checkpoints, so only their number is compared.
    names = {re.sub(r"^checkpoints/\d+", "checkpoints/*", name) for name in names}
    names |= {f"checkpoints, {len(checkpoints)} of them"} if checkpoints else set()
    names = {re.sub(r"(tensorboard/events\.out\.tfevents)\..*", r"\1", name) for name in names}
    # Names of the files of arrays are random.
    return {re.sub(r"(/d/)[0-9a-f]{16,}", r"\1*", name) for name in names}
