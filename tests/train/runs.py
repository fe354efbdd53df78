"""Small pretraining runs, in this process and in separate processes."""

import dataclasses
import functools
import io
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time
import types
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from train.planning.tables import flags, rare_settings
from train.run import begin, loop
from train.run.checkpoint import Checkpoints
from train.run.metrics import read_metrics
from train.run.recipe import Recipe, make_recipe
from train.run.step import init_state
from train.settings.config import DataConfig, FinetuneConfig, PretrainConfig
from train.settings.options import MethodOptions
from train.settings.resolve import dimensions

REPOSITORY = pathlib.Path(__file__).parents[2]
STEPS = 12


def write_text(folder: pathlib.Path) -> None:
    """Writes a text that has something to learn."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), 5)) for _ in range(50)]
    text = "\n\n".join(" ".join(rng.choice(words, 60)) for _ in range(200))
    (folder / "text.txt").write_text(text)


def make_config(folder: pathlib.Path, out: str = "run", **changes) -> PretrainConfig:
    """Returns a run on the text in a folder. Saves every second step."""
    defaults = PretrainConfig(
        model="llama_3m",
        method="low_rank",
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
    if "method" not in changes:
        changes = {"options": MethodOptions(rank=4), **changes}
    return dataclasses.replace(defaults, **changes)


def quiet() -> Console:
    """Returns a console that keeps what is printed in `file`."""
    return Console(file=io.StringIO(), width=140)


def share_steps(patch: pytest.MonkeyPatch) -> None:
    """Lets runs with equal settings share their steps, so that JAX traces each step once."""
    made: dict[tuple[str, str], Any] = {}

    def share(module: types.ModuleType, name: str) -> None:
        make = getattr(module, name)

        def shared(recipe: Recipe, *args: Any) -> Any:
            # The steps do not depend on these settings.
            config = dataclasses.replace(
                recipe.config, folder=pathlib.Path(), out=None, resume=False, log_every=1,
                eval_every=1, eval_batches=1, save_every=1,
            )  # fmt: skip
            key = name, f"{config} {recipe.storage} {recipe.bits}"
            if key not in made:
                made[key] = make(recipe, *args)
            return made[key]

        patch.setattr(module, name, shared)

    for name in ("explain_step", "compile_step"):
        share(begin, name)
    for name in ("make_train_step", "make_refresh_step", "make_eval_step"):
        share(loop, name)


def start(module: str, arguments: list[str], **environment: str) -> subprocess.Popen:
    """Starts a program in a separate process."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_pretraining(config: PretrainConfig, **environment: str) -> subprocess.Popen:
    """Starts a pretraining run in a separate process."""
    return start("train.pretrain", command_line(config), **environment)


def command_line(config: PretrainConfig | FinetuneConfig) -> list[str]:
    """Returns the arguments that give settings; those that are no flags are in a file."""
    assert config.out is not None
    file = config.out.with_name(f"{config.out.name}.yaml")
    text = "\n".join(rare_settings(config)) or "{}"
    if not file.exists() or file.read_text() != text:  # Another process may read it now.
        file.write_text(text)
    return [*shlex.split(flags(config)), "--config", str(file)]


def finish(*processes: subprocess.Popen, code: int = 0) -> list[str]:
    """Returns what processes printed until they ended with an exit code."""
    texts = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), texts
    return texts


def wait_for_step(process: subprocess.Popen, out: pathlib.Path, step: int) -> None:
    """Waits until a running program has recorded a step."""
    for _ in range(2400):
        lines = (out / "metrics.jsonl").read_text() if (out / "metrics.jsonl").exists() else ""
        if f'"step": {step},' in lines or process.poll() is not None:
            return
        time.sleep(0.05)
    pytest.fail(f"the program did not reach step {step}")


def saved_steps(out: pathlib.Path) -> list[int]:
    """Returns the steps of the checkpoints of a run."""
    return sorted(int(p.name) for p in (out / "checkpoints").iterdir() if p.name.isdigit())


def forget_last_checkpoint(out: pathlib.Path) -> None:
    """Removes the last checkpoint of a run, so that it resumes from the one before."""
    shutil.rmtree(out / "checkpoints" / str(saved_steps(out)[-1]))


def final_state(config: PretrainConfig):
    """Returns the step and the arrays of the last checkpoint."""
    recipe = make_recipe(config, dimensions(config, config.data.vocab_size))
    state = jax.eval_shape(functools.partial(init_state, recipe))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), state)
    assert config.out is not None
    folder, step = config.out / "checkpoints", saved_steps(config.out)[-1]
    identity = json.loads((folder / str(step) / "identity" / "metadata").read_text())
    identity.pop("format")  # The format of the names of arrays is no part of the identity.
    checkpoints = Checkpoints(folder, keep=2)
    restored, _ = checkpoints.restore(step, like, identity)
    checkpoints.close()
    return step, restored


def assert_equal_ends(one: PretrainConfig, other: PretrainConfig) -> None:
    """Asserts that two runs end with equal bits and have recorded the same losses."""
    (step, state), (other_step, other_state) = final_state(one), final_state(other)
    assert step == other_step == STEPS
    jax.tree.map(np.testing.assert_array_equal, state, other_state)
    assert losses(one.out) == losses(other.out)


def losses(out: pathlib.Path) -> list[tuple[int, float]]:
    """Returns the recorded steps and their training losses."""
    lines = read_metrics(out / "metrics.jsonl")
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]
