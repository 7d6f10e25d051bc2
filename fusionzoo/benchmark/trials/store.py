"""Results of a unit on disk: written whole or not at all, checked when read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4
from zipfile import BadZipFile

import numpy as np

from ..bench import Unit

Row = dict[str, Any]  # of results.parquet


class Cell(NamedTuple):
    """What came of one seed."""

    seed: int
    rows: list[Row]  # a line per subset, shuffled modality and damage
    facts: dict[str, Any]
    logits: np.ndarray  # (N, K) of the complete test split
    val_logits: np.ndarray


# ---- stored cells


def save(path: Path, unit: Unit, cells: Sequence[Cell]) -> None:
    """Write a unit's cells: whole, or not at all."""
    arrays: dict[str, np.ndarray] = {}
    for number, cell in enumerate(cells):
        arrays[f"logits{number}"], arrays[f"val{number}"] = cell.logits, cell.val_logits
    told = [[cell.seed, cell.rows, cell.facts] for cell in cells]
    about = json.dumps({"unit": unit._asdict(), "cells": told})
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.stem}.part-{uuid4().hex[:8]}")
    with part.open("wb") as file:
        np.savez_compressed(file, about=np.array(about), allow_pickle=False, **arrays)
    part.replace(path)


def load(path: Path) -> list[Cell] | None:
    """Read a unit's cells; None where there are none, or where the file is damaged."""
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as found:
            told = json.loads(str(found["about"]))["cells"]
            return [
                Cell(seed, rows, facts, found[f"logits{number}"], found[f"val{number}"])
                for number, (seed, rows, facts) in enumerate(told)
            ]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        print(f"warning: {path} is damaged ({error}); its cells are run again")
        path.unlink()
        return None
