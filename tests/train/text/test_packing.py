"""Packed batches: whole separate examples, once per epoch; a restored state continues."""

import itertools

import hypothesis
import numpy as np
import pytest
from bytes_tokenizer import Bytes
from hypothesis import strategies as st

from train.text.examples import Example
from train.text.packing import packed_batches, validation_set

PAD = 0
LENGTHS = [2, 9, 17, 5, 5, 3, 12, 2, 8, 16, 4, 7, 11]


def examples_of(lengths: list[int]) -> list[Example]:
    """Returns examples without common tokens; every third token is not counted."""
    starts = np.cumsum([1, *lengths])
    examples = []
    for start, end in itertools.pairwise(starts):
        tokens = np.arange(start, end, dtype=np.int32)
        counted = tokens % 3 != 0
        counted[0], counted[-1] = False, True
        examples.append(Example(tokens, counted))
    return examples


EXAMPLES = examples_of(LENGTHS)


def make(examples=EXAMPLES, **changes):
    options = {"batch_size": 2, "seq_len": 16, "seed": 0, "pad_id": PAD} | changes
    return packed_batches(examples, **options)


def batches_of(count: int, examples=EXAMPLES, **changes) -> list[dict]:
    iterator = make(examples, **changes)
    taken = list(itertools.islice(iterator, count))
    iterator.close()
    return taken


def rows_of(batches: list[dict]) -> list[dict]:
    return [{name: x[i] for name, x in b.items()} for b in batches for i in range(len(b["mask"]))]


def firsts_in(row: dict, examples: list[Example]) -> list[int]:
    """Checks a row, and returns the first token of each of its examples."""
    by_first = {int(example.tokens[0]): example for example in examples}
    found, segments = [], row["segments"]
    edges = np.flatnonzero(np.diff(segments)) + 1
    parts = np.split(np.arange(len(segments)), edges)
    numbers = [int(segments[part[0]]) for part in parts]
    assert numbers in ([*range(1, len(parts) + 1)], [*range(1, len(parts)), 0])
    for number, part in zip(numbers, parts, strict=True):
        if number == 0:
            assert (row["inputs"][part] == PAD).all()
            assert (row["targets"][part] == PAD).all()
            assert not row["mask"][part].any()
        else:
            example = by_first[int(row["inputs"][part[0]])]
            np.testing.assert_array_equal(row["inputs"][part], example.tokens[:-1])
            np.testing.assert_array_equal(row["targets"][part], example.tokens[1:])
            np.testing.assert_array_equal(row["mask"][part], example.counted[1:])
            found.append(int(example.tokens[0]))
    return found


# --- Training. ---


@hypothesis.given(
    lengths=st.lists(st.integers(2, 13), min_size=1, max_size=15),
    more=st.integers(0, 5),
    seed=st.integers(0, 2**32),
)
@hypothesis.settings(deadline=None, max_examples=50)
def test_every_example_occurs_whole_once_per_epoch(lengths, more, seed):
    examples = examples_of(lengths)
    everything = sorted(int(example.tokens[0]) for example in examples)
    sizes = {"batch_size": 1, "seq_len": max(lengths) - 1 + more, "seed": seed}
    rows = iter(rows_of(batches_of(3 * len(lengths), examples, **sizes)))
    for _ in range(3):
        found = []
        while len(found) < len(everything):
            found += firsts_in(next(rows), examples)
        assert sorted(found) == everything


def test_epochs_are_shuffled_differently():
    found = [x for row in rows_of(batches_of(30)) for x in firsts_in(row, EXAMPLES)]
    count = len(EXAMPLES)
    first, second = found[:count], found[count : 2 * count]
    assert sorted(first) == sorted(second)
    assert first != second


def test_rows_have_little_padding():
    lengths = np.random.default_rng(0).integers(10, 120, 1000)
    batches = batches_of(50, examples_of(list(lengths)), batch_size=8, seq_len=256)
    assert np.mean([batch["segments"] > 0 for batch in batches]) > 0.97


