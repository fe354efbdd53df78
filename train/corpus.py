"""Documents from the standard library, a prepared TFDS data set, or local files.

`open_corpus` returns two random-access columns of text without common documents, for every source.

TensorFlow is never imported: TFDS data sets are read as ArrayRecord through `tfds.data_source`.
"""

import codecs
import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import logging
import os
import pathlib
import re
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import pyarrow
import pyarrow.parquet
import tensorflow_datasets as tfds

T_co = TypeVar("T_co", covariant=True)

TEXT_SUFFIXES = (".txt", ".md")
ACCEPTED = (
    "a .txt or .md file (or any other UTF-8 text), a .jsonl file, either of them also as .gz, a "
    ".parquet file, a folder of such files, the name of a TFDS data set prepared in `--data-dir` "
    "(such as 'c4/en'), or 'stdlib'"
)
DOCUMENT_CHARS = 4096
"""Least characters of a document that is made of the paragraphs of a single text file."""


class RandomAccess(Protocol[T_co]):
    """A finite sequence, read by index from any thread."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text to train on and held-out text. Both can be pickled, and neither is empty."""

    name: str
    """Name for logs."""
    train: RandomAccess[str]
    validation: RandomAccess[str]
    fingerprint: str
    """Hexadecimal. Checkpoints keep it, so that resuming on other data is refused. A hash of the
    text of local files, or of a prepared data set's name, version, sizes and splits."""


def open_corpus(
    data: str | None,
    data_dir: pathlib.Path,
    *,
    validation_fraction: float = 0.02,
    text_field: str = "text",
) -> Corpus:
    """Opens the documents that `data` names.

    Args:
      data: one of
        - `None` or `"stdlib"`: the sources of this Python's standard library. Prepared in
          `data_dir` on first use (seconds), with a fixed fiftieth of the files held out.
        - a path: a text file, split at blank lines into documents of about 4 KB; a .jsonl or
          .parquet file with one document per row; or a folder of such files, where each text file
          is one document. All text is held in memory; prepare larger data with TFDS.
        - `"name"`, `"name/config"`, either with `":version"`: a TFDS data set, already prepared
          in `data_dir` as ArrayRecord. An existing path of the same name takes precedence.
      data_dir: folder of prepared data sets.
      validation_fraction: share of the documents to hold out of a source without a validation
        split, in (0, 1). At least one document is held out and at least one is not. Of a single
        document, the end is held out.
      text_field: the JSON field, parquet column or TFDS feature that holds the text.

    Raises:
      FileNotFoundError: `data` is neither a path nor a data set prepared in `data_dir`.
      ValueError: the source has no text, or cannot be read.
    """
    if not 0 < validation_fraction < 1:
        raise ValueError(f"`validation_fraction` must be in (0, 1), got {validation_fraction}.")
    if data is None or data == "stdlib":
        directory = _prepare_standard_library(data_dir)
        return _open_prepared(directory, "stdlib", "text", validation_fraction)
    path = pathlib.Path(data).expanduser()
    if data and path.exists():
        return _open_path(path, validation_fraction, text_field)
    directory = _prepared_directory(data, data_dir)
    return _open_prepared(directory, data, text_field, validation_fraction)


def open_whole(data: str, *, text_field: str = "text") -> Corpus:
    """Returns a corpus with all documents of local files held out, and none to train on.

    A text file is one document.

    Args:
      data: a path, as for `open_corpus`.
      text_field: as for `open_corpus`.

    Raises:
      FileNotFoundError: the path does not exist.
      ValueError: the files have no text, or cannot be read.
    """
    path = pathlib.Path(data).expanduser()
    if not data or not path.exists():
        raise FileNotFoundError(
            f"`--whole` is for local files, and `--data` is '{data}': no such path."
        )
    documents = _with_text(_documents_in(path, text_field), path)
    return Corpus(path.name, [], documents, _digest(documents))


# --- The default: the standard library of the running Python. ---


