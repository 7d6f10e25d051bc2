"""Compare with the paper of `tmc` on six views of handwritten numerals: `python perf/mfeat.py`.

Han et al. (2021, arXiv:2102.02051) report 0.9851 for TMC. As there, each of ten seeds draws its own
80/20 split; no validation split, the last epoch counts, nothing is tuned. 20 and 50 epochs, beside
the best view alone, `late_mean`, `concat` and `mult`. Writes results/mfeat.csv; a quarter of an
hour on two cores. A second start goes on where the first ended (delete runs/mfeat.jsonl after a
change to the code). Needs `fusionzoo data fetch mfeat`.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
from pathlib import Path

from _cells import Cell, run_all, train

from fusionzoo import create_dataset

ROOT = Path(__file__).parents[1]
BEST_VIEW = "fac"
FUSIONS: dict[str, dict[str, object]] = {  # and settings
    "late_mean": {},
    "concat": {},
    "tmc": {},
    "mult": {"num_layers": 1, "memory_layers": 1},  # there are 30 pairs of views
}
EPOCHS = (20, 50)
COLUMNS = ("fusion", "epochs", "seeds", "mean", "deviation", "least")


def accuracy(cell: Cell) -> float:
    """Train one fusion, or the best view alone; return the accuracy on the 400 test samples."""
    name = cell["fusion"]
    views = [BEST_VIEW] if name == BEST_VIEW else None
    dataset = create_dataset("mfeat", split_seed=cell["seed"], val=0.0, modalities=views)
    fusion = {"name": "concat"} if views else {"name": name, **FUSIONS[name]}
    settings = {
        "data": {"name": "mfeat"},
        "fusion": {"dim": 64, **fusion},
        "train": {"epochs": cell["epochs"], "batch_size": 128, "unimodal": False},
        "optim": {"lr": 2e-3},
        "seed": cell["seed"],
    }
    return train(dataset, settings, dataset.split("test"))


def main() -> None:
    """Train what is not trained yet, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "mfeat.csv")
    flags = parser.parse_args()
    kinds = list(itertools.product((BEST_VIEW, *FUSIONS), EPOCHS))
    cells = [
        {"fusion": name, "epochs": epochs, "seed": seed}
        for seed in range(flags.seeds)
        for name, epochs in kinds
    ]
    results = run_all(cells, accuracy, ROOT / "runs" / "mfeat.jsonl", flags.jobs)
    with flags.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for name, epochs in kinds:
            scores = [
                x for cell, x in results if (cell["fusion"], cell["epochs"]) == (name, epochs)
            ]
            spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
            figures = (f"{x:.4f}" for x in (statistics.mean(scores), spread, min(scores)))
            writer.writerow([name, epochs, len(scores), *figures])
    print(f"wrote {flags.out}")


if __name__ == "__main__":
    main()
