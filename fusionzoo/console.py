"""A table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; its first column never breaks."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, name in enumerate(header):
        table.add_column(name, no_wrap=not number)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
