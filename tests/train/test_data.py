"""Batches of text: every token occurs once, and a restored state continues exactly."""

import dataclasses
import itertools
import json

import grain
import hypothesis
import numpy as np
import pytest
from bytes_tokenizer import Bytes
from hypothesis import strategies as st

from train.corpus import Corpus
from train.data import PackIterDataset, train_batches, validation_batches
from train.tokenizer import Tokenizer, train_bpe

DOCUMENTS = [f"document {i}: " + "words é " * (i % 7) for i in range(40)]
HELD_OUT = ["held out ünë " * 3, "", "another one"]
CORPUS = Corpus("test", train=DOCUMENTS, validation=HELD_OUT, fingerprint="0")


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


def assert_equal(got: list[dict], want: list[dict]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def documents_in(tokens: np.ndarray, tokenizer) -> list[str]:
    """Returns the texts between the ends of documents; the last can be truncated."""
    ends = np.flatnonzero(tokens == tokenizer.eos_id) + 1
    return [tokenizer.decode(part) for part in np.split(tokens, ends)]


# --- Packing. ---


@hypothesis.given(
    lengths=st.lists(st.integers(1, 12), max_size=12),
    row=st.integers(1, 10),
    stop=st.integers(0, 30),
)
@hypothesis.settings(deadline=None)
def test_rows_join_to_the_tokens_and_a_restored_state_continues(lengths, row, stop):
    starts = np.cumsum([0, *lengths])
    documents = [np.arange(a, b) for a, b in itertools.pairwise(starts)]
    packed = PackIterDataset(grain.MapDataset.source(documents), length=row)
    rows = [*packed]
    np.testing.assert_array_equal(np.concatenate([[], *rows]), np.arange(starts[-1] // row * row))
    iterator, restored = iter(packed), iter(packed)
    list(itertools.islice(iterator, stop))
    restored.set_state(json.loads(json.dumps(iterator.get_state())))
    np.testing.assert_array_equal(list(restored), rows[stop:])


@hypothesis.given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    row=st.integers(1, 10),
    streams=st.integers(1, 5),
    stop=st.integers(0, 30),
)
@hypothesis.settings(deadline=None)
def test_streams_share_documents_and_a_restored_state_continues(lengths, row, streams, stop):
    starts = np.cumsum([0, *lengths])
    documents = [np.arange(a, b) for a, b in itertools.pairwise(starts)]
    packed = PackIterDataset(grain.MapDataset.source(documents), length=row, streams=streams)
    rows = [*packed]
    tokens = np.concatenate([[], *rows])
    assert len(set(tokens)) == len(tokens)
    for stream in range(streams):
        mine = np.concatenate([[], *rows[stream::streams]]).astype(int)
        # A stream has whole documents in order.
        jumps = mine[1:][np.diff(mine) != 1]
        assert set(jumps) <= set(starts)
        assert (np.diff(mine) > 0).all()
    iterator, restored = iter(packed), iter(packed)
    list(itertools.islice(iterator, stop))
    restored.set_state(json.loads(json.dumps(iterator.get_state())))
    np.testing.assert_array_equal(list(restored), rows[stop:])


# --- Training. ---


def test_rows_of_a_batch_come_from_different_documents():
    corpus = Corpus(
        "letters", train=[c * 100 for c in "abcdefgh"], validation=["x"], fingerprint="2"
    )
    (batch,) = batches_of(Bytes(), 1, corpus)
    assert len(set(batch["inputs"][:, 1])) == 4


def test_targets_are_the_inputs_one_ahead(tokenizer):
    (batch,) = batches_of(tokenizer, 1)
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    for name, dtype in (("inputs", np.int32), ("targets", np.int32), ("mask", np.float32)):
        assert (batch[name].shape, batch[name].dtype) == ((4, 16), dtype)
    assert batch["mask"].all()


def test_one_epoch_holds_each_document_once(tokenizer):
    tokens = rows_of(batches_of(tokenizer, 60, batch_size=1)).ravel()
    assert sorted(documents_in(tokens, tokenizer)[: len(DOCUMENTS)]) == sorted(DOCUMENTS)


def test_epochs_are_shuffled_differently(tokenizer):
    tokens = rows_of(batches_of(tokenizer, 120, batch_size=1)).ravel()
    found = documents_in(tokens, tokenizer)
    first, second = found[:40], found[40:80]
    assert first != second
    assert sorted(first) == sorted(second)


def test_documents_begin_with_bos_if_the_tokenizer_has_one():
    tokens = rows_of(batches_of(Bytes(), 20)).ravel()
    assert tokens[0] == 256
    ends = np.flatnonzero(tokens[:-1] == 257)
    assert len(ends) > 5
    assert (tokens[ends + 1] == 256).all()


def test_the_same_seed_gives_the_same_batches(tokenizer):
    assert_equal(batches_of(tokenizer, 10), batches_of(tokenizer, 10))


def test_another_seed_gives_other_batches(tokenizer):
    one, other = batches_of(tokenizer, 1), batches_of(tokenizer, 1, seed=1)
    assert (one[0]["inputs"] != other[0]["inputs"]).any()


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 7, 20, 41])
def test_restored_iterator_continues_with_the_same_batches(tokenizer, taken):
    unbroken, restored = make(tokenizer), make(tokenizer)
    list(itertools.islice(unbroken, taken))
    restored.set_state(json.loads(json.dumps(unbroken.get_state())))
    assert_equal(list(itertools.islice(restored, 8)), list(itertools.islice(unbroken, 8)))
    unbroken.close()
    restored.close()


