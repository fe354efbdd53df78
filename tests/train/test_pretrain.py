"""The program as a user runs it: begun, killed, gone on with, and told nonsense."""

import dataclasses
import functools
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from train.checkpoint import Checkpoints
from train.config import DataConfig, OptimizerConfig, PretrainConfig
from train.loop import BadRunError, NonFiniteError
from train.methods import MethodOptions
from train.metrics import read_metrics
from train.pretrain import run
from train.step import init_state, make_recipe

pytestmark = pytest.mark.usefixtures("quick_compile")

REPOSITORY = pathlib.Path(__file__).parents[2]
STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a small text, on which the tokenizer is trained once."""
    folder = tmp_path_factory.mktemp("pretrain")
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), 5)) for _ in range(50)]
    text = "\n\n".join(" ".join(rng.choice(words, 60)) for _ in range(200))
    (folder / "text.txt").write_text(text)
    return folder


def config(folder, out: str = "run", **changes) -> PretrainConfig:
    defaults = PretrainConfig(
        model="llama_3m",
        method="low_rank",
        options=MethodOptions(rank=4),
        steps=STEPS,
        batch_size=4,
        seq_len=32,
        data=DataConfig(str(folder / "text.txt"), folder / "cache", vocab_size=300),
        out=folder / out,
        log_every=1,
        eval_every=5,
        eval_batches=2,
        save_every=2,
    )
    return dataclasses.replace(defaults, **changes)


def arguments(config: PretrainConfig) -> list[str]:
    """The command line that says the same as a configuration."""
    names = ("model", "method", "steps", "batch_size", "seq_len", "out", "log_every", "eval_every",
             "eval_batches", "save_every")  # fmt: skip
    flags = {name.replace("_", "-"): getattr(config, name) for name in names}
    flags |= {
        "rank": config.options.rank,
        "gap": config.options.gap,
        "moments": config.options.moments,
        "bits": config.options.bits,
        "moment-dtype": config.optimizer.moment_dtype,
        "data": config.data.data,
        "data-dir": config.data.data_dir,
        "vocab-size": config.data.vocab_size,
    }
    switches = {"stagger": config.options.stagger, "in-backward": config.in_backward}
    return [
        *(f"--{name}={value}" for name, value in flags.items()),
        *(f"--{name if on else f'no-{name}'}" for name, on in switches.items()),
    ]


def start(config: PretrainConfig, *more: str) -> subprocess.Popen:
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    command = [sys.executable, "-m", "train.pretrain", *arguments(config), *more]
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def wait_for_step(process: subprocess.Popen, out: pathlib.Path, step: int) -> None:
    """Waits until a running program has recorded a step."""
    for _ in range(2400):
        lines = (out / "metrics.jsonl").read_text() if (out / "metrics.jsonl").exists() else ""
        if f'"step": {step},' in lines or process.poll() is not None:
            return
        time.sleep(0.05)
    pytest.fail("the program did not come that far")


def final_state(config: PretrainConfig):
    """The arrays of the last checkpoint."""
    from models import preset

    recipe = make_recipe(config, preset(config.model))
    state = jax.eval_shape(functools.partial(init_state, recipe))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), state)
    folder = config.out / "checkpoints"
    step = max(int(p.name) for p in folder.iterdir() if p.name.isdigit())
    identity = json.loads((folder / str(step) / "identity" / "metadata").read_text())
    checkpoints = Checkpoints(folder, keep=2)
    restored, _ = checkpoints.restore(step, like, identity)
    checkpoints.close()
    return step, restored


@pytest.fixture(scope="module")
def unbroken(folder):
    """A run from beginning to end, in a process of its own as the others are."""
    whole = config(folder, "unbroken")
    process = start(whole)
    text = process.communicate()[0]
    assert process.returncode == 0, text
    return whole, text


def test_a_run_leaves_all_it_promises(unbroken):
    whole, text = unbroken
    lines = read_metrics(whole.out / "metrics.jsonl")
    training = [line for line in lines if "loss" in line]
    assert [line["step"] for line in training] == [*range(1, STEPS + 1)]
    columns = {"loss", "grad_norm", "update_norm", "learning_rate", "tokens_per_second"}
    assert columns <= training[0].keys()
    assert training[-1]["loss"] < training[0]["loss"]
    assert [line["step"] for line in lines if "perplexity" in line] == [5, 10, STEPS]
    assert (whole.out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((whole.out / "tensorboard").glob("events*"))
    for word in (
        "RandomizedSVD(rank=4)",
        "optimizer",
        "linear residuals",
        "workspace",
        "held-out loss",
        f"done at step {STEPS}",
    ):
        assert word in text


def test_bases_moments_and_keys_survive_a_kill(folder):
    changes: dict[str, Any] = {
        "method": "subspace",
        "options": MethodOptions(rank=4, gap=4, bits=8, moments="rotate", stagger=True),
        "optimizer": OptimizerConfig(moment_dtype="8bit"),
        "in_backward": True,
    }
    console = Console(file=io.StringIO(), width=140)
    whole = config(folder, f"{changes['method']}-whole", **changes)
    run(whole, console)
    # Killed after a step that changed the subspace, and before the next that does.
    broken = config(folder, f"{changes['method']}-killed", **changes)
    process = start(broken)
    wait_for_step(process, broken.out, 7)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    run(dataclasses.replace(broken, resume=True), console)
    assert "going on from step" in console.file.getvalue()
    step, state = final_state(broken)
    assert step == STEPS
    jax.tree.map(np.testing.assert_array_equal, state, final_state(whole)[1])
    assert training_losses(broken) == training_losses(whole)


def assert_ends_like(unbroken, broken: PretrainConfig) -> None:
    whole, _ = unbroken
    process = start(broken, "--resume")
    text = process.communicate()[0]
    assert process.returncode == 0, text
    assert "going on from step" in text
    step, state = final_state(broken)
    whole_step, whole_state = final_state(whole)
    assert step == whole_step == STEPS
    jax.tree.map(np.testing.assert_array_equal, state, whole_state)
    assert training_losses(broken) == training_losses(whole)


def training_losses(config: PretrainConfig) -> list[tuple[int, float]]:
    lines = read_metrics(config.out / "metrics.jsonl")
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def test_a_killed_run_ends_with_the_same_bits(folder, unbroken):
    broken = config(folder, "killed")
    process = start(broken)
    wait_for_step(process, broken.out, 5)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert_ends_like(unbroken, broken)


def test_a_terminated_run_saves_and_exits_with_zero(folder, unbroken):
    broken = config(folder, "terminated", save_every=100)
    process = start(broken)
    wait_for_step(process, broken.out, 3)
    process.send_signal(signal.SIGTERM)
    text = process.communicate()[0]
    assert process.returncode == 0, text
    assert "stopped by SIGTERM, saved at step" in text
    assert_ends_like(unbroken, broken)


def test_the_same_in_one_process_and_a_second_time_is_refused(folder, unbroken):
    whole = config(folder, "inside")
    console = Console(file=io.StringIO(), width=140)
    run(whole, console)
    with pytest.raises(BadRunError, match=r"`--out` .* holds a run at step 12: pass `--resume`"):
        run(whole, console)
    run(dataclasses.replace(whole, resume=True), console)
    assert console.file.getvalue().rstrip().endswith(f"everything is in {whole.out}")
    assert "with other settings" not in console.file.getvalue()
    run(dataclasses.replace(whole, resume=True, z_loss=1e-4), console)
    assert "with other settings than before: z_loss: 0.0, now 0.0001" in console.file.getvalue()
    with pytest.raises(BadRunError, match="`--steps` 11 is below the 12 steps that the run"):
        run(dataclasses.replace(whole, resume=True, steps=11), console)
    message = r"another run:(?s:.*)  model.hidden_size: 128 there, 256 now"
    with pytest.raises(BadRunError, match=message):
        run(dataclasses.replace(whole, model="llama_20m", resume=True), console)
    message = r"another run:(?s:.*)optimizer.method: 'one of full rank' there, 'subspace' now"
    with pytest.raises(BadRunError, match=message):
        run(dataclasses.replace(whole, method="subspace", resume=True), console)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(folder):
    wild = dataclasses.replace(PretrainConfig().optimizer, learning_rate=1e10, warmup_steps=1)
    doomed = config(folder, "doomed", optimizer=wild, save_every=1, method="exact")
    with pytest.raises(NonFiniteError, match=r"step \d+ is not finite .*last good checkpoint") as e:
        run(doomed, Console(file=io.StringIO(), width=140))
    kept = max(int(p.name) for p in (doomed.out / "checkpoints").iterdir() if p.name.isdigit())
    assert f"it is that of step {kept}" in str(e.value)


def test_weights_that_are_not_finite_are_never_saved(folder):
    # Loss and gradient of the first step are finite; its update, 1e30 a weight, is no number.
    wild = dataclasses.replace(PretrainConfig().optimizer, learning_rate=1e30, warmup_steps=1)
    doomed = config(folder, "overflow", optimizer=wild, save_every=1, method="exact")
    with pytest.raises(NonFiniteError, match=r"step 1 is not finite .*there is none yet"):
        run(doomed, Console(file=io.StringIO(), width=140))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "lama_9m"}, "unknown `--model` 'lama_9m'. Did you mean llama_9m"),
        ({"method": "remmat"}, "unknown `--method` 'remmat'. Did you mean remat"),
        ({"options": MethodOptions(rank=4096)}, r"`rank` 4096 .* above min\(T, d\) = 128"),
        (
            {"method": "subspace", "options": MethodOptions(rank=129)},
            "`--rank` 129 of subspace is above 128, the smallest side",
        ),
        ({"data": DataConfig("missing.txt", pathlib.Path("nowhere"))}, r"`--data`.*missing\.txt"),
        ({"seq_len": 4096}, "`--seq-len` 4096 is above the 1024 positions of llama_3m"),
        ({"mesh": "fsdp=3"}, "4 sequences .* do not divide over the 3 devices"),
        ({"mesh": "fsdp=99"}, "asks for 99 devices"),
    ],
)
def test_nonsense_is_refused_before_anything_is_written(folder, changes, message):
    wrong = config(folder, "wrong", **changes)
    with pytest.raises(BadRunError, match=message):
        run(wrong, Console(file=io.StringIO()))
    assert not wrong.out.exists()


def test_an_out_that_is_a_file_is_refused(folder):
    (folder / "file").write_text("")
    with pytest.raises(BadRunError, match=r"`--out` .*file cannot be made a folder"):
        run(config(folder, "file"), Console(file=io.StringIO()))


def test_texts_that_are_too_small_are_refused(folder):
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("a few words\n\nand a few more")
    for name, message in (("empty.txt", "empty.txt"), ("short.txt", "`--seq-len` is 32, so")):
        data = DataConfig(str(folder / name), folder / "cache", vocab_size=300)
        with pytest.raises(BadRunError, match=message):
            run(config(folder, "small", data=data), Console(file=io.StringIO()))


def test_the_command_line_says_what_is_wrong_in_one_line(folder):
    process = start(config(folder, "cli"), "--model=lama")
    text = process.communicate()[0]
    assert process.returncode == 2
    # A plugin of JAX without its GPU logs a line of its own before.
    assert text.splitlines()[-1].startswith("error: unknown `--model` 'lama'.")
    assert "Traceback" not in text
