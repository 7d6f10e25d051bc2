"""Results of the benchmark's jobs on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from fusionzoo.files import replacing
from fusionzoo.training import run_folder

from .bench import GOES_ON, Job
from .train import Weights

Row = dict[str, Any]  # of results.parquet


class SeedResult(NamedTuple):
    """The result of one candidate on one fold with one seed; a job has one for each seed."""

    seed: int
    rows: list[Row]  # one per subset, broken pairing and corruption
    facts: dict[str, Any]  # best epoch, loss, costs
    logits: np.ndarray  # (N, K) of the whole test split
    val_logits: np.ndarray
    scores: np.ndarray  # (U, N) of each subset of the modalities, the full one first
    val_losses: np.ndarray | None = None  # (N,) as in FitResult; linear baselines have none
    weights: Weights | None = None  # of the tested model, until damaged samples are tested too


def folder_of(out: str) -> Path:
    """Return the folder of the stored results of jobs in the folder of a report."""
    return Path(out) / "cells"


def weights_path(path: Path) -> Path:
    """Return the file of the tested models' weights: there until damaged samples are tested."""
    return path.with_suffix(".pt")


def save(path: Path, job: Job, results: Sequence[SeedResult]) -> None:
    """Write the results of a job, completely or not at all."""
    weights = [result.weights for result in results if result.weights is not None]
    if weights:
        run_folder.write({"weights": weights}, weights_path(path), goes_on=GOES_ON)
    arrays: dict[str, np.ndarray] = {}
    for number, result in enumerate(results):
        arrays[f"logits{number}"], arrays[f"val{number}"] = result.logits, result.val_logits
        arrays[f"scores{number}"] = result.scores
        if result.val_losses is not None:
            arrays[f"losses{number}"] = result.val_losses
    entries = [[result.seed, result.rows, result.facts] for result in results]
    metadata = json.dumps({"unit": job._asdict(), "cells": entries})
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, about=np.array(metadata), allow_pickle=False, **arrays)
    if not weights:
        weights_path(path).unlink(missing_ok=True)


def load(path: Path) -> list[SeedResult] | None:
    """Read the results of a job; None if there are none, or if the file is damaged."""
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            entries = json.loads(str(arrays["about"]))["cells"]
            names = ("logits", "val", "scores")
            return [
                SeedResult(*entry, *(arrays[f"{name}{number}"] for name in names))._replace(
                    val_losses=arrays.get(f"losses{number}")
                )
                for number, entry in enumerate(entries)
            ]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        print(f"warning: {path} is damaged ({error}); its job is run again")
        path.unlink()
        return None
