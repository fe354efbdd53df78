"""The evaluation program: questions, and how answers are read."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from models import huggingface
from tests.train.evaluations import CHOICES, SUMS, asked, lines, log_softmax, quietly
from train import evaluate
from train.run.loop import BadRunError
from train.text.tokenizer import load_tokenizer


@pytest.fixture
def folder(folder_of_model):
    return folder_of_model


def test_numbers_are_read_from_written_answers(folder, says, tmp_path):
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
    # The last batch is padded with its last prompt, which is counted once.
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
    with pytest.raises(BadRunError, match=r"`--out` .* exists already: name another file"):
        quietly(asked(folder, "sums", out=out))
    link = folder / "link.jsonl"
    link.symlink_to(folder / "elsewhere.jsonl")
    with pytest.raises(BadRunError, match=r"`--out` .*link.jsonl' exists already"):
        quietly(asked(folder, "sums", out=link))
    assert link.is_symlink()
    assert not link.exists()


def test_letters_are_read_from_written_answers(folder, says):
    shown = [
        "Two and two?\nOptions:\nA) four\nB) five\nC) a sum\nAnswer:",
        "Two less one?\nOptions:\nA) two\nB) one of them\nAnswer:",
        "None?\nOptions:\nA) 0\nB) naught\nC) it is two\nAnswer:",
    ]
    seen = says(folder, dict(zip(shown, [" A", " C, or rather B", " C"], strict=True)))
    # With two options, C is not a letter.
    assert quietly(asked(folder, "choices"))["choice"]["correct"] == 2
    assert seen[:3] == ["Question: " + prompt for prompt in shown]
    (folder / "more.jsonl").write_text(json.dumps(CHOICES[2]))
    says(folder, {shown[0]: " A"})
    with_examples = asked(folder, "choices", shots=1, limit=1, examples=folder / "more.jsonl")
    assert quietly(with_examples)["choice"]["accuracy"] == 1


@pytest.mark.parametrize("normalize", ["none", "tokens", "bytes"])
def test_likelihoods_are_those_of_the_forward_pass(folder, normalize, tmp_path):
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


def test_options_begin_before_the_first_token_that_one_of_them_changes(folder):
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