class PythonStandardLibrary(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """The `.py` files of this Python's standard library, as TFDS stores documents.

    The configuration has the Python version, so that two Pythons have two data sets. Empty files
    and files that are not UTF-8 (a few, for tests of encodings) are left out.
    """

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS: ClassVar = [
        tfds.core.BuilderConfig(
            name="_".join([sys.implementation.name, *map(str, sys.version_info[:3])]),
            description="The version of Python whose sources these are.",
        )
    ]
    # Otherwise TFDS searches for this file with `importlib_resources`, which may be missing.
    code_path = tfds.core.Path(__file__)
    _HELD_OUT = 0.02
    _NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        features = tfds.features.FeaturesDict({"path": text, "text": text})
        return tfds.core.DatasetInfo(builder=self, features=features, license="PSF-2.0")

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager  # Nothing is downloaded.
        return {
            "train": self._generate_examples(held_out=False),
            "validation": self._generate_examples(held_out=True),
        }

    def _generate_examples(self, *, held_out: bool) -> Iterator[tuple[str, dict[str, str]]]:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if self._NOT_THE_LIBRARY.isdisjoint(path.parts[len(root.parts) :]) and held_out == (
                unit_hash(name.encode()) < self._HELD_OUT
            ):
                with contextlib.suppress(UnicodeDecodeError):
                    text = path.read_bytes().decode().replace("\r\n", "\n")
                    if text.strip():
                        yield name, {"path": name, "text": text}


def _prepare_standard_library(data_dir: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the prepared `PythonStandardLibrary`, and prepares it if it is missing.

    It is written to another folder in `data_dir` and then renamed: a killed process leaves no
    partial data set. If two processes prepare it at once, the later one discards its copy.
    """
    config = PythonStandardLibrary.BUILDER_CONFIGS[0].name
    relative = pathlib.Path(PythonStandardLibrary.name, config, str(PythonStandardLibrary.VERSION))
    final = data_dir / relative
    if final.exists():
        return final
    logging.info("Preparing the standard library's sources in %s (once).", final)
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=data_dir, prefix=".preparing-") as scratch:
        _build_standard_library(scratch)
        with contextlib.suppress(OSError):  # Another process was faster.
            os.rename(pathlib.Path(scratch, relative), final)
    if not final.exists():
        raise OSError(f"`--data-dir` is '{data_dir}': cannot write '{final}' in it.")
    return final


def _build_standard_library(data_dir: str) -> None:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    if not any(root.glob("*.py")):
        raise ValueError(
            f"`--data` is 'stdlib', but '{root}' has no .py files: this Python came without its "
            "sources. Give `--data PATH` instead."
        )
    tfds.disable_progress_bar()
    builder = PythonStandardLibrary(data_dir=data_dir, file_format="array_record")
    with contextlib.redirect_stdout(io.StringIO()):  # Hides "Downloading".
        builder.download_and_prepare()


# --- Prepared TFDS data sets. ---


@dataclasses.dataclass(frozen=True)
class _TextColumn:
    """The text of each record of a TFDS data source. Each call reads one record."""

    records: Sequence[dict[str, Any]]
    field: str

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> str:
        return self.records[index][self.field].decode()


def _prepared_directory(data: str, data_dir: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the data set `data`: the named version, or the newest."""
    name, _, version = data.partition(":")
    found = [p.parent for p in (data_dir / name).glob("*/dataset_info.json")]
    found = [p for p in found if version in ("", p.name) and tfds.core.Version.is_valid(p.name)]
    if not found:
        there = [*data_dir.glob("*/*/dataset_info.json"), *data_dir.glob("*/*/*/dataset_info.json")]
        names = sorted(p.relative_to(data_dir).parent.parent.as_posix() for p in there)
        raise FileNotFoundError(
            f"`--data` is '{data}': there is no such file or folder, and no TFDS data set of that "
            f"name is prepared in `--data-dir` '{data_dir}' (found there: "
            f"{', '.join(names) or 'none'}). Correct the path, or prepare the data set first with "
            f"`tfds build {name} --data_dir={data_dir} --file_format=array_record`. Accepted: "
            f"{ACCEPTED}."
        )
    return max(found, key=lambda p: tfds.core.Version(p.name))


def _open_prepared(directory: pathlib.Path, data: str, field: str, fraction: float) -> Corpus:
    """Opens the ArrayRecord data set in `directory`.

    Without a validation split the end of train is held out. TFDS writes documents in the order of a
    hash of their keys, so the end is a random sample.
    """
    try:
        builder = tfds.builder_from_directory(directory)
    except Exception as error:  # JSON and protobuf raise various errors.
        raise _damaged(data, directory, error) from error
    features: Any = builder.info.features
    splits = builder.info.splits
    for wanted, present, kind in ((field, features, "feature"), ("train", splits, "split")):
        if wanted not in present:
            raise ValueError(
                f"`--data` is '{data}': it has no {kind} '{wanted}', only {', '.join(present)}. "
                "Choose another data set, or another field for the text."
            )
    train, validation = "train", "validation"
    if "validation" not in splits:
        kept = _kept(splits["train"].num_examples, fraction, data)
        train, validation = f"train[:{kept}]", f"train[{kept}:]"
    columns = [_column(builder, split, field, data) for split in (train, validation)]
    shards = sorted([s.name, s.shard_lengths, int(s.num_bytes)] for s in splits.values())
    identity = [builder.info.full_name, field, train, validation, shards]
    return Corpus(data, *columns, fingerprint=_digest([json.dumps(identity)]))


def _column(builder: tfds.core.DatasetBuilder, split: str, field: str, data: str) -> _TextColumn:
    """Returns the text of `split` after a check of its files and of its first and last record."""
    try:
        source: Any = builder.as_data_source  # Its decorator hides its parameters.
        column = _TextColumn(source(split=split), field)
    except NotImplementedError as error:
        raise ValueError(
            f"`--data` is '{data}': it is stored as {builder.info.file_format}, which needs "
            "TensorFlow. Prepare it again with `tfds build --file_format=array_record`."
        ) from error
    if not len(column):
        raise ValueError(f"`--data` is '{data}': split '{split}' is empty. Prepare it again.")
    try:
        for file in builder.info.splits[split].filepaths:
            file.stat()
        _ = column[0], column[len(column) - 1]
    except (OSError, RuntimeError) as error:  # RuntimeError is ArrayRecord's.
        raise _damaged(data, builder.data_path, error) from error
    return column


def _damaged(data: str, directory: os.PathLike[str], error: Exception) -> ValueError:
    return ValueError(
        f"`--data` is '{data}', but its prepared copy in '{directory}' is damaged ({error}). "
        "Delete that folder and prepare it again."
    )


def _kept(count: int, fraction: float, data: str) -> int:
    """Returns how many of `count` documents are for training: at least one, and not all."""
    if count < 2:
        raise ValueError(
            f"`--data` is '{data}': it has {count} document(s), and one must be held out. "
            "Give at least two."
        )
    return min(max(1, round(count * (1 - fraction))), count - 1)


# --- Local files. ---


def _open_path(path: pathlib.Path, fraction: float, field: str) -> Corpus:
    """Reads a file, or every accepted file under a folder in the order of their names.

    A single text file is split into documents, so that some can be held out. Other files in a
    folder and hidden files are skipped. Documents without text are dropped.
    """
    if path.is_dir() or not _is_text(path):
        documents = _documents_in(path, field)
    else:
        documents = _group_paragraphs(read_text(path))
    documents = _with_text(documents, path)
    train, validation = _hold_out(documents, fraction, path)
    fingerprint = _digest([str(len(train)), *train, *validation])
    return Corpus(path.name, train, validation, fingerprint)


def _documents_in(path: pathlib.Path, field: str) -> list[str]:
    """Returns the documents of a file, or of every accepted file under a folder."""
    if not path.is_dir():
        return list(_read_documents(path, field))
    files = [p for p in sorted(path.rglob("*")) if _is_accepted(p.relative_to(path))]
    return [text for file in files for text in _read_documents(file, field)]


def _with_text(documents: list[str], path: pathlib.Path) -> list[str]:
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise ValueError(f"`--data` is '{path}': it has no text. Accepted: {ACCEPTED}.")
    return documents


def suffix_of(path: pathlib.Path) -> str:
    """Returns the suffix of the contents: `.jsonl` for `a.jsonl.gz`."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix


def _is_text(path: pathlib.Path) -> bool:
    return suffix_of(path) not in (".json", ".jsonl", ".parquet")


def _is_accepted(path: pathlib.Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and suffix_of(path) in (*TEXT_SUFFIXES, ".jsonl", ".parquet")


def _read_documents(path: pathlib.Path, field: str) -> Iterable[str]:
    match suffix_of(path):
        case ".jsonl":
            return _read_jsonl(path, field)
        case ".parquet":
            return _read_parquet(path, field)
        case ".json":
            raise ValueError(
                f"`--data` is '{path}': .json files are not read. Write one JSON object per line "
                "into a .jsonl file."
            )
        case _:
            return [read_text(path)]


def read_text(path: pathlib.Path, flag: str = "--data") -> str:
    """Returns the UTF-8 text of a file, without BOM and carriage returns.

    Args:
      path: the file; a .gz file is decompressed.
      flag: flag of the file, for messages.

    Raises:
      ValueError: the file is not UTF-8, or is truncated.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"`{flag}`: '{path}' is not a complete gzip file ({error}). Download it again."
        ) from error
    start = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
    try:
        text = data[start:].decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"`{flag}`: '{path}' is not UTF-8 at byte {start + error.start} ({error.reason}). "
            "Convert it to UTF-8, or remove it."
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_jsonl(path: pathlib.Path, field: str) -> Iterator[str]:
    # Not `splitlines`: JSON strings may hold line separators such as U+2028.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                yield _field_of(line, field)
            except ValueError as error:
                raise ValueError(
                    f"`--data`: '{path}' line {number}: {error}. Correct or remove the line."
                ) from error


def _field_of(line: str, field: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict):
        raise ValueError(f"a JSON object is required, not {type(row).__name__}")
    if field not in row:
        raise ValueError(f"there is no field '{field}', only {', '.join(row) or 'an empty object'}")
    if not isinstance(row[field], str):
        raise ValueError(f"field '{field}' is {type(row[field]).__name__}, not text")
    row[field].encode()  # Raises for a lone surrogate, which JSON allows.
    return row[field]


def _read_parquet(path: pathlib.Path, field: str) -> Iterator[str]:
    try:
        table = pyarrow.parquet.ParquetFile(path)
        columns = {column.name: column.type for column in table.schema_arrow}
        if field not in columns:
            raise ValueError(f"there is no column '{field}', only {', '.join(columns)}")
        if columns[field] not in (pyarrow.string(), pyarrow.large_string()):
            raise ValueError(f"column '{field}' is {columns[field]}, not text")
        yield from filter(None, table.read([field]).column(field).to_pylist())
    except (ValueError, OSError) as error:  # pyarrow.ArrowInvalid is a ValueError.
        raise ValueError(f"`--data`: '{path}': {error}. Correct or remove the file.") from error


def _group_paragraphs(text: str) -> list[str]:
    """Splits `text` after blank lines into pieces of at least `DOCUMENT_CHARS` characters."""
    documents, start = [], 0
    for blank in re.finditer(r"\n(?:[ \t]*\n)+", text):
        if blank.end() - start >= DOCUMENT_CHARS:
            documents.append(text[start : blank.end()])
            start = blank.end()
    return [*documents, text[start:]]


def _hold_out(
    documents: list[str], fraction: float, path: pathlib.Path
) -> tuple[list[str], list[str]]:
    """Splits documents by a hash of their text, so that copies of a document stay together.

    Adding documents does not move the others. Both sides get at least one. Of a single document,
    the last `fraction` is held out.
    """
    if len(documents) == 1:
        return _hold_out_tail(documents[0], fraction, path)
    hashes = [unit_hash(text.encode()) for text in documents]
    bound = min(max(fraction, min(hashes)), sorted(hashes)[-2])
    held_out = [value <= bound for value in hashes]
    if all(held_out):  # All documents are copies of one.
        held_out[0] = False
    return (
        [text for text, out in zip(documents, held_out, strict=True) if not out],
        [text for text, out in zip(documents, held_out, strict=True) if out],
    )


def _hold_out_tail(text: str, fraction: float, path: pathlib.Path) -> tuple[list[str], list[str]]:
    cut = len(text) - max(1, round(len(text) * fraction))
    if not text[:cut].strip() or not text[cut:].strip():
        raise ValueError(
            f"`--data` is '{path}': a single document of {len(text)} characters is too short to "
            "hold its end out. Give more text."
        )
    return [text[:cut]], [text[cut:]]


def unit_hash(data: bytes) -> float:
    """Returns a number in [0, 1) that depends only on `data`."""
    return int.from_bytes(hashlib.sha256(data).digest()[:6], "big") / 2**48


def _digest(texts: Iterable[str]) -> str:
    """Returns a hash of the texts and their lengths."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()
