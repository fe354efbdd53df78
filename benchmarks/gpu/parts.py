"""The parts of the queue for a GPU, in their order.

The first are for changed kernels: do they agree, and what do steps gain. The last repeat what was
measured before, for another version of JAX or another GPU.
"""

import dataclasses
import math
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.gpu import kernels, trace
from benchmarks.gpu.queue import Part
from benchmarks.gpu.steps import (
    Rows,
    Setting,
    Steps,
    attempt,
    compile_only,
    compiled_for_gpu,
    time_steps,
)

_NO_BUFFERS = {"xla_gpu_enable_command_buffer": ""}
_DOUBLE = "xla_gpu_enable_while_loop_double_buffering"
_SMALL_STATES, _ON_HOST = "lean, 4-bit and factored", "lean, states on the host"
_PROFILED, _PROFILED_STEPS = ("exact", "lean", "jax.checkpoint, full"), 3
_CARD_GIB = 22
"""Memory of a card of 24 GB without what the driver and CUDA take."""
_METHODS = (
    "plain", "jax.checkpoint, dots", "jax.checkpoint, full", "jax.checkpoint, dots offloaded",
    "exact", "pamm", "low_rank 32", "subspace d/4", "subspace d/16", "gact, 4 bits",
    "quantized, 4 bits", "compressed_remat", "lean", _SMALL_STATES, "lean_subspace d/4",
)  # fmt: skip


def profile(dry: bool) -> Rows:
    """Profiles steps by kernel, without command buffers, which would hide what launched a kernel.

    The dry run compiles them for a GPU, finds the kinds of their instructions, and profiles a step
    of a small model on this machine.
    """
    settings = [Setting(name, options=_NO_BUFFERS) for name in _PROFILED]
    if not dry:
        return _profiles(settings)
    rows = [{"checked": f"{setting.name} has {_kinds_for_gpu(setting)}"} for setting in settings]
    small = Setting("lean", model="llama_3m", batch_size=2, seq_len=64)
    (here,) = _profiles([small])
    shares = [f"{kind} {100 * x['share']:.0f}%" for kind, x in here["kinds"].items()]
    return [*rows, {"checked": f"a profile of llama_3m on this CPU: {', '.join(shares)}"}]


def _profiles(settings: list[Setting]) -> Rows:
    steps = Steps(settings)
    rows = [{"name": setting.name, "model": setting.model} for setting in settings]
    return [{**row, **attempt(_profile, steps, i)} for i, row in enumerate(rows)]


def _profile(steps: Steps, i: int) -> dict[str, Any]:
    if "failure" in (first := steps.run(i, 2)):
        return first
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            seconds = steps.run(i, _PROFILED_STEPS)["seconds"]
        events = trace.read_events(pathlib.Path(folder))
    summary = trace.summary(events, steps.programs[i]["step"].as_text(), _PROFILED_STEPS)
    return {"wall_ms": 1e3 * seconds, **summary}


def _kinds_for_gpu(setting: Setting) -> str:
    """Returns the kinds of the instructions of a step for a GPU; an error if one is missing."""
    program = trace.instructions(compiled_for_gpu(setting).as_text())
    kinds = {trace.category(trace.Event(name, name), program) for name in program}
    if missing := trace.KINDS - kinds:
        raise RuntimeError(f"{setting.name} lacks {', '.join(missing)}.")
    return ", ".join(["all kinds", *sorted(kind for kind in kinds - trace.KINDS if kind)])


def _steps(
    *settings: Setting, compiled: Sequence[Setting] | None = None, **options: Any
) -> Callable[[bool], Rows]:
    """Returns a part that times settings in turn.

    Args:
      *settings: steps.
      compiled: steps that the dry run compiles; those that `profile` does not compile if None.
      **options: as for `time_steps`.
    """
    if compiled is None:
        names = {x.name for x in settings if x.options == _NO_BUFFERS} | {*_PROFILED}
        compiled = [x for x in settings if x.name not in names]
    return lambda dry: compile_only(compiled) if dry else time_steps(settings, **options)


_REMAT = "remat, 8-bit states, in backward"


def _products(step: str, ffn_size: int = 0, *, in_triton: bool = False) -> Setting:
    width, written_in = f", width {ffn_size}" * (ffn_size > 0), "Triton" if in_triton else "cuBLAS"
    options = {"xla_gpu_enable_triton_gemm": in_triton}
    return Setting(f"{step}{width}, {written_in}", step, ffn_size=ffn_size, options=options)


