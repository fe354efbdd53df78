"""Tables on a terminal, as all benchmarks print them."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def print_table(title: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table: names on the left, figures on the right.

    Args:
      title: what was measured, on what.
      headers: of the columns; the first is that of the names.
      rows: a text for each column.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    # Wider than any of them: a row that is wrapped cannot be read, nor pasted.
    Console(width=200).print(table)
