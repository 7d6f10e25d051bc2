"""Measure what `dynmm` can save at most: `python perf/branches.py`.

A prediction of one batch (no gradients) in which the gate sends every sample through the cheapest
branch, beside one that runs all branches (`hard: false`), in turn, for the whole model and for the
fusion alone. The gate reads every modality, so both run all encoders. Two models: `digits` with
its default encoders, and configs/stamps.yaml (needs `fusionzoo data fetch stamps`). Writes
results/branches.csv; under a minute on two cores, with nothing beside it.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import torch
from _timing import ratio
from recipes import commit, hardware

from fusionzoo.config import RunConfig, from_args
from fusionzoo.model import FusionModel
from fusionzoo.training.build import build_objective, open_dataset

ROOT = Path(__file__).parents[1]
RECIPES: dict[str, list[str]] = {
    "digits": [],
    "stamps": ["--config", str(ROOT / "configs" / "stamps.yaml")],
}
BATCH = 64


def main() -> None:
    """Write one line for each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "branches.csv")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    facts = {"batch_size": BATCH, "commit": commit(), "hardware": hardware(1)}
    rows = [{"data": name, **measure(name, flags.rounds), **facts} for name in RECIPES]
    with flags.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {flags.out}")


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Return seconds of a prediction through one branch and through all, and what one saves."""
    one, batch = build(name, hard=True)
    all_branches, _ = build(name, hard=False)
    with torch.no_grad():
        one.fusion.get_submodule("gate")[-1].bias[0] += 1e4  # type: ignore[index]
        features = one.encode(batch)
        chosen = one.fusion(features).extra["branch_weights"]
        assert bool((chosen[:, 0] == 1).all()), "a sample left the cheapest branch"
        fusion = ratio(lambda: one.fusion(features), lambda: all_branches.fusion(features), rounds)
        model = ratio(lambda: one(batch), lambda: all_branches(batch), rounds)
    saved = fusion["bare_s"] - fusion["ours_s"]
    return {
        "fusion_one_ms": f"{1000 * fusion['ours_s']:.3f}",
        "fusion_all_ms": f"{1000 * fusion['bare_s']:.3f}",
        "model_one_ms": f"{1000 * model['ours_s']:.1f}",
        "model_all_ms": f"{1000 * model['bare_s']:.1f}",
        "saved_share_of_model": f"{saved / model['bare_s']:.5f}",
    }


def build(name: str, *, hard: bool) -> tuple[FusionModel, Any]:
    """Return an untrained model with `dynmm`, and a batch of its training samples."""
    arguments = [*RECIPES[name], "--fusion.name", "dynmm", "--fusion.hard", json.dumps(hard)]
    cfg = from_args(RunConfig, arguments)
    dataset = open_dataset(cfg.data).split("train")
    if not cfg.encoders:
        defaults = ["--encoders", json.dumps(dataset.default_encoders)]
        cfg = from_args(RunConfig, [*arguments, *defaults])
    torch.manual_seed(0)
    model = build_objective(cfg, dataset)[0].model.eval()
    return model, model.collate(train=False)([dataset[row] for row in range(BATCH)])


if __name__ == "__main__":
    main()