def test_a_row_without_a_counted_target_does_not_occur():
    assert all(row["mask"].any() for row in rows_of(batches_of(100)))


def test_one_example_fills_every_row_and_rows_of_one_token_have_examples_of_two():
    rows = rows_of(batches_of(3, examples_of([4]), batch_size=3, seq_len=7))
    assert all(row["segments"].tolist() == [1, 1, 1, 0, 0, 0, 0] for row in rows)
    (batch,) = batches_of(1, examples_of([2, 2]), batch_size=2, seq_len=1)
    assert sorted(batch["inputs"][:, 0]) == [1, 3]
    assert (batch["targets"] == batch["inputs"] + 1).all()


# --- Validation. ---


def validate(examples=EXAMPLES, **changes):
    options = {"batch_size": 2, "seq_len": 16, "eval_batches": 100, "pad_id": PAD} | changes
    return validation_set(examples, Bytes(), **options)


def spoken(prompt: str, completion: str) -> Example:
    tokens = [256, *prompt.encode(), *completion.encode(), 257]
    counted = np.arange(len(tokens)) > len(prompt.encode())
    return Example(np.asarray(tokens, np.int32), counted)


def test_validation_has_each_example_once_in_the_order_of_rows():
    held_out = validate()
    rows = [row for row in rows_of(held_out.batches) if row["segments"].any()]
    found = [firsts_in(row, EXAMPLES) for row in rows]
    assert sorted(itertools.chain(*found)) == [int(example.tokens[0]) for example in EXAMPLES]
    assert [x[0] for x in found] == sorted(x[0] for x in found)
    assert held_out.num_tokens == sum(int(example.counted.sum()) for example in EXAMPLES)
    assert held_out.num_tokens == sum(batch["mask"].sum() for batch in held_out.batches)


def test_the_number_of_batches_is_limited_and_tokens_are_those_of_the_batches():
    examples = [spoken("ab", "cdé"), spoken("a", "long answer é"), spoken("", "x")]
    whole, part = (validate(examples, batch_size=1, eval_batches=n) for n in (100, 1))
    # One row: "cdé" and its end, then "x" and its end.
    assert (part.num_tokens, part.num_bytes) == (5 + 2, 4 + 1)
    assert (whole.num_tokens, whole.num_bytes) == (5 + 2 + 15, 4 + 1 + 14)


def test_bytes_are_those_of_the_counted_turns_of_which_there_must_be_some():
    tokens = [256, *b"ask", *b"say", *b"more", *b"yes", 257]
    counted = [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]
    example = Example(np.asarray(tokens, np.int32), np.asarray(counted, bool))
    held_out = validate([example])
    assert (held_out.num_tokens, held_out.num_bytes) == (7, 6)
    with pytest.raises(ValueError, match="counted tokens of the validation examples have no text"):
        validate([spoken("prompt", "")])


BARE = Example(np.arange(3), np.array([True, False, False]))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"examples": []}, "`examples` is empty: give at least one"),
        ({"seq_len": 15},
         r"number 2 has 17 tokens, and a row of `--seq-len` 15 has room for 16\. Shorten it"),
        ({"examples": [*EXAMPLES, BARE]},
         "number 13 has no counted token after its first. Drop it"),
        ({"examples": [Example(np.arange(1), np.ones(1, bool))]}, "number 0 has no counted token"),
    ],
)  # fmt: skip
def test_examples_that_do_not_fit_are_refused(changes, match):
    for function in (make, validate):
        with pytest.raises(ValueError, match=match):
            function(**changes)


def test_an_epoch_draws_each_source_in_proportion_to_its_weight():
    examples = examples_of([9] * 40)
    iterator = make(examples, batch_size=1, seq_len=8, shares=[(30, 1.0), (10, 3.0)])
    drawn = [int(next(iterator)["inputs"][0, 0]) // 9 for _ in range(40)]  # An epoch.
    iterator.close()
    counts = np.bincount(drawn, minlength=40)
    assert (counts[:30].sum(), counts[:30].max()) == (10, 1)
    assert counts[30:].tolist() == [3] * 10
