"""Every fusion on six views of handwritten numerals: `python perf/mfeat.py`.

Ten seeds; each draws its own 80/20 split, weights and order. 20 epochs, the last one counts:
nothing is tuned or chosen. Writes results/mfeat.csv (mean and deviation); about an hour on two
cores. A second start goes on where the first ended. Needs `fusionzoo data fetch mfeat`.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path

from _cells import Cell, run_all, train

from fusionzoo import create_dataset, fusion_info, list_fusions
from fusionzoo.datasets.mfeat import VIEWS

ROOT = Path(__file__).parents[1]
# What grows with the power or the square of the number of views is made smaller for six of them.
SETTINGS: dict[str, dict[str, object]] = {
    "block": {"width": 320, "chunks": 4, "rank": 5},
    "i2moe": {"max_modalities": 6},
    "mult": {"num_layers": 1, "memory_layers": 1},
    "multiplicative": {"order": "pairwise"},
    "mutan": {"width": 160},
    "tfn": {"proj_dim": 4},
}


def accuracy(cell: Cell) -> float:
    """Train one strategy, or one view alone; return the accuracy on the 400 test samples."""
    alone = cell["fusion"].removeprefix("alone:")
    views = [alone] if alone in VIEWS else None
    dataset = create_dataset("mfeat", split_seed=cell["seed"], val=0.0, modalities=views)
    name = "concat" if views else cell["fusion"]
    settings = {
        "data": {"name": "mfeat"},
        "fusion": {"name": name, "dim": 64, **SETTINGS.get(name, {})},
        "train": {"epochs": 20, "batch_size": 128, "unimodal": False},
        "optim": {"lr": 2e-3},
        "seed": cell["seed"],
    }
    return train(dataset, settings, dataset.split("test"))


def known_rows(path: Path) -> dict[str, list[str]]:
    """Return the rows of an earlier table, by strategy."""
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        return {row[0]: row for row in csv.reader(file)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", nargs="*", help="some strategies; the others' rows stay as known")
    parser.add_argument("--out", default=str(ROOT / "results" / "mfeat.csv"))
    flags = parser.parse_args()
    names = [*(f"alone:{view}" for view in VIEWS), *list_fusions()]
    cells = [{"fusion": n, "seed": s} for s in range(flags.seeds) for n in flags.only or names]
    results = run_all(cells, accuracy, ROOT / "runs" / "mfeat.jsonl", flags.jobs)
    known = known_rows(Path(flags.out))
    with Path(flags.out).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["fusion", "family", "seeds", "mean", "deviation", "least", "settings"])
        for name in names:
            accuracies = [result for cell, result in results if cell["fusion"] == name]
            family = "alone" if name.startswith("alone:") else fusion_info(name).family
            settings = " ".join(f"{k}={v}" for k, v in SETTINGS.get(name, {}).items())
            if not accuracies:
                writer.writerows([known[name]] if name in known else [])
                continue
            spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
            figures = [f"{x:.4f}" for x in (statistics.mean(accuracies), spread, min(accuracies))]
            writer.writerow([name, family, len(accuracies), *figures, settings])
    print(f"wrote {flags.out}")


if __name__ == "__main__":
    main()
