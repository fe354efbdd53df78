"""The evaluation program: texts, writing, checkpoints and adapters."""

import dataclasses
import io
import json
import pathlib
import shutil
import sys

import hub_cache
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from rich.console import Console

from actjax._core.paths import map_named
from models import huggingface, lora, peft
from models.checkpoints import load_checkpoint, stop_ids
from models.padding import pad, published_shape
from tests.train.evaluations import (
    MODEL,
    SUMS,
    TEXT,
    asked,
    config,
    log_softmax,
    quietly,
)
from tests.train.example_files import write
from train import evaluate
from train.evaluate import run, text_after
from train.run.program import BadRunError
from train.text.tokenizer_files import load_tokenizer

# ----- text


def test_the_cost_of_a_text_is_the_sum_over_its_tokens(folder):
    report = quietly(config(folder, data=str(folder / "text.txt"), whole=True, seq_len=32))
    tokenizer, model = load_tokenizer(folder / "model"), huggingface.load(folder / "model")
    ids = np.array([*tokenizer.encode(TEXT * 20), tokenizer.eos_id])
    count = len(ids) - 1
    # Rows of 32 that do not see each other, each target once.
    rows = -(-count // 32)
    filled = np.pad(ids, (0, rows * 32 - count), constant_values=tokenizer.eos_id)
    inputs, targets = filled[:-1].reshape(rows, 32), filled[1:].reshape(rows, 32)
    logs = np.asarray(log_softmax()(model, jnp.asarray(inputs)))
    nats = -np.take_along_axis(logs, targets[..., None], 2).ravel()[:count].sum()
    got = report["text"]
    assert got["tokens"] == count
    # Sums of some hundred numbers in float32.
    assert got["nats_per_token"] == pytest.approx(nats / count, rel=1e-5)
    assert got["perplexity"] == pytest.approx(np.exp(nats / count), rel=1e-4)
    num_bytes = len((TEXT * 20).encode()) - len(tokenizer.decode(ids[:1]))
    assert got["bits_per_byte"] == pytest.approx(nats / np.log(2) / num_bytes, rel=1e-5)


def test_by_default_the_held_out_part_is_measured(folder):
    console = Console(file=io.StringIO(), width=140)
    given = config(folder, data=str(folder / "text.txt"), seq_len=8)
    report = run(given, console)
    assert 8 < report["text"]["tokens"] < len(TEXT)
    assert (
        f"text (a held-out part of it): {report['text']['nats_per_token']:.4f} nats per token"
        in console.file.getvalue()
    )


def test_all_records_are_measured_on_request(folder, tmp_path):
    texts = [TEXT[:40], TEXT, TEXT[5:]]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"said": text}) + "\n" for text in texts))
    given = {"data": str(path), "whole": True, "seq_len": 32, "text_field": "said"}
    tokenizer = load_tokenizer(folder / "model")
    count = sum(len(tokenizer.encode(text)) + 1 for text in texts)
    assert quietly(config(folder, **given))["text"]["tokens"] == count - 1


def test_weights_are_held_in_four_bits_on_request(folder, monkeypatch):
    base = config(
        folder, data=str(folder / "text.txt"), seq_len=8, generate="One", max_new_tokens=4
    )
    got = quietly(dataclasses.replace(base, four_bit=True))
    assert got["text"] != quietly(base)["text"]
    four_bit = load_checkpoint(folder / "model", convert=lora.quantize)
    monkeypatch.setattr("train.evaluate.load_checkpoint", lambda *_, **__: four_bit)
    assert got == quietly(base)


# ----- writing


def test_samples_depend_on_the_question_and_not_on_its_batch(folder, monkeypatch):
    found: list[dict[tuple, np.ndarray]] = []

    def fake(model, prompts, *, key, temperature, **options):
        assert temperature == 0.5
        assert len(prompts) == len(key)
        found[-1] |= zip(map(tuple, prompts), jax.random.key_data(key).tolist(), strict=True)
        return [[]] * len(prompts)

    monkeypatch.setattr(evaluate, "generate", fake)
    for size, seed in ((4, 0), (3, 0), (3, 1)):
        found.append({})
        quietly(asked(folder, "sums", temperature=0.5, batch_size=size, seed=seed))
    assert found[0] == found[1] != found[2]
    assert len(set(map(tuple, found[0].values()))) == len(SUMS)


def test_a_beginning_is_continued(folder, capsys, monkeypatch):
    arguments = ["--checkpoint", str(folder / "model"), "--generate", "One plus [two]",
                 "--max-new-tokens", "8", "--compute-dtype", "float32"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["evaluate", *arguments])
    evaluate.main()
    given = config(folder, generate="One plus [two]")
    text = quietly(given)["generated"]
    remark, _, printed = capsys.readouterr().out.partition("\n")
    assert remark.startswith("tokenizer of 290 (tokenizer.json, tokenizer_config.json): nothing be")
    assert printed.rstrip("\n") == ("One plus [two]" + text).rstrip("\n")
    tokenizer, model = load_tokenizer(folder / "model"), huggingface.load(folder / "model")
    prompt = tokenizer.encode("One plus [two]")
    ids = evaluate.generate(
        model, [prompt], max_new_tokens=8, stop=[tokenizer.eos_id], compute_dtype="float32"
    )[0]
    assert text == text_after(tokenizer, prompt, ids)


def test_the_text_after_a_prompt_keeps_its_space_and_omits_unknown_ids(folder):
    tokenizer = load_tokenizer(folder / "model")
    prompt, more = tokenizer.encode("It is"), tokenizer.encode(" two")
    assert text_after(tokenizer, prompt, [*more, 299]) == " two"


