"""Tests of the fine-tuning program: a checkpoint in, a better one out, nothing lost on the way."""

import dataclasses
import io
import json
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from models import Decoder, ModelConfig, huggingface, llama2c
from models.lora import attach
from models.peft import load_adapters
from train.calibration import calibrate
from train.config import AdapterConfig, FinetuneConfig, OptimizerConfig
from train.examples import ExampleConfig
from train.finetune import prepare, run
from train.loop import BadRunError
from train.methods import METHODS, MethodOptions
from train.metrics import read_metrics
from train.step import model_of
from train.tokenizer import train_bpe

pytestmark = pytest.mark.usefixtures("quick_compile")

DIMS = ModelConfig(300, 32, 48, 2, 4, num_kv_heads=2, max_seq_len=64)
STEPS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with its tokenizer, and sums to learn."""
    folder = tmp_path_factory.mktemp("finetune")
    rng = np.random.default_rng(0)
    records = []
    for _ in range(120):
        a, b = rng.integers(0, 50, 2)
        records.append({"prompt": f"What is {a} plus {b}?", "completion": f" It is {a + b}."})
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, records)))
    huggingface.save(Decoder(DIMS, jax.random.key(0)), folder / "checkpoint")
    texts = [one["prompt"] + one["completion"] for one in records]
    train_bpe(texts, 300).save(folder / "checkpoint")
    return folder


def config(folder, out: str, **changes) -> FinetuneConfig:
    defaults = FinetuneConfig(
        checkpoint=str(folder / "checkpoint"),
        data=ExampleConfig(data=str(folder / "sums.jsonl")),
        adapter=AdapterConfig(lora_rank=2, calibration_batches=2),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, weight_decay=0.0),
        steps=STEPS,
        batch_size=4,
        seq_len=48,
        compute_dtype="float32",
        out=folder / out,
        log_every=1,
        eval_every=4,
        eval_batches=2,
        save_every=2,
    )
    return dataclasses.replace(defaults, **changes)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=140)


def losses(config: FinetuneConfig) -> list[float]:
    lines = read_metrics(config.folder / "metrics.jsonl")
    return [line["loss"] for line in lines if "loss" in line]


OPTIONS = {
    "exact": MethodOptions(),
    "pamm": MethodOptions(ratio=1e-9),
    "low_rank": MethodOptions(rank=4),
    "subspace": MethodOptions(rank=4),
    "gact": MethodOptions(),
    "frugal": MethodOptions(),
    "lora": MethodOptions(),
    "qlora": MethodOptions(),
    "hyc_lora": MethodOptions(bits=4),
}
"""What differs by more than a codec; a step of every method is in test_step.py."""


@pytest.mark.parametrize("method", OPTIONS)
def test_every_method_learns_and_leaves_a_checkpoint(method, folder):
    one = config(folder, method, method=method, options=OPTIONS[method])
    console = quiet()
    assert run(one, console) == STEPS
    found = losses(one)
    assert np.mean(found[-2:]) < found[0]
    text = console.file.getvalue()
    # Before the first step, too.
    assert "step 0: held-out loss" in text
    assert "of which count" in text
    if METHODS[method].adapters:
        adapters, lora = load_adapters(one.out / "adapter", DIMS)
        assert any(np.any(x["b"]) for x in adapters["layers"].values())
        assert lora.rank == 2
        assert not (one.out / "model").exists()
    else:
        trained = huggingface.load(one.out / "model")
        before = huggingface.load(folder / "checkpoint")
        assert np.any(trained.layers.mlp.up[...] != before.layers.mlp.up[...])
        names = {p.name for p in (one.out / "model").iterdir()}
        assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= names


def test_what_is_exported_is_what_was_trained(folder):
    one = config(folder, "merged", adapter=AdapterConfig(lora_rank=2, lora_alpha=3.0, merge=True))
    run(one, quiet())
    ready = prepare(dataclasses.replace(one, resume=True), quiet())
    tokens = jnp.arange(20)[None]
    want = model_of(ready.recipe, ready.state)(tokens, compute_dtype="float32")
    ready.checkpoints.close()
    ready.batches.close()
    adapters, lora = load_adapters(one.out / "adapter", DIMS)
    base = huggingface.load(folder / "checkpoint")
    apart = attach(base, adapters, lora)(tokens, compute_dtype="float32")
    np.testing.assert_array_equal(apart, want)
    merged = huggingface.load(one.out / "model")(tokens, compute_dtype="float32")
    np.testing.assert_allclose(merged, want, rtol=1e-5, atol=1e-5)
    # Once more: what is there is replaced, and nothing else is.
    run(dataclasses.replace(one, resume=True), quiet())
    assert {"adapter", "model"} <= {p.name for p in one.out.iterdir()}


def flags(config: FinetuneConfig) -> list[str]:
    adapter, options = config.adapter, config.options
    return [
        *(f"--checkpoint={config.checkpoint}", f"--data={config.data.data}"),
        *(f"--method={config.method}", f"--steps={config.steps}", f"--out={config.out}"),
        *(f"--batch-size={config.batch_size}", f"--seq-len={config.seq_len}"),
        *(f"--compute-dtype={config.compute_dtype}", f"--rounding={options.rounding}"),
        *(f"--learning-rate={config.optimizer.learning_rate}", "--warmup-steps=2"),
        *(f"--lora-rank={adapter.lora_rank}", f"--lora-dropout={adapter.lora_dropout}"),
        f"--recalibrate-every={adapter.recalibrate_every}",
        f"--calibration-batches={adapter.calibration_batches}",
        *("--log-every=1", "--eval-every=4", "--eval-batches=2", "--save-every=2"),
    ]


def start(config: FinetuneConfig, *more: str) -> subprocess.Popen:
    import os

    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    return subprocess.Popen(
        [sys.executable, "-m", "train.finetune", *flags(config), *more],
        cwd=pathlib.Path(__file__).parents[2],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_killed_run_ends_with_the_same_bits(folder):
    """Calibration, dropout and dither among them; in processes of their own, as a user has it."""
    from tests.train.test_pretrain import wait_for_step

    one = config(
        folder,
        "whole",
        method="hyc_lora",
        options=MethodOptions(rounding="dither"),
        adapter=AdapterConfig(
            lora_rank=2, lora_dropout=0.1, recalibrate_every=3, calibration_batches=2
        ),
    )
    process = start(one)
    text = process.communicate()[0]
    assert process.returncode == 0, text
    broken = dataclasses.replace(one, out=folder / "killed")
    process = start(broken)
    wait_for_step(process, broken.out, 5)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    process = start(broken, "--resume")
    text = process.communicate()[0]
    assert process.returncode == 0, text
    assert "going on from step" in text
    assert losses(broken) == losses(one)
    weights = "adapter/adapter_model.safetensors"
    assert (broken.out / weights).read_bytes() == (one.out / weights).read_bytes()


def test_calibration_is_of_data_and_saved(folder):
    one = config(folder, "calibrated", method="hyc_lora", steps=1)
    run(one, quiet())
    ready = prepare(dataclasses.replace(one, resume=True), quiet())
    ready.checkpoints.close()
    saved = jax.tree.map(np.asarray, ready.state.calibration)
    assert set(saved) == {"attention_norm", "q", "k", "v", "mlp_norm", "gate", "up"}
    assert set(saved["attention_norm"]) == {"step", "centre", "channels"}
    assert set(saved["gate"]) == {"step", "centre"}
    # Of the first batches, before any step, when adapters add nothing.
    ready.batches.set_state({"epoch": 0, "row": 0})
    first = [next(ready.batches) for _ in range(one.adapter.calibration_batches)]
    ready.batches.close()
    found = calibrate(ready.recipe.storage, ready.state.frozen, first, one.compute_dtype)
    jax.tree.map(np.testing.assert_array_equal, found, saved)


def test_another_checkpoint_or_other_adapters_are_refused(folder):
    one = config(folder, "identity", steps=2)
    run(one, quiet())
    other = folder / "other"
    huggingface.save(Decoder(DIMS, jax.random.key(1)), other, like=folder / "checkpoint")
    on = dataclasses.replace(one, resume=True, steps=3)
    for changes, message in (
        ({"checkpoint": str(other)}, "checkpoint"),
        ({"adapter": AdapterConfig(lora_rank=3)}, "adapters.rank: 2 there, 3 now"),
    ):
        with pytest.raises(BadRunError, match=message):
            run(dataclasses.replace(on, **changes), quiet())
    assert run(on, quiet()) == 3


def test_a_file_of_llama2c_is_a_checkpoint(folder):
    dims = dataclasses.replace(DIMS, norm_eps=1e-5, tie_embeddings=True)
    path = folder / "tiny.bin"
    llama2c.save(Decoder(dims, jax.random.key(0)), path)
    tokenizer = folder / "checkpoint"
    for method in ("exact", "qlora"):
        one = config(
            folder, f"bin-{method}", checkpoint=str(path), tokenizer=tokenizer, method=method,
            steps=2, adapter=AdapterConfig(lora_rank=2, merge=True),
        )  # fmt: skip
        run(one, quiet())
        assert huggingface.load(one.out / "model").config.tie_embeddings
        assert (one.out / "model/tokenizer.json").exists()
    with pytest.raises(BadRunError, match="has no tokenizer: pass `--tokenizer`"):
        run(config(folder, "bin", checkpoint=str(path)), quiet())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint": "nowhere"}, "'nowhere' cannot be read: no such file or folder"),
        ({"seq_len": 65}, "`--seq-len` 65 is above the 64 positions of checkpoint"),
        ({"data": ExampleConfig(data="nowhere.jsonl")}, "nowhere.jsonl"),
        ({"method": "hyc"}, "unknown `--method` 'hyc'"),
        ({"method": "hyc_lora", "options": MethodOptions(bits=16)}, "`--bits` 16 stores nothing"),
        ({"method": "qlora", "in_backward": True}, "`--in-backward` is for methods that train all"),
    ],
    ids=str,
)
def test_what_cannot_be_is_said_in_a_line(changes, message, folder):
    with pytest.raises(BadRunError, match=message):
        run(config(folder, "bad", **changes), quiet())
    assert not (folder / "bad" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint": ""}, "`--checkpoint` is missing"),
        ({"adapter": AdapterConfig(targets=("q_prj",))}, "has 'q_prj', which is no weight"),
        ({"adapter": AdapterConfig(lora_rank=0)}, "must be at least 1, got 0"),
    ],
    ids=str,
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        FinetuneConfig(**{"checkpoint": "somewhere", **changes})


def test_adapters_are_for_fine_tuning():
    from train.config import PretrainConfig
    from train.pretrain import run as pretrain

    with pytest.raises(BadRunError, match=r"trains adapters of a checkpoint: use train.finetune"):
        pretrain(PretrainConfig(method="lora"), quiet())
