"""Documents of local files: text, .jsonl and .parquet, and folders of them."""

import codecs
import gzip
import json
import pathlib
import re
import zlib
from collections.abc import Collection, Iterable, Iterator

import pyarrow
import pyarrow.parquet

_TEXT_SUFFIXES = (".txt", ".md")
DOCUMENT_CHARS = 4096
"""Least characters of a document that is made of the paragraphs of a single text file."""


def documents_in(path: pathlib.Path, field: str) -> list[str]:
    """Returns the documents of a file, or of every accepted file under a folder.

    Files of a folder are read in the order of their names; other files and hidden ones are skipped.

    Args:
      path: a text file, which is one document; a .jsonl or .parquet file with one document per row;
        or a folder of such files. All but .parquet also as .gz.
      field: the JSON field or parquet column that holds the text.

    Raises:
      ValueError: a file cannot be read, or has no such field.
    """
    if not path.is_dir():
        return list(_read_documents(path, field))
    files = files_under(path, (*_TEXT_SUFFIXES, ".jsonl", ".parquet"))
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


def is_text(path: pathlib.Path) -> bool:
    """Returns whether a file is read as plain text."""
    return suffix_of(path) not in (".json", ".jsonl", ".parquet")


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
      ValueError: the file cannot be read, is not UTF-8, or is truncated.
    """
    try:
        read = path.read_bytes()
    except OSError as error:
        raise ValueError(f"`{flag}`: '{path}' cannot be read: {error.strerror}.") from error
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
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(row, dict):
        raise ValueError(f"a JSON object is required, not {type(row).__name__}")
    if field not in row:
        known = ", ".join(row) or "an empty object"
        raise ValueError(f"there is no field '{field}', only {known}: pass `--text-field`")
    if not isinstance(row[field], str):
        raise ValueError(f"field '{field}' is {type(row[field]).__name__}, not text")
    row[field].encode()  # Raises for a lone surrogate, which JSON allows.
    return row[field]


def _read_parquet(path: pathlib.Path, field: str) -> Iterator[str]:
    try:
        table = pyarrow.parquet.ParquetFile(path)
        columns = {column.name: column.type for column in table.schema_arrow}
        if field not in columns:
            known = ", ".join(columns)
            raise ValueError(f"there is no column '{field}', only {known}: pass `--text-field`")
        if columns[field] not in (pyarrow.string(), pyarrow.large_string()):
            raise ValueError(f"column '{field}' is {columns[field]}, not text")
        yield from filter(None, table.read([field]).column(field).to_pylist())
    except (ValueError, OSError) as error:  # pyarrow.ArrowInvalid is a ValueError.
        raise ValueError(f"`--data`: '{path}': {error}. Correct or remove the file.") from error
