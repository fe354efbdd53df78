"""The memory of a run over its time, against the plan, and what a watched program says."""

import re
import sys

import pytest

from benchmarks import command, start

SAYS = """
import signal, time
signal.signal(signal.SIGINT, lambda *_: (print("bye", flush=True), exit(3)))
print("memory of a step  MiB", flush=True)
print("  total  1,024.5", flush=True)
print("step 1 is running", flush=True)
taken = bytearray(2**27)
print("step 1: done", flush=True)
time.sleep(60)
"""


def test_a_program_is_watched_and_interrupted():
    seen, sent = start.watch([sys.executable, "-c", SAYS], start.in_a_step)
    assert (seen.code, seen.planned) == (3, int(1024.5 * 2**20))
    before, after = seen.peak(until="is running"), seen.peak(since="1: done")
    assert after > before + 2**27 * 0.9
    row = start.row_of("title", seen, sent, "folder")
    assert [line for _, line in row["answers"]] == ["bye"]
    assert row["peaks"]["whole"] == max(size for _, size in seen.resident)
    assert row["longest_silence"] == pytest.approx(sent - seen.lines[-2][0], abs=0.3)
    (cells,) = start.table([row])
    assert re.fullmatch(r"0\.\d+", cells["of the plan"])
    assert cells["exit code"] == "3"


def test_a_run_that_ends_early_has_no_plan():
    seen, sent = start.watch([sys.executable, "-c", "print('a'); raise SystemExit(2)"])
    assert (seen.code, seen.planned, sent) == (2, None, None)
    assert start.table([start.row_of("title", seen, sent, "folder")])[0]["of the plan"] == ""


@pytest.mark.slow  # 150 s of processor time: two starts of a model of 190 million weights.
@pytest.mark.parametrize("method", ["lean", "exact"])
def test_a_run_takes_the_planned_memory_at_every_moment(tmp_path, method):
    flags = f"--model llama_250m --method {method} --batch-size 1 --seq-len 128 --vocab-size 1024"
    times = "--steps 3 --save-every 2 --eval-every 2"
    (tmp_path / "rare.yaml").write_text("eval_batches: 1\n")
    folders = f"--out {tmp_path}/run --data-dir {tmp_path}/data --config {tmp_path}/rare.yaml"
    line = [sys.executable, "-m", "train.pretrain", *f"{flags} {times} {folders}".split()]
    seen, _ = start.watch(line, env=command.environment())
    assert seen.code == 0, seen.lines[-5:]
    assert seen.peak() <= 1.1 * seen.planned
    seen, _ = start.watch([*line, "--resume", "--steps", "4"], env=command.environment())
    assert seen.code == 0, seen.lines[-5:]
    assert seen.peak() <= 1.1 * seen.planned
