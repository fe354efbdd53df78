"""Examples to batches: several share a row, and `segments` tells attention which is which.

All examples are in memory, so each epoch is laid out as a whole before its first row. The state of
the iterator is then an epoch and a row in it, and it is the same in every process.
"""

import bisect
from collections.abc import Iterable, Sequence
from typing import Any

import grain
import numpy as np

from train.data import Batch, ValidationSet, rows_of_process
from train.examples import Example
from train.tokenizer import Tokenizer

_READ_AHEAD_BATCHES = 2


def packed_batches(
    examples: Sequence[Example],
    *,
    batch_size: int,
    seq_len: int,
    seed: int,
    pad_id: int,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator[Batch]:
    """Returns this process's batches, without end, each of `batch_size / process_count` rows.

    An example of n tokens takes n - 1 places of a row, and is never cut: its last token is a target
    alone. Each epoch, examples are shuffled, each is put into the fullest row that has room for it,
    and the rows are shuffled. Rows follow one another over the ends of epochs and of batches, so
    each example is there once an epoch. Batches of all processes together do not depend on how many
    there are.

    A batch holds `inputs`, `targets` and `segments`, int32, and `mask`, float32, all of them
    [batch_size / process_count, seq_len]. The mask is 1 where the target counts. Segments number
    the examples of a row from 1, and are 0 where there is padding.

    `get_state()` is a JSON-serialisable dict, before or after any batch; `set_state()` of it, on
    an iterator made with the same arguments, continues with the same batches. `close()` stops the
    thread that reads ahead.

    Args:
      examples: each of at least one counted token, and at most `seq_len + 1` tokens.
      batch_size: rows of all processes together.
      seq_len: length of a row, in tokens.
      seed: of the shuffles.
      pad_id: what inputs and targets are where there is padding.
      process_index: which process this is, from 0.
      process_count: how many there are.

    Raises:
      ValueError: an argument is out of range, or examples are not as said.
    """
    _check(examples, batch_size, seq_len)
    mine = rows_of_process(batch_size, process_index, process_count)
    batches = _PackedIterDataset(examples, batch_size, seq_len, seed, pad_id, mine)
    return iter(
        grain.experimental.ThreadPrefetchIterDataset(
            batches, prefetch_buffer_size=_READ_AHEAD_BATCHES
        )
    )


def validation_set(
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    seq_len: int,
    max_batches: int,
    pad_id: int,
) -> ValidationSet:
    """Returns the first `max_batches` batches of the examples, packed in order: always the same.

    The last batch is filled up with rows of padding. `num_bytes` is of the text that counts.

    Args:
      examples: as for `packed_batches`.
      tokenizer: what made them.
      batch_size: rows of a batch.
      seq_len: length of a row, in tokens.
      max_batches: how many batches at most.
      pad_id: as for `packed_batches`.

    Raises:
      ValueError: an argument is out of range, examples are not as said, or no text of them counts.
    """
    _check(examples, batch_size, seq_len)
    if max_batches < 1:
        raise ValueError(f"`max_batches` is {max_batches}: give at least 1.")
    rows = _pack(examples, range(len(examples)), seq_len)[: max_batches * batch_size]
    shown = [[examples[index] for index in row] for row in rows]
    batches = [
        _as_batch(shown[start : start + batch_size], batch_size, seq_len, pad_id)
        for start in range(0, len(shown), batch_size)
    ]
    num_tokens = sum(int(example.counted[1:].sum()) for row in shown for example in row)
    num_bytes = sum(_counted_bytes(example, tokenizer) for row in shown for example in row)
    if not num_bytes:
        raise ValueError(
            "`--data` or `--validation`: what counts in the examples to validate on has no text,"
            " but for the tokens that end it. Give others."
        )
    return ValidationSet(batches, num_tokens, num_bytes)


class _PackedIterDataset(grain.IterDataset[Batch]):
    """Batches without end; `mine` are the rows of each that are wanted."""

    def __init__(
        self,
        examples: Sequence[Example],
        batch_size: int,
        seq_len: int,
        seed: int,
        pad_id: int,
        mine: slice,
    ) -> None:
        super().__init__()
        self.examples, self.batch_size, self.seq_len = examples, batch_size, seq_len
        self.pad_id, self.mine, self._seed = pad_id, mine, seed

    def __iter__(self) -> grain.DatasetIterator[Batch]:
        return _PackedIterator(self)

    def rows_of(self, epoch: int) -> list[list[int]]:
        """Returns the rows of an epoch: the examples in each."""
        generator = np.random.default_rng([self._seed, epoch])
        rows = _pack(self.examples, generator.permutation(len(self.examples)), self.seq_len)
        # The last rows to be begun are the emptiest.
        return [rows[index] for index in generator.permutation(len(rows))]


class _PackedIterator(grain.DatasetIterator[Batch]):
    """State: an epoch, and the next row in it."""

    def __init__(self, dataset: _PackedIterDataset) -> None:
        super().__init__()
        self._dataset = dataset
        self._epoch, self._row = 0, 0
        self._rows: list[list[int]] | None = None

    def __next__(self) -> Batch:
        data = self._dataset
        rows = [self._take() for _ in range(data.batch_size)][data.mine]
        shown = [[data.examples[index] for index in row] for row in rows]
        return _as_batch(shown, len(shown), data.seq_len, data.pad_id)

    def _take(self) -> list[int]:
        if self._rows is None:  # Newly begun, or restored.
            self._rows = self._dataset.rows_of(self._epoch)
        row = self._rows[self._row]
        self._row += 1
        if self._row == len(self._rows):
            self._epoch, self._row, self._rows = self._epoch + 1, 0, None
        return row

    def get_state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "row": self._row}

    def set_state(self, state: dict[str, Any]) -> None:
        self._epoch, self._row = state["epoch"], state["row"]
        self._rows = None


