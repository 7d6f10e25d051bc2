"""Run a recipe over its seeds: `python perf/recipes.py digits` writes results/digits.csv.

`digits` is `python train.py` as it stands, `stamps` is configs/stamps.yaml (it needs
`fusionzoo data fetch stamps`). One row per seed: test accuracies, and what made them.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

ROOT = Path(__file__).parents[1]


class Recipe(NamedTuple):
    """The flags of train.py, and how often it is run."""

    seeds: int
    flags: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


RECIPES = {
    "digits": Recipe(3, environment=(("OMP_NUM_THREADS", "1"),)),
    "stamps": Recipe(5, ("--config", "configs/stamps.yaml")),
}


def main() -> None:
    """Train every seed, then write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--seeds", type=int, help="fewer or more than the table has")
    parser.add_argument("--out", type=Path, help="CSV file")
    parsed = parser.parse_args()
    recipe = RECIPES[parsed.recipe]
    rows = [measure(recipe, seed) for seed in range(parsed.seeds or recipe.seeds)]
    out = parsed.out or ROOT / "results" / f"{parsed.recipe}.csv"
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {out}")


def measure(recipe: Recipe, seed: int) -> dict[str, Any]:
    """Train with one seed; return its row."""
    command = ["train.py", *recipe.flags, "--seed", str(seed)]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, *command, "--log", "none", "--out", f"{folder}/run"],
            cwd=ROOT,
            env={**os.environ, **dict(recipe.environment)},
            check=True,
        )
        metrics = json.loads(Path(folder, "run", "metrics.json").read_text())
        settings = yaml.safe_load(Path(folder, "run", "config.yaml").read_text())
    alone = {f"{name}_alone": x["accuracy"] for name, x in metrics["unimodal"].items()}
    fused = metrics["test"]["accuracy"]
    figures = {
        **alone,
        "fused": fused,
        "gain_over_best_alone": fused - max(alone.values()),
        "fused_macro_f1": metrics["test"]["macro_f1"],
    }
    variables = [f"{name}={value}" for name, value in recipe.environment]
    return {
        "fusion": settings["fusion"]["name"],
        "seed": seed,
        **{name: round(x, 4) for name, x in figures.items()},
        "best_epoch": metrics["best_epoch"],
        "commit": commit(),
        "hardware": hardware(metrics["environment"]["threads"]),
        "command": " ".join([*variables, "python", *command]),
    }


def commit() -> str:
    """Return the revision of the working tree, marked where it has changes."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout[:-1]


def hardware(threads: int) -> str:
    """Describe this machine in a few words."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{os.cpu_count()} cores {platform.machine()}, {gpu}, threads: {threads}"


if __name__ == "__main__":
    main()
