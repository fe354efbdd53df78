"""Documents of tokens to rows of equal length, in random order within windows."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

WINDOW_ROWS = 8192
"""Rows that are mixed with each other."""

_ROWS_AHEAD = 2
"""Rows that are read for each one that is handed out. A window can have twice as many rows as the
one before."""

ReadDocuments = Callable[[int], Sequence[np.ndarray]]
"""From the index of a document to its tokens and those of any number of documents after it, each
int32 [at least 1]. There is a document at every index."""


class ShuffledRowsIterDataset(grain.IterDataset[np.ndarray]):
    """Concatenates documents, splits them into rows, and mixes the rows within windows.

    A window is `window` consecutive rows. It ends with the row that ends an epoch; the last window
    of an epoch takes all rows that are left, up to `2 window`, if fewer documents are left than it
    has read. The next window is read while the rows of one are handed out.

    grain 0.2.18 has `ConcatThenSplitIterDataset`, whose state has tuples, which JSON turns into
    lists that continue differently, and `WindowShuffleIterDataset`, which fills a window from any
    number of epochs, and all at once between two rows.
    """

    def __init__(
        self, read: ReadDocuments, *, length: int, epoch: int, seed: int, window: int = WINDOW_ROWS
    ) -> None:
        """Makes the data set.

        Args:
          read: reads documents.
          length: tokens of a row.
          epoch: number of documents of an epoch.
          seed: seed of the order within windows.
          window: rows of a window.
        """
        super().__init__()
        self._read, self._length = read, length
        self._epoch, self._seed, self._window = epoch, seed, window

    def __iter__(self) -> grain.DatasetIterator[np.ndarray]:
        stream = _Stream(self._read, self._length)
        return _ShuffledRowsIterator(stream, self._epoch, self._seed, self._window)


class _Stream:
    """The rows of the concatenated documents, in order.

    Attributes:
      document: index of the document in which the next row begins.
      offset: tokens of this document that belong to earlier rows.
    """

    def __init__(self, read: ReadDocuments, length: int) -> None:
        self._read, self._length = read, length
        self.seek(0, 0)

    def seek(self, document: int, offset: int) -> None:
        """Sets where the next row begins."""
        self.document, self.offset = document, offset
        self._documents: collections.deque[np.ndarray] = collections.deque()

    def next_row(self) -> np.ndarray:
        """Returns the next row."""
        pieces, missing = [], self._length
        while missing:
            if not self._documents:
                self._documents.extend(self._read(self.document))
            tokens = self._documents[0]
            piece = tokens[self.offset : self.offset + missing]
            pieces.append(piece)
            missing -= len(piece)
            self.offset += len(piece)
            if self.offset == len(tokens):
                self.document, self.offset = self.document + 1, 0
                self._documents.popleft()
        return np.concatenate(pieces)


@dataclasses.dataclass
class _Window:
    """Consecutive rows.

    Attributes:
      number: number of the window, which seeds its order.
      document: index of the document in which it begins.
      offset: tokens of this document that belong to the window before.
      rows: the rows that are read so far.
      is_whole: whether all rows are read.
    """

    number: int
    document: int
    offset: int
    rows: list[np.ndarray] = dataclasses.field(default_factory=list)
    is_whole: bool = False


class _ShuffledRowsIterator(grain.DatasetIterator[np.ndarray]):
    """State: number and beginning of the window that is handed out, and the rows taken from it.

    A restored iterator reads this window again.
    """

    def __init__(self, stream: _Stream, epoch: int, seed: int, size: int) -> None:
        super().__init__()
        self._stream, self._epoch, self._seed, self._size = stream, epoch, seed, size
        self._window, self._taken = _Window(0, 0, 0), 0
        # Both are set when the window is whole: its rows that are left, and the window after it.
        self._left: collections.deque[np.ndarray] = collections.deque()
        self._after = self._window

    def __next__(self) -> np.ndarray:
        self._assert_not_closed()
        if not self._left:
            self._open_window()
        row = self._left.popleft()
        self._taken += 1
        for _ in range(_ROWS_AHEAD):
            self._read_row(self._after)
        if not self._left:
            self._window, self._taken = self._after, 0
        return row

    def _open_window(self) -> None:
        """Reads what is missing of the window, and puts its rows in order."""
        window = self._window
        while not window.is_whole:
            self._read_row(window)
        order = np.random.default_rng([self._seed, window.number]).permutation(len(window.rows))
        self._left.extend(window.rows[index] for index in order[self._taken :])
        window.rows.clear()  # A row's memory is freed when it was handed out.
        self._after = _Window(window.number + 1, self._stream.document, self._stream.offset)

    def _read_row(self, window: _Window) -> None:
        if not window.is_whole:
            window.rows.append(self._stream.next_row())
            window.is_whole = self._is_whole(window)

    def _is_whole(self, window: _Window) -> bool:
        end = (window.document // self._epoch + 1) * self._epoch
        count, document = len(window.rows), self._stream.document
        if document >= end or count == 2 * self._size:
            return True
        # Documents that are read and that are left tell about how many rows are left.
        return count >= self._size and end - document >= document - window.document

    def get_state(self) -> dict[str, Any]:
        window = self._window
        return {
            "window": window.number,
            "document": window.document,
            "offset": window.offset,
            "taken": self._taken,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._stream.seek(state["document"], state["offset"])
        self._window = _Window(state["window"], state["document"], state["offset"])
        self._taken = state["taken"]
        self._left.clear()


class SideBySideIterDataset(grain.IterDataset[np.ndarray]):
    """The rows of several data sets, one below the other.

    The state has an entry for each of them, by name, and entries of others are ignored.
    """

    def __init__(self, parts: Mapping[int, grain.IterDataset[np.ndarray]]) -> None:
        """Makes the data set.

        Args:
          parts: by number; their elements are [rows, ...].
        """
        super().__init__()
        self._parts = dict(parts)

    def __iter__(self) -> grain.DatasetIterator[np.ndarray]:
        return _SideBySideIterator({str(name): iter(part) for name, part in self._parts.items()})


class _SideBySideIterator(grain.DatasetIterator[np.ndarray]):
    def __init__(self, parts: Mapping[str, Any]) -> None:
        super().__init__()
        self._iterators = parts

    def __next__(self) -> np.ndarray:
        return np.concatenate([next(part) for part in self._iterators.values()])

    def get_state(self) -> dict[str, Any]:
        return {name: part.get_state() for name, part in self._iterators.items()}

    def set_state(self, state: dict[str, Any]) -> None:
        for name, part in self._iterators.items():
            part.set_state(state[name])
