"""`fusionzoo zoo check`: which component, and what it is built with. Imports nothing heavy."""

from __future__ import annotations

import argparse

KINDS = {  # what an option names
    "encoder": "an encoder",
    "data": "a data set",
    "balance": "a training strategy",
    "objective": "an objective",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of the subcommand."""
    targets = parser.add_mutually_exclusive_group(required=True)
    words = "a fusion: NAME, module:Class or path/to/file.py:Class"
    targets.add_argument("fusion", nargs="?", metavar="TARGET", help=words)
    for kind, name in KINDS.items():
        targets.add_argument(f"--{kind}", metavar="TARGET", help=f"{name} instead")
    words = "settings of its constructor, say pretrained=false size=64"
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help=words)


def run(parsed: argparse.Namespace) -> int:
    """Check the component; return 0 if every check passes."""
    from fusionzoo.config.flags import parse_flags
    from fusionzoo.plugins import load_plugins

    from .runner import main_check

    load_plugins(parsed.plugins)
    kind = next((kind for kind in KINDS if getattr(parsed, kind)), "fusion")
    settings = parse_flags([f"--{setting}" for setting in parsed.set])
    return main_check(getattr(parsed, kind), kind, settings)
