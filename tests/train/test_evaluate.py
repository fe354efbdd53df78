"""The program as a user runs it, on a model that knows nothing."""

import dataclasses
import functools
import io
import json
import os
import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from rich.console import Console

from models import Decoder, huggingface, llama2c, lora, peft
from models.checkpoints import load_checkpoint, stop_ids
from train import evaluate
from train.evaluate import EvaluateConfig, TextConfig, WritingConfig, run, text_after
from train.loop import BadRunError
from train.questions import QuestionConfig
from train.tokenizer import load_tokenizer, train_bpe

MODEL = dataclasses.replace(
    tiny.CONFIG, vocab_size=300, num_layers=2, max_seq_len=256, norm_eps=1e-5, tie_embeddings=True
)
TEXT = "One plus two is three. Seven less five is two.\n\nIs two and two four? It is. "
SUMS = [
    {"question": f"What is {i} + {j}?", "answer": f"It is {i + j}.\n#### {i + j}"}
    for i in range(1, 4)
    for j in range(1, 4)
]
CHOICES = [
    {"question": "Two and two?", "options": ["A)four", "B)five", "C)a sum"], "correct": "A"},
    {"question": "Two less one?", "options": ["A)two", "B)one of them"], "correct": "B"},
    {"question": "None?", "options": ["A)0", "B)naught", "C)it is two"], "correct": "B"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a checkpoint, its tokenizer, a text and questions."""
    folder = tmp_path_factory.mktemp("evaluate")
    # Weights of NumPy: JAX would compile a program for each of their shapes.
    shapes = jax.eval_shape(functools.partial(Decoder, MODEL), jax.random.key(0))
    rng = np.random.default_rng(0)
    model = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), "float32"), shapes)
    huggingface.save(model, folder / "model")
    llama2c.save(model, folder / "model.bin")
    train_bpe([TEXT], 290).save(folder / "model")
    (folder / "text.txt").write_text(TEXT * 20)
    for name, records in (("sums", SUMS), ("choices", CHOICES)):
        lines = [json.dumps(record) for record in records]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


PARTS = {"text": TextConfig, "asked": QuestionConfig, "writing": WritingConfig}


def config(folder, **changes) -> EvaluateConfig:
    """Settings by name, whichever part they belong to."""
    defaults = {"checkpoint": folder / "model", "compute_dtype": "float32", "batch_size": 4}
    values = {**defaults, "max_new_tokens": 8, **changes}
    parts = {}
    for part, kind in PARTS.items():
        names = [field.name for field in dataclasses.fields(kind) if field.name in values]
        parts[part] = kind(**{name: values.pop(name) for name in names})
    return EvaluateConfig(**values, **parts)


def asked(folder, name: str, **changes) -> EvaluateConfig:
    task = "gsm8k" if name == "sums" else "choice"
    return config(folder, **{"task": task, "questions": folder / f"{name}.jsonl", **changes})


def quietly(config: EvaluateConfig, *more) -> dict:
    return run(config, Console(file=io.StringIO(), width=140), *more)


def lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def says(monkeypatch):
    """Puts words in the model's mouth; returns the prompts that it was given, as text."""

    def put(folder, answers: dict[str, str]) -> list[str]:
        tokenizer, seen = load_tokenizer(folder / "model"), []

        def fake(model, prompts, **options):
            new = []
            for prompt in prompts:
                text = tokenizer.decode(prompt)
                seen.append(text)
                new.append(tokenizer.encode(answers[text.rpartition("Question: ")[2]]))
            return new

        monkeypatch.setattr(evaluate, "generate", fake)
        return seen

    return put


@functools.cache
def log_softmax():
    return jax.jit(lambda m, x: jax.nn.log_softmax(m(x, compute_dtype="float32")))


# ----- text


def test_the_cost_of_a_text_is_that_of_its_tokens(folder):
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


def test_held_out_text_is_a_part(folder):
    console = Console(file=io.StringIO(), width=140)
    given = config(folder, data=str(folder / "text.txt"), seq_len=8)
    report = run(given, console)
    assert 8 < report["text"]["tokens"] < len(TEXT)
    assert (
        f"text (a held-out part of it): {report['text']['nats_per_token']:.4f} nats a token"
        in console.file.getvalue()
    )


def test_all_records_can_be_measured(folder, tmp_path):
    texts = [TEXT[:40], TEXT, TEXT[5:]]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"said": text}) + "\n" for text in texts))
    given = {"data": str(path), "whole": True, "seq_len": 32, "text_field": "said"}
    tokenizer = load_tokenizer(folder / "model")
    count = sum(len(tokenizer.encode(text)) + 1 for text in texts)
    assert quietly(config(folder, **given))["text"]["tokens"] == count - 1


