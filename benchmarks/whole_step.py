"""One rival in a separate process: time of its steps, and the peak of the device's memory.

`benchmarks.gpu` runs it once for each rival and round, and reads the line that it prints. A device
reports the peak of a process, not of a program.
"""

import dataclasses
import json
import pathlib
import statistics
import sys
import sysconfig
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from actjax import kernels
from actjax.optim.host_states import HOST
from benchmarks import memory
from benchmarks.gpu.parts import wait_to_be_alone
from benchmarks.rivals import Rival, compiled_memory, rival
from models import preset
from train.run.loop import with_sharding
from train.run.loss import Batch
from train.run.report import tree_bytes
from train.settings.config import Dtype, PretrainConfig


@dataclasses.dataclass(frozen=True)
class Job:
    """What to run.

    Attributes:
      rival: its name in `benchmarks.rivals`.
      model: name of the preset.
      batch_size: sequences in a step.
      seq_len: tokens in a sequence.
      dtype: dtype of weights and computation.
      warmup: steps that are not timed.
      steps: timed steps.
      implementation: implementation of the kernels, as for `actjax.kernels.use`.
      only_compile: compile the programs, for a cache that another process reads.
    """

    rival: str
    model: str
    batch_size: int
    seq_len: int
    dtype: Dtype
    warmup: int
    steps: int
    implementation: kernels.Implementation | None
    only_compile: bool = False


def measure(job: Job) -> dict[str, Any]:
    """Returns the seconds of each step, the peak in bytes (None on a CPU), and the losses."""
    config: Any = PretrainConfig(
        model=job.model,
        batch_size=job.batch_size,
        seq_len=job.seq_len,
        weight_dtype=job.dtype,
        compute_dtype=job.dtype,
    )
    with kernels.use(job.implementation):
        one = rival(job.rival, config)
        batches = real_batches(config, job.warmup + job.steps)
        programs = compile_rival(one, batches[0])
        if job.only_compile:
            return {}
        flops = memory.operations(one.step, jax.eval_shape(one.init), batches[0])
        # Until this process ends: its memory is the device's until then.
        wait_to_be_alone()
        state = programs.init()
        if programs.refresh is not None:
            state, _ = programs.refresh(state, batches[0])
        seconds, losses = [], []
        for batch in batches:
            begin = time.perf_counter()
            state, metrics = jax.block_until_ready(programs.step(state, batch))
            seconds.append(time.perf_counter() - begin)
            losses.append(float(metrics["loss"]))
    stats = jax.local_devices()[0].memory_stats() or {}
    on_host = [x for x in jax.tree.leaves(state) if x.sharding.memory_kind == HOST]
    return {
        "on_host": tree_bytes(on_host),
        "seconds": seconds[job.warmup :],
        "losses": losses,
        "peak": stats.get("peak_bytes_in_use"),
        "planned_peak": compiled_memory(programs.step)["peak"],
        "matmul_flops": flops,
    }


class Programs(NamedTuple):
    """Compiled programs of a rival; `refresh` is None without refresh steps."""

    init: Any
    refresh: Any
    step: Any


def compile_rival(one: Rival, batch: Batch) -> Programs:
    """Returns the compiled programs of a rival for a batch."""
    state = jax.eval_shape(one.init)
    places: dict[str, Any] = {}
    if one.on_host is None:
        init = jax.jit(one.init).lower().compile()
    else:
        shardings, init = one.on_host()
        state = jax.tree.map(with_sharding, state, shardings)
        places["out_shardings"] = shardings, None
    step, refresh = (
        None if run is None else jax.jit(run, donate_argnums=0, **places).lower(state, batch)
        for run in (one.step, one.refresh)
    )
    return Programs(init, refresh and refresh.compile(), step and step.compile())


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the last of several rounds of a rival, with medians; None if a round failed.

    Args:
      rounds: results of `measure`, or dictionaries with `failure`.

    Returns:
      The last result, where `seconds` is the median over all steps of all rounds, `memory` is the
      peak (the planned peak if the device reports none), and `loss` is the last loss.
    """
    if not rounds or any("failure" in one for one in rounds):
        return None
    seconds = [s for one in rounds for s in one["seconds"]]
    last = rounds[-1]
    memory = last["peak"] or last["planned_peak"]
    return {
        **last,
        "seconds": statistics.median(seconds),
        "memory": memory,
        "loss": last["losses"][-1],
    }


def real_batches(config: PretrainConfig, count: int) -> list[dict[str, jax.Array]]:
    """Returns batches of the bytes of Python's standard library, which every machine has."""
    need = count * config.batch_size * (config.seq_len + 1)
    text = b""
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= need:
            break
    tokens = np.frombuffer(text, np.uint8)
    tokens = np.resize(tokens, need).astype(np.int32) % preset(config.model).vocab_size
    rows = tokens.reshape(count, config.batch_size, config.seq_len + 1)
    mask = jnp.ones((config.batch_size, config.seq_len), jnp.float32)
    return [
        {"inputs": jnp.asarray(row[:, :-1]), "targets": jnp.asarray(row[:, 1:]), "mask": mask}
        for row in rows
    ]


if __name__ == "__main__":
    print(json.dumps(measure(Job(**json.loads(sys.argv[1])))))
