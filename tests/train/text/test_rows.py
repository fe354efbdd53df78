"""Rows in random order: each once per epoch, equal bits after a restore, bounded windows."""

import itertools
import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from train.text.rows import ShuffledRowsIterDataset

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=12)


class Documents:
    """Endless epochs of documents whose tokens are their places in the stream.

    Attributes:
      reads: the documents that were read, by index.
    """

    def __init__(self, lengths: list[int], at_once: int = 1) -> None:
        self.lengths, self.at_once, self.reads = lengths, at_once, []

    def __call__(self, index: int) -> list[np.ndarray]:
        self.reads += range(index, index + self.at_once)
        return [self.document(i) for i in range(index, index + self.at_once)]

    def document(self, index: int) -> np.ndarray:
        epoch, place = divmod(index, len(self.lengths))
        start = epoch * sum(self.lengths) + sum(self.lengths[:place])
        return np.arange(start, start + self.lengths[place], dtype=np.int32)


def make(documents: Documents, *, length: int = 1, window: int = 8192, seed: int = 0):
    rows = ShuffledRowsIterDataset(
        documents, length=length, epoch=len(documents.lengths), seed=seed, window=window
    )
    return iter(rows)


def take(iterator, count: int) -> np.ndarray:
    """Returns rows [count, length]."""
    return np.stack(list(itertools.islice(iterator, count)))


@hypothesis.given(
    lengths=LENGTHS,
    at_once=st.integers(1, 3),
    row=st.integers(1, 10),
    window=st.integers(1, 20),
)
def test_every_row_of_an_epoch_is_handed_out_once(lengths, at_once, row, window):
    hypothesis.assume(sum(lengths) >= row)
    # Rows that begin in the first epoch: all of them come before the others.
    count = -(-sum(lengths) // row)
    rows = take(make(Documents(lengths, at_once), length=row, window=window), count)
    rows = rows[np.argsort(rows[:, 0])]
    np.testing.assert_array_equal(rows.ravel(), np.arange(count * row))


@hypothesis.given(
    lengths=LENGTHS,
    at_once=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    row=st.integers(1, 10),
    window=st.integers(1, 20),
    stops=st.lists(st.integers(0, 25), max_size=4),
)
def test_a_restored_iterator_continues_with_equal_rows(lengths, at_once, row, window, stops):
    hypothesis.assume(sum(lengths) >= row)
    options = {"length": row, "window": window}
    unbroken = make(Documents(lengths, at_once[0]), **options)
    restored = make(Documents(lengths, at_once[1]), **options)
    for stop in stops:
        list(itertools.islice(unbroken, stop))
        restored.set_state(json.loads(json.dumps(unbroken.get_state())))
        assert restored.get_state() == unbroken.get_state()
        np.testing.assert_array_equal(take(restored, 5), take(unbroken, 5))


@pytest.mark.parametrize("lengths", [[50] * 20, [1000]])
def test_consecutive_rows_are_far_apart_in_the_text(lengths):
    rows = take(make(Documents(lengths)), 1000)[:, 0]
    # A random order of n rows has neighbors n / 3 apart on average.
    assert np.abs(np.diff(rows)).mean() == pytest.approx(1000 / 3, rel=0.1)


def test_windows_and_seeds_have_orders_of_their_own():
    documents = Documents([1] * 20)
    first, second = take(make(documents), 40)[:, 0].reshape(2, 20)
    other = take(make(documents, seed=1), 20)[:, 0]
    assert sorted(first) == sorted(second - 20) == sorted(other)
    assert (first != second - 20).any()
    assert (first != other).any()


@pytest.mark.parametrize(
    ("documents", "windows"),
    [
        (7, [7, 7, 7]),  # A window ends with the epoch.
        (25, [10, 15, 10, 15]),  # The last one takes what is left, ...
        (30, [10, 20, 10, 20]),
        (31, [10, 10, 11, 10]),  # ... which is at most twice as much.
    ],
)
def test_a_window_is_as_large_as_asked_or_ends_with_the_epoch(documents, windows):
    rows = take(make(Documents([1] * documents), window=10), sum(windows))[:, 0]
    ends = np.cumsum(windows)
    for start, end in itertools.pairwise([0, *ends]):
        assert sorted(rows[start:end]) == [*range(start, end)]


def test_a_long_last_document_does_not_grow_a_window_without_bound():
    rows = take(make(Documents([10, 90]), window=10), 40)[:, 0]
    assert sorted(rows[:20]) == [*range(20)]
    assert sorted(rows[20:30]) == [*range(20, 30)]


def test_reading_is_spread_over_the_rows_before():
    documents = Documents([1] * 100)
    rows = make(documents, window=10)
    counts = []
    for _ in range(60):
        next(rows)
        counts.append(len(documents.reads))
    assert counts[0] == 12
    assert max(np.diff(counts)) == 2


def test_a_small_text_is_read_once_an_epoch():
    documents = Documents([3] * 4)
    rows = make(documents, length=2)
    take(rows, 6)
    assert max(documents.reads) < 9
