"""Documents to batches of tokens during training, without tokenized files on disk.

A grain pipeline shuffles documents, encodes them, concatenates them, splits the stream into rows
and shuffles the rows. Its state is a few integers; a restored pipeline continues with exactly the
batches that would have followed. Threads read ahead; no processes are started.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np
from grain.experimental import ThreadPrefetchIterDataset

from train.settings.data import SpecialTokens
from train.settings.options import check_at_least
from train.text.corpus import Corpus
from train.text.rows import WINDOW_ROWS, ShuffledRowsIterDataset
from train.text.tokenizer import Tokenizer

Batch = dict[str, np.ndarray]
"""`inputs` and `targets` int32 [batch, seq_len], where targets are one token ahead; `mask` float32
of the same shape, 1 where the target counts and 0 where it is padding or where the construction of
the stream dictates it, such as the token that begins each document."""

Encode = Callable[[Sequence[str]], list[np.ndarray]]
"""From texts to the ids of whole documents, int32 [length] each."""

_READ_AHEAD_BATCHES = 8
"""Enough for the time in which documents are encoded, a tenth of a second on two cores."""
_ENCODED_CHARS = 2**18
"""Characters of documents that are encoded together, on all cores."""


def row_order(tokenizer: Tokenizer) -> str:
    """Returns the order of the rows, for the identity of a run: its position depends on it.

    Earlier versions read `batch_size` streams of documents, and learned to begin documents.
    """
    begins = "; beginnings of documents are not learned" if tokenizer.dictated else ""
    return f"shuffled in windows of {WINDOW_ROWS} rows{begins}"


_COUNTED_DOCUMENTS = 256
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
    part: tuple[int, int] = (0, 1),
    special_tokens: SpecialTokens = "text",
) -> grain.DatasetIterator[Batch]:
    """Returns an endless iterator over this process's part of batches of `batch_size` rows.

    Documents are shuffled again in each epoch. Their tokens are split into rows of `seq_len + 1`
    without overlap, and batches take rows in random order from a window of thousands of rows
    (`train.text.rows`). Every process reads all documents and keeps its rows, so the batches of all
    processes together do not depend on their number.

    The first batch takes until the first window is read; `start_prefetch()` begins at once.
    `get_state()` returns a JSON-serializable dict, the same in all processes. `set_state()`, on an
    iterator made with the same arguments but for the processes, continues with the same batches.
    `close()` stops the threads.

    Args:
      corpus: its train split is read.
      tokenizer: its tokens `between` documents divide them.
      special_tokens: how names of special tokens in the text are read.
      batch_size: rows of all processes together.
      seq_len: tokens of a row.
      seed: seed of the shuffles.
      part: which part of each batch this process reads, from 0, of how many equal ones.

    Raises:
      ValueError: an argument is out of range, or the documents do not fill one row.
    """
    check_at_least(1, batch_size=batch_size, seq_len=seq_len)
    mine = rows_of_part(batch_size, part)
    # `Any`: grain's protocols allow missing elements.
    documents: Any = grain.MapDataset.source(corpus.train)
    encode = document_encoder(tokenizer, special_tokens)
    _check_fills_a_row(documents, encode, seq_len)
    endless = documents.seed(seed).shuffle().repeat()
    rows: Any = ShuffledRowsIterDataset(
        functools.partial(_read_documents, endless, encode, len(documents)),
        length=seq_len + 1,
        epoch=len(documents),
        seed=seed,
    )
    batches = rows.batch(batch_size, drop_remainder=True).map(
        lambda x: _as_batch(x[mine], tokenizer.dictated)
    )
    return iter(ThreadPrefetchIterDataset(batches, prefetch_buffer_size=_READ_AHEAD_BATCHES))


def count_rows(
    corpus: Corpus, tokenizer: Tokenizer, seq_len: int, special_tokens: SpecialTokens
) -> float:
    """Returns the rows of one epoch of `train_batches`. Encodes all of the training text."""
    encode, tokens = document_encoder(tokenizer, special_tokens), 0
    for start in range(0, len(corpus.train), _COUNTED_DOCUMENTS):
        stop = min(start + _COUNTED_DOCUMENTS, len(corpus.train))
        tokens += sum(map(len, encode([corpus.train[i] for i in range(start, stop)])))
    return tokens / (seq_len + 1)


@dataclasses.dataclass(frozen=True)
class ValidationSet:
    """Held-out batches, and the numbers of tokens and bytes that losses are divided by."""

    batches: list[Batch]
    num_tokens: int
    """Targets whose mask is 1, including the tokens that end documents."""
    num_bytes: int
    """UTF-8 bytes of the text of those targets: `sum of nats / ln 2 / num_bytes` is bits per byte.
    Exact except for a few bytes where the first or last target is part of a character."""

    def report(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns the cost from sums over the batches, as a run records it."""
        cost = self.cost(sums["nats"])
        return {"validation_loss": cost.pop("nats_per_token"), **cost}

    def cost(self, nats: float) -> dict[str, float]:
        """Returns the cost of the text from the sum of its cross-entropy.

        Bits per byte do not depend on the tokenizer; they are NaN without bytes. The perplexity is
        capped where it would overflow.
        """
        loss = nats / self.num_tokens
        return {
            "nats_per_token": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": nats / math.log(2) / self.num_bytes if self.num_bytes else math.nan,
        }


