"""Local files: documents of text, .jsonl files and tables, and the records of files."""

import codecs
import gzip
import json
import pathlib
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from models.plain_files import check_plain
from train.text.tables import SUFFIXES, rows_in

T = TypeVar("T")

DOCUMENT_CHARS = 4096
"""Least characters of a document that is made of the paragraphs of a single text file."""


class Record(NamedTuple):
    """The fields of a record, and its place for messages."""

    where: str
    fields: dict[str, Any]

    def apply(self, make: Callable[..., T], *args: Any) -> T:
        """Returns `make(self, *args)`; a ValueError from it gets the place of the record."""
        try:
            return make(self, *args)
        except ValueError as error:  # Also UnicodeEncodeError, from half a surrogate pair.
            reason = str(error).removesuffix(".")
            raise ValueError(f"{self.where}: {reason}. Correct or remove it.") from error


def documents_in(path: pathlib.Path, field: str) -> list[str]:
    """Returns the documents of a file, or of every accepted file under a folder.

    Files of a folder are read in the order of their names; other files and hidden ones are skipped.

    Args:
      path: a text file, which is one document; a .jsonl, .parquet or .arrow file with one document
        per row; or a folder of such files. Text and .jsonl also as .gz.
      field: the JSON field or parquet column that holds the text.

    Raises:
      ValueError: a file cannot be read, or has no such field.
    """
    suffixes = (".txt", ".md", ".jsonl", *SUFFIXES)
    files = files_under(path, suffixes) if path.is_dir() else [path]
    return [text for file in files for text in _read_documents(file, field)]


def files_under(folder: pathlib.Path, suffixes: Collection[str]) -> list[pathlib.Path]:
    """Returns the paths under a folder with some suffixes, in the order of names, if not hidden."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if suffix_of(path) in suffixes
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]


def group_paragraphs(text: str) -> list[str]:
    """Splits `text` after blank lines into pieces of at least `DOCUMENT_CHARS` characters."""
    documents, start = [], 0
    for blank in re.finditer(r"\n(?:[ \t]*\n)+", text):
        if blank.end() - start >= DOCUMENT_CHARS:
            documents.append(text[start : blank.end()])
            start = blank.end()
    return [*documents, text[start:]]


def suffix_of(path: pathlib.Path) -> str:
    """Returns the suffix of the contents: `.jsonl` for `a.jsonl.gz`."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix


def _read_documents(path: pathlib.Path, field: str) -> Iterable[str]:
    match suffix_of(path):
        case ".jsonl":
            return (
                record.apply(lambda x: text_of(x.fields, field))
                for record in records_in(path, "--data")
            )
        case ".parquet" | ".arrow":
            return (row[field] for row in rows_in(path, "--data", field) if row[field])
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
      ValueError: the file cannot be read, is not UTF-8, or is truncated.
    """
    try:
        check_plain(path, most=None)
        read = path.read_bytes()
    except OSError as error:
        raise ValueError(f"`{flag}`: '{path}' cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"`{flag}`: {error} Write the text into one.") from error
    try:
        data = gzip.decompress(read) if path.suffix == ".gz" else read
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


def text_of(fields: Mapping[str, Any], field: str) -> str:
    """Returns a field that is text. Raises a `ValueError` if it is missing or is none."""
    if field not in fields:
        known = ", ".join(fields) or "an empty object"
        raise ValueError(f"there is no field '{field}', only {known}: pass `--text-field`")
    text = fields[field]
    if not isinstance(text, str):
        raise ValueError(f"field '{field}' is {type(text).__name__}, not text")
    text.encode()  # Raises for a lone surrogate, which JSON allows.
    return text


def records_in(path: pathlib.Path, flag: str) -> Iterator[Record]:
    """Yields the records of a file: rows of a table, objects of a JSON array, or one per line.

    Args:
      path: the file.
      flag: flag of the file, for messages.

    Raises:
      ValueError: the file cannot be read, or has something else than objects.
    """
    if suffix_of(path) in SUFFIXES:
        for number, row in enumerate(rows_in(path, flag), 1):
            yield Record(f"`{flag}`: row {number} of '{path}'", row)
        return
    text = read_text(path, flag)
    if suffix_of(path) == ".json" and text.lstrip().startswith("["):
        for number, value in enumerate(_parse(text, 1, path, flag), 1):
            yield _as_record(value, f"`{flag}`: record {number} of '{path}'")
        return
    # Not `splitlines`: JSON strings may hold line separators such as U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            value = _parse(line, number, path, flag)
            yield _as_record(value, f"`{flag}`: line {number} of '{path}'")


def _parse(text: str, line: int, path: pathlib.Path, flag: str) -> Any:
    """Returns the JSON value of `text`, which begins in line `line`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
            line += error.lineno - 1
        raise ValueError(
            f"`{flag}`: line {line} of '{path}' is not JSON: {reason}. Correct or remove it."
        ) from error


def _as_record(value: Any, where: str) -> Record:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {type(value).__name__}, not an object. Correct or remove it.")
    return Record(where, value)
