"""Kernels against their definitions in float64, XLA's programs, and a copy of as many bytes."""

import concurrent.futures
import functools
import multiprocessing
import os
import secrets
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from actjax.kernels.dispatch import Implementation, Kernel
from benchmarks import operator_check
from benchmarks.gpu.steps import Rows, attempt
from benchmarks.kernel_cases import KERNELS
from benchmarks.kernel_cases.case import Case
from benchmarks.kernel_check import check
from benchmarks.timing import interleaved

_LEAST_BYTES = 600_000_000
"""Enough that a call takes longer than its launch and does not fit into a cache."""
Unit = dict[str, str]
"""The names of a kernel and a case, or of an operator."""


def case_units(small: bool | None = None) -> list[Unit]:
    """Returns kernels and their cases: the small ones, the others, or all."""
    pairs = [(name, case) for name, (_, cases) in KERNELS.items() for case in cases]
    return [{"kernel": name, "case": x.name} for name, x in pairs if small in (None, x.small)]


def _first_cases(units: list[Unit]) -> list[Unit]:
    return list({unit["kernel"]: unit for unit in reversed(units)}.values())[::-1]


def _find_case(unit: Unit) -> tuple[Kernel, Case]:
    kernel, cases = KERNELS[unit["kernel"]]
    return kernel, next(case for case in cases if case.name == unit["case"])


def _takes_triton(unit: Unit) -> bool:
    """Returns whether a second program of a kernel, written in Triton, can run a case."""
    kernel, case = _find_case(unit)
    return kernel.refusal("triton", case.shapes(), dict(case.options)) is None


def _usual(kernel: Kernel, implementation: Implementation) -> Implementation | None:
    """Returns the implementation to ask a kernel for; None if its parts have it, not the whole."""
    return None if kernel.pallas is None else implementation


def check_kernels(dry: bool) -> Rows:
    """Compares kernels with their definitions; the dry run one small case of each."""
    units = _first_cases(case_units(small=True)) if dry else case_units()
    return _checked(_check_kernel, units, dry)


def check_operators(dry: bool) -> Rows:
    """Compares gradients of operators in bfloat16 with those in float64; the dry run of one."""
    units = [{"operator": name} for name in operator_check.CASES]
    return _checked(_check_operator, units[: 1 if dry else None], dry)


def _checked(run: Callable[[Unit], Any], units: list[Unit], dry: bool) -> Rows:
    """Returns a row for each unit, from several processes on a GPU; a dry run raises an error."""
    if dry:
        if bad := [row for row in (run(unit) for unit in units) if not row["ok"]]:
            raise RuntimeError(f"{len(bad)} checks failed: {bad}")
        return [{"checked": f"{', '.join(next(iter(unit.values())) for unit in units)} agree"}]
    # The processes share the memory of the device.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    context, count = multiprocessing.get_context("spawn"), min(12, os.cpu_count() or 1)
    with concurrent.futures.ProcessPoolExecutor(count, mp_context=context) as pool:
        futures = [pool.submit(run, unit) for unit in units]
    rows = zip(units, futures, strict=True)
    return [{**unit, "ok": False, **attempt(x.result)} for unit, x in rows]


def _check_kernel(unit: Unit) -> dict[str, Any]:
    seed, on_gpu = secrets.randbits(31), jax.default_backend() == "gpu"
    kernel, case = _find_case(unit)
    result = check(kernel, case, seed, _usual(kernel, "pallas" if on_gpu else "interpreted"))
    if on_gpu and _takes_triton(unit):
        in_triton = check(kernel, case, seed, "triton")
        result |= {"triton": in_triton, "ok": result["ok"] and in_triton["ok"]}
    return {"seed": seed, **result}


def _check_operator(unit: Unit) -> dict[str, Any]:
    seed, case = secrets.randbits(31), operator_check.CASES[unit["operator"]]
    implementation = None if jax.default_backend() == "gpu" else "interpreted"
    return {"seed": seed, **operator_check.check(case, seed, implementation)}


def time_kernels(dry: bool, *, in_triton: bool = False) -> Rows:
    """Times large cases; the dry run lowers the first of each kernel.

    Raises:
      RuntimeError: no case has one that can run here.
    """
    units = [x for x in case_units(small=False) if not in_triton or _takes_triton(x)]
    if not units:
        raise RuntimeError("no program in Triton can run: is jax-triton installed?")
    if not dry:
        return time_units(units)
    firsts = _first_cases(units)
    for kernel, case in map(_find_case, firsts):
        asked = "triton" if in_triton else _usual(kernel, "pallas")
        run = functools.partial(kernel, implementation=asked, **case.options)
        # That compiles programs in Triton; XLA compiles the others later.
        jax.jit(run).trace(*case.shapes()).lower(lowering_platforms=("cuda",))
    return [{"checked": f"lowered {', '.join(unit['kernel'] for unit in firsts)}"}]


def time_units(units: list[Unit]) -> Rows:
    """Returns times of kernels, of XLA and of a copy: all are compiled first."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(functools.partial(attempt, _compiled), units))
    return [unit | attempt(_times, x) for unit, x in zip(units, compiled, strict=True)]


def _compiled(unit: Unit) -> dict[str, Any]:
    """Returns the bytes of a case, and by name its compiled programs with their arguments."""
    kernel, case = _find_case(unit)
    longer = case.longer(-(-_LEAST_BYTES // case.least_bytes(kernel.reference)))
    least, key = longer.least_bytes(kernel.reference), jax.random.key(0)
    # Words: XLA's copy of bytes reaches half the bandwidth.
    source = jax.jit(lambda key: (jax.random.bits(key, (least // 8,), jnp.uint32),))
    make = jax.jit(longer.make)
    run = functools.partial(kernel, **case.options)
    programs = {
        "kernel": (make, functools.partial(run, implementation=_usual(kernel, "pallas"))),
        "xla": (make, functools.partial(kernel.reference, **case.options)),
        "copy": (source, lambda x: x ^ 1),
    }
    if _takes_triton(unit):
        programs["triton"] = make, functools.partial(run, implementation="triton")
    return {"bytes": least} | {
        name: (make, jax.jit(run).lower(*jax.eval_shape(make, key)).compile())
        for name, (make, run) in programs.items()
    }


def _times(compiled: dict[str, Any]) -> dict[str, Any]:
    if "failure" in compiled:
        return compiled
    key, least = jax.random.key(0), compiled.pop("bytes")
    arguments = {make: make(key) for make, _ in compiled.values()}
    seconds = interleaved(
        {name: functools.partial(run, *arguments[make]) for name, (make, run) in compiled.items()},
        rounds=7,
        calls=20,
    )
    median = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "bytes": least,
        "seconds": seconds,
        "bandwidth": least / median["kernel"],
        "share_of_copy": median["copy"] / median["kernel"],
        "of_xla": median["kernel"] / median["xla"],
        "triton_of_pallas": median["triton"] / median["kernel"] if "triton" in median else None,
    }