def rows_of_part(batch_size: int, part: tuple[int, int]) -> slice:
    """Returns the rows of a part of a batch.

    Raises:
      ValueError: there is no such part, or the rows do not divide evenly.
    """
    index, count = part
    if not 0 <= index < count:
        raise ValueError(f"`part` must be from 0 to {count - 1} of {count}, got {index}.")
    if batch_size % count:
        raise ValueError(f"`--batch-size` must be a multiple of {count} parts, got {batch_size}.")
    rows = batch_size // count
    return slice(index * rows, (index + 1) * rows)


def validation_batches(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    seq_len: int,
    eval_batches: int,
    special_tokens: SpecialTokens = "text",
) -> ValidationSet:
    """Returns the first `eval_batches` batches of the validation split, the same at every call.

    Documents come in order, truncated to 2048 tokens if there are several. Every token except the
    first is a target once: the last target of a row is the first input of the next. After the end
    of the text, rows are padded with `eos_id` and masked.

    Args:
      corpus: its validation split is read as far as necessary.
      tokenizer: as for `train_batches`.
      batch_size: rows of a batch.
      seq_len: tokens of a row.
      eval_batches: largest number of batches.
      special_tokens: as for `train_batches`.

    Raises:
      ValueError: a size is below 1, or the split has fewer than two tokens.
    """
    check_at_least(1, batch_size=batch_size, seq_len=seq_len, eval_batches=eval_batches)
    per_batch = batch_size * seq_len
    encode = document_encoder(tokenizer, special_tokens)
    wanted = per_batch * eval_batches + 1
    tokens, num_bytes = _first_tokens(corpus.validation, tokenizer, encode, wanted)
    if len(tokens) < 2:
        raise ValueError(
            f"`--data` is '{corpus.name}': {len(tokens)} token(s) are held out, and two are needed."
            " Give more text."
        )
    mask = np.where(np.isin(tokens[1:], tokenizer.dictated), 0, 1).astype(np.float32)
    count = -(-len(mask) // per_batch)
    padding = (0, count * per_batch - len(mask))
    columns = {
        "inputs": np.pad(tokens[:-1], padding, constant_values=tokenizer.eos_id),
        "targets": np.pad(tokens[1:], padding, constant_values=tokenizer.eos_id),
        "mask": np.pad(mask, padding),
    }
    shaped = {name: x.reshape(count, batch_size, seq_len) for name, x in columns.items()}
    batches = [{name: x[i] for name, x in shaped.items()} for i in range(count)]
    return ValidationSet(batches, int(mask.sum()), num_bytes)


def _check_fills_a_row(documents: Sequence[str], encode: Encode, seq_len: int) -> None:
    """Raises a `ValueError` if the documents do not fill a row. Reads only the first row."""
    count = 0
    for index in range(len(documents)):
        count += len(encode([documents[index]])[0])
        if count > seq_len:
            return
    raise ValueError(
        f"`--seq-len` is {seq_len}, so a row takes {seq_len + 1} tokens, but the training text "
        f"has {count} tokens in {len(documents)} document(s). Lower `--seq-len`, or "
        "give more text in `--data`."
    )


def _read_documents(
    documents: Sequence[str], encode: Encode, epoch: int, index: int
) -> list[np.ndarray]:
    """Returns the ids of a document and of those after it, about `_ENCODED_CHARS` characters.

    They are at most an epoch: a small text is not encoded several times at once.
    """
    texts, size = [], 0
    while size < _ENCODED_CHARS and len(texts) < epoch:
        texts.append(documents[index + len(texts)])
        size += len(texts[-1])
    return encode(texts)


def document_encoder(tokenizer: Tokenizer, special_tokens: SpecialTokens) -> Encode:
    """Returns a function from texts to the ids of whole documents."""
    before, after = tokenizer.between

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        if special_tokens == "parse":
            encoded = [tokenizer.encode_with_special(text) for text in texts]
        else:
            encoded = tokenizer.encode_batch(texts)
        return [np.asarray([*before, *ids, *after], np.int32) for ids in encoded]

    return encode


def _as_batch(rows: np.ndarray, dictated: Sequence[int]) -> Batch:
    """Splits rows [batch, seq_len + 1] into inputs and targets; dictated targets do not count."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    mask = np.where(np.isin(targets, dictated), 0, 1).astype(np.float32)
    return {"inputs": inputs, "targets": targets, "mask": mask}


def _first_tokens(
    texts: Sequence[str], tokenizer: Tokenizer, encode: Encode, wanted: int
) -> tuple[np.ndarray, int]:
    """Returns up to `wanted` tokens, int32, and the UTF-8 bytes of all but the first.

    The first is the token that begins a text, if there is one.
    """
    begins = tokenizer.prefix if not tokenizer.between[0] else ()
    pieces, num_bytes = [np.asarray(begins, np.int32)], 0
    wanted -= len(begins)
    longest = wanted if len(texts) == 1 else _LONGEST_HELD_OUT
    for text in (texts[index] for index in range(len(texts))):
        (document,) = encode([text])
        tokens = document[: min(wanted, longest)]
        wanted -= len(tokens)
        size = len(text.encode())
        if len(tokens) < len(document):
            size = min(size, len(tokenizer.decode(tokens).encode()))
        num_bytes += size
        pieces.append(tokens)
        if not wanted:
            break
    tokens = np.concatenate(pieces)
    return tokens, num_bytes - len(tokenizer.decode(tokens[:1]).encode())
