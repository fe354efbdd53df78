"""Fixtures of the programs and of data: tokenizers, records in a file, a model with questions."""

import copy
import io
import os

import pytest
import sentencepiece

from tests.train.evaluations import write_folder
from tests.train.example_files import open_path, write_rows
from tests.train.runs import share_steps
from train import evaluate
from train.text.examples import Examples
from train.text.sentencepiece_tokenizer import SentencePieceTokenizer
from train.text.tokenizer import HuggingFaceTokenizer, Tokenizer
from train.text.tokenizer_files import load_tokenizer
from train.text.trained_tokenizer import END_OF_TEXT, train_bpe

TEXTS = [f"The quick brown fox number {i} asks: why?\nBecause it can.\n" for i in range(50)]


@pytest.fixture(scope="session")
def bpe() -> Tokenizer:
    """Byte-level BPE with the special tokens of ChatML."""
    inner = copy.deepcopy(train_bpe(TEXTS, 300)._inner)
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return HuggingFaceTokenizer(inner, eos=END_OF_TEXT)


@pytest.fixture(scope="session")
def pieces() -> Tokenizer:
    """A sentencepiece tokenizer, like Llama 2's."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=model,
        model_type="bpe",
        vocab_size=310,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return SentencePieceTokenizer(model.getvalue())


@pytest.fixture
def open_rows(tmp_path):
    """Returns a function that opens records."""

    def opened(rows: list, tokenizer=None, **options) -> Examples:
        return open_path(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, **options)

    return opened


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with a checkpoint, its tokenizer, a text and questions."""
    folder = tmp_path_factory.mktemp("evaluate")
    write_folder(folder)
    return folder


@pytest.fixture
def says(monkeypatch):
    """Returns a function that sets the model's answers and returns the prompts, as text."""

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


@pytest.fixture(scope="module")
def shared_steps():
    """Lets the runs of a file share their steps where these are equal."""
    with pytest.MonkeyPatch.context() as patch:
        share_steps(patch)
        yield


@pytest.fixture
def exits_raise(monkeypatch):
    """Raises `SystemExit` where a program exits at once."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
