"""The evaluation program: questions, and how answers are read."""

import json

import numpy as np
import pytest

from models import huggingface
from tests.train.evaluations import CHOICES, SUMS, asked, lines, log_softmax, quietly
from train import evaluate
from train.run.program import BadRunError
from train.text.tokenizer_files import load_tokenizer


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


@pytest.fixture(scope="module")
def likelihoods(folder):
    """Returns log-likelihood, tokens and bytes of each option of each question."""
    tokenizer, model = load_tokenizer(folder / "model"), huggingface.load(folder / "model")

    def of_option(question: str, option: str) -> tuple[float, int, int]:
        ending, prompt = " " + option[2:], tokenizer.encode(f"Q: {question}\nA:")
        tokens = tokenizer.encode(f"Q: {question}\nA:{ending}")
        assert tokens[: len(prompt)] == prompt
        padded = np.array([tokens + [0] * (64 - len(tokens))])
        logs, places = np.asarray(log_softmax()(model, padded))[0], range(len(prompt), len(tokens))
        return sum(logs[i - 1, tokens[i]] for i in places), len(places), len(ending)

    return [[of_option(row["question"], x) for x in row["options"]] for row in CHOICES]


@pytest.mark.parametrize("normalize", ["none", "tokens", "bytes"])
def test_likelihoods_are_those_of_the_forward_pass(folder, likelihoods, normalize, tmp_path):
    out = tmp_path / "answers.jsonl"
    options = {"choose": "likelihood", "normalize": normalize, "batch_size": 2, "out": out}
    prompt = r"Q: {question}\nA:"
    report = quietly(asked(folder, "choices", prompt_template=prompt, **options))
    written = lines(out)
    got = [x for line in written for x in line["log_likelihoods"]]
    np.testing.assert_allclose(got, [x for row in likelihoods for x, *_ in row], rtol=1e-5)
    lengths = {"none": lambda *_: 1, "tokens": lambda n, _: n, "bytes": lambda _, n: n}[normalize]
    best = [np.argmax([value / lengths(*sizes) for value, *sizes in row]) for row in likelihoods]
    predictions = ["ABC"[i] for i in best]
    assert [line["prediction"] for line in written] == predictions
    right = sum(p == record["correct"] for p, record in zip(predictions, CHOICES, strict=True))
    assert report["choice"]["correct"] == right


def test_an_option_begins_with_the_token_over_its_seam_as_in_training(folder):
    """A continuation without a space joins the last word of the prompt in one token."""
    templates = {"prompt_template": "It is fou", "option_template": "{option}"}
    joined = asked(folder, "choices", choose="likelihood", **templates)
    tokenizer = load_tokenizer(folder / "model")
    (question, *_) = evaluate.prepare(joined).questions
    for option, (prompt, ids) in zip(("four", "five", "a sum"), question.options, strict=True):
        assert [*prompt, *ids] == tokenizer.encode("It is fou" + option)
        assert "It is fou".startswith(tokenizer.decode(prompt))


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
