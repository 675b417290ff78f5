"""Tables on the terminal, as wide as their cells, so that they can be piped and pasted."""

from __future__ import annotations

import sys
from collections.abc import Sequence

MOST_COLUMNS = 200


def print_table(title: str | None, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells, under a title if there is one; the first column is a name, the others are figures."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else MOST_COLUMNS
    Console(highlight=False, width=width).print(table)
