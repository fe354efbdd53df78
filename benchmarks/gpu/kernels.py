"""Kernels against their definitions in float64, XLA's programs, and a copy of as many bytes."""

import concurrent.futures
import contextlib
import functools
import itertools
import multiprocessing
import os
import secrets
import statistics
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from actjax.kernels.dispatch import Kernel
from benchmarks import operator_check
from benchmarks.gpu.steps import Rows, attempt
from benchmarks.kernel_cases import KERNELS
from benchmarks.kernel_cases.case import Case
from benchmarks.kernel_check import check
from benchmarks.timing import interleaved

_LEAST_BYTES = 600_000_000
"""Enough that a call takes longer than its launch and does not fit into a cache."""
_MOST_PROCESSES = 16
"""They share the memory of the device."""
Unit = dict[str, Any]
"""The names of a kernel and a case, and of a program a block, or of an operator."""


def case_units(small: bool | None = None) -> list[Unit]:
    """Returns kernels and their cases: the small ones, the others, or all."""
    pairs = [(name, case) for name, (_, cases) in KERNELS.items() for case in cases]
    return [{"kernel": name, "case": x.name} for name, x in pairs if small in (None, x.small)]


def _first_cases(units: list[Unit]) -> list[Unit]:
    return list({unit["kernel"]: unit for unit in reversed(units)}.values())[::-1]


def _find_case(unit: Unit) -> tuple[Kernel, Case]:
    kernel, cases = KERNELS[unit["kernel"]]
    return kernel, next(case for case in cases if case.name == unit["case"])


def _lowered(units: list[Unit]) -> Rows:
    """Lowers the first case of each kernel, which compiles its program."""
    firsts = _first_cases(units)
    for kernel, case in map(_find_case, firsts):
        run = functools.partial(kernel, implementation="triton", **case.options)
        jax.jit(run).trace(*case.shapes()).lower(lowering_platforms=("cuda",))
    return [{"checked": f"lowered {', '.join(unit['kernel'] for unit in firsts)}"}]


def check_kernels(dry: bool) -> Rows:
    """Compares kernels with their definitions; the dry run lowers one small case of each."""
    if dry:
        return _lowered(case_units(small=True))
    return _checked(_check_kernel, case_units())


def check_operators(dry: bool) -> Rows:
    """Compares gradients of operators in bfloat16 with those in float64; the dry run of one.

    Raises:
      RuntimeError: that of a dry run differs.
    """
    units = [{"operator": name} for name in operator_check.CASES]
    if not dry:
        return _checked(_check_operator, units)
    row = _check_operator(units[0])
    if not row["ok"]:
        raise RuntimeError(f"a check failed: {row}")
    return [{"checked": f"{units[0]['operator']} agrees"}]


def _checked(run: Callable[[Unit], Any], units: list[Unit]) -> Rows:
    """Returns a row for each unit, from several processes."""
    return [{"ok": False, **row} for row in _in_processes(run, units)]


