"""The evaluation program: settings and files that it refuses."""

import pathlib
import sys

import pytest

from tests.train.evaluations import TEXT, asked, config, quietly
from train import evaluate
from train.run.program import BadRunError
from train.text.trained_tokenizer import train_bpe

SUMS = {"task": "gsm8k", "questions": pathlib.Path("q")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "nothing to do: give `--data`, `--task` or `--generate`"),
        ({"task": "gsm8k"}, "`--task` and `--questions` need each other"),
        ({"generate": "a", "out": pathlib.Path("out")}, "`--out` has no effect without `--task`"),
        ({"generate": "a", "whole": True}, "`--whole` has no effect without `--data`"),
        ({"generate": "a", "chat_template": pathlib.Path("a")}, "`--chat-template` has no effect"),
        ({"generate": "a", "batch_size": 0}, "`--batch-size` must be at least 1, got 0"),
        ({"generate": "a", "batch_size": 2}, "`--batch-size 2` has no effect without `--data` or"),
        ({"generate": "a", "seq_len": 8}, "`--seq-len 8` has no effect without `--data`"),
        ({"generate": "a", "eval_batches": 8}, "`--eval-batches 8` has no effect without `--data`"),
        ({"data": "a", "eval_batches": 0}, "`--eval-batches` must be at least 1, got 0"),
        ({"generate": "a", "shots": 2}, "`--shots 2` has no effect without `--task`"),
        ({"generate": "a", "top_k": 2}, "`--top-k 2` has no effect without `--temperature`"),
        ({"data": "a", "temperature": 0.5}, "`--temperature 0.5` has no effect without `--gener"),
        ({"data": "a", "chat": True}, "`--chat` has no effect without `--generate` or `--task`"),
        ({"data": "a", "whole": True, "data_dir": pathlib.Path("b")},
         "`--data-dir b` has no effect with `--whole`"),
        ({**SUMS, "choose": "likelihood"}, "`--choose likelihood` has no effect with `--task gsm"),
        ({**SUMS, "task": "choice", "normalize": "bytes"},
         "`--normalize bytes` has no effect without `--choose likelihood`"),
        ({**SUMS, "examples": pathlib.Path("e")}, "`--examples e` has no effect without `--shots`"),
        ({"generate": "a", "seed": -1}, "`--seed` must be at least 0, got -1"),
        ({"generate": "a", "temperature": -1.0}, r"`--temperature` must be in \[0, inf\), got -1"),
        ({"generate": "a", "top_p": 0.0}, r"`--top-p` must be above 0 and at most 1, got 0\.0"),
    ],
)  # fmt: skip
def test_settings_in_conflict_or_without_effect_are_refused(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        config(folder, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint": "none"}, "the checkpoint 'none' cannot be read: no such file or folder"),
        ({"tokenizer": "none"}, "`--tokenizer` is 'none': no such path"),
        ({"generate": ""}, "`--generate`: the prompt is empty, and the tokenizer has no start tok"),
        ({"generate": "\udcff"}, "`--generate`: 'utf-8' codec .* surrogates not allowed"),
        ({"prompt_template": "\udcff{question}"}, "`--questions`: line 1 of .* surrogates not all"),
        ({"max_new_tokens": 256},
         r"`--generate` has \d+ tokens; with `--max-new-tokens` 256 that exceeds the 256"),
        ({"data": "text.txt", "seq_len": 257}, "`--seq-len` 257 is above the 256 positions"),
        ({"data": "nothing", "whole": True}, "`--whole` is for local files, and `--data` is"),
        ({"adapter": "none"}, "`--adapter`: the adapter 'none' cannot be read"),
        ({"limit": 9, "shots": 9}, "`--shots` is 9, but .* has 9 examples and .* 0 further"),
        ({"examples": "choices.jsonl", "shots": 4}, "`--shots` is 4, but .* has 3 examples"),
        ({"shots": 8}, r"line 9 of .* tokens; with `--max-new-tokens` 8 that exceeds the 256"),
        ({"questions": "none.jsonl"}, "`--questions` is '.*none.jsonl': there is no such path"),
        ({"question_field": "ask"}, "line 1 of .*: there is no field 'ask', only 'question', 'a"),
        ({"prompt_template": "{ask}"}, "`--questions`: line 1 of .*: there is no field 'ask', on"),
        ({"prompt_template": "{0}"}, r"`--prompt-template` is '\{0\}': each \{\} needs the name"),
        ({"prompt_template": "{"}, r"`--prompt-template` is '\{': .* Write \{\{ and"),
        ({"answer_field": "question"}, "line 1 of .* has no number after ####. Correct or"),
        ({"task": "choice"}, "line 1 of .*: there is no field 'correct', only 'question', 'answ"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_in_one_line(folder, changes, message):
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


def test_files_of_questions_that_cannot_be_read_are_named(folder, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"question": 1}\n\n{')
    with pytest.raises(BadRunError, match=r"`--questions`: line 3 of '.*' is not JSON"):
        quietly(asked(folder, "sums", questions=tmp_path / "bad.jsonl"))


def test_a_place_for_answers_that_cannot_be_written_is_refused_first(folder, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "none" / "at" / "all")
    for out, message in (("file/answers.jsonl", "cannot be written"), ("link", "exists already")):
        with pytest.raises(BadRunError, match=f"`--out` '{tmp_path / out}' {message}"):
            quietly(asked(folder, "sums", out=tmp_path / out))
    assert (tmp_path / "link").is_symlink()


def test_a_tokenizer_of_another_model_is_refused(folder, tmp_path):
    train_bpe([TEXT * 3 + "".join(map(chr, range(200, 400)))], 350).save(tmp_path)
    with pytest.raises(
        BadRunError, match=r"tokens, but the model in .* has 300: the one of `--tok"
    ):
        quietly(config(folder, tokenizer=tmp_path, generate="One"))


@pytest.mark.usefixtures("exits_raise")
def test_the_command_line_prints_errors_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["evaluate", "--checkpoint", "none", "--generate", "a"])
    with pytest.raises(SystemExit) as ending:
        evaluate.main()
    assert ending.value.code == 2
    assert capsys.readouterr().err == (
        "error: `--checkpoint`: the checkpoint 'none' cannot be read: no such file or folder.\n"
    )