def test_used_iterator_can_be_set_back(tokenizer):
    iterator = make(tokenizer)
    next(iterator)
    state = iterator.get_state()
    first = list(itertools.islice(iterator, 5))
    iterator.set_state(state)
    assert_equal(list(itertools.islice(iterator, 5)), first)
    iterator.close()


def test_processes_share_documents_and_rows(tokenizer):
    found = []
    for index in range(2):
        batches = batches_of(tokenizer, 60, batch_size=2, process_index=index, process_count=2)
        assert batches[0]["inputs"].shape == (1, 16)
        found.append(documents_in(rows_of(batches).ravel(), tokenizer)[:20])
    assert sorted(found[0] + found[1]) == sorted(DOCUMENTS)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"seq_len": 0}, "`--seq-len` must be at least 1, got 0"),
        ({"batch_size": 0}, "`--batch-size` must be at least 1, got 0"),
        (
            {"process_count": 3},
            "`--batch-size` must be a multiple of the 3 processes, got 4",
        ),
        ({"process_index": 2, "process_count": 2}, "`process_index` must be from 0 to 1, got 2"),
        (
            {"seq_len": 10_000},
            r"`--seq-len` is 10000, so a row takes 10001 .* has \d+ tokens in 40 doc.*Lower",
        ),
        ({"batch_size": 64, "process_count": 64, "process_index": 63}, "has 0 tokens in 0 doc"),
    ],
)
def test_bad_arguments_are_refused(tokenizer, changes, match):
    with pytest.raises(ValueError, match=match):
        make(tokenizer, **changes)


def test_a_text_of_exactly_one_row_is_enough():
    corpus = Corpus("one", train=["abc"], validation=["abc"], fingerprint="1")
    (batch,) = batches_of(Bytes(), 1, corpus, batch_size=1, seq_len=4)
    assert [*batch["inputs"][0], batch["targets"][0, -1]] == [256, *b"abc", 257]
    with pytest.raises(ValueError, match="has 5 tokens in 1 document"):
        make(Bytes(), corpus, batch_size=1, seq_len=5)


# --- Validation. ---


def held_out_tokens(tokenizer) -> list[int]:
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return [i for text in HELD_OUT for i in [*start, *tokenizer.encode(text), tokenizer.eos_id]]


