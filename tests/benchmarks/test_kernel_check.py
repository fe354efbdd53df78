"""Tests of benchmarks/kernel_check.py and of benchmarks/report.py."""

import dataclasses
import sys

import jax.numpy as jnp
import pytest

from benchmarks import record, report
from benchmarks.kernel_cases import KERNELS
from benchmarks.kernel_check import check
from benchmarks.report import summary


def small_cases():
    """The small cases of each kernel; all but the first are slow. `tests/kernels` tests kernels."""
    for name, (_, cases) in KERNELS.items():
        for i, case in enumerate(case for case in cases if case.small):
            marks = pytest.mark.slow if i else ()
            yield pytest.param(name, case, id=f"{name}-{case.name}", marks=marks)


@pytest.mark.parametrize(("name", "case"), small_cases())
def test_every_kernel_agrees_with_its_definition_in_float64(name, case):
    found = check(KERNELS[name].kernel, case, seed=3, implementation="interpreted")
    assert found["ok"], found


PLANTED = {
    "an unwritten result": lambda x: jnp.full_like(x, jnp.nan),
    "a tenth of a percent too large": lambda x: x * 1.001,
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_is_found(fault):
    kernel, cases = KERNELS["scaled_segment_sum"]
    case = next(case for case in cases if case.name == "ragged")

    def wrong(*args, interpret, **options):
        del interpret
        return PLANTED[fault](kernel.reference(*args, **options))

    broken = dataclasses.replace(kernel, pallas=wrong)
    assert not check(broken, case, seed=3, implementation="interpreted")["ok"]


ROUND = {"seconds": [1.0, 3.0], "peak": None, "planned_peak": 2**30, "losses": [5.0, 4.0]}


def test_a_summary_has_medians_or_is_none_after_a_failure():
    one = summary([ROUND, {**ROUND, "seconds": [2.0]}])
    assert (one["seconds"], one["memory"], one["loss"]) == (2.0, 2**30, 4.0)
    assert summary([ROUND, {"failure": "no memory"}]) is None
    assert summary([]) is None


def test_the_report_omits_columns_without_measurements():
    row = {
        "kernel": "quantize", "case": "c", "bytes": 2e6, "bound_us": 0.5, "registers": 48,
        "spilled": 0, "shared": 64, "moved": 2e6, "xla_moved": 4e6,
    }  # fmt: skip
    table = report.kernel_table([row], [])
    assert "| `quantize` | c | 2.0 | 0.5 | 48 | 0 | 64 | 1.00 | 2.00 |" in table
    assert "TB/s" not in table
    measured = {**row, "seconds": {}, "bandwidth": 4e12, "share_of_copy": 0.9, "of_xla": 0.5}
    assert "| 4.00 | 0.90 | 0.50 |" in report.kernel_table([row], [measured])
    size = {"batch_size": 4, "seq_len": 25}
    rows = [
        {"rival": "plain", **size, "rounds": [ROUND]},
        {"rival": "x", **size, "rounds": [{"failure": "f"}]},
    ]
    table = report.step_table(rows)
    assert "| plain | 50 | 1.000 | 1.00 | 1.000 | 4.000 |" in table
    assert "| x | failed |" in table


def test_the_report_reads_what_the_repository_has(monkeypatch, capsys):
    paths = [str(record.RESULTS / name) for name in ("kernels.json", "gpu.json")]
    monkeypatch.setattr(sys, "argv", ["report", *paths])
    report.main()
    printed = capsys.readouterr().out
    assert "| TB/s |" in printed
    assert "llama_1b, 8 x 1024" in printed
    assert "llama_7b, 4 x 1024, within 22 GiB" in printed


def test_the_report_shows_failures_first():
    kernels = [
        {"kernel": "quantize", "case": "a", "ok": True, "error": 1e-7},
        {"kernel": "quantize", "case": "b", "ok": False, "failure": "out of registers"},
    ]
    lines = report.check_table(kernels, [{"operator": "rms_norm", "ok": False, "error": 0.1}])
    shown = lines.splitlines()[2:]
    assert "out of registers" in shown[0]
    assert "| rms_norm | NO | 1.0e-01 |" in shown[1]
    assert "| yes | 1.0e-07 |" in shown[2]
    steps = report.determinism_table([{"rival": "pamm", "same_bits": False, "apart": 0.0}])
    assert "| pamm | NO | 0.0e+00 |" in steps
