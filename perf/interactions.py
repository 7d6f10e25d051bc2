"""Accuracy of each fusion on tasks with known interactions: `python perf/interactions.py`.

Every strategy on every task of the data set `interactions`, with two and three modalities, against
the best possible accuracy (1 here: no label is flipped) and the best that its family can reach.
Writes results/interactions.csv; about 20 minutes on two cores. A second start goes on where the
first ended.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from _cells import Cell, run_all, train

from fusionzoo import create_dataset, fusion_info, list_fusions
from fusionzoo.datasets.builtin.interactions import TASKS, interactions_bayes_accuracy

ROOT = Path(__file__).parents[1]
DEGREE_TWO = {"film"}  # with three modalities its formula holds products of two, not of three


def accuracy(cell: Cell) -> float:
    """Train one strategy on one task; return its accuracy on the 600 samples not trained on."""
    count = cell["modalities"]
    common = {"task": cell["task"], "num_modalities": count, "samples": 1500, "seed": 0}
    dataset = create_dataset("interactions", **common)
    unseen = [row for row, split in enumerate(dataset.split_names) if split != "train"]
    settings = {
        "data": {"name": "interactions"},
        "fusion": {"name": cell["fusion"], "dim": 32},
        "train": {"epochs": 20, "batch_size": 64, "unimodal": False},
        "optim": {"lr": 2e-3},
        "seed": cell["seed"],
    }
    return train(dataset, settings, dataset.subset(unseen))


def best_of_family(name: str, task: str, modalities: int) -> float:
    """Return the best accuracy that the strategy's formula can express, at most the Bayes optimum.

    Cross-entropy of a sum of unimodal terms is least at chance on `xor`.
    """
    deaf = not fusion_info(name).synergy or (name in DEGREE_TWO and modalities > 2)
    return 0.5 if task == "xor" and deaf else interactions_bayes_accuracy(task, modalities)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", default=str(ROOT / "results" / "interactions.csv"))
    flags = parser.parse_args()
    cells = [
        {"fusion": name, "task": task, "modalities": count, "seed": 0}
        for task in TASKS
        for count in (2, 3)
        for name in list_fusions()
    ]
    results = run_all(cells, accuracy, ROOT / "runs" / "interactions.jsonl", flags.jobs)
    with Path(flags.out).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["fusion", "family", "task", "modalities", "accuracy", "family_best", "bayes"]
        )
        for cell, reached in sorted(results, key=lambda pair: list(map(str, pair[0].values()))):
            name, task, count = cell["fusion"], cell["task"], cell["modalities"]
            best, bayes = (
                best_of_family(name, task, count),
                interactions_bayes_accuracy(task, count),
            )
            row = [name, fusion_info(name).family, task, count, f"{reached:.3f}", best, bayes]
            writer.writerow(row)
    print(f"wrote {flags.out}")


if __name__ == "__main__":
    main()
