"""Checks and timings on a GPU; needs only JAX, flax, optax and tyro.

`python -m benchmarks.gpu --sections kernels operators determinism` checks every kernel against its
definition in float64, on random inputs and with poisoned results. It times each kernel beside XLA's
program for the definition and beside a copy of the same number of bytes. Then it checks the
gradients of the operators, and runs steps of every method twice to compare the bits. `--sections
steps --models llama_1b` times whole steps of plain JAX and of every method, each in a separate
process, round after round, with the peak of the device's memory and the loss. Sections, models and
rivals can be run in parts; each result is written as soon as it exists. Without a GPU, kernels are
interpreted on small shapes and nothing is timed.
"""

import dataclasses
import functools
import json
import os
import pathlib
import secrets
import subprocess
import sys
import tempfile
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from actjax import kernels
from actjax.kernels.dispatch import Kernel
from benchmarks import operator_check, record
from benchmarks.device_time import interleaved, medians
from benchmarks.kernel_cases import KERNELS
from benchmarks.kernel_cases.case import Case
from benchmarks.kernel_check import check
from benchmarks.rivals import RIVALS, Rival, random_batch, rival
from benchmarks.tables import print_table
from benchmarks.variants import check_names
from benchmarks.whole_step import Job, summary
from models import preset
from train.config import PretrainConfig

Section = Literal["kernels", "operators", "determinism", "steps"]


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    sections: tuple[Section, ...] = ("kernels", "operators", "determinism", "steps")
    """Sections to run, in this order."""
    only: tuple[str, ...] = tuple(KERNELS)
    """Kernels to check and time."""
    models: tuple[str, ...] = ("llama_60m", "llama_350m", "llama_1b")
    """Models whose whole steps are timed."""
    rivals: tuple[str, ...] = (
        "plain",
        "jax.checkpoint, dots",
        "jax.checkpoint, full",
        "jax.checkpoint, dots offloaded",
        "exact",
        "pamm",
        "low_rank 32",
        "subspace d/4",
        "subspace d/16",
        "gact, 4 bits",
        "quantized, 4 bits",
        "compressed_remat",
        "lean",
        "lean_subspace d/4",
    )
    """Rivals to time, from `benchmarks.rivals`; ratios are to the first."""
    batch_size: int = 8
    """Sequences in a step."""
    seq_len: int = 1024
    """Tokens in a sequence."""
    warmup: int = 3
    """Steps that are not timed."""
    steps: int = 12
    """Timed steps of a rival in a round."""
    rounds: int = 2
    """Rounds over all rivals."""
    seconds: float = 180
    """Longest time of a rival in a round, in seconds."""
    results: pathlib.Path = record.RESULTS / "gpu.json"

    def __post_init__(self) -> None:
        check_names(self.only, tuple(KERNELS))
        check_names(self.rivals, RIVALS)
        for model in self.models:
            preset(model)


def run(config: Config) -> dict[str, Any]:
    """Runs the sections, and writes the result of each as soon as it exists."""
    found: dict[str, Any] = {}
    for section in config.sections:
        _SECTIONS[section](config, found)
    return found


def _write(config: Config, found: dict[str, Any]) -> None:
    record.write(config, found.get("steps", []), **{k: v for k, v in found.items() if k != "steps"})


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


# Kernels.


def _kernels(config: Config, found: dict[str, Any]) -> None:
    seed = secrets.randbits(31)
    rows = found["kernels"] = []
    for name in config.only:
        kernel, cases = KERNELS[name]
        for case in cases:
            if not (_on_gpu() or case.small):
                continue
            rows.append({"kernel": name, "case": case.name, "seed": seed})
            try:
                rows[-1] |= check(kernel, case, seed, "pallas" if _on_gpu() else "interpreted")
                if _on_gpu() and not case.small:
                    rows[-1] |= _timed(kernel, case)
            except Exception as error:
                # A kernel that fails must not lose the results of the others.
                rows[-1] |= {"ok": False, "failure": f"{type(error).__name__}: {error}"[:500]}
    _write(config, found)
    _show_kernels(rows)