def _in_processes(run: Callable[[Unit], Any], units: list[Unit]) -> Rows:
    """Returns a row for each unit: what `run` returns, or its error."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    context = multiprocessing.get_context("spawn")
    count = min(_MOST_PROCESSES, os.cpu_count() or 1)
    options: Any = {"mp_context": context, "initializer": _share, "initargs": (context.Lock(),)}
    with concurrent.futures.ProcessPoolExecutor(count, **options) as pool:
        futures = [pool.submit(run, unit) for unit in units]
    return [{**unit, **attempt(x.result)} for unit, x in zip(units, futures, strict=True)]


_alone: Any = contextlib.nullcontext()
"""A lock of all processes: one of them has the device for itself while it measures times."""


def _share(lock: Any) -> None:
    global _alone
    _alone = lock


def _check_kernel(unit: Unit) -> dict[str, Any]:
    seed, (kernel, case) = secrets.randbits(31), _find_case(unit)
    return {"seed": seed, **check(kernel, case, seed, "triton")}


def _check_operator(unit: Unit) -> dict[str, Any]:
    seed, case = secrets.randbits(31), operator_check.CASES[unit["operator"]]
    return {"seed": seed, **operator_check.check(case, seed)}


def time_kernels(dry: bool) -> Rows:
    """Times large cases; the dry run lowers the first of each kernel."""
    units = case_units(small=False)
    return _lowered(units) if dry else _in_processes(_times, units)


def _times(unit: Unit) -> dict[str, Any]:
    """Returns times of a kernel, of XLA's program and of a copy of as many bytes."""
    kernel, case = _find_case(unit)
    longer = _long(kernel, case)
    least = longer.least_bytes(kernel.reference)
    # Words: XLA's copy of bytes reaches half the bandwidth.
    source = jax.jit(lambda key: (jax.random.bits(key, (least // 8,), jnp.uint32),))
    make = jax.jit(longer.make)
    run = functools.partial(kernel, **case.options)
    programs: dict[str, tuple[Any, Callable[..., Any]]] = {
        "kernel": (make, functools.partial(run, implementation="triton")),
        "xla": (make, functools.partial(kernel.reference, **case.options)),
        "copy": (source, lambda x: x ^ 1),
    }
    key = jax.random.key(0)
    compiled = {
        name: (make, jax.jit(run).lower(*jax.eval_shape(make, key)).compile())
        for name, (make, run) in programs.items()
    }
    seconds = _seconds(compiled)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "bytes": least,
        "seconds": seconds,
        "bandwidth": least / median["kernel"],
        "share_of_copy": median["copy"] / median["kernel"],
        "of_xla": median["kernel"] / median["xla"],
    }


def _long(kernel: Kernel, case: Case) -> Case:
    return case.longer(-(-_LEAST_BYTES // case.least_bytes(kernel.reference)))


def _seconds(programs: Mapping[Any, tuple[Any, Callable[..., Any]]]) -> dict[Any, list[float]]:
    """Returns the times of programs, each with a function that makes its arguments from a key."""
    key, makers = jax.random.key(0), {make for make, _ in programs.values()}
    for make in makers:
        make.lower(key).compile()
    with _alone:
        arguments = {make: jax.block_until_ready(make(key)) for make in makers}
        turns = {
            name: functools.partial(run, *arguments[make]) for name, (make, run) in programs.items()
        }
        return interleaved(turns, rounds=7, calls=20)


_TILES = {"TILE": (32, 64), "STEPS": (2, 4, 8), "num_warps": (4, 8), "num_stages": (1, 2)}
_ONE_STAGE = {**_TILES, "num_stages": (1,)}
_ROWS = {"TILE": (8, 16, 32), "num_warps": (2, 4, 8), "num_stages": (1, 2)}
_NUMBERS = {"NUMBERS": (1024, 2048, 4096), "num_warps": (4, 8), "num_stages": (1,)}
_NORMAL = "4 bits, normal levels, balanced, rotated"
Choices = dict[str, tuple[int, ...]]
_BLOCKS: dict[str, tuple[str, str, Choices]] = {
    "actjax_quantize": ("quantize", f"llama_1b gate, {_NORMAL}", _TILES),
    "actjax_dequantize": ("dequantize", f"llama_1b gate, {_NORMAL}", _ONE_STAGE),
    "actjax_swiglu_backward": ("swiglu_backward", f"llama_1b, {_NORMAL}", _ONE_STAGE),
    "actjax_swiglu_encode": ("swiglu_encode", f"llama_1b, {_NORMAL}", _TILES),
    "actjax_rope_encode": ("rope_encode", "llama_1b query, 5 bits, balanced, rotated", _TILES),
    "actjax_rope_decode": ("rope_decode", "llama_1b query, 5 bits, balanced, rotated", _ONE_STAGE),
    "actjax_rms_norm_encode": ("rms_norm_encode", f"llama_1b, {_NORMAL}", _ROWS),
    "actjax_rms_norm_backward": ("rms_norm_backward", "llama_1b, exact", _ROWS),
    "actjax_rms_norm_sums": ("rms_norm_backward", f"llama_1b, {_NORMAL}", _ONE_STAGE),
    "actjax_rms_norm_gradient": ("rms_norm_backward", f"llama_1b, {_NORMAL}", _ONE_STAGE),
    "actjax_adam_8bit": ("adam_8bit", "llama_1b gate", _NUMBERS),
    "actjax_adam_4bit": ("adam_4bit", "llama_1b gate", _NUMBERS),
    "actjax_adam_4bit_maxima": (
        "adam_4bit_maxima", "llama_1b gate", {"num_warps": (1, 2, 4), "num_stages": (1,)}
    ),
}  # fmt: skip
"""By program in Triton: a kernel, its case, and the blocks to measure."""


def time_blocks(dry: bool) -> Rows:
    """Times programs in Triton with other blocks than those of `actjax/kernels/blocks.json`.

    The dry run only counts them.
    """
    units = []
    for program, (kernel, case, choices) in _BLOCKS.items():
        blocks = [dict(zip(choices, x, strict=True)) for x in itertools.product(*choices.values())]
        # A process measures a few, with one set of arguments.
        for i in range(0, len(blocks), 6):
            unit = {"program": program, "kernel": kernel, "case": case}
            units.append({**unit, "blocks": blocks[i : i + 6]})
    if dry:
        count = sum(len(unit["blocks"]) for unit in units)
        return [{"checked": f"{count} blocks of {len(_BLOCKS)} programs"}]
    results = _in_processes(_time_blocks, units)
    return [row for result in results for row in result.pop("rows", [result])]


def _time_blocks(unit: Unit) -> dict[str, Any]:
    from actjax.kernels import triton_call  # It needs jax-triton.

    kernel, case = _find_case(unit)
    longer = _long(kernel, case)
    make, least = jax.jit(longer.make), longer.least_bytes(kernel.reference)
    programs: dict[int, Any] = {}
    rows: Rows = []
    for block in unit["blocks"]:
        jax.clear_caches()  # They have programs of other blocks.
        known = {**triton_call.known_blocks(), unit["program"]: {"8.0": block}}
        row = {"program": unit["program"], "case": unit["case"], "block": block, "bytes": least}
        with mock.patch.object(triton_call, "known_blocks", functools.partial(dict, known)):
            result = attempt(_in_triton, kernel, longer)
        if "run" in result:
            programs[len(rows)] = make, result.pop("run")
        rows.append(row | result)
    for i, seconds in _seconds(programs).items():
        rows[i] |= {"seconds": seconds, "bandwidth": least / statistics.median(seconds)}
    return {"rows": rows}


def _in_triton(kernel: Kernel, case: Case) -> dict[str, Any]:
    """Returns under `run` the compiled program of a case in Triton."""
    run = functools.partial(kernel, implementation="triton", **case.options)
    return {"run": jax.jit(run).lower(*case.shapes()).compile()}
