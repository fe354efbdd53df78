"""Documents to batches of tokens during training, without tokenized files on disk.

A grain pipeline shuffles documents, encodes them, concatenates them and splits the stream into
rows. Its state is a few integers; a restored pipeline continues with exactly the batches that would
have followed. Threads read ahead; no processes are started.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from train.corpus import Corpus, RandomAccess
from train.tokenizer import Tokenizer

Batch = dict[str, np.ndarray]
"""`inputs` and `targets` int32 [batch, seq_len], where targets are one token ahead; `mask` float32
of the same shape, 1 where the target counts and 0 where it is padding."""

_READ_AHEAD_BATCHES = 2

_LONGEST_HELD_OUT = 2048
"""Most tokens of a held-out document, so that an evaluation of some ten thousand tokens covers more
than a few long documents."""


def train_batches(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    seq_len: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator[Batch]:
    """Returns an endless iterator over this process's batches of `batch_size / process_count` rows.

    Each process reads every `process_count`-th document, shuffled again in each epoch. Rows of
    `seq_len + 1` tokens are taken from the stream without overlap.

    `get_state()` returns a JSON-serializable dict. `set_state()`, on an iterator made with the same
    arguments, continues with the same batches. `close()` stops the threads.

    Args:
      corpus: its train split is read.
      tokenizer: its `bos_id`, if any, comes before each document and its `eos_id` after it.
      batch_size: rows of all processes together.
      seq_len: tokens of a row.
      seed: seed of the shuffles.
      process_index: number of this process, from 0.
      process_count: number of processes.

    Raises:
      ValueError: an argument is out of range, or this process's documents do not fill one row.
    """
    _check_sizes(batch_size, seq_len)
    mine = rows_of_process(batch_size, process_index, process_count)
    # `Any`: grain's protocols name the index argument, unlike a list, and allow missing elements.
    source: Any = corpus.train
    documents: Any = grain.MapDataset.source(source)[process_index::process_count]
    _check_fills_a_row(documents, tokenizer, seq_len)
    tokens = documents.seed(seed).shuffle().repeat().map(lambda text: _encode(tokenizer, text))
    count = mine.stop - mine.start
    rows = PackIterDataset(tokens, length=seq_len + 1, streams=count)
    batches = rows.batch(count, drop_remainder=True).map(_as_batch)
    return iter(
        grain.experimental.ThreadPrefetchIterDataset(
            batches, prefetch_buffer_size=_READ_AHEAD_BATCHES
        )
    )


@dataclasses.dataclass(frozen=True)
class ValidationSet:
    """Held-out batches, and the numbers of tokens and bytes that losses are divided by."""

    batches: list[Batch]
    num_tokens: int
    """Targets whose mask is 1, including the tokens that end documents."""
    num_bytes: int
    """UTF-8 bytes of the text of those targets: `sum of nats / ln 2 / num_bytes` is bits per byte.
    Exact except for a few bytes where the first or last target is part of a character."""


def rows_of_process(batch_size: int, process_index: int, process_count: int) -> slice:
    """Returns the rows of a batch that belong to a process.

    Raises:
      ValueError: there is no such process, or the rows do not divide evenly.
    """
    if not 0 <= process_index < process_count:
        raise ValueError(
            f"`process_index` must be from 0 to {process_count - 1}, got {process_index}."
        )
    if batch_size % process_count:
        raise ValueError(
            f"`--batch-size` must be a multiple of the {process_count} processes, got {batch_size}."
        )
    count = batch_size // process_count
    return slice(process_index * count, (process_index + 1) * count)


def validation_batches(
    corpus: Corpus, tokenizer: Tokenizer, *, batch_size: int, seq_len: int, max_batches: int
) -> ValidationSet:
    """Returns the first `max_batches` batches of the validation split, the same at every call.

    Documents come in order, truncated to 2048 tokens if there are several. Every token except the
    first is a target once: the last target of a row is the first input of the next. After the end
    of the text, rows are padded with `eos_id` and masked.

    Args:
      corpus: its validation split is read as far as necessary.
      tokenizer: as for `train_batches`.
      batch_size: rows of a batch.
      seq_len: tokens of a row.
      max_batches: largest number of batches.

    Raises:
      ValueError: a size is below 1, or the split has fewer than two tokens.
    """
    _check_sizes(batch_size, seq_len)
    if max_batches < 1:
        raise ValueError(f"`max_batches` must be at least 1, got {max_batches}.")
    per_batch = batch_size * seq_len
    tokens, num_bytes = _first_tokens(corpus.validation, tokenizer, per_batch * max_batches + 1)
    if len(tokens) < 2:
        raise ValueError(
            f"`--data` is '{corpus.name}': {len(tokens)} token(s) are held out, and two are needed."
            " Give more text."
        )
    num_tokens = len(tokens) - 1
    count = -(-num_tokens // per_batch)
    padding = (0, count * per_batch - num_tokens)
    columns = {
        "inputs": np.pad(tokens[:-1], padding, constant_values=tokenizer.eos_id),
        "targets": np.pad(tokens[1:], padding, constant_values=tokenizer.eos_id),
        "mask": np.pad(np.ones(num_tokens, np.float32), padding),
    }
    shaped = {name: x.reshape(count, batch_size, seq_len) for name, x in columns.items()}
    batches = [{name: x[i] for name, x in shaped.items()} for i in range(count)]
    return ValidationSet(batches, num_tokens, num_bytes)


class PackIterDataset(grain.IterDataset[np.ndarray]):
    """Concatenates documents and splits them into rows of `length` tokens; a rest is dropped.

    Several streams are filled in parallel, and rows are taken from them in turn, so that the rows
    of a batch come from different documents. Each document goes to the first stream that runs out,
    so that every document is read once per epoch.

    grain's `ConcatThenSplitIterDataset` has one stream. Its state has tuples that it compares with
    tuples; after a round trip through JSON, which grain uses for states, they are lists, and the
    stream continues differently (grain 0.2.18).
    """

    def __init__(
        self, documents: grain.MapDataset[np.ndarray], *, length: int, streams: int = 1
    ) -> None:
        super().__init__()
        self._documents, self._length, self._streams = documents, length, streams

    def __iter__(self) -> grain.DatasetIterator[np.ndarray]:
        return _PackIterator(self._documents, self._length, self._streams)


class _PackIterator(grain.DatasetIterator[np.ndarray]):
    """State: the next document, the next stream, and each stream's document and offset."""

    def __init__(self, documents: grain.MapDataset[np.ndarray], length: int, streams: int) -> None:
        super().__init__()
        self._documents, self._length = documents, length
        self._open: dict[int, np.ndarray] = {}
        self._places: list[list[int] | None] = [None] * streams
        self._next_document, self._turn = 0, 0

    def __next__(self) -> np.ndarray:
        pieces, missing = [], self._length
        while missing:
            piece = self._take(self._turn, missing)
            pieces.append(piece)
            missing -= len(piece)
        self._turn = (self._turn + 1) % len(self._places)
        return np.concatenate(pieces)

    def _take(self, stream: int, at_most: int) -> np.ndarray:
        place = self._places[stream]
        if place is None:
            if self._next_document == len(self._documents):
                raise StopIteration
            place = self._places[stream] = [self._next_document, 0]
            self._next_document += 1
        index, offset = place
        document = self._open.get(index)
        if document is None:  # A new document, or a restored state.
            document = self._open[index] = np.asarray(self._documents[index])
        piece = document[offset : offset + at_most]
        place[1] += len(piece)
        if place[1] == len(document):
            self._places[stream] = None
            del self._open[index]
        return piece

    def get_state(self) -> dict[str, Any]:
        places = [place and list(place) for place in self._places]
        return {"next": self._next_document, "turn": self._turn, "places": places}

    def set_state(self, state: dict[str, Any]) -> None:
        self._next_document, self._turn = state["next"], state["turn"]
        self._places = [place and list(place) for place in state["places"]]
        self._open = {}


