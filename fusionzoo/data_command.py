"""`fusionzoo data`: list, check and show data sets, fetch those to download, convert others'."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .console import add_plugins_option, print_table
from .errors import FusionZooError
from .plugins import load_plugins


def add_data_command(commands: Any) -> None:
    """Add the command and its actions to a parser's subcommands."""
    data = commands.add_parser("data", help="list, fetch, convert, check or show data sets")
    data.set_defaults(run=list_data)
    add_plugins_option(data, "")
    actions = data.add_subparsers(metavar="action")
    every = actions.add_parser("list", help="the data sets")
    fetch = actions.add_parser("fetch", help="download a data set")
    fetch.add_argument("name", nargs="?", help="the data set; without it, those there are")
    fetch.add_argument("--root", help="folder to put it in; default: the cache")
    fetch.set_defaults(run=fetch_data)
    # `cli.main` runs these, which take settings of data sets as train.py does.
    actions.add_parser("convert", help="write shards: `fusionzoo data convert --help`")
    actions.add_parser("check", help="find faults and leaks: `fusionzoo data check --help`")
    actions.add_parser("show", help="write a contact sheet: `fusionzoo data show --help`")
    for action in (every, fetch):
        add_plugins_option(action)


def list_data(parsed: argparse.Namespace) -> None:
    """Print the data sets and their settings."""
    from .datasets import DATASETS

    load_plugins(parsed.plugins)
    rows = [DATASETS[name] for name in DATASETS]
    table = [(row.name, row.summary, ", ".join(row.parameters)) for row in rows]
    print_table("Data sets", ("name", "what it holds", "settings (--data.<setting>)"), table)


def fetch_data(parsed: argparse.Namespace) -> None:
    """Download a data set, or print which there are to download."""
    from .datasets import DATASETS

    load_plugins(parsed.plugins)
    names = [name for name in DATASETS if DATASETS[name].fetch is not None]
    if parsed.name is None:
        rows = [(name, DATASETS[name].summary) for name in names]
        print_table("Data sets to download", ("name", "what it holds"), rows)
        return
    fetch = DATASETS[parsed.name].fetch
    if fetch is None:
        raise FusionZooError(
            f"data set {parsed.name!r} is not downloaded; those that are: {', '.join(names)}"
        )
    print(f"ready: {fetch(Path(parsed.root) if parsed.root else None)}")
