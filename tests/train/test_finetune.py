"""The fine-tuning program: a pretrained checkpoint in, a trained one out."""

import dataclasses
import json
import pathlib
import shlex
import shutil
import signal
from types import SimpleNamespace

import hub_cache
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import Decoder, ModelConfig, huggingface
from models.json_files import read_object
from models.lora import attach
from models.peft import load_adapters
from tests.train.example_files import write_rows
from tests.train.runs import finish, forget_last_checkpoint, losses, quiet, start, wait_for_step
from train import finetune
from train.finetune import export, prepare, run
from train.planning import tables
from train.run import begin, loop
from train.run import export as run_export
from train.run.calibration import calibrate
from train.run.metrics import read_metrics
from train.run.program import BadRunError
from train.run.step import model_of
from train.settings.config import (
    AdapterConfig,
    FinetuneConfig,
    OptimizerConfig,
    PreferenceConfig,
)
from train.settings.data import ExampleConfig
from train.settings.options import ADAPTERS, MethodOptions
from train.text.trained_tokenizer import train_bpe

pytestmark = pytest.mark.usefixtures("shared_steps")
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
    texts = [record["prompt"] + record["completion"] for record in records]
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
    config = make_config(folder, method, method=method, options=OPTIONS[method], save_every=100)
    console = quiet()
    assert run(config, console) == STEPS
    assert_learned(config)
    text = console.file.getvalue()
    assert "step 0: held-out loss" in text  # Before the first step, too.
    assert "count in the loss" in text
    trained = huggingface.load(config.out / "model")
    before = huggingface.load(folder / "checkpoint")
    assert np.any(np.asarray(trained.layers.mlp.up[...]) != before.layers.mlp.up[...])
    names = {p.name for p in (config.out / "model").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= names


def assert_learned(config: FinetuneConfig) -> None:
    values = [loss for _, loss in losses(config.out)]
    assert np.mean(values[-2:]) < values[0]


@pytest.fixture(scope="module")
def merged(folder):
    """A finished run of `lora` that wrote its adapter and the merged model."""
    adapter = AdapterConfig(2, lora_alpha=3.0, merge=True)
    config = make_config(folder, "merged", adapter=adapter, save_every=STEPS - 2)
    run(config, quiet())
    return config


def opened(config: FinetuneConfig):
    """Returns a run that is ready for its next step, whose files are closed."""
    ready = prepare(config, quiet())
    ready.checkpoints.close()
    ready.batches.close()
    ready.lock.close()
    return ready


def test_the_exports_of_adapters_are_the_trained_model(folder, merged):
    ready = opened(dataclasses.replace(merged, resume=True))
    adapters, lora = load_adapters(merged.out / "adapter", DIMS)
    assert lora.rank == 2
    assert any(np.any(np.asarray(x["b"])) for x in adapters["layers"].values())

    @jax.jit
    def outputs(state, base, adapters, exported):
        models = model_of(ready.recipe, state), attach(base, adapters, lora), exported
        return [model(np.arange(20)[None], compute_dtype="float32") for model in models]

    base, exported = (huggingface.load(x) for x in (folder / "checkpoint", merged.out / "model"))
    want, apart, together = outputs(ready.state, base, adapters, exported)
    np.testing.assert_array_equal(apart, want)
    np.testing.assert_allclose(together, want, rtol=1e-5, atol=1e-5)
    train_bpe(["another text"], 280).save(folder / "tokenizer")
    export(dataclasses.replace(merged, tokenizer=folder / "tokenizer"), ready, quiet())
    copied, given = (x / "tokenizer.json" for x in (merged.out / "model", folder / "tokenizer"))
    assert copied.read_bytes() == given.read_bytes()


def test_a_run_is_exported_with_its_own_base_and_method(folder, merged, monkeypatch):
    base = str(folder / "checkpoint")
    fields = read_object(merged.out / "adapter" / "adapter_config.json")
    assert fields["base_model_name_or_path"] == base
    monkeypatch.chdir(folder.parent)
    relative = f"{folder.name}/checkpoint"  # A name at the Hub has this form too.
    assert finetune._target(dataclasses.replace(merged, checkpoint=relative), None).base == base
    out = folder / "shared"
    run(dataclasses.replace(merged, export=out), quiet())
    want = (merged.out / "model" / "model.safetensors").read_bytes()
    assert (out / "model.safetensors").read_bytes() == want
    huggingface.save(_model(1), folder / "foreign")
    train_bpe(["some text"], 300).save(folder / "foreign")
    for changes, message in (
        ({"method": "qlora"}, "has `--method lora`: pass the settings of the run"),
        ({"checkpoint": str(folder / "foreign")}, "began with other weights than those of"),
    ):
        with pytest.raises(BadRunError, match=message):
            run(dataclasses.replace(merged, export=folder / "no", **changes), quiet())
        assert not (folder / "no").exists()


def test_another_checkpoint_or_other_adapters_are_refused(folder, merged):
    other = folder / "other"
    huggingface.save(_model(1), other, like=folder / "checkpoint")
    for changes, message in (
        ({"checkpoint": str(other)}, "checkpoint"),
        ({"adapter": AdapterConfig(lora_rank=3)}, "adapters.rank: 2 there, 3 now"),
    ):
        with pytest.raises(BadRunError, match=message):
            run(dataclasses.replace(merged, resume=True, steps=STEPS + 1, **changes), quiet())
    load_adapters(merged.out / "adapter", DIMS, folder / "checkpoint")
    message = r"adapter_model.* was trained with other weights than those of .*: .* tensors changed"
    with pytest.raises(ValueError, match=message):
        load_adapters(merged.out / "adapter", DIMS, other)


def test_a_resumed_run_ends_with_equal_bits_and_replaces_its_exports_and_nothing_else(merged):
    names = {p.name for p in merged.out.iterdir()}
    want, want_losses = (merged.out / ADAPTER).read_bytes(), losses(merged.out)
    (merged.out / ADAPTER).write_bytes(b"of an earlier export")
    forget_last_checkpoint(merged.out)
    console = quiet()
    assert run(dataclasses.replace(merged, resume=True), console) == STEPS
    text = console.file.getvalue()
    assert f"resuming from step {STEPS - 2}" in text
    # If the run were stopped now, they would be of another step than the checkpoint.
    assert text.index("removed: ") < text.index("written: ")
    assert (merged.out / ADAPTER).read_bytes() == want
    assert losses(merged.out) == want_losses
    assert {p.name for p in merged.out.iterdir()} == names


def flags(config: FinetuneConfig) -> list[str]:
    return shlex.split(tables.flags(config))


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
def test_a_killed_run_ends_with_equal_bits(folder):
    whole = make_config(folder, "whole", **RANDOM)
    finish(start("train.finetune", flags(whole)))
    assert_learned(whole)
    broken = dataclasses.replace(whole, out=folder / "killed")
    process = start("train.finetune", flags(broken))
    wait_for_step(process, broken.out, 5)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (text,) = finish(start("train.finetune", [*flags(broken), "--resume"]))
    assert "resuming from step" in text
    assert losses(broken.out) == losses(whole.out)
    assert (broken.out / ADAPTER).read_bytes() == (whole.out / ADAPTER).read_bytes()


@pytest.fixture
def no_steps(monkeypatch):
    """Leaves out what is printed of the training step, and its compilation."""
    compiled = SimpleNamespace(memory_analysis=lambda: SimpleNamespace(temp_size_in_bytes=0))
    memory = SimpleNamespace(with_workspace=lambda *_: None)
    for name, result in (("explain_step", 1), ("compile_step", compiled), ("step_memory", memory),
                         ("print_tables", None)):  # fmt: skip
        monkeypatch.setattr(begin, name, lambda *_, result=result: result)


@pytest.mark.usefixtures("no_steps")
def test_a_signal_in_the_first_evaluation_ends_the_program(folder, monkeypatch):
    def evaluated(*_: object) -> None:
        assert signal.getsignal(signal.SIGTERM) == before
        raise InterruptedError

    before = signal.getsignal(signal.SIGTERM)
    ready = prepare(make_config(folder, "interrupted", method="exact"), quiet())
    monkeypatch.setattr(loop._Trainer, "evaluate", evaluated)
    with pytest.raises(InterruptedError):
        loop.train(ready, quiet())


@pytest.mark.usefixtures("no_steps")
def test_calibration_is_measured_on_the_first_batches(folder):
    config = make_config(folder, "calibrated", method="hyc_lora")
    ready = prepare(config, quiet())
    ready.checkpoints.close()
    found = jax.tree.map(np.asarray, ready.state.calibration)
    assert set(found) == {"attention_norm", "q", "k", "v", "mlp_norm", "gate", "up"}
    assert set(found["attention_norm"]) == {"step", "centre", "channels"}
    assert set(found["gate"]) == {"step", "centre"}
    first = [next(ready.batches) for _ in range(config.adapter.calibration_batches)]
    ready.batches.close()
    # Before any step the output of the adapters is zero.
    # The order of the batches does not matter.
    want = calibrate(ready.recipe.storage, ready.state.frozen, first[::-1], config.compute_dtype)
    jax.tree.map(np.testing.assert_array_equal, found, want)


@pytest.mark.slow
@pytest.mark.usefixtures("no_steps")
def test_the_input_of_a_block_has_the_calibration_of_its_first_norm(folder):
    sites, *others = (
        opened(make_config(folder, f"norm-{i}", method="hyc_lora", options=options))
        .state.calibration
        for i, options in enumerate((
            MethodOptions(), MethodOptions(remat=True), MethodOptions(remat=True, offload=True)
        ))
    )  # fmt: skip
    for other in others:
        assert set(other) == {"attention_norm"}
        jax.tree.map(
            np.testing.assert_array_equal, other["attention_norm"], sites["attention_norm"]
        )


@pytest.mark.usefixtures("no_steps")
def test_weights_of_a_bfloat16_checkpoint_are_trained_in_float32(folder):
    half = folder / "half"
    model = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), _model(0))
    huggingface.save(model, half)
    train_bpe(["some text"], 300).save(half)
    ready = opened(make_config(folder, "wide", checkpoint=str(half), method="exact"))
    assert {x.dtype for x in jax.tree.leaves(ready.state.model)} == {jnp.dtype("float32")}