def test_weights_may_be_held_in_four_bits(folder):
    base = config(
        folder, data=str(folder / "text.txt"), seq_len=8, generate="One", max_new_tokens=4
    )
    got = quietly(dataclasses.replace(base, four_bit=True))
    four_bit = load_checkpoint(folder / "model", convert=lora.quantize)
    want = quietly(base, lambda model, path: four_bit)
    assert got["text"] != want["text"]
    given = dataclasses.replace(base, adapter=folder)
    assert got == quietly(given, lambda model, path: four_bit)


# ----- questions


def test_numbers_are_read_in_what_the_model_writes(folder, says, tmp_path):
    answers = {f"{r['question']}\nAnswer:": f" {r['answer']}" for r in SUMS}
    answers["What is 1 + 3?\nAnswer:"] = " I do not know."
    answers["What is 3 + 3?\nAnswer:"] = " #### 5\n#### 6"
    seen = says(folder, answers)
    out = tmp_path / "answers" / "sums.jsonl"
    report = quietly(asked(folder, "sums", shots=1, limit=7, out=out))
    accuracy = {"accuracy": 6 / 7, "correct": 6, "questions": 7}
    accuracy["standard_error"] = pytest.approx((6 / 49 / 6) ** 0.5)
    assert report == {"gsm8k": accuracy}
    first = "Question: What is 1 + 1?\nAnswer: It is 2.\n#### 2\n\n"
    assert seen[:2] == [first + f"Question: What is 1 + {i}?\nAnswer:" for i in (2, 3)]
    # The last batch is filled up with its last prompt, which is answered once.
    assert len(seen) == 8
    written = lines(out)
    assert [line["number"] for line in written] == [*range(1, 8)]
    assert written[1] == {
        "number": 2,
        "question": "What is 1 + 3?",
        "answer": " I do not know.",
        "prediction": None,
        "gold": "4",
        "correct": False,
    }
    with pytest.raises(BadRunError, match=r"`--out` .* is there already: name another file"):
        quietly(asked(folder, "sums", out=out))


def test_letters_are_read_in_what_the_model_writes(folder, says):
    shown = [
        "Two and two?\nOptions:\nA) four\nB) five\nC) a sum\nAnswer:",
        "Two less one?\nOptions:\nA) two\nB) one of them\nAnswer:",
        "None?\nOptions:\nA) 0\nB) naught\nC) it is two\nAnswer:",
    ]
    seen = says(folder, dict(zip(shown, [" A", " C, or rather B", " C"], strict=True)))
    # There is no C among two options.
    assert quietly(asked(folder, "choices"))["choice"]["correct"] == 2
    assert seen[:3] == ["Question: " + prompt for prompt in shown]
    (folder / "more.jsonl").write_text(json.dumps(CHOICES[2]))
    says(folder, {shown[0]: " A"})
    with_examples = asked(folder, "choices", shots=1, limit=1, examples=folder / "more.jsonl")
    assert quietly(with_examples)["choice"]["accuracy"] == 1


