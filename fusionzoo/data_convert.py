"""`fusionzoo data convert`: turn a pickle of features into a manifest and arrays."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_convert_action(actions: Any) -> None:
    """Add the action to the subcommands of `fusionzoo data`."""
    convert = actions.add_parser(
        "convert", help="turn a pickle of features (MMSA) into a manifest; nothing in it is run"
    )
    convert.add_argument("source", metavar="SOURCE.pkl", help="{split: {key: values}}, as MMSA's")
    convert.add_argument("out", metavar="OUT", help="folder of manifest.parquet and the arrays")
    convert.add_argument(
        "--nonfinite",
        choices=("raise", "zero"),
        default="raise",
        help="features that are infinite or NaN: end with an error, or write zeros",
    )
    convert.set_defaults(run=convert_data)


def convert_data(parsed: argparse.Namespace) -> None:
    """Convert, and print what was written."""
    from .datasets.convert_pickle import convert_pickle

    converted = convert_pickle(Path(parsed.source), Path(parsed.out), nonfinite=parsed.nonfinite)
    print("\n".join(converted.notes))
    print(f"wrote   {converted.manifest}")
    print(f"next    python train.py --data.name manifest --data.root {converted.manifest}")
