"""Tables on a terminal."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

Cells = list[dict[str, str]]
"""Rows of cells by header."""


def cell(value: Any, spec: str) -> str:
    """Returns the text of a number; nothing for None. Text, as files have NaN, stays as it is."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:{spec}}"


def print_table(title: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table: names on the left, figures on the right.

    Args:
      title: title of the table.
      headers: headers of the columns; the first column has the names.
      rows: rows of one text for each column.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    # Wider than any table: a wrapped row can be neither read nor pasted.
    Console(width=200).print(table)
