"""Does augmentation help? `digits` and `stamps` over three folds, at strength 0, 0.3 and 0.6.

`python perf/augment.py` (`fusionzoo data fetch stamps` first; about 20 minutes on two idle cores)
writes results/augment.csv: a row for each data set and way of training, with the accuracy of the
fusion and of each modality's own head on the test parts of all folds together, and the difference
to plain training with its 95 % interval over the samples (paired; samples of one group together).

All encoders are small and trained from scratch, end to end, with the fusion `concat`, AdamW and the
same number of epochs, the last of which counts: nothing is tuned or chosen. Values are decoded
once, pictures reduced to 48 x 48 pixels and sound to 8 kHz. `mixup` is plain training with
`--balance mixup`. A second start goes on where the first ended.
"""

from __future__ import annotations

import argparse
import csv
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _cells import Cell, run_all

from fusionzoo import create_dataset
from fusionzoo.benchmark.folds import make_folds
from fusionzoo.config import RunConfig, from_tree
from fusionzoo.datasets import PairedDataset
from fusionzoo.distributed.process_group import World, seed_everything
from fusionzoo.encoders._wave import read_at_rate
from fusionzoo.encoders.augment import set_augmentation
from fusionzoo.evaluation.statistics import compare, crossed
from fusionzoo.structures import Audio, StepContext
from fusionzoo.training.build import build_objective
from fusionzoo.training.data import build_loader, chunks
from fusionzoo.training.optim.optimizers import build_optimizer, set_rates
from fusionzoo.training.optim.param_groups import param_groups
from fusionzoo.training.optim.schedules import phased
from fusionzoo.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
ALONE = World()
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "strength 0.3": {"strength": 0.3},
    "strength 0.6": {"strength": 0.6},
    "mixup": {"balance": "mixup"},
}
RATE, SIDE = 8000, 48
SMALL = {"pretrained": False, "channels": [16, 32, 48, 64], "stem_width": 16}
ENCODERS: dict[str, Any] = {
    "image": {"name": "timm/resnet10t", "size": SIDE, "fit": "pad", **SMALL},
    "text": {"name": "chars", "dim": 64, "max_length": 64},
    "audio": {"name": "mel/resnet10t", "rate": RATE, "num_mels": 40, "duration": 2.0, **SMALL},
}
EPOCHS = {"digits": 10, "stamps": 25}


@cache
def opened(name: str, samples: int | None) -> PairedDataset:
    """Return a data set whose values are decoded and small."""
    dataset = create_dataset(name)
    if name == "digits":
        return dataset if samples is None else create_dataset(name, samples=samples)
    if samples is not None:
        dataset = dataset.subset(range(samples))
    values: dict[str, dict[int, Any]] = {name: {} for name in dataset.modalities}
    for position, row in enumerate(dataset.rows.tolist()):
        sample = dataset[position]
        assert sample is not None
        for name, kind in dataset.modalities.items():
            if sample.values[name] is not None:
                values[name][row] = _reduced(kind, sample.values[name])
    return dataset.read_by({name: reduced.__getitem__ for name, reduced in values.items()})


def _reduced(kind: str, value: Any) -> Any:
    from torchvision.transforms.v2.functional import resize

    if kind == "image":
        height, width = value.shape[-2:]
        scale = SIDE / max(height, width)
        size = [max(1, round(height * scale)), max(1, round(width * scale))]
        return resize(value, size, antialias=True)
    if kind == "audio":
        return Audio(read_at_rate(value, RATE, 0, 2 * RATE), RATE)
    return value


def settings_of(cell: Cell, dataset: PairedDataset) -> RunConfig:
    """Return the settings of a run, as train.py would have them."""
    way = WAYS[cell["way"]]
    encoders = {name: ENCODERS[name] for name in dataset.modalities}
    if cell["data"] == "digits":
        encoders = dataset.default_encoders
    tree = {
        "encoders": encoders,
        "fusion": {"name": "concat", "dim": 64},
        "balance": way.get("balance", ""),
        "optim": {"lr": 2e-3},
        "train": {"epochs": cell["epochs"], "batch_size": 32, "num_workers": 0},
        "seed": cell["fold"],
    }
    return from_tree(RunConfig, tree)


