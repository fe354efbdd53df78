"""Batches of text: every token occurs once, and a restored state continues exactly."""

import dataclasses
import itertools
import math

import hypothesis
import numpy as np
import pytest
from bytes_tokenizer import Bytes
from hypothesis import strategies as st

from train.text.corpus import Corpus
from train.text.data import ValidationSet, train_batches, validation_batches
from train.text.tokenizer import Tokenizer
from train.text.trained_tokenizer import train_bpe

DOCUMENTS = [f"document {i}: " + "words é " * (i % 7) for i in range(40)]
HELD_OUT = ["held out ünë " * 3, "", "another one"]
CORPUS = Corpus("test", train=DOCUMENTS, validation=HELD_OUT, fingerprint="0")

WHOLE_ROWS = Corpus(
    "rows",
    # With the special tokens of `Bytes`, seven documents of three rows of 17 tokens. A row has the
    # numbers of its document and of itself in its middle.
    train=["".join(f"..{i:02}{j:02}".ljust(17, ".") for j in range(3))[1:-1] for i in range(7)],
    validation=["x"],
    fingerprint="4",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(DOCUMENTS, 280)


def batches_of(tokenizer, count: int, corpus: Corpus = CORPUS, **changes) -> list[dict]:
    """Returns the first `count` training batches."""
    iterator = make(tokenizer, corpus, **changes)
    taken = list(itertools.islice(iterator, count))
    iterator.close()
    return taken


def make(tokenizer, corpus: Corpus = CORPUS, **changes):
    options = {"batch_size": 4, "seq_len": 16, "seed": 0} | changes
    return train_batches(corpus, tokenizer, **options)


def rows_of(batches: list[dict]) -> np.ndarray:
    """Returns rows [n, seq_len + 1] from inputs and targets."""
    rows = [np.concatenate([b["inputs"], b["targets"][:, -1:]], axis=1) for b in batches]
    return np.concatenate(rows)


def documents_in(tokens: np.ndarray, tokenizer) -> list[str]:
    """Returns the texts between the ends of documents; the last can be truncated."""
    ends = np.flatnonzero(tokens == tokenizer.eos_id) + 1
    return [tokenizer.decode(part) for part in np.split(tokens, ends)]


# --- Training. ---


def test_rows_of_a_document_are_spread_over_the_epoch():
    # Documents of 100 rows: in their order, 99 of 100 neighbors would be of one document.
    letters = "abcdefghijklmnopqrstuvwxyz"
    corpus = Corpus("letters", train=[c * 1700 for c in letters], validation=["x"], fingerprint="2")
    rows = rows_of(batches_of(Bytes(), 600, corpus))
    same = rows[1:, 8] == rows[:-1, 8]
    assert same.mean() < 3 / len(letters)


def test_each_epoch_has_every_row_once_in_another_order():
    batches = batches_of(Bytes(), 42, WHOLE_ROWS, batch_size=1)  # 7 documents of 3 rows, twice.
    assert batches[0]["inputs"].shape == (1, 16)
    names = [bytes(row[2:6].tolist()).decode() for row in rows_of(batches)]
    first, second = names[:21], names[21:]
    assert sorted(first) == sorted(second) == [f"{i:02}{j:02}" for i in range(7) for j in range(3)]
    assert first != second


@pytest.mark.parametrize("kind", ["bpe", "bos"])
def test_rows_hold_whole_documents_between_their_special_tokens(tokenizer, kind):
    tokenizer = tokenizer if kind == "bpe" else Bytes()
    special = 1 if tokenizer.bos_id is None else 2
    count = sum(len(tokenizer.encode(text)) + special for text in DOCUMENTS)
    (batch,) = batches_of(tokenizer, 1, batch_size=1, seq_len=count - 1)  # A row is an epoch.
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    np.testing.assert_array_equal(batch["mask"] == 0, batch["targets"] == tokenizer.bos_id)
    tokens = rows_of([batch]).ravel()
    *found, rest = documents_in(tokens, tokenizer)
    assert (sorted(found), rest) == (sorted(DOCUMENTS), "")
    begins = np.append(0, np.flatnonzero(tokens == tokenizer.eos_id)[:-1] + 1)
    if tokenizer.bos_id is not None:
        assert (tokens[begins] == tokenizer.bos_id).all()


@pytest.mark.parametrize(
    ("prefix", "suffix", "dictated"),
    [
        ((), (), []),
        ((257,), (), []),  # Bytes.eos_id.
        ((257,), (257,), []),
        ((256,), (), [256]),
        ((256,), (257,), [256]),
        ((), (257, 256), [256]),
    ],
)
def test_one_separator_divides_documents_and_what_it_dictates_is_no_target(
    prefix, suffix, dictated
):
    tokenizer = Bytes()
    tokenizer.prefix, tokenizer.suffix = prefix, suffix
    texts = [f"document {i:02}" for i in range(100)]
    for documents in (texts, ["".join(texts)]):
        corpus = Corpus("short", train=documents, validation=documents, fingerprint="5")
        for batch in batches_of(tokenizer, 4, corpus, seq_len=64):
            np.testing.assert_array_equal(batch["mask"] == 0, np.isin(batch["targets"], dictated))
            tokens = rows_of([batch])
            assert not ((tokens[:, 1:] == tokens[:, :-1]) & (tokens[:, 1:] > 255)).any()
        sizes = {"batch_size": 4, "seq_len": 64, "eval_batches": 100}
        held_out = validation_batches(corpus, tokenizer, **sizes)
        assert held_out.num_tokens == 1100 + len(documents) - (not prefix)
        assert held_out.num_bytes == 1100 - (not prefix)


def test_a_text_of_exactly_one_row_is_enough():
    corpus = Corpus("one", train=["abc"], validation=["abc"], fingerprint="1")
    (batch,) = batches_of(Bytes(), 1, corpus, batch_size=1, seq_len=4)
    assert [*batch["inputs"][0], batch["targets"][0, -1]] == [256, *b"abc", 257]
    with pytest.raises(
        ValueError, match=r"`--seq-len` is 5, so a row takes 6 .* has 5 tokens in 1 document.*Lower"
    ):
        make(Bytes(), corpus, batch_size=1, seq_len=5)


# --- Validation. ---


def held_out_tokens(tokenizer) -> list[int]:
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return [i for text in HELD_OUT for i in [*start, *tokenizer.encode(text), tokenizer.eos_id]]


def validate(tokenizer, **changes):
    options = {"batch_size": 2, "seq_len": 5, "eval_batches": 100} | changes
    return validation_batches(CORPUS, tokenizer, **options)


def unpadded(batches: list[dict], name: str) -> np.ndarray:
    return np.concatenate([batch[name][batch["mask"] == 1] for batch in batches])


@pytest.mark.parametrize("kind", ["bpe", "bos"])
def test_every_token_but_the_first_and_beginnings_is_a_target_once(tokenizer, kind):
    tokenizer = tokenizer if kind == "bpe" else Bytes()
    tokens = np.array(held_out_tokens(tokenizer))
    held_out, counts = validate(tokenizer), tokens[1:] != tokenizer.bos_id
    np.testing.assert_array_equal(unpadded(held_out.batches, "targets"), tokens[1:][counts])
    np.testing.assert_array_equal(unpadded(held_out.batches, "inputs"), tokens[:-1][counts])
    assert held_out.num_tokens == counts.sum()
    first = len(tokenizer.decode(tokens[:1]).encode())
    assert held_out.num_bytes == sum(len(text.encode()) for text in HELD_OUT) - first


def test_the_number_of_batches_is_limited_and_bytes_are_those_of_the_batches():
    held_out = validate(Bytes(), eval_batches=2)
    assert len(held_out.batches) == 2
    assert held_out.num_tokens == 20
    # The first token is BOS and not a target: 20 targets are 20 bytes of the text.
    assert held_out.num_bytes == 20
    assert all(batch["mask"].all() for batch in held_out.batches)


def test_a_long_document_does_not_crowd_out_the_others():
    letters = "abc"
    corpus = Corpus("long", train=["x"], validation=[c * 5000 for c in letters], fingerprint="3")
    sizes = {"batch_size": 4, "seq_len": 1000, "eval_batches": 10}
    held_out = validation_batches(corpus, Bytes(), **sizes)
    targets = unpadded(held_out.batches, "targets")
    assert [int((targets == ord(c)).sum()) for c in letters] == [2047] * 3
    assert held_out.num_bytes == 3 * 2047
    alone = dataclasses.replace(corpus, validation=["a" * 5000])
    assert validation_batches(alone, Bytes(), **sizes).num_bytes == 5000


@hypothesis.given(seq_len=st.integers(1, 40), eval_batches=st.integers(1, 5))
@hypothesis.settings(deadline=None)
def test_bytes_are_those_of_the_targets(seq_len, eval_batches):
    held_out = validate(Bytes(), seq_len=seq_len, eval_batches=eval_batches)
    targets = unpadded(held_out.batches, "targets")
    # A character that is cut off at the end can count as U+FFFD, which has three bytes.
    assert abs(held_out.num_bytes - int((targets < 256).sum())) <= 2


def test_too_little_held_out_is_refused(tokenizer):
    corpus = Corpus("tiny", train=DOCUMENTS, validation=[""], fingerprint="2")
    with pytest.raises(ValueError, match=r"`--data` is 'tiny': 1 token\(s\) are held out"):
        validation_batches(corpus, tokenizer, batch_size=1, seq_len=4, eval_batches=1)


def test_costs_of_a_text_are_per_token_and_per_byte():
    cost = ValidationSet([], num_tokens=4, num_bytes=8).cost(4.0)
    assert cost["nats_per_token"] == 1.0
    assert cost["perplexity"] == pytest.approx(math.e)
    assert cost["bits_per_byte"] == pytest.approx(0.5 / math.log(2))
    of_no_text = ValidationSet([], num_tokens=1, num_bytes=0).cost(1e6)
    assert math.isfinite(of_no_text["perplexity"])
    assert math.isnan(of_no_text["bits_per_byte"])
