"""The pretraining program: runs, resumed runs, and settings that it refuses."""

import dataclasses
import functools
import json
import math
import os
import pathlib
import queue
import re
import signal

import jax
import numpy as np
import pytest

import models
from models.checkpoints import find_checkpoint, stop_ids
from models.generation import generate
from tests.train.runs import (
    STEPS,
    assert_equal_ends,
    final_state,
    finish,
    forget_last_checkpoint,
    losses,
    make_config,
    quiet,
    saved_steps,
    start_pretraining,
    wait_for_step,
    write_text,
)
from train import pretrain
from train.pretrain import run
from train.run import loss_scale
from train.run.metrics import read_metrics
from train.run.program import BadRunError, NonFiniteError, run_program
from train.run.saved_settings import changed_rate
from train.run.sharding import make_mesh
from train.run.state import shardings_of_run
from train.run.step import init_state
from train.settings.config import DataConfig, OptimizerConfig, PretrainConfig
from train.settings.options import MethodOptions
from train.text.corpus import open_corpus
from train.text.tokenizer_files import load_tokenizer

pytestmark = pytest.mark.usefixtures("shared_steps")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a small text, on which the tokenizer is trained once."""
    folder = tmp_path_factory.mktemp("pretrain")
    write_text(folder)
    return folder


@pytest.fixture(scope="module")
def unbroken(folder, shared_steps):
    """A run from beginning to end, and what it printed.

    Its state has bases, 8-bit moments and an estimated norm; it dithers, rounds its bfloat16
    weights stochastically and takes refresh steps.
    """
    options = MethodOptions(rank=4, gap=4, codec=("Quantized(rounding='dither')",))
    whole = make_config(
        folder, "unbroken", method="lean_subspace", options=options, weight_dtype="bfloat16",
        save_every=10,
    )  # fmt: skip
    console = quiet()
    assert run(whole, console) == STEPS
    return whole, console.file.getvalue()


def test_a_run_writes_metrics_picture_and_opening(unbroken):
    whole, text = unbroken
    lines = read_metrics(whole.out / "metrics.jsonl")
    training = [line for line in lines if "loss" in line]
    assert [line["step"] for line in training] == [*range(1, STEPS + 1)]
    columns = {
        "loss",
        "grad_norm",
        "update_norm",
        "learning_rate",
        "tokens_per_second",
        "tflop_per_second",
    }
    assert columns <= training[0].keys()
    assert training[-1]["loss"] < training[0]["loss"]
    assert [line["step"] for line in lines if "perplexity" in line] == [5, 10, STEPS]
    assert (whole.out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((whole.out / "tensorboard").glob("events*"))
    assert saved_steps(whole.out) == [10, 12]
    for word in ("Quantized(bits=4", "optimizer", "linear residuals", "workspace",
                 "weights: bfloat16, rounded stochastically", "held-out loss",
                 f"done at step {STEPS}"):  # fmt: skip
        assert word in text


@pytest.mark.slow
def test_a_terminated_and_then_killed_run_ends_with_equal_bits(folder, unbroken):
    whole, _ = unbroken
    broken = dataclasses.replace(whole, out=folder / "broken", resume=True, save_every=100)
    process = start_pretraining(broken)
    wait_for_step(process, broken.out, 3)
    process.send_signal(signal.SIGTERM)
    (text,) = finish(process)
    assert "stopped by SIGTERM, saved at step" in text
    broken = dataclasses.replace(broken, save_every=2)
    process = start_pretraining(broken)
    # After a refresh step, and before the next.
    wait_for_step(process, broken.out, 7)
    process.send_signal(signal.SIGKILL)
    finish(process, code=-signal.SIGKILL)
    console = quiet()
    assert run(broken, console) == STEPS
    assert "resuming from step" in console.file.getvalue()
    assert "with other settings" not in console.file.getvalue()
    assert_equal_ends(broken, whole)


def test_a_run_is_a_model_that_programs_and_transformers_read(folder, unbroken):
    whole, _ = unbroken
    exported = dataclasses.replace(whole, export=folder / "exported")
    assert run(exported, quiet()) == STEPS  # Of its last checkpoint, without a step.
    _, state = final_state(whole)
    for path in (whole.out, exported.export):
        jax.tree.map(np.testing.assert_array_equal, models.load(path), state.model)
        tokenizer = load_tokenizer(find_checkpoint(path))
        assert tokenizer.fingerprint == load_tokenizer(whole.out / "tokenizer").fingerprint
        assert stop_ids(find_checkpoint(path)) == (tokenizer.eos_id,)
    with pytest.raises(BadRunError, match=r"`--export`: '.*exported' exists and is not empty"):
        run(exported, quiet())
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported.export, dtype=torch.float32)
    ids = transformers.AutoTokenizer.from_pretrained(exported.export)(
        " the cat", return_tensors="pt"
    )
    prompt = ids.input_ids.tolist()
    assert prompt == [tokenizer.encode(" the cat")]
    ours = models.load(exported.export, dtype="float32")
    with torch.no_grad():
        logits = theirs(**ids).logits.numpy()
        text = theirs.generate(**ids, max_new_tokens=4)[0].tolist()
    logits_of = jax.jit(lambda model, ids: model(ids, compute_dtype="float32"))
    np.testing.assert_allclose(logits_of(ours, np.array(prompt)), logits, atol=1e-4)
    stop = (tokenizer.eos_id,)
    new = generate(ours, prompt, max_new_tokens=4, stop=stop, compute_dtype="float32")
    assert [*prompt[0], *new[0]] == [i for i in text if i not in stop]


@pytest.fixture
def begun(monkeypatch):
    """Returns a function that prepares a run up to its first step: its recipe and parts."""
    monkeypatch.setattr(pretrain, "begin", lambda config, recipe, *_, **parts: (recipe, parts))

    def prepared(config):
        recipe, parts = pretrain.prepare(config, quiet())
        parts["batches"].close()
        return recipe, parts

    return prepared


def test_training_goes_on_from_the_model_of_a_run(folder, unbroken, begun):
    whole, _ = unbroken
    data = dataclasses.replace(whole.data, vocab_size=DataConfig.vocab_size)
    further = {"model": PretrainConfig.model, "checkpoint": str(whole.out), "data": data}
    recipe, parts = begun(dataclasses.replace(whole, out=folder / "further", **further))
    assert recipe.config.pretrained  # It is evaluated first.
    shapes = jax.eval_shape(functools.partial(init_state, recipe))
    place = make_mesh("")
    state = parts["first_state"](shardings_of_run(recipe, shapes, place))
    jax.tree.map(np.testing.assert_array_equal, state.model, models.load(whole.out))
    assert parts["tokenizer"].fingerprint == load_tokenizer(whole.out / "tokenizer").fingerprint


def test_epochs_are_steps_over_all_rows_and_a_resumed_run_says_what_it_learns_at(
    folder, unbroken, begun
):
    whole, _ = unbroken
    config = dataclasses.replace(whole, out=folder / "epochs", steps=1000, epochs=0.5)
    recipe, _ = begun(config)
    encode = load_tokenizer(whole.out / "tokenizer").encode
    tokens = sum(len(encode(text)) + 1 for text in open_corpus(whole.data.data, folder).train)
    assert recipe.config.steps == math.ceil(tokens / 2 / (whole.seq_len + 1) / whole.batch_size)
    with pytest.raises(ValueError, match="`--epochs` and `--steps` exclude each other"):
        begun(dataclasses.replace(config, steps=3))
    line = changed_rate(whole.out, dataclasses.replace(recipe.config, steps=2 * STEPS), STEPS)
    assert re.fullmatch(r"the learning rate of step 13 is \S+, with the former settings \S+", line)


def test_a_run_that_was_saved_under_a_former_method_name_resumes_with_equal_bits(unbroken):
    whole, _ = unbroken
    _, want = final_state(whole)
    want_losses = losses(whole.out)
    forget_last_checkpoint(whole.out)
    _store_in_former_form(whole, "frugal_subspace")
    console = quiet()
    assert run(dataclasses.replace(whole, resume=True), console) == STEPS
    assert "resuming from step 10" in console.file.getvalue()
    assert "with other settings" not in console.file.getvalue()
    jax.tree.map(np.testing.assert_array_equal, final_state(whole)[1], want)
    assert losses(whole.out) == want_losses


def _store_in_former_form(one: PretrainConfig, method: str) -> None:
    """Rewrites a saved run as the program wrote it before the method was renamed."""
    assert one.out is not None
    (path,) = (one.out / "checkpoints").glob("*/identity/metadata")
    identity = json.loads(path.read_text())
    identity["optimizer"]["method"] = method
    identity["format"] = 2
    path.write_text(json.dumps(identity))
    for digests in one.out.rglob("digests.json"):
        digests.unlink()
    settings = json.loads((one.out / "settings.json").read_text())
    settings["method"] = method
    (one.out / "settings.json").write_text(json.dumps(settings))


def test_a_folder_with_a_run_is_resumed_only_on_request_and_with_its_settings(unbroken):
    whole, _ = unbroken
    console = quiet()
    with pytest.raises(BadRunError, match=r"`--out` .* holds a run at step 12: pass `--resume`"):
        run(whole, console)
    again = dataclasses.replace(whole, resume=True)
    written = (whole.out / "settings.json").read_bytes()
    run(dataclasses.replace(again, eval_batches=3), console)
    assert (whole.out / "settings.json").read_bytes() == written  # No step had other settings.
    assert "with other settings than before: eval_batches: 2, now 3" in console.file.getvalue()
    assert (
        f"everything is in {whole.out}\nwritten: {whole.out / 'model'}" in console.file.getvalue()
    )
    for changes, message in (
        ({"steps": 11}, "`--steps` 11 is below the 12 steps that the run"),
        ({"model": "llama_20m"}, r"another run: .*model.hidden_size: 128 there, 256 now"),
        ({"method": "lean", "options": MethodOptions()},
         r"optimizer.method: 'lean_subspace' there, 'any full-rank method' now"),
        ({"weight_dtype": "float32"}, "weight_dtype: 'bfloat16' there, 'float32' now"),
        ({"model_vocab_size": 512},
         r"vocab_size: 384 there, 512 now.*`--model-vocab-size` is given"),
        ({"weight_rounding": "nearest"},
         "optimizer.weight_rounding: 'stochastic' there, 'nearest' now"),
    ):  # fmt: skip
        with pytest.raises(BadRunError, match=message):
            run(dataclasses.replace(again, **changes), console)


def test_every_file_of_an_exported_model_is_compared_with_what_was_written(unbroken):
    whole, _ = unbroken
    check = PretrainConfig(check=whole.out)
    run(check, quiet())
    names = {path.name for path in (whole.out / "model").iterdir()} - {"digests.json"}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    for name in sorted(names):
        path = whole.out / "model" / name
        written = path.read_bytes()
        path.write_bytes(bytes([*written[:-2], written[-2] ^ 1, written[-1]]))
        with pytest.raises(BadRunError, match="is damaged: model"):
            run(check, console := quiet())
        assert f"model/{name} is damaged" in console.file.getvalue().replace("\n", "")
        path.write_bytes(written)
    run(check, quiet())
    # Without their list, files of weights have the digests of earlier versions.
    (whole.out / "model" / "digests.json").unlink()
    run(check, quiet())
    path = whole.out / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(BadRunError, match="is damaged: model"):
        run(check, quiet())


def test_a_step_that_is_not_finite_stops_the_run_and_is_never_saved(folder):
    # The first step is finite, and the loss at its weights is not. The second step is saved, but
    # not logged.
    wild = OptimizerConfig(learning_rate=1e10, warmup_steps=1)
    doomed = make_config(
        folder, "doomed", optimizer=wild, log_every=100, save_every=1, method="exact"
    )
    message = r"step 2 is not finite .*last good checkpoint .* it is that of step 1\."
    with pytest.raises(NonFiniteError, match=message):
        run(doomed, quiet())
    assert saved_steps(doomed.out) == [1]
    with pytest.raises(NonFiniteError, match=message):  # Logged.
        run(dataclasses.replace(doomed, resume=True, log_every=1), quiet())


@pytest.mark.slow
def test_a_run_in_float16_resumes_with_equal_bits_and_stops_if_no_scale_fits(folder, monkeypatch):
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**24)  # The first refresh step is skipped.
    options = MethodOptions(rank=4, gap=6)
    whole = make_config(
        folder, "half", method="subspace", options=options, compute_dtype="float16", keep=STEPS
    )
    console = quiet()
    assert run(whole, console) == STEPS
    lines = [line for line in read_metrics(whole.out / "metrics.jsonl") if "loss_scale" in line]
    skipped = int(lines[-1]["skipped"])
    assert lines[1]["skipped_in_a_row"] == 2 < skipped < STEPS - 4
    assert lines[-1]["loss_scale"] == 2.0 ** (24 - skipped)
    assert f"{skipped} steps were skipped so far" in console.file.getvalue()
    (_, ended), trained_losses = final_state(whole), losses(whole.out)
    assert trained_losses[-1][1] < trained_losses[0][1]
    while saved_steps(whole.out) != [2]:
        forget_last_checkpoint(whole.out)
    assert run(dataclasses.replace(whole, resume=True), quiet()) == STEPS
    jax.tree.map(np.testing.assert_array_equal, final_state(whole)[1], ended)
    assert losses(whole.out) == trained_losses

    with pytest.raises(BadRunError, match="loss_scale: True there, "):
        run(dataclasses.replace(whole, compute_dtype="bfloat16", resume=True), quiet())
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**100)
    monkeypatch.setattr(loss_scale, "MOST_SKIPPED", 3)
    message = r"step 3 was skipped, as were others .*loss_scale .*--compute-dtype bfloat16"
    with pytest.raises(NonFiniteError, match=message):
        run(dataclasses.replace(whole, out=folder / "hopeless"), quiet())


def test_bad_settings_are_refused_before_anything_is_written(folder):
    points = MethodOptions(codec=("PointApproximation(points=500)",))
    for changes, message in (
        ({"model": "lama_9m"}, "unknown `--model` 'lama_9m'. Did you mean llama_9m"),
        ({"options": MethodOptions(rank=4096)},
         r"`--rank`: `rank` 4096 .* above min\(T, d\) = 128"),
        ({"data": DataConfig("missing.txt", pathlib.Path("nowhere"))}, r"`--data`.*missing\.txt"),
        ({"mesh": "tensor=3"}, "tensor=3 does not divide the . heads of keys and values"),
        ({"mesh": "seq=3"}, "tensor=1,seq=3 does not divide the 4 heads of llama_3m over the 3"),
        ({"mesh": "seq=2", "seq_len": 31}, "`--seq-len` 31 does not divide over the 2 devices of"),
        ({"mesh": "fsdp=3"}, "4 sequences .* do not divide over the 3 parts of `--mesh` fsdp=3"),
        ({"mesh": "fsdp=99"}, "asks for 99 devices"),
        ({"method": "pamm", "options": points}, "`--codec`: `points` 500 of PointApproximation"),
    ):  # fmt: skip
        wrong = make_config(folder, "wrong", **changes)
        with pytest.raises(BadRunError, match=message):
            run(wrong, quiet())
        assert not wrong.out.exists()


def test_files_that_are_no_folder_and_texts_that_are_too_small_are_refused(folder):
    for name, text in (("file", ""), ("empty.txt", ""), ("short.txt", "a few words\n\nand more")):
        (folder / name).write_text(text)
    with pytest.raises(BadRunError, match=r"`--out` .*file cannot be made a folder"):
        run(make_config(folder, "file"), quiet())
    # As Python reads a name of other letters in the locale "C".
    with pytest.raises(BadRunError, match=r"`--out` .*udce6.* that this locale does not have"):
        run(make_config(folder, "\udce6"), quiet())
    for name, message in (("empty.txt", "empty.txt"), ("short.txt", "`--seq-len` is 32, so")):
        data = DataConfig(str(folder / name), folder / "cache", vocab_size=300)
        with pytest.raises(BadRunError, match=message):
            run(make_config(folder, "small", data=data), quiet())


@pytest.mark.usefixtures("exits_raise")
def test_the_command_line_prints_errors_in_one_line_and_exits_with_2(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["pretrain", "--model=lama"])
    with pytest.raises(SystemExit) as stopped:
        pretrain.main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: unknown `--model` 'lama'.")


def test_a_new_run_replaces_nothing_that_it_did_not_write(folder):
    config = make_config(folder, "occupied")
    for name, is_refused in (("model", True), ("adapter", True), ("tokenizer", False)):
        (config.out / name).mkdir(parents=True)
        (config.out / name / "mine").write_text("")
        with pytest.raises(BadRunError, match=f"has a folder '{name}' and no checkpoint of a run"):
            run(config, quiet())
        (config.out / "settings.json").write_text("{}")  # Of a run without a checkpoint.
        if is_refused:
            with pytest.raises(BadRunError, match=f"has a folder '{name}'"):
                run(config, quiet())
        (config.out / "settings.json").unlink()
        (config.out / name / "mine").unlink()


def test_a_signal_before_the_first_step_ends_the_program(folder, monkeypatch, capfd):
    ended = queue.Queue()

    def interrupted(*_: object) -> None:
        assert signal.getsignal(signal.SIGTERM) == before
        signal.raise_signal(signal.SIGINT)
        raise BadRunError(str(ended.get(timeout=10)))  # The program would have ended.

    monkeypatch.setattr(os, "_exit", ended.put)
    before, on_interrupt = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(pretrain, "prepare", interrupted)
    run_program(lambda: run(make_config(folder, "interrupted"), quiet()))
    assert ended.get() == BadRunError.exit_code
    assert capfd.readouterr().err.endswith("interrupted\nerror: 130\n")
    assert signal.getsignal(signal.SIGINT) == on_interrupt
