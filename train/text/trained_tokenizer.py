"""The tokenizer of a run that is given none: byte-level BPE, trained on its text."""

import contextlib
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from models.folders import scratch_folder
from train.text.corpus import Corpus
from train.text.tokenizer import HuggingFaceTokenizer, Tokenizer

END_OF_TEXT = "<|endoftext|>"
TRAINING_CHARS = 10_000_000
"""Characters that `default_tokenizer` trains on. On the standard library, three times as many make
the validation text about 1% shorter in tokens, and training takes three times as long."""


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Returns byte-level BPE trained on `texts`. Its only special token ends a document.

    The same texts give the same merges. The vocabulary is smaller than `vocab_size` if the texts
    have too few pairs to merge.

    Raises:
      ValueError: `vocab_size` is too small for the 256 bytes and the special token.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + 1:
        raise ValueError(
            f"`--vocab-size` is {vocab_size}: at least {len(alphabet) + 1} are needed, one for "
            "each byte and one for the end of a document."
        )
    inner = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    inner.train_from_iterator(iter(texts), trainer)
    return HuggingFaceTokenizer(inner, eos=END_OF_TEXT, source="trained on the text")


def default_tokenizer(corpus: Corpus, vocab_size: int, data_dir: pathlib.Path) -> Tokenizer:
    """Returns BPE trained on the corpus, from `data_dir` if it was trained before.

    It is trained on evenly spaced documents of the train split, about `TRAINING_CHARS` characters.
    The copy in `data_dir` belongs to this corpus and vocabulary size, and is written atomically.
    """
    final = data_dir / "tokenizers" / f"bpe-{vocab_size}-{corpus.fingerprint[:16]}"
    if not final.exists():
        trained = train_bpe(_sample(corpus.train), vocab_size)
        final.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(final.parent, ".training-") as scratch:
            trained.save(scratch / "tokenizer")
            with contextlib.suppress(OSError):  # Another process was faster.
                os.rename(scratch / "tokenizer", final)
    return _loaded(final)


def _sample(texts: Sequence[str]) -> Iterator[str]:
    """Yields evenly spaced documents of about `TRAINING_CHARS` characters, or all documents."""
    probe = [len(texts[i]) for i in range(0, len(texts), -(-len(texts) // 100))]
    expected = len(texts) * sum(probe) / len(probe)
    step = max(1, math.ceil(expected / TRAINING_CHARS))
    seen = 0
    for index in range(0, len(texts), step):
        if seen >= TRAINING_CHARS:  # The probed documents were short.
            return
        text = texts[index]
        seen += len(text)
        yield text


def byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    """Returns a tokenizer over bytes that splits words as GPT-2 does."""
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def _loaded(folder: pathlib.Path) -> Tokenizer:
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizer(inner, eos=END_OF_TEXT, source="trained on the text")