def _check_sizes(batch_size: int, seq_len: int) -> None:
    for name, value in (("--batch-size", batch_size), ("--seq-len", seq_len)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")


def _check_fills_a_row(documents: RandomAccess[str], tokenizer: Tokenizer, seq_len: int) -> None:
    """Raises a `ValueError` if the documents do not fill a row. Reads only the first row."""
    count = 0
    for index in range(len(documents)):
        count += len(_encode(tokenizer, documents[index]))
        if count > seq_len:
            return
    raise ValueError(
        f"`--seq-len` is {seq_len}, so a row takes {seq_len + 1} tokens, but the training text of "
        f"this process has {count} tokens in {len(documents)} document(s). Lower `--seq-len`, or "
        "give more text in `--data`."
    )


def _encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Returns the ids of a whole document, int32 [length]."""
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return np.asarray([*start, *tokenizer.encode(text), tokenizer.eos_id], np.int32)


def _as_batch(rows: np.ndarray) -> Batch:
    """Splits rows [batch, seq_len + 1] into inputs and targets."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    return {"inputs": inputs, "targets": targets, "mask": np.ones(targets.shape, np.float32)}


def _first_tokens(
    texts: RandomAccess[str], tokenizer: Tokenizer, wanted: int
) -> tuple[np.ndarray, int]:
    """Returns up to `wanted` tokens, int32, and the UTF-8 bytes of all but the first."""
    pieces, num_bytes = [], 0
    longest = wanted if len(texts) == 1 else _LONGEST_HELD_OUT
    for text in _iterate(texts):
        document = _encode(tokenizer, text)
        tokens = document[: min(wanted, longest)]
        wanted -= len(tokens)
        whole, cut = len(text.encode()), len(tokens) < len(document)
        num_bytes += min(whole, len(tokenizer.decode(tokens).encode())) if cut else whole
        pieces.append(tokens)
        if not wanted:
            break
    tokens = np.concatenate(pieces)
    return tokens, num_bytes - len(tokenizer.decode(tokens[:1]).encode())


def _iterate(texts: RandomAccess[str]) -> Iterator[str]:
    return (texts[index] for index in range(len(texts)))
