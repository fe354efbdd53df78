"""Templates and tokenizers of strangers: within limits, or refused in a line."""

import json
import os

import pytest

from tests.train.example_files import CHAT, CHATML, write
from train.run.metrics import read_metrics
from train.run.saved_settings import changed_settings
from train.settings.config import PretrainConfig
from train.settings.config_file import read_arguments
from train.text import chat, tokenizer_trial
from train.text.chat import ChatTemplate
from train.text.corpus import open_whole
from train.text.limited import AtLimitError, Limited
from train.text.text_files import records_in
from train.text.tokenizer_files import load_tokenizer
from train.text.trained_tokenizer import train_bpe

DAYS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLE = "{% set ns.x = ns.x ~ ns.x %}"
PETABYTES = f"{{% set ns = namespace(x='a') %}}{{% for i in range(50) %}}{DOUBLE}{{% endfor %}}"


def test_a_template_is_stopped_at_a_limit_and_the_next_one_works(bpe, monkeypatch):
    monkeypatch.setattr(chat, "_RENDERER", Limited(chat._RENDERER._module, seconds=3, gib=1))
    for source, reason in (
        (DAYS, "takes more than 3 s"),
        (PETABYTES, "needs more than 1 GiB"),
        ("{{ 'x' * 10 ** 10 }}", "needs more than 1 GiB"),
    ):
        with pytest.raises(ValueError, match=f"the template {reason}"):
            ChatTemplate(source, bpe).render(CHAT["messages"])
    assert ChatTemplate(CHATML, bpe).render(CHAT["messages"]).startswith("<|im_start|>system")


def test_a_tokenizer_with_a_huge_id_is_stopped_at_a_limit(bpe, monkeypatch, tmp_path):
    bpe.save(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["model"]["vocab"][next(reversed(state["model"]["vocab"]))] = 2**31 - 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    limited = Limited(tokenizer_trial._TRIAL._module, seconds=2, gib=4)
    monkeypatch.setattr(tokenizer_trial, "_TRIAL", limited)
    assert tokenizer_trial.wrong_with(tmp_path / "tokenizer.json") == "takes more than 2 s"


def test_a_slow_template_takes_its_time_once(bpe, monkeypatch):
    template = ChatTemplate(DAYS, bpe)
    monkeypatch.setattr(chat, "_RENDERER", Limited(chat._RENDERER._module, seconds=0.5, gib=1))
    with pytest.raises(ValueError, match="takes more than"):
        template.render(CHAT["messages"])
    monkeypatch.setattr(chat, "_RENDERER", None)  # The second conversation asks no process.
    with pytest.raises(ValueError, match="takes more than"):
        template.render(CHAT["messages"])


def test_arguments_do_not_replace_the_conversation(bpe):
    template = ChatTemplate("{{ messages | length }}", bpe, {"tools": [1]})
    with pytest.raises(ValueError, match="tools: every template gets these"):
        template.render(CHAT["messages"])


def test_values_that_cannot_be_passed_on_are_a_line(bpe):
    with pytest.raises(ValueError, match=r"fails on it \(a value cannot be passed on \("):
        ChatTemplate("{{ x }}", bpe, {"x": lambda: 1}).render(CHAT["messages"])


def test_a_process_that_dies_is_a_line():
    process = Limited("train.text.template_process", seconds=5, gib=1)
    assert process.ask(("a", {})) == {"text": "a"}
    os.kill(process._process.pid, 9)
    with pytest.raises(AtLimitError, match=r"ends the process that tries it \(SIGKILL"):
        process.ask(("a", {}))
    assert process.ask(("{{ x }}", {"x": "\ud800"})) == {"text": "\ud800"}


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


BOMB = [replace({"String": "a"}, 1000 * "a")] * 6
AFTER = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "B", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}
WORDS = {"<|endoftext|>": 0, "a": 1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": BOMB}}, "ends the process|needs more"),
        ({"normalizer": replace({"Regex": ""}, "y")}, "index out of bounds"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "Cannot parse"),
        ({"decoder": {"type": "Strip", "content": "a", "start": 9, "stop": 9}}, "out of bounds"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size"),
        ({"post_processor": AFTER}, "cannot be read"),
    ],
)
def test_a_tokenizer_that_takes_the_program_with_it_is_refused(changes, reason, tmp_path):
    train_bpe(["a text"], 260).save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=f"(?s)tokenizer.json': it .*({reason})"):
        load_tokenizer(tmp_path)


