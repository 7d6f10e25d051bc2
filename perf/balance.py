"""Every training strategy beside plain training, with a dominant modality.

`python perf/balance.py` writes a row for each strategy and seed, with each of two imbalances:

- `rate` (results/balance.csv): `digits`, whose modalities are damaged so that none suffices. Text
  is made dominant by speed, not by content: its encoder learns at rate 0.1, those of image and
  audio at a tenth of it, so that the fusion can rely on text before they have learned anything.
- `content` (results/balance_content.csv): perf/situations.py (starved), where `a` shows the class
  plainly in 80 % of the samples, and `b` shows it in the others, but as a difference modulo 4 that
  takes an encoder longer to learn than `a` leaves it gradient for. All rates are the same.

Everything else is the same for all: fusion `mean` (the only kind all strategies can wrap: a linear
head that modalities share), SGD with momentum (Adam divides most of a modulated gradient's size out
again), the same epochs, the last of which counts. Nothing is tuned or chosen; strategies have their
defaults, but for what a short run forces (SETTINGS). The teachers of `umt` are trained the same
way, alone, and their time counts as the strategy's, as do the copies of `gblend`.

`comm` is left out: it compares augmented views, and augmentation would help it on its own.

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
from typing import Any, NamedTuple

import situations  # noqa: F401 (registers the data set)
import torch
from _cells import Cell, run_all

from fusionzoo import create_dataset
from fusionzoo.config import RunConfig, from_tree
from fusionzoo.datasets import PairedDataset
from fusionzoo.machine.devices import seed_everything
from fusionzoo.machine.distributed import World
from fusionzoo.structures import StepContext
from fusionzoo.training.balance import BALANCE
from fusionzoo.training.build import build_objective
from fusionzoo.training.fit import evaluate
from fusionzoo.training.loaders import build_loader, chunks
from fusionzoo.training.optim import build_optimizer, param_groups, set_rates
from fusionzoo.training.schedules import phased
from fusionzoo.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
SETTINGS: dict[str, dict[str, Any]] = {
    "reconboost": {"epochs": 1, "rectify": 1},
    "opm": {"start": 1},
    "relearn": {"every": 2},
}
NEEDS_VIEWS = "comm"  # two augmented views of a sample: left out, as plain training has one


class Imbalance(NamedTuple):
    """Data in which one modality dominates the others, and how to train on it."""

    data: dict[str, Any]
    modalities: tuple[str, ...]
    epochs: int
    modality_lr: dict[str, float]
    encoder: dict[str, Any] | None  # instead of each modality's own
    out: str

    @property
    def figures(self) -> tuple[str, ...]:
        """The columns of figures in its table."""
        return ("fused", *(f"{n}_{how}" for how in ("masked", "head") for n in self.modalities))


IMBALANCES = {
    "rate": Imbalance(
        {"name": "digits", "samples": 1797},
        ("image", "text", "audio"),
        epochs=6,
        modality_lr={"image": 0.01, "audio": 0.01},
        encoder=None,
        out="balance.csv",
    ),
    "content": Imbalance(
        {"name": "situations", "situation": "starved", "samples": 1000, "width": 64},
        ("a", "b"),
        epochs=15,
        modality_lr={},
        encoder={"name": "vector/mlp", "dim": 64},
        out="balance_content.csv",
    ),
}
ALONE = World()


def fit(dataset: PairedDataset, cell: Cell, balance: str, settings: dict[str, Any]) -> Trainer:
    """Train as train.py does, and keep the last epoch."""
    imbalance = IMBALANCES[cell["imbalance"]]
    rates = imbalance.modality_lr
    encoders = {
        name: {**settings, **(imbalance.encoder or {})}
        for name, settings in dataset.default_encoders.items()
    }
    tree = {
        "balance": balance,
        "balance_settings": {balance: settings} if settings else {},
        "data": imbalance.data,
        "encoders": encoders,
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
        name: build_loader(part, objective.model.collate(train=name == "train"), cfg, ALONE, name)
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
    """Train with one strategy; test the fusion with all modalities and with each one alone."""
    settings_of_data = {**IMBALANCES[cell["imbalance"]].data, "samples": cell["samples"]}
    if cell["imbalance"] == "content":
        settings_of_data["seed"] = cell["seed"]  # planted: every seed draws its own
    dataset = create_dataset(**settings_of_data)
    name, settings = cell["strategy"], SETTINGS.get(cell["strategy"], {})
    began = time.perf_counter()
    if name == "umt":
        teachers = {}
        for modality in dataset.modalities:
            data = create_dataset(**settings_of_data, modalities=[modality])
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
    return f"{cell['imbalance']}-{modality}-{cell['seed']}-{cell['epochs']}-{cell['samples']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--imbalance", nargs="*", choices=IMBALANCES, default=list(IMBALANCES))
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="instead of each imbalance's own")
    parser.add_argument("--samples", type=int, help="instead of each imbalance's own")
    parser.add_argument("--only", nargs="*", help="some strategies, `plain` among them")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder")
    flags = parser.parse_args()
    names = flags.only or ["plain", *(name for name in BALANCE if name != NEEDS_VIEWS)]
    for key in flags.imbalance:
        imbalance = IMBALANCES[key]
        same = {
            "imbalance": key,
            "epochs": flags.epochs or imbalance.epochs,
            "samples": flags.samples or imbalance.data["samples"],
        }
        cells = [{"strategy": n, "seed": s, **same} for s in range(flags.seeds) for n in names]
        results = run_all(cells, measure, ROOT / "runs" / "balance.jsonl", flags.jobs)
        selected = [(c, r) for c, r in results if {k: c.get(k) for k in same} == same]
        write(flags.out / imbalance.out, imbalance, selected)


def write(path: Path, imbalance: Imbalance, results: list[tuple[Cell, Any]]) -> None:
    """Write a row for each strategy and seed."""
    order = ["plain", *BALANCE]
    results.sort(key=lambda pair: (order.index(pair[0]["strategy"]), pair[0]["seed"]))
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["strategy", "seed", "epochs", *imbalance.figures, "seconds"])
        for cell, result in results:
            figures = [f"{result[key]:.4f}" for key in imbalance.figures]
            row = [cell["strategy"], cell["seed"], cell["epochs"], *figures]
            writer.writerow([*row, f"{result['seconds']:.1f}"])
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
