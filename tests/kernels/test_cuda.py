"""Tests of every kernel for NVIDIA GPUs, at the shapes of real models, on a machine without one."""

import functools
import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest

from actjax.kernels.registry import KERNELS
from benchmarks.hlo import traffic

EVERY = [(name, case) for name, (_, cases) in KERNELS.items() for case in cases]


@pytest.mark.parametrize(("name", "case"), EVERY, ids=lambda x: getattr(x, "name", x))
def test_it_lowers_for_cuda(name, case):
    kernel = KERNELS[name].kernel
    assert kernel.refuses(*case.shapes(), **case.options) is None
    assert triton_kernels(kernel, case, "cuda") == 1


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("name", KERNELS)
def test_the_definition_lowers_for_the_rest(name, platform):
    kernel, cases = KERNELS[name]
    assert triton_kernels(kernel, cases[0], platform) == 0


def triton_kernels(kernel, case, platform) -> int:
    traced = jax.jit(functools.partial(kernel, **case.options)).trace(*case.shapes())
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    return text.count("__gpu$xla.gpu.triton")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What the compiler for an H100 says of every kernel, by kernel and case."""
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        pytest.skip("needs the compiler for GPUs: pip install -e '.[compile]'")
    results = tmp_path_factory.mktemp("kernels") / "kernels.json"
    # In a process of its own: some mistakes in a kernel end it, and others compile for minutes.
    command = [sys.executable, "-m", "benchmarks.kernels", "--results", str(results)]
    command += ["--small", "--no-against-xla"]
    # Not with the flags of this process, which leave optimisations out.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {(row["kernel"], row["case"]): row for row in json.loads(results.read_text())["rows"]}


def test_no_kernel_spills_registers_or_takes_more_than_a_core_has(compiled):
    assert compiled.keys() == {(name, case.name) for name, case in EVERY}
    for row in compiled.values():
        assert row["spilled"] == 0, row
        # A core has 65,536 registers and 227 KiB of shared memory: room for a program at least, and
        # for two, whose loads and arithmetic overlap, where its tiles are not products'.
        assert row["registers"] * row["threads"] <= 65536, row
        assert row["shared"] <= 232448, row
        if row["kernel"] not in ("point_assignment", "scaled_segment_sum"):
            assert 2 * row["registers"] * row["threads"] <= 65536, row


def test_every_kernel_reads_and_writes_once(compiled):
    for row in compiled.values():
        if row["bytes"] < 1e6:
            continue  # Of small arrays what is made beside counts: sums of programs, and seeds.
        # Sums by program, which are added up afterwards, and points, which are normalised before,
        # are what is beyond.
        summed = row["kernel"] in ("rms_norm_backward", "scaled_segment_sum")
        beside = 0
        if row["kernel"] == "point_assignment":
            cases = {case.name: case for case in KERNELS["point_assignment"].cases}
            points = cases[row["case"]].shapes()[1]
            beside = 8 * points.size * points.dtype.itemsize
        assert row["moved"] <= (1.27 if summed else 1.03) * row["bytes"] + beside, row


def test_traffic_counts_operands_results_and_loops():
    text = """HloModule m

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %y = f32[8]{0} fusion(%x), kind=kLoop, calls=%f
  ROOT %t = (s32[], f32[8]) tuple(%i, %y)
}

ENTRY %main (a: bf16[10,10], b: u8[3]) -> f32[10] {
  %a = bf16[10,10]{1,0} parameter(0)
  %b = u8[3]{0} parameter(1)
  %c = (f32[10]{0}, s32[2]{0}) fusion(%a, %b), kind=kInput, calls=%g
  %w = (s32[], f32[8]) while(%q), body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %d = f32[10]{0} get-tuple-element(%c), index=0
}
"""
    assert traffic(text) == (200 + 3 + 40 + 8 + 5 * (32 + 32), 1 + 5)