def test_a_slow_tokenizer_is_refused(tmp_path, monkeypatch):
    train_bpe(["a text"], 260).save(tmp_path)
    file = tmp_path / "tokenizer.json"
    slow = {"normalizer": {"type": "Prepend", "prepend": 10**6 * "x"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | slow))
    trial = Limited(tokenizer_trial._TRIAL._module, seconds=0.1, gib=4)
    monkeypatch.setattr(tokenizer_trial, "_TRIAL", trial)
    with pytest.raises(ValueError, match=r"it takes more than 0.1 s. Give a tokenizer.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["WordLevel", "WordPiece"])
def test_a_text_without_tokens_is_a_line(kind, tmp_path):
    train_bpe(["a text"], 260).save(tmp_path)
    file = tmp_path / "tokenizer.json"
    model = {"type": kind, "vocab": WORDS, "unk_token": "[UNK]"}
    if kind == "WordPiece":
        model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 9}
    plain = {"pre_tokenizer": {"type": "Whitespace"}, "decoder": None, "model": model}
    file.write_text(json.dumps(json.loads(file.read_text()) | plain))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a a") == [1, 1]
    with pytest.raises(ValueError, match=r"the tokenizer .* fails on a text \(.*Missing \[UNK\]"):
        tokenizer.encode("b")


def test_merges_that_are_dropped_at_random_are_refused(tmp_path):
    train_bpe(["a text"], 260).save(tmp_path)
    file = tmp_path / "tokenizer.json"
    state = json.loads(file.read_text())
    state["model"]["dropout"] = 0.1
    file.write_text(json.dumps(state))
    with pytest.raises(ValueError, match=r"drops merges at random \(`dropout` 0.1"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pipe_is_no_file(bpe, name, tmp_path):
    bpe.save(tmp_path)
    write(tmp_path / "chat_template.jinja", CHATML)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} is not a file"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        *((name, lambda path: list(records_in(path, "--data")))
          for name in ("a.jsonl", "a.json", "a.jsonl.gz", "a.parquet", "a.arrow")),
        ("a.txt", lambda path: open_whole(str(path))),
        ("a.txt.gz", lambda path: open_whole(str(path))),
        ("a.txt", lambda path: open_whole(str(path.parent))),
        ("run.yaml", lambda path: read_arguments(path, {}, "program")),
        ("metrics.jsonl", read_metrics),
    ],
)  # fmt: skip
def test_a_pipe_is_no_file_for_who_reads_texts_and_settings(name, read, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} is not a file"):
        read(tmp_path / name)


def test_settings_in_a_pipe_are_unknown(tmp_path):
    os.mkfifo(tmp_path / "settings.json")
    (line,) = changed_settings(tmp_path, PretrainConfig())
    assert line.startswith("unknown")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"additional_special_tokens": "<a>"}, "must be a list of tokens, got '<a>'"),
        ({"tokenizer_class": 3}, "`tokenizer_class` must be a name, got 3"),
        (
            {"tokenizer_class": "LlamaTokenizer", "legacy": "no"},
            "`legacy` must be true or false, got 'no'",
        ),
    ],
)
def test_settings_of_a_wrong_type_are_refused(changes, message, tmp_path):
    train_bpe(["a text"], 260).save(tmp_path)
    file = tmp_path / "tokenizer.json"
    state = json.loads(file.read_text()) | {"decoder": None}
    file.write_text(json.dumps(state))
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)