def test_a_checkpoint_by_its_name_at_the_hub(folder, tmp_path, monkeypatch):
    hub_cache.use(monkeypatch, tmp_path)
    snapshot = hub_cache.put(tmp_path, "org/Tiny-1.5B", folder / "checkpoint")
    monkeypatch.setattr(finetune, "begin", lambda user_config, recipe, *_, **parts: (recipe, parts))
    config = dataclasses.replace(make_config(folder, "", checkpoint="org/Tiny-1.5B"), out=None)
    recipe, parts = prepare(config, quiet())
    assert recipe.config.title == "Tiny-1.5B"
    assert recipe.config.folder == pathlib.Path("runs/Tiny-1.5B-lora")
    assert parts["checkpoint"] == finetune.fingerprint(snapshot)
    written = []
    monkeypatch.setattr(run_export, "replace_folder", lambda path, write, _: written.append(write))
    state = SimpleNamespace(model=None)
    parts = {"recipe": recipe, "state": state, "config": recipe.config, "identity": {}}
    export(config, SimpleNamespace(**parts), quiet())
    # PEFT downloads the base by this name on other machines.
    assert [write.keywords["base"] for write in written] == ["org/Tiny-1.5B"]


def preferences(folder, out: str, **changes) -> FinetuneConfig:
    """Returns settings that prefer right sums over wrong ones."""
    pairs = [
        {"prompt": f"What is {a} plus {a}?", "chosen": f" It is {a + a}.", "rejected": f" {a}."}
        for a in range(60)
    ]
    write_rows(folder / "pairs.jsonl", pairs)
    data = ExampleConfig(data=(str(folder / "pairs.jsonl"),), held_out=0.2)
    return make_config(folder, out, **{"loss": "dpo", "data": data, "steps": 6} | changes)


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("lora", {}),  # The reference is computed within a step.
        pytest.param("exact", {"accumulate": 2}, marks=pytest.mark.slow),
        pytest.param("lean", {}, marks=pytest.mark.slow),
    ],
)
def test_preferences_are_learned(folder, method, changes):
    config = preferences(folder, f"dpo-{method}", method=method, **changes)
    run(config, quiet())
    lines = read_metrics(config.out / "metrics.jsonl")
    first, *_, last = [line for line in lines if "reward_accuracy" in line]
    # Before a step the policy is the reference.
    np.testing.assert_allclose(first["validation_loss"], np.log(2), rtol=1e-5)
    np.testing.assert_allclose(lines[1]["loss"], np.log(2), rtol=1e-5)
    assert last["validation_loss"] < 0.95 * first["validation_loss"]
    assert last["reward_accuracy"] > 0.9
    assert last["reward_margin"] > 0