@pytest.mark.parametrize("normalize", ["none", "tokens", "bytes"])
def test_the_likeliest_option_is_that_of_the_forward_pass(folder, normalize, tmp_path):
    tokenizer, model = load_tokenizer(folder / "model"), huggingface.load(folder / "model")
    likelihoods, predictions = [], []
    for record in CHOICES:
        prompt = tokenizer.encode(f"Q: {record['question']}\nA:")
        own, lengths = [], []
        for option in record["options"]:
            ending = " " + option[2:]
            whole = tokenizer.encode(f"Q: {record['question']}\nA:{ending}")
            assert whole[: len(prompt)] == prompt
            logs = log_softmax()(model, jnp.array([whole + [0] * (64 - len(whole))]))[0]
            places = range(len(prompt), len(whole))
            own.append(sum(np.asarray(logs)[i - 1, whole[i]] for i in places))
            lengths.append({"none": 1, "tokens": len(places), "bytes": len(ending)}[normalize])
        likelihoods += own
        predictions.append("ABC"[int(np.argmax(np.array(own) / lengths))])
    out = tmp_path / "answers.jsonl"
    options = {"choose": "likelihood", "normalize": normalize, "batch_size": 2, "out": out}
    prompt = r"Q: {question}\nA:"
    report = quietly(asked(folder, "choices", prompt_template=prompt, **options))
    written = lines(out)
    got = [x for line in written for x in line["log_likelihoods"]]
    np.testing.assert_allclose(got, likelihoods, rtol=1e-5)
    assert [line["prediction"] for line in written] == predictions
    right = sum(p == record["correct"] for p, record in zip(predictions, CHOICES, strict=True))
    assert report["choice"]["correct"] == right


def test_options_begin_where_none_changes_the_tokens_before(folder):
    """A continuation without a space joins the last word of the prompt in one token."""
    joined = asked(
        folder,
        "choices",
        choose="likelihood",
        prompt_template="It is fou",
        option_template="{option}",
    )
    tokenizer = load_tokenizer(folder / "model")
    (question, *_) = evaluate.prepare(joined).questions
    for option, ids in zip(("four", "five", "a sum"), question.continuations, strict=True):
        assert [*question.prompt, *ids] == tokenizer.encode("It is fou" + option)


# ----- what a model writes


def test_what_is_drawn_depends_on_the_question_and_not_on_its_batch(folder, monkeypatch):
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


def test_a_beginning_is_gone_on_from(folder, capsys, monkeypatch):
    arguments = ["--checkpoint", str(folder / "model"), "--generate", "One plus [two]",
                 "--max-new-tokens", "8", "--compute-dtype", "float32"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["evaluate", *arguments])
    evaluate.main()
    given = config(folder, generate="One plus [two]", batch_size=1)
    text = quietly(given)["generated"]
    assert capsys.readouterr().out.rstrip("\n") == ("One plus [two]" + text).rstrip("\n")
    tokenizer, model = load_tokenizer(folder / "model"), huggingface.load(folder / "model")
    prompt = tokenizer.encode("One plus [two]")
    ids = evaluate.generate(
        model, [prompt], max_new_tokens=8, stop=[tokenizer.eos_id], compute_dtype="float32"
    )[0]
    assert text == text_after(tokenizer, prompt, ids)


def test_the_text_after_a_prompt_keeps_its_space_and_leaves_unknown_ids_out(folder):
    tokenizer = load_tokenizer(folder / "model")
    prompt, more = tokenizer.encode("It is"), tokenizer.encode(" two")
    assert text_after(tokenizer, prompt, [*more, 299]) == " two"


