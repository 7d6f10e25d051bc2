"""Every training strategy beside plain training, with a dominant modality.

`python perf/balance.py` writes results/balance.csv: one row for each strategy and seed.

Data: `digits`, whose modalities are damaged so that none suffices. Text is made dominant by speed,
not by content: its encoder learns at rate 0.1, those of image and audio at a tenth of it, so that
the fusion can rely on text before they have learned anything. Everything else is the same for
all: fusion `mean` (the only kind all strategies can wrap: a linear head that modalities share),
SGD with momentum (Adam divides most of a modulated gradient's size out again), the same epochs, the
last of which counts. Nothing is tuned or chosen; strategies have their defaults, but for what a
short run forces (SETTINGS). The teachers of `umt` are trained the same way, alone, and their time
counts as the strategy's, as do the copies of `gblend`.

Columns: accuracy on the test split of the fusion with everything (`fused`), of the fusion with one
modality alone (`image_masked` ...), of a small head on that modality's features, whose gradient
does not reach the encoder (`image_head` ...); seconds of training. A second start goes on where
the first ended.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import torch
from _cells import Cell, run_all

from fusionzoo import create_dataset
from fusionzoo.config import RunConfig, from_tree
from fusionzoo.datasets import PairedDataset
from fusionzoo.distributed.process_group import World, seed_everything
from fusionzoo.structures import StepContext
from fusionzoo.training.balance import BALANCE
from fusionzoo.training.build import build_objective
from fusionzoo.training.data import build_loader, chunks
from fusionzoo.training.evaluate import evaluate
from fusionzoo.training.optim.optimizers import build_optimizer, set_rates
from fusionzoo.training.optim.param_groups import param_groups
from fusionzoo.training.optim.schedules import phased
from fusionzoo.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
NAMES = ("image", "text", "audio")
SETTINGS: dict[str, dict[str, Any]] = {"reconboost": {"epochs": 1, "rectify": 1}}
FIGURES = ("fused", *(f"{n}_{how}" for how in ("masked", "head") for n in NAMES), "seconds")
ALONE = World()


def fit(dataset: PairedDataset, cell: Cell, balance: str, settings: dict[str, Any]) -> Trainer:
    """Train as train.py does, and keep the last epoch."""
    rates = {"image": 0.01, "audio": 0.01}
    tree = {
        "balance": balance,
        "balance_settings": {balance: settings} if settings else {},
        "data": {"name": "digits"},
        "encoders": dataset.default_encoders,
        "fusion": {"name": "mean", "dim": 64},
        "optim": {
            "name": "sgd",
            "lr": 0.1,
            "modality_lr": {n: rate for n, rate in rates.items() if n in dataset.modalities},
            "weight_decay": 1e-4,
        },
        "train": {"epochs": cell["epochs"], "batch_size": 32, "num_workers": 0},
        "seed": cell["seed"],
    }
    cfg = from_tree(RunConfig, tree)
    seed_everything(cfg.seed)
    splits = {name: dataset.split(name) for name in ("train", "val")}
    objective, _ = build_objective(cfg, splits["train"])
    groups = param_groups(objective.model, objective.heads, cfg.optim, objective.balance)
    trainer = Trainer(objective, build_optimizer(groups, cfg.optim), cfg, ALONE)
    loaders = {
        name: build_loader(part, objective.model.collate(name == "train"), cfg, ALONE, name)
        for name, part in splits.items()
    }
    steps = len(loaders["train"])
    plan = phased(cfg.optim, trainer.freeze_plan.phases, cfg.train.epochs * steps, steps)
    step = 0
    for epoch in range(cfg.train.epochs):
        trainer.begin_epoch(loaders, StepContext(step, epoch, plan(step)[0]))
        for batches in chunks(loaders["train"], 1, epoch):
            phase, factors = plan(step)
            set_rates(trainer.optimizer, factors)
            trainer.step(batches, StepContext(step, step / steps, phase))
            step += 1
    return trainer


def measure(cell: Cell) -> dict[str, float]:
    """Train with one strategy, and test the fusion whole and by parts."""
    dataset = create_dataset("digits", samples=cell["samples"])
    name, settings = cell["strategy"], SETTINGS.get(cell["strategy"], {})
    began = time.perf_counter()
    if name == "umt":
        teachers = {}
        for modality in dataset.modalities:
            data = create_dataset("digits", samples=cell["samples"], modalities=[modality])
            model = fit(data, cell, "", {}).module.model
            teachers[modality] = str(model.save(ROOT / "runs" / "balance" / _label(cell, modality)))
        settings = {"teachers": teachers}
    trainer = fit(dataset, cell, "" if name == "plain" else name, settings)
    seconds = time.perf_counter() - began
    test = dataset.split("test")
    loader = build_loader(test, trainer.module.model.collate(), trainer.cfg, ALONE, "test")
    found = evaluate(trainer, loader)
    figures = {"fused": found["accuracy"], "seconds": seconds}
    figures |= {f"{m}_head": own["accuracy"] for m, own in found["unimodal"].items()}
    for column, modality in enumerate(dataset.modalities):
        figures[f"{modality}_masked"] = masked(trainer, loader, column)
    return figures


@torch.no_grad()
def masked(trainer: Trainer, loader: Any, column: int) -> float:
    """Return the fusion's accuracy where only one modality is present."""
    trainer.module.eval()
    right = count = 0
    for batch in loader:
        present = torch.zeros_like(batch.present)
        present[:, column] = batch.present[:, column]
        answer = trainer.module.model(batch._replace(present=present)).logits.argmax(-1)
        right, count = right + int((answer == batch.target).sum()), count + len(answer)
    return right / count


def _label(cell: Cell, modality: str) -> str:
    return f"{modality}-{cell['seed']}-{cell['epochs']}-{cell['samples']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--samples", type=int, default=1797)
    parser.add_argument("--only", nargs="*", help="some strategies, `plain` among them")
    parser.add_argument("--out", default=str(ROOT / "results" / "balance.csv"))
    flags = parser.parse_args()
    names = flags.only or ["plain", *BALANCE]
    same = {"epochs": flags.epochs, "samples": flags.samples}
    cells = [{"strategy": n, "seed": s, **same} for s in range(flags.seeds) for n in names]
    found = run_all(cells, measure, ROOT / "runs" / "balance.jsonl", flags.jobs)
    wanted = [(c, r) for c, r in found if {k: c[k] for k in same} == same]
    wanted.sort(key=lambda pair: (["plain", *BALANCE].index(pair[0]["strategy"]), pair[0]["seed"]))
    with Path(flags.out).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["strategy", "seed", "epochs", *FIGURES])
        for cell, result in wanted:
            figures = [f"{result[key]:.4f}" for key in FIGURES[:-1]]
            row = [cell["strategy"], cell["seed"], cell["epochs"], *figures]
            writer.writerow([*row, f"{result['seconds']:.1f}"])
    print(f"wrote {flags.out}")


if __name__ == "__main__":
    main()
