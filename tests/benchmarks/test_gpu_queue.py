"""Tests of benchmarks/gpu: the queue, the parser of profiles, and that the parts can be made."""

import json
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from actjax.kernels import dispatch
from benchmarks.gpu import kernels, parts, queue, trace
from benchmarks.gpu.__main__ import Config
from benchmarks.gpu.steps import Setting, Steps, time_steps
from benchmarks.kernel_cases import KERNELS
from benchmarks.training_steps import STEPS

WRITE = "import json, sys; json.dump({}, open(sys.argv[1], 'w'))"
SCRIPTS = {
    "fails": "raise ValueError('out of memory')",
    "hangs": "import time; time.sleep(60)",
    "measures nothing": WRITE.format({"rows": [{"failure": "no GPU"}]}),
    "is checked": WRITE.format({"rows": [{"checked": "x compiled"}]}),
}
MEASURED = {"rows": [{"name": "x", "median": 0.25}], "environment": {"commit": "abc"}}


def started(part, path, dry):
    """Stands for the process of a part, by its name."""
    return [sys.executable, "-S", "-c", SCRIPTS.get(part.name, WRITE.format(MEASURED)), str(path)]


def a_part(name, seconds=1.0):
    return queue.Part(name, seconds, lambda dry: [])


@pytest.fixture
def run(tmp_path, capsys):
    """Runs a queue; returns its lines and its file."""
    path = tmp_path / "queue.json"

    def run(*names, seconds=1.0, **options):
        parts = [a_part(name, seconds) for name in names]
        queue.run(parts, path, command=started, **{"minutes": 1.0, **options})
        return capsys.readouterr().out.splitlines(), json.loads(path.read_text())["parts"]

    return run


def test_parts_run_in_order_and_are_skipped_when_they_are_done(run):
    lines, written = run("b", "a")
    assert lines[0].startswith("b: 1 rows, 0 of them failed; x 250.0 ms, ")
    assert [line[0] for line in lines] == list(written) == ["b", "a"]
    assert written["b"]["rows"] == MEASURED["rows"]
    lines, _ = run("b", "a", "c", again=("a",))
    assert lines[0] == "b: done at abc; `--again b` measures it again"
    assert [line.split(",")[0] for line in lines[1:]] == ["a: 1 rows", "c: 1 rows"]


def test_a_part_that_fails_is_one_line_and_comes_last_the_next_time(run):
    lines, written = run("fails", "a")
    assert lines[0].startswith("fails: ended with 1: ValueError: out of memory, ")
    assert lines[1].startswith("a: 1 rows")
    assert written["fails"]["failure"] == "ended with 1: ValueError: out of memory"
    lines, written = run("fails", "measures nothing", "b")
    assert [line.split(":")[0] for line in lines] == ["measures nothing", "b", "fails"]
    assert written["measures nothing"]["failure"] == "no GPU"


def test_a_part_has_a_time_limit_and_waits_where_it_does_not_fit(run):
    begin = time.monotonic()
    lines, _ = run("hangs", "a", seconds=0.5)
    assert lines[0].startswith("hangs: took more than 1 seconds, 1 s")
    assert time.monotonic() - begin < 30
    lines, written = run("late", minutes=0.5, seconds=40)
    assert lines == ["late: left for the next time, 30 of 40 s"]
    assert "late" not in written


def test_a_killed_queue_loses_the_part_that_ran(run, tmp_path):
    def kill(*signal_and_frame):
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, kill)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.5)
        with pytest.raises(KeyboardInterrupt):
            run("a", "hangs", seconds=20)
    finally:
        signal.signal(signal.SIGALRM, former)
    assert not (tmp_path / "queue.json.part").exists()
    lines, written = run("a", "b")
    assert lines[-2].startswith("a: done at abc")
    assert list(written) == ["a", "b"]


