"""Documents of tokens to rows of equal length, in random order within windows."""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

WINDOW_ROWS = 8192
"""Rows that are mixed with each other."""

_ROWS_AHEAD = 2
"""Rows that are read for each row that is handed out. A window can have twice as many rows as the
window before."""

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
        self.read, self.length = read, length
        self.epoch, self.order_seed, self.window = epoch, seed, window

    def __iter__(self) -> grain.DatasetIterator[np.ndarray]:
        return _ShuffledRowsIterator(self)


@dataclasses.dataclass
class _Window:
    """Consecutive rows.

    Attributes:
      number: number of the window, which seeds its order.
      document: index of the document in which it begins.
      offset: tokens of this document that belong to the window before.
      rows: the rows that are read so far.
      is_complete: whether all rows are read.
    """

    number: int
    document: int
    offset: int
    rows: list[np.ndarray] = dataclasses.field(default_factory=list)
    is_complete: bool = False


class _ShuffledRowsIterator(grain.DatasetIterator[np.ndarray]):
    """State: number and beginning of the window that is handed out, and the rows taken from it.

    A restored iterator reads this window again.
    """

    def __init__(self, data: ShuffledRowsIterDataset) -> None:
        super().__init__()
        self._data = data
        self.set_state({"window": 0, "document": 0, "offset": 0, "taken": 0})

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
        """Reads the missing rows of the window, and puts its rows in order."""
        window = self._window
        while not window.is_complete:
            self._read_row(window)
        generator = np.random.default_rng([self._data.order_seed, window.number])
        order = generator.permutation(len(window.rows))
        self._left.extend(window.rows[index] for index in order[self._taken :])
        window.rows.clear()  # A row's memory is freed when it was handed out.
        self._after = _Window(window.number + 1, self._document, self._offset)

    def _read_row(self, window: _Window) -> None:
        """Adds the next row of the concatenated documents to a window that is not complete."""
        if window.is_complete:
            return
        pieces, missing = [], self._data.length
        while missing:
            if not self._documents:
                self._documents.extend(self._data.read(self._document))
            tokens = self._documents[0]
            piece = tokens[self._offset : self._offset + missing]
            pieces.append(piece)
            missing -= len(piece)
            self._offset += len(piece)
            if self._offset == len(tokens):
                self._document, self._offset = self._document + 1, 0
                self._documents.popleft()
        window.rows.append(np.concatenate(pieces))
        window.is_complete = self._is_complete(window)

    def _is_complete(self, window: _Window) -> bool:
        end = (window.document // self._data.epoch + 1) * self._data.epoch
        count, size = len(window.rows), self._data.window
        if self._document >= end or count == 2 * size:
            return True
        # Documents that are read and that are left tell about how many rows are left.
        return count >= size and end - self._document >= self._document - window.document

    def get_state(self) -> dict[str, Any]:
        window = self._window
        return {
            "window": window.number,
            "document": window.document,
            "offset": window.offset,
            "taken": self._taken,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        # The next row begins in this document, after tokens that belong to earlier rows.
        self._document, self._offset = state["document"], state["offset"]
        self._documents: collections.deque[np.ndarray] = collections.deque()
        self._window = _Window(state["window"], state["document"], state["offset"])
        self._taken = state["taken"]
        # Both are set when the window is complete: its rows that are left, and the window after it.
        self._left: collections.deque[np.ndarray] = collections.deque()
        self._after = self._window