_WIDTHS = [
    _products("exact", size, in_triton=in_triton)
    for size in (5461, 5504)
    for in_triton in (True, False)
]
"""Rows of 5461 and of 5504 numbers, with products in Triton and without. Models store both as 5504;
the committed results are of a version that stored 5461 as it is."""
_PRODUCTS = [
    *map(_products, ("exact", "lean", "jax.checkpoint, full", "jax.checkpoint, dots", _REMAT,
                     "compressed_remat", "lean_subspace d/4")),
    _products("lean", in_triton=True),
    _products("lean", 5504, in_triton=True),
    _products("lean", 5504),
]  # fmt: skip
_LOOPS = (
    Setting("exact"),
    Setting("exact, unrolled by 2", "exact", unroll=2),
    Setting("exact, double buffers", "exact", options={_DOUBLE: True}),
    Setting("exact, no command buffers", "exact", options=_NO_BUFFERS),
    # Not unrolled, whose backward loop is no `scan`, nor twice, which takes minutes to compile.
    Setting("lean"),
    Setting("lean, no command buffers", "lean", options=_NO_BUFFERS),
)
_MICRO_BATCHES = [
    Setting(f"{name}, {size} in {count}", name, batch_size=size, accumulate=count)
    for name, size, count in (
        ("exact", 32, 4), ("lean", 32, 4), ("lean", 64, 8), ("exact", 64, 8), ("lean", 64, 2)
    )
]  # fmt: skip
# Compiled, small states take 22.39 GiB with 2,048 tokens; those on the host 20.49 with 4,096.
_LLAMA3_8B = [
    Setting(_ON_HOST, "", "llama3_8b", 2, 2048),
    Setting(_SMALL_STATES, "", "llama3_8b", 1, 1024),
]
"""Steps for an allocator that gives no more than a card of 24 GB has."""


_IN_PLACE = {
    name: [Setting(name), Setting(f"{name}, slices", name, in_place=False)]
    for name in ("lean", "exact")
}


def in_place(dry: bool) -> Rows:
    """Compares steps whose kernels read and write stacks with those of slices; times all."""
    if dry:
        return [row for pair in _IN_PLACE.values() for row in compile_only(pair[1:])]
    checks = [_compared(name, pair) for name, pair in _IN_PLACE.items()]
    return checks + time_steps([x for pair in _IN_PLACE.values() for x in pair])


def _compared(name: str, pair: list[Setting]) -> dict[str, Any]:
    # Its matrices are large enough for updates within kernels.
    small = [dataclasses.replace(x, model="llama_60m", batch_size=2, seq_len=64) for x in pair]
    steps = Steps(small)
    first, *ends = steps.programs[0]["init"](), *(steps.state_after(i, 2) for i in range(2))
    before, one, other = ([*map(np.asarray, jax.tree.leaves(x.model))] for x in (first, *ends))

    def squares(xs: list[np.ndarray], ys: list[np.ndarray]) -> float:
        pairs = zip(xs, ys, strict=True)
        return float(sum(np.sum((x.astype("f8") - y.astype("f8")) ** 2) for x, y in pairs))

    # Relative to the change of the weights; 0 if the two programs round alike.
    error = math.sqrt(squares(one, other) / squares(before, other))
    return {"name": f"{name} in place against slices", "error": error, "ok": error < _SAME}


_SAME = 0.05
"""Most that two steps may differ whose programs are fused, and therefore rounded, in two ways."""


_STEPS = [
    *map(Setting, ("lean", _REMAT, "exact", "jax.checkpoint, full")),
    Setting("lean, definitions", "lean", implementation="reference"),
]


_ALL_METHODS = [Setting(name) for name in _METHODS]
PARTS = (
    Part("kernels", 110, kernels.check_kernels),
    Part("steps", 90, _steps(*_STEPS, compiled=_STEPS[:1])),
    Part("profile", 75, profile),
    Part("blocks", 90, kernels.time_blocks),
    Part("operators", 30, kernels.check_operators),
    Part("width", 40, _steps(*_WIDTHS)),
    Part("in_place", 90, in_place),
    Part("products", 110, _steps(*_PRODUCTS, compiled=_PRODUCTS[-1:], rounds=3)),
    Part("loops", 60, _steps(*_LOOPS)),
    Part("micro_batches", 80,
         _steps(*_MICRO_BATCHES, compiled=_MICRO_BATCHES[-2:], rounds=2, calls=1)),
    Part("llama3_8b", 90, _steps(*_LLAMA3_8B, compiled=_LLAMA3_8B, alone=True), _CARD_GIB),
    Part("host_states", 60, _steps(Setting("lean"), Setting(_ON_HOST))),
    Part("times", 150, kernels.time_kernels),
    Part("methods", 300, _steps(*_ALL_METHODS, compiled=_ALL_METHODS[:1], alone=True)),
)  # fmt: skip
"""Names, seconds that they are expected to take on an H100, and functions; the memory of one of
them is limited. Those of `times` and `methods` were not measured."""