def _timed(kernel: Kernel, case: Case) -> dict[str, Any]:
    """Returns times of a kernel, of XLA's program and of a copy of as many bytes, in seconds."""
    least = case.least_bytes(kernel.reference)
    # Enough tokens that a call takes longer than its launch and does not fit into a cache.
    longer = case.longer(-(-600_000_000 // least))
    least = longer.least_bytes(kernel.reference)
    args = jax.jit(longer.make)(jax.random.key(0))
    source = jax.random.bits(jax.random.key(1), (least // 2,), jnp.uint8)
    ours = jax.jit(functools.partial(kernel, implementation="pallas", **case.options))
    plain = jax.jit(functools.partial(kernel.reference, **case.options))
    copy = jax.jit(lambda x: x ^ 1)
    seconds = interleaved(
        {"kernel": lambda: ours(*args), "xla": lambda: plain(*args), "copy": lambda: copy(source)}
    )
    middle = medians(seconds)
    return {
        "bytes": least,
        "seconds": seconds,
        "bandwidth": least / middle["kernel"],
        "share_of_copy": middle["copy"] / middle["kernel"],
        "of_xla": middle["kernel"] / middle["xla"],
    }


def _show_kernels(rows: list[dict[str, Any]]) -> None:
    headers = ("kernel, case", "ok", "error", "differing", "us", "TB/s", "of a copy", "of XLA's")
    cells = []
    for row in rows:
        timed = "seconds" in row
        middle = medians(row["seconds"])["kernel"] if timed else 0
        cells.append(
            (
                f"{row['kernel']}, {row['case']}",
                str(row["ok"]) if "failure" not in row else row["failure"][:60],
                f"{row.get('error', 0):.1e}",
                f"{row.get('differing', 0):.1e}",
                f"{middle * 1e6:,.1f}" if timed else "",
                f"{row['bandwidth'] / 1e12:.2f}" if timed else "",
                f"{row['share_of_copy']:.2f}" if timed else "",
                f"{row['of_xla']:.2f}" if timed else "",
            )
        )
    how = "compiled" if _on_gpu() else "interpreted, without a GPU"
    print_table(f"Kernels, {how}, against float64", headers, cells)


# Operators.


def _operators(config: Config, found: dict[str, Any]) -> None:
    seed = secrets.randbits(31)
    rows = found["operators"] = []
    for name, case in operator_check.CASES.items():
        rows.append({"operator": name, "seed": seed})
        try:
            rows[-1] |= operator_check.check(case, seed, None if _on_gpu() else "interpreted")
        except Exception as error:
            rows[-1] |= {"ok": False, "failure": f"{type(error).__name__}: {error}"[:500]}
    _write(config, found)
    print_table(
        "Gradients of operators in bfloat16, against float64",
        ("operator", "ok", "error"),
        [
            (row["operator"], str(row["ok"]), row.get("failure") or f"{row['error']:.1e}")
            for row in rows
        ],
    )


# Determinism, and agreement of whole gradients.


def _determinism(config: Config, found: dict[str, Any]) -> None:
    implementation = "pallas" if _on_gpu() else "interpreted"
    rows = found["determinism"] = []
    for name in config.rivals:
        train: Any = PretrainConfig(
            model="llama_3m", batch_size=2, seq_len=64, weight_dtype="float32",
            compute_dtype="float32",
        )  # fmt: skip
        one = rival(name, train)
        batch = random_batch(train, preset(train.model).vocab_size)
        state = jax.jit(one.init)()
        if one.refresh is not None:
            state, _ = jax.jit(one.refresh)(state, batch)

        program = _step_by(one, implementation)
        first, second = (jax.tree.map(np.asarray, program(state, batch)) for _ in range(2))
        plain = jax.tree.map(np.asarray, _step_by(one, "reference")(state, batch))
        leaves = [jax.tree.leaves(x[0].model) for x in (first, second, plain)]
        start = [np.asarray(x) for x in jax.tree.leaves(state.model)]
        moved = _norm([a - b for a, b in zip(leaves[2], start, strict=True)])
        apart = _norm([a - b for a, b in zip(leaves[0], leaves[2], strict=True)])
        same = all(
            np.array_equal(a, b)
            for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
        )
        rows.append({"rival": name, "same_bits": same, "apart": apart / moved})
    _write(config, found)
    print_table(
        f"A step of llama_3m, kernels {implementation}",
        ("rival", "same bits twice", "from the step without kernels, of the step"),
        [(row["rival"], str(row["same_bits"]), f"{row['apart']:.1e}") for row in rows],
    )


def _step_by(one: Rival, implementation: kernels.Implementation) -> Any:
    """Returns a jitted step that computes kernels by an implementation."""

    def step(state: Any, batch: Any) -> Any:
        with kernels.use(implementation):
            return one.step(state, batch)

    return jax.jit(step)


def _norm(arrays: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in arrays)))


# Whole steps.


def _steps(config: Config, found: dict[str, Any]) -> None:
    rows: list[dict[str, Any]] = []
    found["steps"] = rows
    with tempfile.TemporaryDirectory() as cache:
        for model in config.models:
            mine = [{"model": model, "rival": name, "rounds": []} for name in config.rivals]
            rows.extend(mine)
            for _ in range(config.rounds):
                for row in mine:
                    row["rounds"].append(_one(config, model, row["rival"], cache))
                    _write(config, found)
            _show_steps(config, mine)


def _one(config: Config, model: str, name: str, cache: str) -> dict[str, Any]:
    """Runs a rival in a separate process; returns what it printed, or why it failed."""
    job = Job(
        rival=name,
        model=model,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        dtype="bfloat16" if _on_gpu() else "float32",
        warmup=config.warmup,
        steps=config.steps,
        implementation=None if _on_gpu() else "interpreted",
    )
    command = [sys.executable, "-m", "benchmarks.whole_step", json.dumps(dataclasses.asdict(job))]
    # The child needs the device's memory, so this process holds little.
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=config.seconds, env=environment,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failure": f"took more than {config.seconds:g} seconds"}
    if done.returncode != 0:
        return {"failure": done.stderr[-500:] or f"ended with {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def _show_steps(config: Config, rows: list[dict[str, Any]]) -> None:
    first = next((one for row in rows if (one := summary(row["rounds"])) is not None), None)
    tokens = config.batch_size * config.seq_len
    cells = []
    for row in rows:
        one = summary(row["rounds"])
        if one is None:
            why = next(one["failure"] for one in row["rounds"] if "failure" in one)
            cells.append((row["rival"], why[-60:], *[""] * 6))
            continue
        against = one if first is None else first
        cells.append(
            (
                row["rival"],
                f"{one['seconds'] * 1e3:,.1f}",
                f"{tokens / one['seconds']:,.0f}",
                f"{against['seconds'] / one['seconds']:.3f}",
                f"{one['memory'] / 2**30:.2f}" + ("" if one["peak"] else " (planned)"),
                f"{one['memory'] / against['memory']:.3f}",
                f"{one['matmul_flops'] / one['seconds'] / 1e12:,.2f}",
                f"{one['loss']:.4f}",
            )
        )
    headers = ("rival", "ms", "tokens/s", "/ first", "peak GiB", "/ first", "TFLOP/s", "last loss")
    title = f"{rows[0]['model']}, {config.batch_size} x {config.seq_len}, {jax.devices()[0]}"
    print_table(title, headers, cells)


_SECTIONS = {
    "kernels": _kernels,
    "operators": _operators,
    "determinism": _determinism,
    "steps": _steps,
}


def main() -> None:
    # The processes that run steps need the memory of the device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    run(tyro.cli(Config, description=__doc__, config=(tyro.conf.OmitArgPrefixes,)))


if __name__ == "__main__":
    main()