def measure(cell: Cell) -> dict[str, Any]:
    """Train on one fold; return which test samples the fusion and each head got right."""
    dataset = opened(cell["data"], cell["samples"])
    fold = make_folds(dataset, cell["folds"], seed=0)[cell["fold"]]
    train_set = dataset.subset(torch.cat([fold.train, fold.val]).sort().values)
    cfg = settings_of(cell, dataset)
    began = time.process_time()
    seed_everything(cfg.seed)
    objective, _ = build_objective(cfg, train_set)
    set_augmentation(objective.model.named_encoders(), WAYS[cell["way"]].get("strength"))
    groups = param_groups(objective.model, objective.heads, cfg.optim, objective.balance)
    trainer = Trainer(objective, build_optimizer(groups, cfg.optim), cfg, ALONE)
    loader = build_loader(train_set, objective.model.collate(train=True), cfg, ALONE, "train")
    epoch_steps = len(loader)
    plan = phased(
        cfg.optim, trainer.freeze_plan.phases, cfg.train.epochs * epoch_steps, epoch_steps
    )
    step = 0
    for epoch in range(cfg.train.epochs):
        for batches in chunks(loader, 1, epoch):
            phase, factors = plan(step)
            set_rates(trainer.optimizer, factors)
            trainer.step(batches, StepContext(step, step / epoch_steps, phase))
            step += 1
    seconds = time.process_time() - began
    return {**tested(trainer, dataset, fold.test), "seconds": seconds}


@torch.no_grad()
def tested(trainer: Trainer, dataset: PairedDataset, rows: torch.Tensor) -> dict[str, Any]:
    """Return by row of the data set whether each answer is right; None where a modality lacks."""
    module, test_set = trainer.module.eval(), dataset.subset(rows)
    loader = build_loader(test_set, module.model.collate(), trainer.cfg, ALONE, "test")
    answers: dict[str, list[Any]] = {"rows": rows.tolist()}
    for batch in loader:
        output = module(batch)
        named = {"fused": output.logits, **output.unimodal_logits}
        for name, logits in named.items():
            right = (logits.argmax(-1) == batch.target).tolist()
            if name != "fused":
                column = list(dataset.modalities).index(name)
                has = batch.present[:, column].tolist()
                right = [x if y else None for x, y in zip(right, has, strict=True)]
            answers.setdefault(name, []).extend(right)
    return answers


def table(results: list[tuple[Cell, Any]], data: str) -> list[dict[str, Any]]:
    """Return a row for each way of training, over all folds."""
    dataset = opened(data, results[0][0]["samples"])
    right: dict[str, np.ndarray] = {}
    rows = []
    folds = len({cell["fold"] for cell, _ in results})
    for way in WAYS:
        mine = [(cell, result) for cell, result in results if cell["way"] == way]
        if not mine:
            continue
        by_row = {
            row: value
            for _, result in mine
            for row, value in zip(result["rows"], result["fused"], strict=True)
        }
        tested_rows = sorted(by_row)
        right[way] = np.array([[float(by_row[row]) for row in tested_rows]])
        groups = [dataset.groups[row] for row in tested_rows] if dataset.groups else None
        interval, _ = crossed(right[way], folds)
        row = {"data": data, "way": way, "folds": folds, "epochs": mine[0][0]["epochs"]}
        row["samples"] = len(tested_rows)
        row |= {"fused": interval.mean, "low": interval.low, "high": interval.high}
        if way != "none" and right["none"].shape == right[way].shape:
            pair = compare(right[way], right["none"], groups=groups, folds=folds)
            row |= {"gain": pair.difference, "gain_low": pair.low, "gain_high": pair.high}
            row["p"] = pair.p
        for modality in dataset.modalities:
            known = [x for _, result in mine for x in result[modality] if x is not None]
            row[modality] = float(np.mean(known))
        row["cpu_seconds"] = float(np.mean([result["seconds"] for _, result in mine]))
        rows.append(row)
    return rows


COLUMNS = ("data", "way", "folds", "epochs", "samples", "fused", "low", "high", "gain")
COLUMNS += ("gain_low", "gain_high", "p", "image", "text", "audio", "cpu_seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", nargs="*", choices=EPOCHS, default=list(EPOCHS))
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--first", type=int, help="train the first folds only")
    parser.add_argument("--epochs", type=int, help="instead of each data set's own")
    parser.add_argument("--samples", type=int, help="at most so many")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "augment.csv")
    flags = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for data in flags.data:
        same = {
            "data": data,
            "folds": flags.folds,
            "epochs": flags.epochs or EPOCHS[data],
            "samples": flags.samples,
        }
        chosen = range(flags.first or flags.folds)
        cells = [{**same, "fold": fold, "way": way} for fold in chosen for way in flags.ways]
        results = run_all(cells, measure, ROOT / "runs" / "augment.jsonl", flags.jobs)
        mine = [(cell, result) for cell, result in results if cell in cells]
        rows += table(mine, data)
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    with flags.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            cells_of_row = {k: f"{x:.4f}" if isinstance(x, float) else x for k, x in row.items()}
            writer.writerow(cells_of_row)
            print(cells_of_row)
    print(f"wrote {flags.out}")


if __name__ == "__main__":
    main()