@pytest.mark.usefixtures("no_steps")
def test_preferences_that_do_not_fit_are_refused(folder):
    sums = ExampleConfig(data=str(folder / "sums.jsonl"))
    for changes, message in (
        ({"loss": "sft"}, "has 'chosen' and 'rejected', a pair of preference: pass `--loss dpo`"),
        ({"data": sums}, "`--loss dpo` needs 'prompt', 'chosen' and 'rejected'"),
    ):
        with pytest.raises(BadRunError, match=message):
            run(preferences(folder, "bad", **changes), quiet())
    for changes, message in (
        ({"batch_size": 3}, "must be even with `--loss dpo`"),
        ({"z_loss": 0.1}, "`z_loss` has no effect with `--loss dpo`"),
        ({"loss": "sft", "preference": PreferenceConfig(beta=0.2)}, "`--beta 0.2` has no effect"),
    ):
        with pytest.raises(ValueError, match=message):
            preferences(folder, "bad", **changes)
    with pytest.raises(ValueError, match="`--beta` must be above 0"):
        PreferenceConfig(beta=0.0)


def test_damaged_weights_are_found_before_the_examples_are_read(folder, tmp_path):
    shutil.copytree(folder / "checkpoint", tmp_path / "half")
    weights = tmp_path / "half" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    data = ExampleConfig(data="nowhere.jsonl")
    with pytest.raises(BadRunError, match=r"`--checkpoint`: .*model.safetensors"):
        run(make_config(folder, "bad", checkpoint=str(tmp_path / "half"), data=data), quiet())


def test_bad_settings_are_refused_in_one_line(folder):
    nose = MethodOptions(codec=("nose=Exact()",))
    for changes, message in (
        ({"checkpoint": "nowhere"}, "'nowhere' cannot be read: no such file or folder"),
        ({"data": ExampleConfig(data="nowhere.jsonl")}, "nowhere.jsonl"),
        ({"method": "hyc"}, "unknown `--method` 'hyc'"),
        ({"method": "hyc_lora", "options": nose}, "`--codec nose="),
        ({"method": "lora", "options": MethodOptions(offload=True)}, "`--offload` has no effect"),
        ({"method": "qlora", "in_backward": True}, "`--in-backward` has no effect with"),
        ({"method": "exact", "adapter": AdapterConfig(lora_rank=2)}, "`--lora-rank 2` has no eff"),
    ):
        with pytest.raises(BadRunError, match=message):
            run(make_config(folder, "bad", **changes), quiet())
        assert not (folder / "bad" / "checkpoints").exists()
