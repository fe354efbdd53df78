"""Tables on a terminal and in Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

Cells = list[dict[str, str]]
"""Rows of cells by header."""


def cell(value: Any, spec: str, unit: float = 1) -> str:
    """Returns the text of a number; nothing for None. Text, as files have NaN, stays as it is."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value / unit if unit != 1 else value:{spec}}"


def print_table(title: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table: names on the left, figures on the right."""
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    # Wider than any table: a wrapped row can be neither read nor pasted.
    Console(width=200).print(table)


def print_cells(title: str, cells: Cells) -> None:
    """Prints a table of cells by header."""
    print_table(title, list(cells[0]) if cells else [], (list(row.values()) for row in cells))


def markdown(cells: Cells) -> str:
    """Returns a table in Markdown."""
    if not cells:
        return "No rows."
    lines = [cells[0], ["---"] * len(cells[0]), *(row.values() for row in cells)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