def _pack(examples: Sequence[Example], order: Iterable[int], seq_len: int) -> list[list[int]]:
    """Puts examples, as they come, into the fullest row that has room for them: "best fit".

    Returns:
      For each row, which examples are in it. Rows are in the order of their first example.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # Places that are left in a row, and which it is; sorted.
    for index in order:
        needed = len(examples[index].tokens) - 1
        found = bisect.bisect_left(room, (needed, 0))
        if found < len(room):
            left, row = room.pop(found)
        else:
            left, row = seq_len, len(rows)
            rows.append([])
        rows[row].append(int(index))
        if left > needed:
            bisect.insort(room, (left - needed, row))
    return rows


def _as_batch(rows: list[list[Example]], count: int, seq_len: int, pad_id: int) -> Batch:
    """Returns `count` rows, of which those that are missing are padding."""
    shape = (count, seq_len)
    batch = {
        "inputs": np.full(shape, pad_id, np.int32),
        "targets": np.full(shape, pad_id, np.int32),
        "mask": np.zeros(shape, np.float32),
        "segments": np.zeros(shape, np.int32),
    }
    for index, row in enumerate(rows):
        start = 0
        for number, example in enumerate(row, 1):
            place = index, slice(start, start + len(example.tokens) - 1)
            batch["inputs"][place] = example.tokens[:-1]
            batch["targets"][place] = example.tokens[1:]
            batch["mask"][place] = example.counted[1:]
            batch["segments"][place] = number
            start = place[1].stop
    return batch


def _counted_bytes(example: Example, tokenizer: Tokenizer) -> int:
    """Returns the UTF-8 bytes of the text that counts.

    What stands before a token is decoded with it, for it may say how: a character in several
    tokens, or the space of sentencepiece that the first word loses.
    """
    # Where what counts begins and ends, in turn.
    changes = np.flatnonzero(np.diff(example.counted, prepend=False, append=False))
    bytes_until = [len(tokenizer.decode(example.tokens[:end]).encode()) for end in changes]
    return sum(bytes_until[1::2]) - sum(bytes_until[::2])


def _check(examples: Sequence[Example], batch_size: int, seq_len: int) -> None:
    for name, value in (("--batch-size", batch_size), ("--seq-len", seq_len)):
        if value < 1:
            raise ValueError(f"`{name}` is {value}: give at least 1.")
    if not len(examples):
        raise ValueError("`examples` is empty: give at least one.")
    for index, example in enumerate(examples):
        if len(example.tokens) > seq_len + 1:
            raise ValueError(
                f"`examples`: number {index} has {len(example.tokens)} tokens, and a row of "
                f"`--seq-len` {seq_len} has room for {seq_len + 1}. Cut it, or raise `--seq-len`."
            )
        if not example.counted[1:].any():
            raise ValueError(
                f"`examples`: number {index} has no token that counts after its first. Drop it."
            )
