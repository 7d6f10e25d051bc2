"""What commands print: tables, columns, how they were called, closed pipes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from textwrap import fill
from typing import ParamSpec

P = ParamSpec("P")
SCRIPTS = ("train.py", "embed.py", "benchmark.py")
FILE_WIDTH = 120  # columns of a table that is not printed to a terminal
BROKEN_PIPE = 141  # exit code that shells report after SIGPIPE


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; its first column never breaks. A pipe or file gets it in full width."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, name in enumerate(header):
        table.add_column(name, no_wrap=not number)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(table)


def print_columns(rows: Sequence[Sequence[str]], width: int = 96) -> None:
    """Print rows in aligned columns, of which the last is wrapped."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    margin = 2 + sum(widths) + 2 * len(widths)
    indent = margin if margin <= width - 40 else 8
    for row in rows:
        padded = [f"{cell:<{size}}" for cell, size in zip(row, widths, strict=False)]
        line = "  ".join(["", *padded, row[-1]])
        print(fill(line, width, subsequent_indent=" " * indent, break_on_hyphens=False))


def add_plugins_option(parser: argparse.ArgumentParser, default: str = argparse.SUPPRESS) -> None:
    """Add --plugins; an action leaves it to its command unless it stands after the action."""
    parser.add_argument(
        "--plugins", default=default, metavar="FILE.py,MODULE", help="components of your own"
    )


def command_line(name: str) -> str:
    """Return the command line of command `name`, in the style in which this process was started.

    `python embed.py` beside `python train.py`, `fusionzoo embed` after the console command.
    """
    started = Path(sys.argv[0])
    if started.name == "__main__.py":
        return f"python -m fusionzoo {name}"
    script = started.name in SCRIPTS and started.parent.name != "scripts"
    return f"python {started.with_name(name)}.py" if script else f"fusionzoo {name}"


def quiet_pipe(main: Callable[P, int]) -> Callable[P, int]:
    """Exit without a traceback if the output pipe is closed: `... --help | head`."""

    @wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            code = main(*args, **kwargs)
            sys.stdout.flush()
        except BrokenPipeError:
            # Python flushes stdout at exit; send that to the null device.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE
        return code

    return run
