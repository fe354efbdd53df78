"""The fine-tuning program: a pretrained checkpoint in, a trained one out."""

import dataclasses
import json
import signal
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import Decoder, ModelConfig, huggingface
from models.lora import attach
from models.peft import load_adapters
from tests.train.runs import forget_last_checkpoint, losses, quiet, start, wait_for_step
from train.finetune import export, prepare, run
from train.run.calibration import calibrate
from train.run.loop import BadRunError
from train.run.step import model_of
from train.settings.config import AdapterConfig, FinetuneConfig, OptimizerConfig
from train.settings.data import ExampleConfig
from train.settings.options import ADAPTERS, MethodOptions
from train.text.tokenizer import train_bpe

DIMS = ModelConfig(300, 32, 48, 2, 4, num_kv_heads=2, max_seq_len=64)
STEPS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a checkpoint, its tokenizer, and sums to learn."""
    folder = tmp_path_factory.mktemp("finetune")
    rng = np.random.default_rng(0)
    records = []
    for _ in range(120):
        a, b = rng.integers(0, 50, 2)
        records.append({"prompt": f"What is {a} plus {b}?", "completion": f" It is {a + b}."})
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, records)))
    huggingface.save(_model(0), folder / "checkpoint")
    texts = [one["prompt"] + one["completion"] for one in records]
    train_bpe(texts, 300).save(folder / "checkpoint")
    return folder


def _model(seed: int, dims: ModelConfig = DIMS) -> Decoder:
    """Returns a decoder with random weights, drawn in one program."""
    return jax.jit(lambda key: Decoder(dims, key))(jax.random.key(seed))


def make_config(folder, out: str, **changes) -> FinetuneConfig:
    method = changes.get("method", "lora")
    adapter = AdapterConfig()
    if method in ADAPTERS:
        adapter = AdapterConfig(lora_rank=2)
    if method == "hyc_lora":
        adapter = dataclasses.replace(adapter, calibration_batches=2)
    defaults = FinetuneConfig(
        checkpoint=str(folder / "checkpoint"),
        data=ExampleConfig(data=str(folder / "sums.jsonl")),
        adapter=adapter,
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


OPTIONS = {
    "pamm": MethodOptions(codec=("PointApproximation(points=1)",)),
    "low_rank": MethodOptions(rank=4),
    "subspace": MethodOptions(rank=4),
    "gact": MethodOptions(),
    "lean": MethodOptions(),
}
"""Methods that differ by more than a codec. Other tests here run `exact`, `lora`, `qlora` and
`hyc_lora`, and test_step.py takes a step with every method."""


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=pytest.mark.slow if m != "lean" else ()) for m in OPTIONS],
)
def test_every_method_learns_and_writes_the_model(method, folder):
    one = make_config(folder, method, method=method, options=OPTIONS[method])
    console = quiet()
    assert run(one, console) == STEPS
    assert_learnt(one)
    text = console.file.getvalue()
    assert "step 0: held-out loss" in text  # Before the first step, too.
    assert "count in the loss" in text
    trained = huggingface.load(one.out / "model")
    before = huggingface.load(folder / "checkpoint")
    assert np.any(trained.layers.mlp.up[...] != before.layers.mlp.up[...])
    names = {p.name for p in (one.out / "model").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= names


def assert_learnt(one: FinetuneConfig) -> None:
    found = [loss for _, loss in losses(one.out)]
    assert np.mean(found[-2:]) < found[0]


@pytest.fixture(scope="module")
def merged(folder):
    """A finished run of `lora` that wrote its adapter and the merged model."""
    one = make_config(folder, "merged", adapter=AdapterConfig(2, lora_alpha=3.0, merge=True))
    run(one, quiet())
    return one


def test_the_exports_of_adapters_are_the_trained_model(folder, merged):
    ready = prepare(dataclasses.replace(merged, resume=True), quiet())
    tokens = jnp.arange(20)[None]
    want = model_of(ready.recipe, ready.state)(tokens, compute_dtype="float32")
    ready.checkpoints.close()
    ready.batches.close()
    adapters, lora = load_adapters(merged.out / "adapter", DIMS)
    assert lora.rank == 2
    assert any(np.any(x["b"]) for x in adapters["layers"].values())
    base = huggingface.load(folder / "checkpoint")
    apart = attach(base, adapters, lora)(tokens, compute_dtype="float32")
    np.testing.assert_array_equal(apart, want)
    model = huggingface.load(merged.out / "model")(tokens, compute_dtype="float32")
    np.testing.assert_allclose(model, want, rtol=1e-5, atol=1e-5)
    train_bpe(["another text"], 280).save(folder / "tokenizer")
    export(dataclasses.replace(merged, tokenizer=folder / "tokenizer"), ready, quiet())
    exported, given = (x / "tokenizer.json" for x in (merged.out / "model", folder / "tokenizer"))
    assert exported.read_bytes() == given.read_bytes()


def test_another_checkpoint_or_other_adapters_are_refused(folder, merged):
    other = folder / "other"
    huggingface.save(_model(1), other, like=folder / "checkpoint")
    longer = dataclasses.replace(merged, resume=True, steps=STEPS + 1)
    for changes, message in (
        ({"checkpoint": str(other)}, "checkpoint"),
        ({"adapter": AdapterConfig(lora_rank=3)}, "adapters.rank: 2 there, 3 now"),
    ):
        with pytest.raises(BadRunError, match=message):
            run(dataclasses.replace(longer, **changes), quiet())


def test_a_longer_run_replaces_its_exports_and_nothing_else(merged):
    names = {p.name for p in merged.out.iterdir()}
    before = (merged.out / ADAPTER).read_bytes()
    assert run(dataclasses.replace(merged, resume=True, steps=STEPS + 1), quiet()) == STEPS + 1
    assert (merged.out / ADAPTER).read_bytes() != before
    assert {p.name for p in merged.out.iterdir()} == names


def flags(config: FinetuneConfig) -> list[str]:
    adapter, options = config.adapter, config.options
    return [
        *(f"--checkpoint={config.checkpoint}", f"--data={config.data.data}"),
        *(f"--method={config.method}", f"--steps={config.steps}", f"--out={config.out}"),
        *(f"--batch-size={config.batch_size}", f"--seq-len={config.seq_len}"),
        *(f"--compute-dtype={config.compute_dtype}", f"--codec={options.codec[0]}"),
        *(f"--learning-rate={config.optimizer.learning_rate}", "--warmup-steps=2"),
        *(f"--lora-rank={adapter.lora_rank}", f"--lora-dropout={adapter.lora_dropout}"),
        f"--recalibrate-every={adapter.recalibrate_every}",
        f"--calibration-batches={adapter.calibration_batches}",
        *("--log-every=1", "--eval-every=4", "--eval-batches=2", "--save-every=2"),
    ]


RANDOM = {
    "method": "hyc_lora",
    "options": MethodOptions(codec=("Quantized(rounding='dither')",)),
    "adapter": AdapterConfig(
        lora_rank=2, lora_dropout=0.1, recalibrate_every=4, calibration_batches=2
    ),
}
"""A run with calibration, dropout and dither."""
ADAPTER = "adapter/adapter_model.safetensors"


@pytest.mark.slow
def test_a_run_resumed_from_its_last_but_one_checkpoint_ends_with_equal_bits(folder):
    one = make_config(folder, "resumed", **RANDOM)
    run(one, quiet())
    assert_learnt(one)
    want, want_losses = (one.out / ADAPTER).read_bytes(), losses(one.out)
    forget_last_checkpoint(one.out)
    console = quiet()
    run(dataclasses.replace(one, resume=True), console)
    assert f"resuming from step {STEPS - 2}" in console.file.getvalue()
    assert (one.out / ADAPTER).read_bytes() == want
    assert losses(one.out) == want_losses


@pytest.mark.slow
def test_a_killed_run_ends_with_equal_bits(folder):
    one = make_config(folder, "whole", **RANDOM)
    process = start("train.finetune", flags(one))
    text = process.communicate()[0]
    assert process.returncode == 0, text
    broken = dataclasses.replace(one, out=folder / "killed")
    process = start("train.finetune", flags(broken))
    wait_for_step(process, broken.out, 5)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    process = start("train.finetune", [*flags(broken), "--resume"])
    text = process.communicate()[0]
    assert process.returncode == 0, text
    assert "resuming from step" in text
    assert losses(broken.out) == losses(one.out)
    assert (broken.out / ADAPTER).read_bytes() == (one.out / ADAPTER).read_bytes()


@pytest.fixture
def no_steps(monkeypatch):
    """Leaves out the compilation of the training step."""
    no_memory = SimpleNamespace(temp_size_in_bytes=0)
    compiled = SimpleNamespace(memory_analysis=lambda: no_memory)
    monkeypatch.setattr("train.run.begin.compile_step", lambda *_: compiled)


@pytest.mark.usefixtures("no_steps")
def test_calibration_is_measured_on_the_first_batches(folder):
    one = make_config(folder, "calibrated", method="hyc_lora")
    ready = prepare(one, quiet())
    ready.checkpoints.close()
    found = jax.tree.map(np.asarray, ready.state.calibration)
    assert set(found) == {"attention_norm", "q", "k", "v", "mlp_norm", "gate", "up"}
    assert set(found["attention_norm"]) == {"step", "centre", "channels"}
    assert set(found["gate"]) == {"step", "centre"}
    first = [next(ready.batches) for _ in range(one.adapter.calibration_batches)]
    ready.batches.close()
    # Before any step the output of the adapters is zero.
    # The order of the batches does not matter.
    want = calibrate(ready.recipe.storage, ready.state.frozen, first[::-1], one.compute_dtype)
    jax.tree.map(np.testing.assert_array_equal, found, want)


@pytest.mark.slow
@pytest.mark.usefixtures("no_steps")
def test_the_input_of_a_block_has_the_calibration_of_its_first_norm(folder):
    found = []
    for name, options in (
        ("whole", MethodOptions()),
        ("remat", MethodOptions(remat=True)),
        ("offloaded", MethodOptions(remat=True, offload=True)),
    ):
        ready = prepare(
            make_config(folder, f"norm-{name}", method="hyc_lora", options=options), quiet()
        )
        ready.checkpoints.close()
        ready.batches.close()
        found.append(jax.tree.map(np.asarray, ready.state.calibration))
    whole, *others = found
    for other in others:
        assert set(other) == {"attention_norm"}
        jax.tree.map(
            np.testing.assert_array_equal, other["attention_norm"], whole["attention_norm"]
        )


@pytest.mark.usefixtures("no_steps")
def test_weights_of_a_bfloat16_checkpoint_are_trained_in_float32(folder):
    half = folder / "half"
    model = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), _model(0))
    huggingface.save(model, half)
    train_bpe(["some text"], 300).save(half)
    ready = prepare(make_config(folder, "wide", checkpoint=str(half), method="exact"), quiet())
    ready.checkpoints.close()
    ready.batches.close()
    assert {x.dtype for x in jax.tree.leaves(ready.state.model)} == {jnp.dtype("float32")}


def test_bad_settings_are_refused_in_one_line(folder):
    for changes, message in (
        ({"checkpoint": "nowhere"}, "'nowhere' cannot be read: no such file or folder"),
        ({"data": ExampleConfig(data="nowhere.jsonl")}, "nowhere.jsonl"),
        ({"method": "hyc"}, "unknown `--method` 'hyc'"),
        (
            {"method": "hyc_lora", "options": MethodOptions(codec=("nose=Exact()",))},
            "`--codec nose=",
        ),
        ({"method": "lora", "options": MethodOptions(offload=True)}, "`--offload` has no effect"),
        ({"method": "qlora", "in_backward": True}, "`--in-backward` has no effect with"),
        ({"method": "exact", "adapter": AdapterConfig(lora_rank=2)}, "`--lora-rank 2` has no eff"),
    ):
        with pytest.raises(BadRunError, match=message):
            run(make_config(folder, "bad", **changes), quiet())
        assert not (folder / "bad" / "checkpoints").exists()


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="`--checkpoint` is missing"):
        FinetuneConfig()
    with pytest.raises(ValueError, match="'q_prj'"):
        AdapterConfig(targets=("q_prj",))
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        AdapterConfig(lora_rank=0)
    with pytest.raises(ValueError, match="`--calibration-batches` must be at least 1, got 0"):
        AdapterConfig(calibration_batches=0)
