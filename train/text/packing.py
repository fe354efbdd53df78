"""Examples to batches: several examples share a row, separated for attention by `segments`.

Pairs of preference take two rows, one below the other: the chosen responses and the rejected ones.

All examples are in memory, and each epoch is packed before its first row. The state of the iterator
is an epoch and a row, and is equal in all processes.
"""

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grain
import numpy as np
from grain.experimental import ThreadPrefetchIterDataset

from train.settings.data import MOST_PAIRS
from train.settings.options import check_at_least
from train.text.data import Batch, ValidationSet, rows_of_part
from train.text.encoder import Example
from train.text.examples import parts_of
from train.text.pairs import Pair
from train.text.tokenizer import Tokenizer

_READ_AHEAD_BATCHES = 2

PackedRow = list[Any]
"""The examples that share a row, or the pairs that share two."""


def packed_batches(
    examples: Sequence[Any],
    *,
    batch_size: int,
    seq_len: int,
    seed: int,
    pad_id: int,
    part: tuple[int, int] = (0, 1),
    shares: Sequence[tuple[int, float]] = (),
) -> grain.DatasetIterator[Batch]:
    """Returns an endless iterator over this process's part of batches of `batch_size` rows.

    An example of n tokens takes n - 1 places of a row (its last token is only a target) and is
    never split. Each epoch, examples are shuffled, each goes into the fullest row with room for it,
    and the rows are shuffled. Rows continue over the ends of epochs and batches, so that each
    example occurs once per epoch. The batches of all processes together do not depend on the number
    of processes.

    A batch has `inputs`, `targets` and `segments` int32, and `mask` float32, each [rows, seq_len].
    The mask is 1 where the target counts. Segments number a row's examples from 1; padding is 0.
    With pairs, rows of chosen and of rejected responses alternate, and `reference` float32 has the
    log-probability of each response at its first place and 0 elsewhere.

    `get_state()` returns a JSON-serializable dict. `set_state()`, on an iterator made with the same
    arguments, continues with the same batches. `close()` stops the thread that reads ahead.

    Args:
      examples: examples or pairs, each with a counted token after the first, and at most
        `seq_len + 1` tokens.
      batch_size: rows of all processes together.
      seq_len: tokens of a row.
      seed: seed of the shuffles.
      pad_id: id of padding in inputs and targets.
      part: as for `train_batches`.
      shares: numbers of consecutive examples of several sources, and the weights of the sources. An
        epoch then draws as many examples as there are, from each source in proportion to its
        weight: some twice before others once, if a source is small. Empty: each example once.

    Raises:
      ValueError: an argument is out of range, or an example is too long or has no counted token.
    """
    _check(examples, batch_size, seq_len)
    mine = rows_of_part(batch_size, part)

    def rows_of(epoch: int) -> list[PackedRow]:
        return _rows_of_epoch(examples, epoch, seq_len, seed, shares)

    rows_each = len(parts_of(examples[0]))
    if (mine.stop - mine.start) % rows_each:
        raise ValueError(
            f"`--batch-size` {batch_size} gives a process {mine.stop - mine.start} rows, and a pair"
            " takes two: make it a multiple of twice the number of processes."
        )
    taken = slice(mine.start // rows_each, mine.stop // rows_each)

    def batch_of(rows: Sequence[PackedRow]) -> Batch:
        return _as_batch(rows[taken], mine.stop - mine.start, seq_len, pad_id, rows_each)

    batches = _EpochsIterDataset(rows_of).batch(batch_size // rows_each, batch_fn=batch_of)
    return iter(ThreadPrefetchIterDataset(batches, prefetch_buffer_size=_READ_AHEAD_BATCHES))


def pack_pairs(pairs: Sequence[Pair], seq_len: int) -> list[PackedRow]:
    """Returns pairs packed in order: the pairs of each row.

    Raises:
      ValueError: as for `packed_batches`.
    """
    _check(pairs, 2, seq_len)
    return _pack(pairs, range(len(pairs)), seq_len)


def pair_batches(
    rows: Sequence[PackedRow], *, batch_size: int, seq_len: int, pad_id: int
) -> list[Batch]:
    """Returns batches of packed pairs; the last is padded with empty rows.

    Args:
      rows: the pairs of each row, which takes two of a batch.
      batch_size: rows of a batch.
      seq_len: tokens of a row.
      pad_id: as for `packed_batches`.
    """
    step = batch_size // 2
    return [
        _as_batch(rows[i : i + step], batch_size, seq_len, pad_id, 2)
        for i in range(0, len(rows), step)
    ]


def count_rows(
    examples: Sequence[Any],
    epochs: float,
    *,
    seq_len: int,
    seed: int,
    shares: Sequence[tuple[int, float]] = (),
) -> float:
    """Returns the rows of `packed_batches` in a number of epochs; a pair takes two.

    Args:
      examples: as for `packed_batches`.
      epochs: the number, above 0.
      seq_len: tokens of a row.
      seed: seed of the shuffles.
      shares: as for `packed_batches`.
    """
    counts = [
        len(_rows_of_epoch(examples, epoch, seq_len, seed, shares))
        for epoch in range(math.ceil(epochs))
    ]
    return (sum(counts) - counts[-1] * (len(counts) - epochs)) * len(parts_of(examples[0]))


def validation_set(
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    seq_len: int,
    eval_batches: int,
    pad_id: int,
) -> ValidationSet:
    """Returns the first `eval_batches` batches of the examples, packed in order.

    The last batch is padded with empty rows. `num_bytes` is that of the counted text.

    Args:
      examples: as for `packed_batches`.
      tokenizer: tokenizer of the examples.
      batch_size: rows of a batch.
      seq_len: tokens of a row.
      eval_batches: largest number of batches.
      pad_id: as for `packed_batches`.

    Raises:
      ValueError: as for `packed_batches`, or the counted tokens have no text.
    """
    check_at_least(1, eval_batches=eval_batches)
    _check(examples, batch_size, seq_len)
    rows = _pack(examples, range(len(examples)), seq_len)[: eval_batches * batch_size]
    batches = [
        _as_batch(rows[start : start + batch_size], batch_size, seq_len, pad_id, 1)
        for start in range(0, len(rows), batch_size)
    ]
    num_tokens = sum(int(example.counted[1:].sum()) for row in rows for example in row)
    num_bytes = sum(_counted_bytes(example, tokenizer) for row in rows for example in row)
    if not num_bytes:
        raise ValueError(
            "`--data` or `--validation`: the counted tokens of the validation examples have no text"
            " except for end tokens. Give other examples."
        )
    return ValidationSet(batches, num_tokens, num_bytes)


def _rows_of_epoch(
    examples: Sequence[Any],
    epoch: int,
    seq_len: int,
    seed: int,
    shares: Sequence[tuple[int, float]],
) -> list[PackedRow]:
    generator = np.random.default_rng([seed, epoch])
    rows = _pack(examples, _order(generator, len(examples), shares), seq_len)
    # Without this, the emptiest rows would come last.
    return [rows[index] for index in generator.permutation(len(rows))]


def _order(
    generator: np.random.Generator, count: int, shares: Sequence[tuple[int, float]]
) -> np.ndarray:
    """Returns the examples of an epoch in random order."""
    if not shares:
        return generator.permutation(count)
    total, start, drawn = sum(weight for _, weight in shares), 0, []
    for size, weight in shares:
        wanted = max(1, round(count * weight / total)) if size else 0
        rounds = [generator.permutation(size) + start for _ in range(-(-wanted // max(1, size)))]
        drawn += [np.concatenate(rounds)[:wanted]] if rounds else []
        start += size
    return generator.permutation(np.concatenate(drawn))


class _EpochsIterDataset(grain.IterDataset[PackedRow]):
    """Endless rows, of one epoch after the other."""

    def __init__(self, rows_of: Callable[[int], list[PackedRow]]) -> None:
        super().__init__()
        self._rows_of = rows_of

    def __iter__(self) -> grain.DatasetIterator[PackedRow]:
        return _EpochsIterator(self._rows_of)


class _EpochsIterator(grain.DatasetIterator[PackedRow]):
    """State: an epoch and its next row."""

    def __init__(self, rows_of: Callable[[int], list[PackedRow]]) -> None:
        super().__init__()
        self._rows_of = rows_of
        self.set_state({"epoch": 0, "row": 0})

    def __next__(self) -> PackedRow:
        if self._rows is None:  # A new epoch, or a restored state.
            self._rows = self._rows_of(self._epoch)
        row = self._rows[self._row]
        self._row += 1
        if self._row == len(self._rows):
            self.set_state({"epoch": self._epoch + 1, "row": 0})
        return row

    def get_state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "row": self._row}

    def set_state(self, state: dict[str, Any]) -> None:
        self._epoch, self._row = state["epoch"], state["row"]
        self._rows: list[PackedRow] | None = None


def _pack(examples: Sequence[Any], order: Iterable[int], seq_len: int) -> list[PackedRow]:
    """Packs examples in the given order, each into the fullest row with room ("best fit").

    Rows are in the order of their first example. A pair needs the places of its longer response.
    """
    most = MOST_PAIRS if len(examples) and isinstance(examples[0], Pair) else seq_len
    rows: list[PackedRow] = []
    room: list[tuple[int, int]] = []  # Free places of a row and its number, sorted.
    for index in order:
        needed = max(len(example.tokens) for example in parts_of(examples[index])) - 1
        place = bisect.bisect_left(room, (needed, 0))
        if place < len(room):
            left, row = room.pop(place)
        else:
            left, row = seq_len, len(rows)
            rows.append([])
        rows[row].append(examples[index])
        if left > needed and len(rows[row]) < most:
            bisect.insort(room, (left - needed, row))
    return rows


def _as_batch(
    rows: Sequence[PackedRow], count: int, seq_len: int, pad_id: int, rows_each: int
) -> Batch:
    """Returns a batch of `count` rows; missing rows are padding.

    Args:
      rows: examples or pairs.
      count: rows of the batch.
      seq_len: tokens of a row.
      pad_id: id of padding.
      rows_each: rows that one of `rows` takes: 2 for pairs.
    """
    shape = (count, seq_len)
    batch = {
        "inputs": np.full(shape, pad_id, np.int32),
        "targets": np.full(shape, pad_id, np.int32),
        "mask": np.zeros(shape, np.float32),
        "segments": np.zeros(shape, np.int32),
    }
    if rows_each > 1:
        batch["reference"] = np.zeros(shape, np.float32)
    for index, row in enumerate(rows):
        for part in range(rows_each):
            start, line = 0, index * rows_each + part
            for number, item in enumerate(row, 1):
                example = parts_of(item)[part]
                place = line, slice(start, start + len(example.tokens) - 1)
                batch["inputs"][place] = example.tokens[:-1]
                batch["targets"][place] = example.tokens[1:]
                batch["mask"][place] = example.counted[1:]
                batch["segments"][place] = number
                if isinstance(item, Pair):
                    batch["reference"][line, start] = item.reference[part]
                start = place[1].stop
    return batch


def _counted_bytes(example: Example, tokenizer: Tokenizer) -> int:
    """Returns the UTF-8 bytes of the counted text.

    Counted tokens are decoded together with the tokens before them, which can change their text: a
    character of several tokens, or the space that sentencepiece removes from the first word.
    """
    # Starts and ends of the counted spans, in turn.
    changes = np.flatnonzero(np.diff(example.counted, prepend=False, append=False))
    bytes_until = [len(tokenizer.decode(example.tokens[:end]).encode()) for end in changes]
    return sum(bytes_until[1::2]) - sum(bytes_until[::2])


def _check(examples: Sequence[Any], batch_size: int, seq_len: int) -> None:
    check_at_least(1, batch_size=batch_size, seq_len=seq_len)
    if not len(examples):
        raise ValueError("`examples` is empty: give at least one.")
    if isinstance(examples[0], Pair) and batch_size % 2:
        raise ValueError(
            f"`--batch-size` {batch_size} must be even for pairs, which take two rows each."
        )
    for index, example in enumerate(examples):
        for part in parts_of(example):
            if len(part.tokens) > seq_len + 1:
                raise ValueError(
                    f"`examples`: number {index} has {len(part.tokens)} tokens, and a row of "
                    f"`--seq-len` {seq_len} has room for {seq_len + 1}. Shorten it, or raise"
                    " `--seq-len`."
                )
            if not part.counted[1:].any():
                raise ValueError(
                    f"`examples`: number {index} has no counted token after its first. Drop it."
                )
