"""Tables of records: parquet files, and the Arrow files of a folder that `datasets` saved."""

import pathlib
from collections.abc import Iterator
from typing import Any

import pyarrow
import pyarrow.parquet

from models.plain_files import check_plain

SUFFIXES = (".parquet", ".arrow")


def rows_in(path: pathlib.Path, flag: str, column: str | None = None) -> Iterator[dict[str, Any]]:
    """Yields the rows of a table.

    Args:
      path: a .parquet or .arrow file.
      flag: flag of the path, for messages.
      column: the only column to read, of text; None for all.

    Raises:
      ValueError: the file cannot be read, or the column is missing or has no text.
    """
    try:
        for part in _parts(path, column):
            yield from part.to_pylist()
    except (ValueError, OSError) as error:  # pyarrow.ArrowInvalid is a ValueError.
        reason = str(error).rstrip(".")
        raise ValueError(f"`{flag}`: '{path}': {reason}. Correct or remove the file.") from error


def _parts(path: pathlib.Path, column: str | None) -> Iterator[Any]:
    columns = None if column is None else [column]
    check_plain(path, most=None)
    if path.suffix == ".parquet":
        file = pyarrow.parquet.ParquetFile(path)
        _check(file.schema_arrow, column)
        yield from file.iter_batches(columns=columns)
        return
    with pyarrow.memory_map(str(path)) as source:
        try:
            reader = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            reader = pyarrow.ipc.open_file(source)
        _check(reader.schema, column)
        batches = (
            reader
            if hasattr(reader, "__iter__")
            else map(reader.get_batch, range(reader.num_record_batches))
        )
        for batch in batches:
            yield batch if columns is None else batch.select(columns)


def _check(schema: pyarrow.Schema, column: str | None) -> None:
    if column is None:
        return
    kinds = {field.name: field.type for field in schema}
    if column not in kinds:
        known = ", ".join(kinds)
        raise ValueError(f"there is no column '{column}', only {known}: pass `--text-field`")
    if kinds[column] not in (pyarrow.string(), pyarrow.large_string()):
        raise ValueError(f"column '{column}' is {kinds[column]}, not text")
