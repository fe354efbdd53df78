"""Documents to batches of tokens, while training runs: nothing tokenised is written to disk.

A grain pipeline shuffles documents, encodes them, lays them end to end and cuts the stream into
rows. Its whole state is a few integers, and restoring it continues with exactly the batches that
would have followed. Threads read ahead; no process is started.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from train.corpus import Corpus, RandomAccess
from train.tokenizer import Tokenizer

Batch = dict[str, np.ndarray]
"""`inputs` and `targets` int32 [batch, seq_len], the second a token ahead of the first; `mask`
float32 of the same shape, 1 where the target counts and 0 where it is padding."""

_READ_AHEAD_BATCHES = 2

_LONGEST_HELD_OUT = 2048
"""Tokens of a held-out document that are looked at: an evaluation of some ten thousand tokens would
else be of a few long documents."""


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
    """Returns this process's batches, without end, each of `batch_size / process_count` rows.

    Each process reads its own share of the documents, every `process_count`-th, shuffled anew in
    each epoch. Rows are cut from the stream every `seq_len + 1` tokens, so they never overlap.

    `get_state()` is a JSON-serialisable dict, before or after any batch; `set_state()` of it, on
    an iterator made with the same arguments, continues with the same batches. `close()` stops the
    threads.

    Args:
      corpus: where the train split is read.
      tokenizer: its `eos_id` follows each document, and its `bos_id`, if any, leads it.
      batch_size: rows of all processes together.
      seq_len: length of a row, in tokens.
      seed: of the shuffles.
      process_index: which process this is, from 0.
      process_count: how many there are.

    Raises:
      ValueError: an argument is out of range, or this process's documents do not fill one row.
    """
    _check_sizes(batch_size, seq_len)
    mine = rows_of_process(batch_size, process_index, process_count)
    # `Any`: grain's protocols name the index, which a list does not, and allow missing elements.
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
    """Held-out batches and what a loss over them is divided by."""

    batches: list[Batch]
    num_tokens: int
    """Targets whose mask is 1. The tokens that end documents are among them."""
    num_bytes: int
    """UTF-8 bytes of the text of those targets, so that `sum of nats / ln 2 / num_bytes` is bits
    per byte. Exact, but for a few bytes where the first or last target is part of a character."""


def rows_of_process(batch_size: int, process_index: int, process_count: int) -> slice:
    """Returns the rows of a batch that a process makes.

    Raises:
      ValueError: there is no such process, or the rows cannot be shared evenly.
    """
    if not 0 <= process_index < process_count:
        raise ValueError(
            f"`process_index` is {process_index} of `process_count` {process_count}: give one of "
            f"0 to {process_count - 1}."
        )
    if batch_size % process_count:
        raise ValueError(
            f"`--batch-size` is {batch_size}, which {process_count} processes cannot share evenly. "
            f"Take a multiple of {process_count}."
        )
    count = batch_size // process_count
    return slice(process_index * count, (process_index + 1) * count)


def validation_batches(
    corpus: Corpus, tokenizer: Tokenizer, *, batch_size: int, seq_len: int, max_batches: int
) -> ValidationSet:
    """Returns the first `max_batches` batches of the validation split: the same at every call.

    The documents stand in order, cut to 2048 tokens if there are several, and every token but the
    very first is a target once: a row's last target is the next row's first input. Where the text
    ends, rows are padded with `eos_id` and masked.

    Args:
      corpus: where the validation split is read, only as far as is needed.
      tokenizer: as for `train_batches`.
      batch_size: rows of a batch.
      seq_len: length of a row, in tokens.
      max_batches: how many batches at most.

    Raises:
      ValueError: a size is below 1, or the split has no two tokens.
    """
    _check_sizes(batch_size, seq_len)
    if max_batches < 1:
        raise ValueError(f"`max_batches` is {max_batches}: give at least 1.")
    per_batch = batch_size * seq_len
    tokens, num_bytes = _first_tokens(corpus.validation, tokenizer, per_batch * max_batches + 1)
    if len(tokens) < 2:
        raise ValueError(
            f"`--data` is '{corpus.name}': {len(tokens)} token(s) are held out, and two are needed "
            "to predict one from the other. Give more text."
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
    """Lays documents end to end and cuts them into rows of `length` tokens; a rest is dropped.

    Several streams are filled side by side, and rows are taken from them in turn: rows that follow
    one another, a batch, come from as many documents. A document goes, whole, to the first stream
    that runs out, so every one is read once before any is read again.

    grain's own `ConcatThenSplitIterDataset` has one stream, and keeps tuples in its state that it
    compares with tuples: after JSON, as which grain itself stores states, they are lists, and the
    stream that follows is another one (grain 0.2.18).
    """

    def __init__(
        self, documents: grain.MapDataset[np.ndarray], *, length: int, streams: int = 1
    ) -> None:
        super().__init__()
        self._documents, self._length, self._streams = documents, length, streams

    def __iter__(self) -> grain.DatasetIterator[np.ndarray]:
        return _PackIterator(self._documents, self._length, self._streams)


class _PackIterator(grain.DatasetIterator[np.ndarray]):
    """State: the next document, whose turn it is, and each stream's document and place in it."""

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
        if document is None:  # Newly begun, or restored.
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
            raise ValueError(f"`{name}` is {value}: give at least 1.")


def _check_fills_a_row(documents: RandomAccess[str], tokenizer: Tokenizer, seq_len: int) -> None:
    """Reads no further than the first row."""
    count = 0
    for index in range(len(documents)):
        count += len(_encode(tokenizer, documents[index]))
        if count > seq_len:
            return
    raise ValueError(
        f"`--seq-len` is {seq_len}, so a row takes {seq_len + 1} tokens, but the text to train on "
        f"has {count} tokens in {len(documents)} document(s) of this process. Lower `--seq-len`, "
        "or give more text in `--data`."
    )


def _encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Returns the ids of a whole document, int32 [length]."""
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return np.asarray([*start, *tokenizer.encode(text), tokenizer.eos_id], np.int32)


def _as_batch(rows: np.ndarray) -> Batch:
    """Splits rows [batch, seq_len + 1] into what goes in and what is to come out."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    return {"inputs": inputs, "targets": targets, "mask": np.ones(targets.shape, np.float32)}


def _first_tokens(
    texts: RandomAccess[str], tokenizer: Tokenizer, wanted: int
) -> tuple[np.ndarray, int]:
    """Returns up to `wanted` tokens, int32, and the UTF-8 bytes of all of them but the first."""
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