CHAT = """\
{%- for message in messages %}{{ '<' + message.role + '>' + message.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""


def test_a_chat_template_asks(folder, says, tmp_path):
    (tmp_path / "chat.jinja").write_text(CHAT)
    chat = {"chat": True, "chat_template": tmp_path / "chat.jinja", "prompt_template": "{question}"}
    ready = evaluate.prepare(asked(folder, "sums", shots=1, generate="Two?", **chat))
    before = "<user>What is 1 + 1? It is 2.\n#### 2\n\nWhat is 1 + 2?<assistant>"
    assert ready.tokenizer.decode(ready.questions[0].prompt) == before
    assert ready.tokenizer.decode(ready.beginning) == "<user>Two?<assistant>"
    options = asked(folder, "choices", choose="likelihood", option_template="{letter}", **chat)
    (question, *_) = evaluate.prepare(options).questions
    asked_for = ready.tokenizer.encode("<user>Two and two?<assistant>A")
    assert [*question.prompt, *question.continuations[0]] == asked_for
    # A tokenizer that says nothing of chats.
    (tmp_path / "plain").mkdir()
    shutil.copy(folder / "model" / "tokenizer.json", tmp_path / "plain")
    with pytest.raises(BadRunError, match=r"no chat template .*Give `--chat-template FILE`"):
        quietly(config(folder, generate="a", chat=True, tokenizer=tmp_path / "plain"))


# ----- checkpoints


def llama2c_tokenizer(size: int) -> bytes:
    """The bytes and as many letters as there is room for, as llama2.c lays them out."""
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(b"<0x%02X>" % i for i in range(256))]
    pieces += [b" ", *(bytes([i]) for i in range(97, 123))][: size - len(pieces)]
    data = np.int32(8).tobytes()
    for piece in pieces:
        data += np.float32(-len(piece)).tobytes() + np.int32(len(piece)).tobytes() + piece
    return data


def test_a_file_of_llama2c_is_a_checkpoint_too(folder):
    (folder / "tokenizer.bin").write_bytes(llama2c_tokenizer(300))
    given = config(folder, checkpoint=folder / "model.bin", tokenizer=folder / "tokenizer.bin",
                   generate="abc", batch_size=1)  # fmt: skip
    assert isinstance(quietly(given)["generated"], str)
    ready = evaluate.prepare(given)
    assert ready.beginning == [1, 259, 260, 261, 262]
    assert ready.stop == (1, 2)
    jax.tree.map(
        np.testing.assert_array_equal,
        load_checkpoint(folder / "model.bin"),
        load_checkpoint(folder / "model"),
    )
    assert load_checkpoint(folder / "model.bin", dtype="bfloat16").norm.dtype == jnp.bfloat16
    with pytest.raises(BadRunError, match="has no tokenizer: pass `--tokenizer`"):
        quietly(dataclasses.replace(given, tokenizer=None))
    with pytest.raises(ValueError, match=r"neither a folder with a config\.json nor a \.bin"):
        load_checkpoint(folder / "text.txt")
    with pytest.raises(FileNotFoundError, match=r"'none\.bin' cannot be read: no such file"):
        load_checkpoint("none.bin")


def test_a_checkpoint_says_what_ends_a_text(tmp_path):
    assert stop_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert stop_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert stop_ids(tmp_path) == (7, 9)


def test_an_adapter_is_attached(folder):
    settings = lora.LoRAConfig(rank=2, targets=("q", "down"))
    shapes = jax.eval_shape(lambda: lora.init_adapters(MODEL, settings, jax.random.key(0)))
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 1, x.shape), x.dtype), shapes)
    peft.save_adapters(adapters, settings, folder / "adapter")
    base = config(folder, data=str(folder / "text.txt"), seq_len=8)
    adapted = dataclasses.replace(base, adapter=folder / "adapter")
    got = quietly(adapted)["text"]["nats_per_token"]
    merged = lora.merge(huggingface.load(folder / "model"), adapters, settings)
    want = quietly(adapted, lambda model, path: merged)["text"]["nats_per_token"]
    assert got == pytest.approx(want, rel=1e-5)
    assert got != pytest.approx(quietly(base)["text"]["nats_per_token"], rel=1e-2)


# ----- errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "nothing to do: give `--data`, `--task` or `--generate`"),
        ({"task": "gsm8k"}, "`--task` and `--questions` need each other"),
        ({"generate": "a", "out": pathlib.Path("out")}, "`--out` is for answers"),
        ({"generate": "a", "whole": True}, "`--whole` is of the text in `--data`"),
        ({"generate": "a", "chat_template": pathlib.Path("a")}, "`--chat-template` is of `--chat`"),
        ({"generate": "a", "batch_size": 0}, "`--batch-size` must be at least 1, got 0"),
        ({"generate": "a", "seed": -1}, "`--seed` must be at least 0, got -1"),
        ({"generate": "a", "temperature": -1.0}, r"`--temperature` must be in \[0, inf\), got -1"),
        ({"generate": "a", "top_p": 0.0}, r"`--top-p` must be above 0 and at most 1, got 0\.0"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        config(folder, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint": "none"}, "the checkpoint 'none' cannot be read: no such file or folder"),
        ({"tokenizer": "none"}, "`--tokenizer` is 'none': no such path"),
        ({"generate": ""}, "the prompt is empty, and no token begins a document"),
        (
            {"max_new_tokens": 256},
            r"`--generate` has \d+ tokens, and `--max-new-tokens` 256 more",
        ),
        ({"data": "text.txt", "seq_len": 257}, "`--seq-len` 257 is above the 256 positions"),
        ({"data": "nothing", "whole": True}, "`--whole` is of local files, and `--data` is"),
        ({"adapter": "none"}, "adapter.*none"),
        ({"limit": 9, "shots": 9}, "`--shots` is 9, but .* has 9 examples and .* 0 questions"),
        ({"examples": "choices.jsonl", "shots": 4}, "`--shots` is 4, but .* has 3 examples"),
        ({"shots": 8}, r"line 9 of .* tokens, and with `--max-new-tokens` 8 more than the 256"),
        ({"questions": "none.jsonl"}, "`--questions` is '.*none.jsonl': there is no such path"),
        ({"question_field": "ask"}, "line 1 of .*: there is no field 'ask', only 'question', 'a"),
        ({"prompt_template": "{ask}"}, "`--questions`: line 1 of .*: there is no field 'ask', on"),
        ({"prompt_template": "{0}"}, r"`--prompt-template` is '\{0\}': each \{\} needs the name"),
        ({"prompt_template": "{"}, r"`--prompt-template` is '\{': .* Write \{\{ and"),
        ({"answer_field": "question"}, "line 1 of .* has no number after ####. Correct it"),
        ({"task": "choice"}, "line 1 of .*: there is no field 'correct', only 'question', 'answ"),
    ],
)
def test_nonsense_is_refused_in_one_line(folder, changes, message):
    names = ("checkpoint", "tokenizer", "questions", "examples", "adapter")
    there = {
        name: folder / value if (folder / str(value)).exists() else pathlib.Path(value)
        for name, value in changes.items()
        if name in names
    }
    if "data" in changes:
        there["data"] = str(folder / changes["data"])
    if set(changes) & {"generate", "max_new_tokens", "data", "checkpoint", "tokenizer", "adapter"}:
        given = config(folder, **{"generate": "One", **changes, **there})
    else:
        given = asked(folder, "sums", **{**changes, **there})
    with pytest.raises(BadRunError, match=message) as error:
        quietly(given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": 1}\n\n{', "`--questions`: line 3 of '.*' is no JSON"),
        ("[1, 2]", "`--questions`: line 1 of '.*' is list, not an object"),
        ("", "`--questions` is '.*': there is no record in it"),
        (b"\xff", "`--questions`: .* is not UTF-8"),
    ],
)
def test_questions_that_cannot_be_read_are_named(folder, text, message, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadRunError, match=message):
        quietly(asked(folder, "sums", questions=path))


def test_templates_are_python_format_strings(folder):
    template = r"{question}\n{options[1]} {{{correct}}}\t{options}"
    given = asked(folder, "choices", prompt_template=template)
    ready = evaluate.prepare(given)
    shown = "Two less one?\nB)one of them {B}\tA) two\nB) one of them"
    assert ready.tokenizer.decode(ready.questions[1].prompt) == shown


def test_a_list_of_questions_is_read(folder, says, tmp_path):
    (tmp_path / "sums.json").write_text(json.dumps(SUMS[:2], indent=1))
    says(folder, {f"{r['question']}\nAnswer:": r["answer"] for r in SUMS})
    given = asked(folder, "sums", questions=tmp_path / "sums.json")
    assert quietly(given)["gsm8k"]["correct"] == 2


def test_a_tokenizer_of_another_model_is_refused(folder, tmp_path):
    train_bpe([TEXT * 3 + "".join(map(chr, range(200, 400)))], 350).save(tmp_path)
    with pytest.raises(BadRunError, match=r"tokens, but the model in .* 300: `--tokenizer` is"):
        quietly(config(folder, tokenizer=tmp_path, generate="One"))


def test_the_command_line_says_what_is_wrong_in_one_line(monkeypatch, capsys):
    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(sys, "argv", ["evaluate", "--checkpoint", "none", "--generate", "a"])
    with pytest.raises(SystemExit) as ending:
        evaluate.main()
    assert ending.value.code == 2
    said = capsys.readouterr().err
    assert said == "error: the checkpoint 'none' cannot be read: no such file or folder.\n"
