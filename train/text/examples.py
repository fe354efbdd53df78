"""Examples to fine-tune on: records become tokens, with a mask of those that the loss counts.

`open_examples` makes an `Example` of each record: a prompt and its completion, a conversation for a
chat template, or plain text. All records are encoded at once and held in memory, so that errors in
records are found before the first step.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

from train.settings.data import ExampleConfig
from train.settings.options import check_at_least
from train.text.encoder import Encoder, Example, Written
from train.text.formats import Writer, check_fields, open_writer
from train.text.hashes import unit_hash
from train.text.pairs import Pair
from train.text.records import Record, read_records
from train.text.sources import Source, sources_of
from train.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Examples:
    """Training and held-out examples: at least one of both, each with a counted token.

    Attributes:
      name: name for logs.
      train: training examples, or pairs of preference.
      validation: held-out examples.
      cut: number of examples, of both kinds, that lost their end for being longer than a sequence.
      dropped: number of examples that were dropped: for their length, or because no token counts,
        possibly after their end was cut off.
      fingerprint: hexadecimal: a hash of all tokens, of which count and of which are held out.
      shares: number of training examples of each source, and its weight; empty without weights.
      remarks: lines for the user.
    """

    name: str
    train: Sequence[Any]
    validation: Sequence[Any]
    cut: int
    dropped: int
    fingerprint: str
    shares: Sequence[tuple[int, float]] = ()
    remarks: Sequence[str] = ()


def open_examples(
    config: ExampleConfig,
    tokenizer: Tokenizer,
    seq_len: int,
    tokenizer_path: pathlib.Path | None = None,
    *,
    preferences: bool = False,
) -> Examples:
    """Reads and encodes all records.

    Args:
      config: what to read, and how.
      tokenizer: adds its `prefix` and its end to prompts and texts, but not to conversations, whose
        template writes special tokens.
      seq_len: largest number of tokens of an example minus one; the last token is only a target.
      tokenizer_path: folder of the tokenizer, or a file in it. The chat template is read there
        unless `config` names one.
      preferences: whether records are pairs of preference.

    Raises:
      FileNotFoundError: a file does not exist.
      ValueError: a record or a template is malformed, or no example is left.
    """
    check_at_least(1, seq_len=seq_len)
    encoder = Encoder(tokenizer, config.special_tokens)
    reader = _Reader(config, encoder, seq_len, tokenizer_path, preferences)
    flag, checked = "--data", config.data
    sources = sources_of(config.data, "--data")
    trained, validation, count, held = list[Any](), list[Any](), 0, 0
    for source in sources:
        records = read_records(source.path, "--data")
        encoded = reader.encode(records, reader.writer(records))
        held_out: list[Encoded] = []
        if config.validation is None and encoded:
            encoded, held_out = _hold_out(encoded, config, source)
        trained.append(reader.fit(encoded))
        validation += reader.fit(held_out)
        count, held = count + len(encoded), held + len(held_out)
    if config.validation is not None:
        flag, checked = "--validation", (config.validation,)
        records = read_records(config.validation, flag)
        encoded = reader.encode(records, reader.writer(records))
        validation, held = reader.fit(encoded), len(encoded)
    reader.check_skipped()
    train = [example for part in trained for example in part]
    for examples, name, data, use, number in (
        (train, "--data", config.data, "train on", count),
        (validation, flag, checked, "validate on", held),
    ):
        if not examples:
            raise ValueError(
                f"`{name}` is '{' '.join(data)}': all {number} record(s) to {use} were dropped."
                f" {reader.why_dropped()}. Raise `--seq-len`, or give other records."
            )
    weights = [source.weight for source in sources]
    pairs = zip(trained, weights, strict=True)
    return Examples(
        name=" ".join(pathlib.Path(source.path).name for source in sources),
        train=train,
        validation=validation,
        cut=reader.cut,
        dropped=reader.dropped,
        fingerprint=_fingerprint(train, validation),
        shares=[(len(part), weight) for part, weight in pairs if weight is not None],
        remarks=reader.remarks(),
    )


Encoded = tuple[Record, list[Any]]
"""A record with its examples."""


class _Reader:
    """Makes examples of records, and counts what it leaves out.

    Attributes:
      cut: as in `Examples`.
      dropped: as in `Examples`.
    """

    def __init__(
        self,
        config: ExampleConfig,
        encoder: Encoder,
        seq_len: int,
        folder: pathlib.Path | None,
        preferences: bool,
    ) -> None:
        self._preferences = preferences
        self._config, self._encoder = config, encoder
        self._longest, self._folder = seq_len + 1, folder
        self._skipped: list[str] = []
        self._empty = self._read = self._naming = self._silent = self._longest_dropped = 0
        self.cut = self.dropped = 0

    def writer(self, records: Sequence[Record]) -> Writer:
        """Returns the writer of records that have one form: that of the first.

        Raises:
          ValueError: it has none, or with `skip_bad` no record has one.
        """
        for number, record in enumerate(records):
            try:
                return open_writer(
                    self._config, self._encoder, self._folder, record, preferences=self._preferences
                )
            except ValueError:
                if not self._config.skip_bad or number == len(records) - 1:
                    raise
        raise AssertionError("there are records")

    def encode(self, records: Sequence[Record], writer: Writer) -> list[Encoded]:
        """Returns records with their examples; those that cannot be read are counted.

        Raises:
          ValueError: a record is malformed, and `skip_bad` is off.
        """
        encoded = []
        for record in records:
            self._read += 1
            try:
                encoded.append((record, record.apply(self._write, writer.write)))
            except ValueError as error:
                if not self._config.skip_bad:
                    raise
                self._skipped.append(str(error))
        return encoded

    def fit(self, encoded: Sequence[Encoded]) -> list[Any]:
        """Returns the examples that fit a sequence."""
        examples = [example for _, of_record in encoded for example in of_record]
        fitting, cut, dropped = _fit(examples, self._longest, self._config.long)
        self.cut += cut
        without = sum(not of_record for _, of_record in encoded)
        self.dropped += len(dropped) + without
        self._silent += without
        for parts in map(parts_of, dropped):
            self._silent += not all(part.counted.any() for part in parts)
            longest = max(len(part.tokens) for part in parts)
            self._longest_dropped = max(self._longest_dropped, longest)
        return fitting

    def _write(self, record: Record, write: Callable[..., list[Written]]) -> list[Any]:
        check_fields(record.fields)
        names = self._encoder.marker.found.total()
        texts = write(record.fields)
        self._naming += self._encoder.marker.found.total() > names
        for text in texts:
            empty = not any(text.text[start:stop].strip() for start, stop in text.learned)
            self._empty += empty and not text.is_chat
        learn_all = self._config.count_prompts
        examples = [self._encoder.example(text, learn_all=learn_all) for text in texts]
        if not self._preferences or not examples:
            return examples
        chosen, rejected = examples
        return [Pair(chosen, rejected)]

    def check_skipped(self) -> None:
        """Raises a `ValueError` if all records were skipped."""
        if self._read and len(self._skipped) == self._read:
            raise ValueError(f"`--skip-bad` skipped all records; the first: {self._skipped[0]}")

    def why_dropped(self) -> str:
        """Returns why examples were dropped."""
        reasons = []
        if self._silent:
            reasons.append(
                f"{self._silent:,} have no counted token whatever their length: they have no"
                " answer, or the chat template (`--chat-template`) does not write it"
            )
        if self._silent < self.dropped:
            reasons.append(
                "No counted token (of a completion or of the assistant) is within `--seq-len`"
                f" {self._longest - 1}, or `--long drop` removed them; the longest has"
                f" {self._longest_dropped:,} tokens"
            )
        return ". ".join(reasons)

    def remarks(self) -> list[str]:
        """Returns lines for the user."""
        lines = [f"{self.dropped:,} dropped. {self.why_dropped()}"] if self.dropped else []
        if self._skipped:
            count, first = len(self._skipped), self._skipped[0]
            lines.append(
                f"{count:,} of {self._read:,} records are bad and skipped; the first: {first}"
            )
        if self._empty:
            lines.append(
                f"{self._empty:,} of {self._read:,} completions are empty: their end alone counts"
            )
        where = f"{self._naming:,} of {self._read:,} records"
        return [*lines, *filter(None, [self._encoder.marker.describe(where)])]


def parts_of(item: Example | Pair) -> tuple[Example, ...]:
    """Returns the examples of an example or of a pair."""
    return (item.chosen, item.rejected) if isinstance(item, Pair) else (item,)


def _fit(
    items: list[Any], longest: int, long: Literal["cut", "drop"]
) -> tuple[list[Any], int, list[Any]]:
    """Returns the items whose examples all have a counted token within `longest` tokens.

    Also returns how many of them are cut, and the other items.
    """
    fitting, cut, dropped = [], 0, []
    for item in items:
        parts = parts_of(item)
        is_long = any(len(example.tokens) > longest for example in parts)
        if is_long and long == "drop":
            dropped.append(item)
        elif all(example.counted[:longest].any() for example in parts):
            if is_long:  # Copies, because a slice would keep the whole array in memory.
                parts = [
                    Example(x.tokens[:longest].copy(), x.counted[:longest].copy()) for x in parts
                ]
                item = Pair(parts[0], parts[1]) if isinstance(item, Pair) else parts[0]
                cut += 1
            fitting.append(item)
        else:
            dropped.append(item)
    return fitting, cut, dropped


def _fingerprint(*splits: list[Any]) -> str:
    digest = hashlib.sha256()
    for items in splits:
        digest.update(len(items).to_bytes(8, "little"))
        for example in (example for item in items for example in parts_of(item)):
            digest.update(len(example.tokens).to_bytes(8, "little"))
            digest.update(example.tokens.astype("<i4").tobytes())
            digest.update(example.counted.tobytes())
    return digest.hexdigest()


def _hold_out(
    records: list[Encoded], config: ExampleConfig, source: Source
) -> tuple[list[Encoded], list[Encoded]]:
    """Splits records by a hash of their fields. Copies stay together; both sides get one.

    Where copies would make the part twice as large as it should be, records are held out by their
    places, which do not tell copies apart.
    """
    hashes = [
        unit_hash(json.dumps(record.fields, sort_keys=True, default=str).encode())
        for record, _ in records
    ]
    values = sorted(set(hashes))
    bound = min(max(config.held_out, values[0]), values[-2]) if len(values) > 1 else 1.0
    held_out = [value <= bound for value in hashes]
    wanted = min(max(1, round(config.held_out * len(records))), len(records) - 1)
    if len(records) < 2:
        raise ValueError(
            f"`--data` is '{source.path}': it has {len(records)} record(s), and one must be held"
            " out. Give other records, or a file to validate on by `--validation`."
        )
    if all(held_out) or (sum(held_out) > 2 * wanted and len(values) < len(records)):
        step = len(records) / wanted
        places = {round(step * (i + 0.5) - 0.5) for i in range(wanted)}
        held_out = [index in places for index in range(len(records))]
    return (
        [x for x, out in zip(records, held_out, strict=True) if not out],
        [x for x, out in zip(records, held_out, strict=True) if out],
    )
