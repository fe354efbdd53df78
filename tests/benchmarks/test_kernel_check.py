"""Tests of benchmarks/kernel_check.py and of the parts of benchmarks/gpu that need no GPU."""

import dataclasses
import json
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks import record, report
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import config as gpu_config
from benchmarks.gpu import steps
from benchmarks.gpu.config import Config, case_units
from benchmarks.kernel_cases import KERNELS
from benchmarks.kernel_check import check
from benchmarks.whole_step import summary


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


def with_program(kernel, program, monkeypatch):
    """Returns a kernel with another program for GPUs."""
    module = types.SimpleNamespace(refuses=lambda *args, **options: None)
    setattr(module, kernel.reference.__name__, program)
    monkeypatch.setitem(sys.modules, "other_program", module)
    return dataclasses.replace(kernel, pallas="other_program")


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_is_found(fault, monkeypatch):
    kernel, cases = KERNELS["rms_norm_backward"]
    case = next(case for case in cases if case.name == "three groups, dither")

    def wrong(*args, interpret, **options):
        del interpret
        return jax.tree.map(PLANTED[fault], kernel.reference(*args, **options))

    broken = with_program(kernel, wrong, monkeypatch)
    assert not check(broken, case, seed=3, implementation="interpreted")["ok"]


def test_sections_run_and_are_written(tmp_path, capsys):
    config = Config(sections=("kernels",), only=("adam_8bit",), results=tmp_path / "gpu.json")
    gpu.show(gpu.run(config))
    rows = json.loads(config.results.read_text())["kernels"]
    assert [row["ok"] for row in rows] == [True, True]
    assert "interpreted, without a GPU" in capsys.readouterr().out


def test_a_failing_kernel_does_not_stop_the_others_and_runs_again(tmp_path, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("out of registers")

    entry = KERNELS["adam_8bit"]
    kernel = with_program(entry.kernel, fail, monkeypatch)
    broken = KERNELS | {"adam_8bit": entry._replace(kernel=kernel)}
    config = Config(
        sections=("kernels",), only=("adam_8bit", "point_assignment"),
        results=tmp_path / "gpu.json",
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(gpu_config, "KERNELS", broken)
        rows = gpu.run(config)["kernels"]
    assert [row["ok"] for row in rows] == [False, False, True, True]
    assert "out of registers" in rows[0]["failure"]
    again = gpu.run(dataclasses.replace(config, add=True))["kernels"]
    assert all(row["ok"] for row in again)
    assert [row for row in again if row in rows] == rows[2:]


@pytest.mark.slow
def test_parts_in_processes_are_the_whole(tmp_path):
    config = Config(
        sections=("kernels",), only=("adam_8bit", "point_assignment"), processes=2,
        results=tmp_path / "gpu.json",
    )  # fmt: skip
    rows = gpu.run(config, ["--only", *config.only])["kernels"]
    names = [(row["kernel"], row["case"]) for row in rows]
    assert names == [tuple(unit.values()) for unit in case_units(config)]
    assert all(row["ok"] for row in rows)
    # What is missing or failed is run again, and nothing else is lost.
    rows[1]["ok"] = False
    config.results.write_text(json.dumps({"kernels": rows, "rows": []}))
    again = dataclasses.replace(config, only=("adam_8bit",), add=True)
    others = gpu.run(again, ["--only", "adam_8bit"])["kernels"]
    assert [row["ok"] for row in others] == [True] * 4
    assert [a == b for a, b in zip(others, rows, strict=True)] == [True, False, True, True]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"only": ("quantise",)}, "quantise"),
        ({"rivals": ("fast",)}, "fast"),
        ({"cases": ("nosuch",)}, "`--cases`.*nosuch"),
        ({"processes": 0}, "`--processes`"),
        ({"memory_gib": -1}, "`--memory-gib`"),
        ({"part": (2, 2)}, "`--part`.* 2 2"),
    ],
)
def test_an_unknown_name_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        Config(**setting)


def test_with_add_steps_of_another_size_are_other_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "_run", lambda config, folder, row: {"tokens": row["batch_size"]})
    rows = []
    for batch_size in (8, 4, 8):
        config = Config(models=("llama_3m",), rivals=("exact",), batch_size=batch_size)
        steps.time_steps(config, tmp_path, rows)
    assert [(row["batch_size"], row["rounds"]) for row in rows] == [
        (8, [{"tokens": 8}]),
        (4, [{"tokens": 4}]),
    ]


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