def validate(tokenizer, **changes):
    options = {"batch_size": 2, "seq_len": 5, "max_batches": 100} | changes
    return validation_batches(CORPUS, tokenizer, **options)


def unpadded(batches: list[dict], name: str) -> np.ndarray:
    return np.concatenate([batch[name][batch["mask"] == 1] for batch in batches])


@pytest.mark.parametrize("kind", ["bpe", "bos"])
def test_every_token_except_the_first_is_a_target_once(tokenizer, kind):
    tokenizer = tokenizer if kind == "bpe" else Bytes()
    tokens = held_out_tokens(tokenizer)
    held_out = validate(tokenizer)
    np.testing.assert_array_equal(unpadded(held_out.batches, "targets"), tokens[1:])
    np.testing.assert_array_equal(unpadded(held_out.batches, "inputs"), tokens[:-1])
    assert held_out.num_tokens == len(tokens) - 1
    first = len(tokenizer.decode(tokens[:1]).encode())
    assert held_out.num_bytes == sum(len(text.encode()) for text in HELD_OUT) - first


def test_last_batch_is_padded_and_masked(tokenizer):
    last = validate(tokenizer, batch_size=50).batches[-1]
    assert last["inputs"].shape == (50, 5)
    assert last["inputs"].dtype == np.int32
    assert last["mask"].dtype == np.float32
    assert 0 < last["mask"].sum() < 250
    assert (last["targets"][last["mask"] == 0] == tokenizer.eos_id).all()


def test_validation_is_the_same_at_every_call(tokenizer):
    assert_equal(validate(tokenizer).batches, validate(tokenizer).batches)


def test_the_number_of_batches_is_limited_and_bytes_are_those_of_the_batches():
    held_out = validate(Bytes(), max_batches=2)
    assert len(held_out.batches) == 2
    assert held_out.num_tokens == 20
    # The first token is BOS and not a target: 20 targets are 20 bytes of the text.
    assert held_out.num_bytes == 20
    assert all(batch["mask"].all() for batch in held_out.batches)


def test_a_long_document_does_not_crowd_out_the_others():
    letters = "abc"
    corpus = Corpus("long", train=["x"], validation=[c * 5000 for c in letters], fingerprint="3")
    sizes = {"batch_size": 4, "seq_len": 1000, "max_batches": 10}
    held_out = validation_batches(corpus, Bytes(), **sizes)
    targets = unpadded(held_out.batches, "targets")
    assert [int((targets == ord(c)).sum()) for c in letters] == [2047] * 3
    assert held_out.num_bytes == 3 * 2047
    alone = dataclasses.replace(corpus, validation=["a" * 5000])
    assert validation_batches(alone, Bytes(), **sizes).num_bytes == 5000


@hypothesis.given(seq_len=st.integers(1, 40), max_batches=st.integers(1, 5))
@hypothesis.settings(deadline=None)
def test_bytes_are_those_of_the_targets(seq_len, max_batches):
    held_out = validate(Bytes(), seq_len=seq_len, max_batches=max_batches)
    targets = unpadded(held_out.batches, "targets")
    # A character that is cut off at the end can count as U+FFFD, which has three bytes.
    assert abs(held_out.num_bytes - int((targets < 256).sum())) <= 2


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"seq_len": 0}, "`--seq-len` must be at least 1, got 0"),
        ({"batch_size": -1}, "`--batch-size` must be at least 1, got -1"),
        ({"max_batches": 0}, "`max_batches` must be at least 1, got 0"),
    ],
)
def test_sizes_below_one_are_refused(tokenizer, changes, match):
    with pytest.raises(ValueError, match=match):
        validate(tokenizer, **changes)


def test_too_little_held_out_is_refused(tokenizer):
    corpus = Corpus("tiny", train=DOCUMENTS, validation=[""], fingerprint="2")
    with pytest.raises(ValueError, match=r"`--data` is 'tiny': 1 token\(s\) are held out"):
        validation_batches(corpus, tokenizer, batch_size=1, seq_len=4, max_batches=1)