def test_a_part_is_written_with_the_machine_or_its_error(tmp_path):
    path = tmp_path / "part.json"
    queue.run_part(queue.Part("p", 1, lambda dry: [{"dry": dry}]), path, True)
    written = json.loads(path.read_text())
    assert written["rows"] == [{"dry": True}]
    assert {"commit", "device", "versions"} <= set(written["environment"])
    queue.run_part(queue.Part("p", 1, lambda dry: 1 // 0), path, True)
    assert json.loads(path.read_text())["failure"].startswith("ZeroDivisionError: ")


WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("grain", "tensorflow", "tensorboardX", "jax_triton"):
            raise ModuleNotFoundError(f"no {name}")

sys.meta_path.insert(0, Blocked())
import benchmarks.gpu.__main__
"""


@pytest.mark.slow  # 4 s: another process.
def test_the_queue_imports_neither_grain_nor_tensorflow():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_dry_run_has_a_line_for_each_part(capsys):
    assert queue.dry_run([a_part("is checked", 60)], started)
    assert capsys.readouterr().out == "is checked (60 s on a GPU): x compiled [0 s here]\n"
    assert not queue.dry_run([a_part("fails")], started)
    assert "ended with 1: ValueError: out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give `--queue`"),
        ({"queue": True, "only": ("profil",)}, "`--only`.*profil"),
        ({"queue": True, "again": ("nosuch",)}, "`--again`.*nosuch"),
        ({"queue": True, "minutes": 0}, "`--minutes`"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Config(**settings)


def test_the_parts_name_existing_steps():
    names = [part.name for part in parts.PARTS]
    assert len(set(names)) == len(names) == 14
    used = (*parts._METHODS, *parts._PROFILED, parts._SMALL_STATES, parts._ON_HOST)
    assert set(used) <= set(STEPS)
    assert sum(part.seconds for part in parts.PARTS[:7]) < 600


# A profile of a GPU in the format of `jax.profiler`: two streams, and a line that repeats them.
EVENTS = {  # Kernel: instruction, microseconds.
    "nvjet_hsh_128x256": ("cublas-gemm.1", 60),
    "actjax_quantize__3": ("call.126", 10),
    "cudnn_generated_fort_native_sdpa": ("dot_product_attention_fwd.0", 12),
    "loop_multiply_fusion": ("loop_multiply_fusion", 8),
    "loop_add_fusion": ("loop_add_fusion.2", 6),
    "loop_dynamic_slice_fusion": ("loop_dynamic_slice_fusion", 3),
    "MemcpyD2D": ("", 1),
}
PROGRAM = """HloModule jit_step, is_scheduled=true

FileNames
1 "/code/train/step.py"
2 "/code/actjax/optim/in_backward.py"
3 "/code/models/block.py"
4 "/code/actjax/kernels/noise.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1}
2 {file_name_id=2}
3 {file_name_id=3}
4 {file_name_id=4}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=3}
5 {file_location_id=4 parent_frame_id=4}


%fused_slice (p: f32[4,8]) -> f32[8] {
  %p.1 = f32[4,8]{1,0} parameter(0)
  ROOT %s.1 = f32[8]{0} dynamic-slice(%p.1), metadata={op_name="s" stack_frame_id=2}
}

%fused_multiply (p: f32[8]) -> f32[8] {
  %p.2 = f32[8]{0} parameter(0)
  ROOT %m.1 = f32[8]{0} multiply(%p.2, %p.2), metadata={op_name="m" stack_frame_id=4}
}

%fused_add (p: f32[8]) -> f32[8] {
  %p.3 = f32[8]{0} parameter(0)
  ROOT %a.1 = f32[8]{0} add(%p.3, %p.3), metadata={op_name="a" stack_frame_id=5}
}

ENTRY %main (p: f32[4,8]) -> f32[8] {
  %x = (f32[8]{0}, s8[4]{0}) custom-call(%p), custom_call_target="__cublas$lt$matmul", metadata={}
  %cublas-gemm.1 = (f32[8]{0}, s8[4]{0}) custom-call(%p), custom_call_target="__cublas$lt$matmul"
  %call.126 = u8[8]{0} custom-call(%p), custom_call_target="triton_kernel_call"
  %dot_product_attention_fwd.0 = f32[8]{0} custom-call(%p), custom_call_target="__cudnn$fmhaSoftmax"
  %loop_dynamic_slice_fusion = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused_slice
  %loop_multiply_fusion = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused_multiply
  ROOT %loop_add_fusion.2 = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused_add
}
"""
KINDS = {
    "products": 60, "attention": 12, "actjax_quantize": 10, "optimizer": 8, "element-wise": 6,
    "copies": 4,
}  # fmt: skip


def text_of_profile():
    """Returns two steps on a GPU; 5 microseconds are idle between kernels of a stream."""
    metadata, events, copies, begin = [], [], [], 0
    for i, (kernel, (instruction, duration)) in enumerate(EVENTS.items(), 1):
        stat = f'stats {{ metadata_id: 1 str_value: "{instruction}" }}' if instruction else ""
        metadata.append(f'event_metadata {{ key: {i} value {{ id: {i} name: "{kernel}" }} }}')
        for step in range(2):
            at = (begin + 200 * step) * 10**6
            lasts = f"offset_ps: {at} duration_ps: {duration * 10**6}"
            event = f"events {{ metadata_id: {i} {lasts} {stat} }}"
            (copies if kernel.startswith("Memcpy") else events).append(event)
        begin += duration + 5
    return f"""planes {{ name: "/host:CPU" }}
    planes {{
      name: "/device:GPU:0"
      lines {{ name: "Stream #13(Compute)" timestamp_ns: 100 {" ".join(events)} }}
      lines {{ name: "Stream #14(MemcpyD2D)" timestamp_ns: 100 {" ".join(copies)} }}
      lines {{ name: "XLA Ops" timestamp_ns: 100 {" ".join(events)} }}
      {" ".join(metadata)}
      stat_metadata {{ key: 1 value {{ id: 1 name: "hlo_op" }} }}
    }}"""


def test_a_profile_of_a_gpu_by_kind(tmp_path):
    data = jax.profiler.ProfileData.text_proto_to_serialized_xspace(text_of_profile())
    folder = tmp_path / "plugins" / "profile" / "now"
    folder.mkdir(parents=True)
    (folder / "machine.xplane.pb").write_bytes(data)
    summary = trace.summary(trace.read_events(tmp_path), PROGRAM, steps=2)
    got = {kind: x["ms"] * 1e3 for kind, x in summary["kinds"].items()}
    assert got == pytest.approx(KINDS)
    assert next(iter(summary["kinds"])) == "products"
    assert summary["kinds"]["products"]["share"] == pytest.approx(0.6)
    assert summary["kinds"]["copies"]["launches"] == 2
    # Seven kernels and six gaps of 5 microseconds are 130 of 200 microseconds between two steps.
    assert summary["idle_ms"] * 1e3 == pytest.approx((12 * 5 + 70) / 2)
    assert summary["kernels"][0][:2] == ("nvjet_hsh_128x256", "products")


def test_a_profile_of_this_machine_names_instructions(tmp_path):
    def body(x, w):
        return jax.numpy.tanh(x @ w), None

    step = jax.jit(lambda x, w: jax.lax.scan(body, x, w)[0])
    x, w = np.ones((64, 64), np.float32), np.ones((4, 64, 64), np.float32)
    program = step.lower(x, w).compile()
    jax.block_until_ready(program(x, w))
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(program(x, w))
    text = program.as_text() or ""
    summary = trace.summary(trace.read_events(tmp_path), text, steps=1)
    # Events of the loop itself, which contain the others, are not counted.
    assert summary["kinds"]["products"]["launches"] == 4
    assert summary["kinds"]["element-wise"]["ms"] > 0
    assert sum(x["share"] for x in summary["kinds"].values()) == pytest.approx(1)


def test_settings_that_do_not_compile_do_not_stop_the_others():
    class Tiny(Setting):
        def lowered(self, place=None):
            if self.name == "untraceable":
                raise ValueError("no such step")

            def step(state, batch):
                return (state + 1, {"loss": state.sum()})

            shape = jax.ShapeDtypeStruct((2,), np.float32)
            lowered = jax.jit(step).lower(shape, shape)
            return {"init": lambda: np.zeros(2, np.float32), "step": lowered}

        def batch(self):
            return np.zeros(2, np.float32)

    unknown = {"xla_no_such_flag": True}
    settings = [
        Tiny("untraceable", step="x"), Tiny("a", step="x"), Tiny("b", step="x", options=unknown),
        Tiny("c", step="x"),
    ]  # fmt: skip
    steps = Steps(settings)
    assert "no such step" in steps.run(0, 1)["failure"]
    assert steps.run(1, 3)["loss"] == "4.0"
    assert "xla_no_such_flag" in steps.run(2, 1)["failure"]
    # It goes on with the state of the setting with which it shares it.
    assert steps.run(3, 1)["loss"] == "6.0"
    assert time_steps(settings, rounds=1, calls=1, alone=True)[3]["loss"] == "6.0"
    rows = time_steps(settings, rounds=2, calls=2)
    assert ["failure" in row for row in rows] == [True, False, True, False]
    assert [len(row["seconds"]) for row in rows] == [0, 2, 0, 2]
    assert rows[3]["loss"] == "18.0"


@pytest.mark.parametrize(("length", "unroll", "want"), [(4, 2, 2), (3, 2, 1), (4, 1, 1)])
def test_an_unrolled_setting_unrolls_the_loop_over_layers(length, unroll, want):
    def run(xs):
        return jax.lax.scan(lambda c, x: (c + x, None), 0.0, xs)[0]

    with Setting("x", model="llama_3m", unroll=unroll)._unrolled():
        assert f"unroll={want}" in str(jax.make_jaxpr(run)(np.ones(length)))


def test_a_block_that_does_not_compile_is_a_row(monkeypatch):
    pytest.importorskip("jax_triton")
    units = kernels.case_units(small=True)[:1]

    def fail(*args):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(kernels, "_in_triton", fail)
    (row,) = kernels._time_blocks({**units[0], "program": "x", "blocks": [{"TILE": 16}]})["rows"]
    assert row["failure"] == "RuntimeError: out of registers"


def test_a_queue_without_programs_says_what_is_missing(monkeypatch):
    assert len(kernels.case_units()) == sum(len(cases) for _, cases in KERNELS.values())
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    monkeypatch.setattr(dispatch, "_missing", dispatch._missing.__wrapped__)
    for part in (kernels.check_kernels, kernels.time_kernels):
        with pytest.raises(ValueError, match=r"needs jax_triton.*pip install"):
            part(True)
