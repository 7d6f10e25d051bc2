"""Results of trials on disk: files are written completely or not at all, and checked when read.

The files keep the names of the first version, `cells/*.npz` and the key `cells`: a cell is a trial.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from fusionzoo.files import replacing

from ..bench import Unit

Row = dict[str, Any]  # of results.parquet


class TrialResult(NamedTuple):
    """The result of one trial: one strategy on one fold with one seed."""

    seed: int
    rows: list[Row]  # one per subset, broken pairing and corruption
    facts: dict[str, Any]  # best epoch, loss, costs
    logits: np.ndarray  # (N, K) of the whole test split
    val_logits: np.ndarray
    scores: np.ndarray  # (U, N) of each subset of the modalities, the full one first
    # (C, n) of the damaged samples: undamaged, then in the order of `rows` with a lost part each.
    lost_scores: np.ndarray | None = None


def folder_of(out: str) -> Path:
    """Return the folder of stored trials in the folder of a report."""
    return Path(out) / "cells"


def save(path: Path, unit: Unit, results: Sequence[TrialResult]) -> None:
    """Write the results of a unit, completely or not at all."""
    arrays: dict[str, np.ndarray] = {}
    for number, result in enumerate(results):
        arrays[f"logits{number}"], arrays[f"val{number}"] = result.logits, result.val_logits
        arrays[f"scores{number}"] = result.scores
        if result.lost_scores is not None:
            arrays[f"lost{number}"] = result.lost_scores
    entries = [[result.seed, result.rows, result.facts] for result in results]
    metadata = json.dumps({"unit": unit._asdict(), "cells": entries})
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, many_writers=True) as partial, partial.open("wb") as file:
        np.savez_compressed(file, about=np.array(metadata), allow_pickle=False, **arrays)


def load(path: Path) -> list[TrialResult] | None:
    """Read the results of a unit; None if there are none, or if the file is damaged."""
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            entries = json.loads(str(arrays["about"]))["cells"]
            names = ("logits", "val", "scores")
            results = [
                TrialResult(*entry, *(arrays[f"{name}{number}"] for name in names))
                for number, entry in enumerate(entries)
            ]
            return [  # trials of earlier versions lack these scores
                result._replace(lost_scores=arrays.get(f"lost{number}"))
                for number, result in enumerate(results)
            ]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        print(f"warning: {path} is damaged ({error}); its trials are run again")
        path.unlink()
        return None
