"""Tests of every kernel for NVIDIA GPUs, at the shapes of real models, on a machine without one."""

import functools
import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest
from kernels.kernel_cases import gpu_named

from benchmarks import kernel_cases

KERNELS = {name: entry for name, entry in kernel_cases.KERNELS.items() if entry.kernel.pallas}


@pytest.mark.parametrize("name", KERNELS)
def test_it_lowers_for_cuda(name):
    kernel, cases = KERNELS[name]
    for case in cases:
        assert kernel.refusal("pallas", case.shapes(), dict(case.options)) is None, case.name
    for case in cases[:1]:
        assert triton_kernels(kernel, case, "cuda") == 1, case.name


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_every_case_lowers_for_cuda(name):
    kernel, cases = KERNELS[name]
    for case in cases[1:]:
        assert triton_kernels(kernel, case, "cuda") == 1, case.name


@pytest.mark.parametrize("name", KERNELS)
def test_the_definition_lowers_for_other_platforms(name):
    kernel, cases = KERNELS[name]
    for platform in ("cpu", "tpu"):
        assert triton_kernels(kernel, cases[0], platform) == 0, platform


def triton_kernels(kernel, case, platform) -> int:
    # By default, some cases are XLA's on a GPU too.
    asked = "pallas" if platform == "cuda" else None
    with gpu_named():
        run = functools.partial(kernel, implementation=asked, **case.options)
        traced = jax.jit(run).trace(*case.shapes())
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    return text.count("__gpu$xla.gpu.triton")


@pytest.mark.slow  # The compiler for an H100 takes minutes.
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="needs the compiler for GPUs: pip install -e '.[compile]'",
)
def test_kernels_fit_a_core_without_spills_and_read_and_write_once(tmp_path):
    results = tmp_path / "kernels.json"
    # In its own process: some mistakes in a kernel end the process, others compile for minutes.
    command = [sys.executable, "-m", "benchmarks.kernels", "--results", str(results)]
    command += ["--small", "--no-against-xla"]
    # Without the flags of this process, which turn optimizations off.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(results.read_text())["rows"]
    cases = {(row["kernel"], row["case"]) for row in rows}
    assert cases == {(name, case.name) for name, entry in KERNELS.items() for case in entry[1]}
    for row in rows:
        assert row["spilled"] == 0, row
        # A core has 65,536 registers and 227 KiB of shared memory: room for two programs, whose
        # loads and arithmetic overlap.
        assert 2 * row["registers"] * row["threads"] <= 65536, row
        assert row["shared"] <= 232448, row
        if row["bytes"] < 1e6:
            continue  # For small arrays, sums of programs and seeds count too.
        # Sums of each program, which are added up afterwards, come on top.
        summed = row["kernel"] == "rms_norm_backward"
        assert row["moved"] <= (1.27 if summed else 1.03) * row["bytes"], row