CHAT = """\
{%- for message in messages %}{{ '<' + message.role + '>' + message.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""


def test_prompts_are_written_by_a_chat_template(folder, says, tmp_path):
    (tmp_path / "chat.jinja").write_text(CHAT)
    chat = {"chat": True, "chat_template": tmp_path / "chat.jinja", "prompt_template": "{question}"}
    ready = evaluate.prepare(asked(folder, "sums", shots=1, generate="Two?", **chat))
    before = "<user>What is 1 + 1? It is 2.\n#### 2\n\nWhat is 1 + 2?<assistant>"
    assert ready.tokenizer.decode(ready.questions[0].prompt) == before
    assert ready.tokenizer.decode(ready.beginning) == "<user>Two?<assistant>"
    options = asked(folder, "choices", choose="likelihood", option_template="{letter}", **chat)
    (question, *_) = evaluate.prepare(options).questions
    asked_for = ready.tokenizer.encode("<user>Two and two?<assistant>A")
    assert [*question.options[0][0], *question.options[0][1]] == asked_for
    # A tokenizer without a chat template.
    (tmp_path / "plain").mkdir()
    shutil.copy(folder / "model" / "tokenizer.json", tmp_path / "plain")
    with pytest.raises(BadRunError, match=r"no chat template .*Give `--chat-template FILE`"):
        quietly(config(folder, generate="a", chat=True, tokenizer=tmp_path / "plain"))


# ----- checkpoints


def test_a_tokenizer_with_bos_begins_and_ends_texts_with_it(folder, tmp_path):
    inner = tokenizers.Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="q $A", special_tokens=[("q", inner.token_to_id("q"))]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    ready = evaluate.prepare(config(folder, generate="Two?", tokenizer=tmp_path))
    tokenizer = ready.tokenizer
    assert ready.beginning == [tokenizer.bos_id, *tokenizer.encode("Two?")]
    assert ready.stop == tuple(sorted((tokenizer.bos_id, tokenizer.eos_id)))


def test_adapters_alone_and_merged_models_in_four_bits_are_refused(folder, tmp_path):
    write(tmp_path / "run" / "settings.json", '{"method": "qlora"}')
    shutil.copytree(folder / "model", tmp_path / "run" / "model")
    for path in (tmp_path / "run", tmp_path / "run" / "model"):
        with pytest.raises(ValueError, match="is merged with 4-bit weights, and `--four-bit` wou"):
            evaluate.prepare(config(folder, generate="Two?", checkpoint=path, four_bit=True))
    write(tmp_path / "adapter_config.json", '{"base_model_name_or_path": "org/base"}')
    with pytest.raises(ValueError, match="is an adapter of 'org/base', and no model: pass that"):
        evaluate.prepare(config(folder, generate="Two?", checkpoint=tmp_path))


def test_a_checkpoint_by_its_name_at_the_hub(folder, tmp_path, monkeypatch):
    hub_cache.use(monkeypatch, tmp_path)
    snapshot = hub_cache.put(tmp_path, "org/tiny", folder / "model")
    given = config(folder, generate="Two?", checkpoint=pathlib.Path("org/tiny"))
    assert evaluate.prepare(given).config.checkpoint == snapshot
    with pytest.raises(ValueError, match=r"`--checkpoint`: 'org/none' is no folder and is not in"):
        evaluate.prepare(config(folder, generate="Two?", checkpoint=pathlib.Path("org/none")))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("none", FileNotFoundError, r"/none' cannot be read: no such file or folder"),
        ("text.txt", ValueError, r"/text.txt' is a file: name the folder that has a config\.json"),
        ("model.bin", ValueError, r"/model.bin' is a file: .* with actjax 0\.2\.0, `models\.hugg"),
    ],
)
def test_a_path_that_is_no_folder_is_refused(tmp_path, name, error, message):
    for file in ("text.txt", "model.bin"):
        (tmp_path / file).touch()
    with pytest.raises(error, match=message):
        load_checkpoint(tmp_path / name)


def test_the_ids_that_end_a_text_come_from_the_checkpoint(tmp_path):
    assert stop_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert stop_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert stop_ids(tmp_path) == (7, 9)


def test_an_adapter_is_attached(folder):
    settings = lora.LoRAConfig(rank=2, targets=("q", "down"))
    shapes = jax.eval_shape(lambda: lora.init_adapters(MODEL, settings, jax.random.key(0)))
    rng = np.random.default_rng(0)

    def drawn(path, x):
        array = rng.normal(0, 1, published_shape(path, x.shape, MODEL))
        return jnp.asarray(pad(path, array, MODEL), x.dtype)

    adapters = map_named(drawn, shapes)
    peft.save_adapters(adapters, settings, folder / "adapter", MODEL)
    base = config(folder, data=str(folder / "text.txt"), seq_len=8)
    adapted = dataclasses.replace(base, adapter=folder / "adapter")
    got = quietly(adapted)["text"]["nats_per_token"]
    merged = lora.merge(huggingface.load(folder / "model"), adapters, settings)
    huggingface.save(merged, folder / "merged", like=folder / "model")
    alone = dataclasses.replace(base, checkpoint=folder / "merged")
    want = quietly(alone)["text"]["nats_per_token"]
    assert got == pytest.approx(want, rel=1e-5)
    assert got != pytest.approx(quietly(base)["text"]["nats_per_token"], rel=1e-2)
