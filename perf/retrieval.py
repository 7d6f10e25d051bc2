"""Retrieval across modalities on stamps: `python perf/retrieval.py` writes results/retrieval.csv.

Trains configs/stamps_contrastive.yaml as train.py does (epoch chosen on validation data) in 5
folds, stratified and with near-duplicates in one fold, so that every sample is tested once, by a
model that saw nothing like it. A query is ranked among the items of its test fold. Beside the
trained projections: the same ones before the first step, and chance (random vectors).

Which items are relevant, column `right`:

- `pair`: the query's partner. Samples with the same text (or file) are one query and one item,
  which is right if any of them stands in a row with the query.
- `group`: also the partners of its near-duplicates, as `fusionzoo evaluate` counts: all coins of a
  currency are one group, all chessmen, all images of a horse.

Figures are means over queries and seeds, `low` and `high` the 95 % interval of a bootstrap over
groups of queries. It does not count that folds share training data, nor the seeds.
"""

from __future__ import annotations

import argparse
import copy
import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from recipes import commit, hardware
from torch import Tensor
from tqdm import tqdm

from fusionzoo.benchmark.bench import FOLDS, Fold, make_folds
from fusionzoo.config import RunConfig, from_args
from fusionzoo.datasets import PairedDataset
from fusionzoo.distributed import World, seed_everything
from fusionzoo.evaluation.retrieval import Scores, codes, direction_scores, intervals
from fusionzoo.structures import StepContext
from fusionzoo.training.build import build_objective, frozen_features, open_dataset
from fusionzoo.training.checkpoint import standardise_frozen
from fusionzoo.training.fit import evaluate
from fusionzoo.training.loaders import build_loader, chunks
from fusionzoo.training.multitask import targets_of
from fusionzoo.training.optim import build_optimizer, param_groups, set_rates
from fusionzoo.training.schedules import phased
from fusionzoo.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
CONFIG, OUT = ROOT / "configs" / "stamps_contrastive.yaml", ROOT / "results" / "retrieval.csv"
FIGURES = ("recall@1", "recall@5", "recall@10", "mrr")
SEEDS, DRAWS = 3, 200
ALONE = World()
Vectors = dict[str, Tensor]  # modality -> (N, D)


class Tested(NamedTuple):
    """Vectors of a fold's test rows (N, D), before and after training."""

    untrained: Vectors
    trained: Vectors
    best: float  # the validation figure of the epoch that was chosen


def fit(dataset: PairedDataset, fold: Fold, cfg: RunConfig) -> Tested:
    """Train on a fold as train.py does, from cached features."""
    seed_everything(cfg.seed)
    objective, _ = build_objective(cfg, dataset.subset(fold.train))
    groups = param_groups(objective.model, objective.heads, cfg.optim, objective.balance)
    trainer = Trainer(objective, build_optimizer(groups, cfg.optim), cfg, ALONE)
    seed_everything(cfg.seed)
    frozen = frozen_features(objective, dataset, cfg, ALONE)
    parts = {
        name: frozen.view(dataset.subset(rows))
        for name, rows in (("train", fold.train), ("val", fold.val), ("test", fold.test))
    }
    standardise_frozen(trainer, parts["train"], frozen.modalities)
    loaders = {
        name: build_loader(
            part, frozen.collate(objective.model.collate(train=name == "train")), cfg, ALONE, name
        )
        for name, part in parts.items()
    }
    untrained = embed(trainer, loaders["test"])
    epoch_steps, best, weights = len(loaders["train"]), -1.0, objective.balance.state_dict()
    steps = cfg.train.epochs * epoch_steps
    plan = phased(cfg.optim, trainer.freeze_plan.phases, steps, epoch_steps)
    step = 0
    for epoch in range(cfg.train.epochs):
        trainer.begin_epoch(loaders, StepContext(step, epoch, plan(step)[0]))
        for batches in chunks(loaders["train"], 1, epoch):
            phase, factors = plan(step)
            set_rates(trainer.optimizer, factors)
            trainer.step(batches, StepContext(step, step / epoch_steps, phase))
            step += 1
        figure = evaluate(trainer, loaders["val"])[objective.tasks.leading]
        if figure > best:  # only the strategy's projections learn
            best, weights = figure, copy.deepcopy(objective.balance.state_dict())
    objective.balance.load_state_dict(weights)
    return Tested(untrained, embed(trainer, loaders["test"]), best)


@torch.no_grad()
def embed(trainer: Trainer, loader: Any) -> Vectors:
    """Return each modality's aligned vectors of a split, in the order of its rows."""
    trainer.module.eval()
    batches = [trainer.module(batch).aligned for batch in loader]
    return {name: torch.cat([aligned[name] for aligned in batches]) for name in batches[0]}


def score(
    dataset: PairedDataset, rows: Tensor, vectors: Vectors, by_group: bool
) -> dict[str, Scores]:
    """Score every direction in a test fold; the rows of the scores are those of the data set."""
    part = dataset.subset(rows)
    present = part.present
    content = {name: torch.from_numpy(codes(part.chosen(name))) for name in part.modalities}
    groups = group_codes(dataset)[rows] if by_group else None
    scores: dict[str, Scores] = {}
    for together in (False, True):
        scores |= direction_scores(vectors, present, content, groups, together=together)
    numbers = rows.numpy()
    return {name: x._replace(rows=numbers[x.rows]) for name, x in scores.items()}


def group_codes(dataset: PairedDataset) -> Tensor:
    """Number the groups of the samples, (N,)."""
    return torch.from_numpy(codes(dataset.chosen("group")))


def mean_scores(runs: Sequence[Mapping[str, Scores]]) -> dict[str, Scores]:
    """Average the figures of the same queries over runs."""
    return {
        direction: Scores(
            first.rows,
            {n: np.mean([run[direction].values[n] for run in runs], axis=0) for n in first.values},
        )
        for direction, first in runs[0].items()
    }


def pool(folds: Sequence[Mapping[str, Scores]]) -> dict[str, Scores]:
    """Join the queries of all folds."""
    return {
        direction: Scores(
            np.concatenate([fold[direction].rows for fold in folds]),
            {
                name: np.concatenate([fold[direction].values[name] for fold in folds])
                for name in first.values
            },
        )
        for direction, first in folds[0].items()
    }


def random_vectors(like: Vectors, draws: int) -> list[Vectors]:
    """Draw random vectors in place of a model's."""
    generator = torch.Generator().manual_seed(0)
    return [
        {name: torch.randn(x.shape, generator=generator) for name, x in like.items()}
        for _ in range(draws)
    ]


def measure(dataset: PairedDataset, cfg: RunConfig, seeds: int) -> list[dict[str, Any]]:
    """Train every fold with every seed; return the rows of the table."""
    classes = torch.from_numpy(codes(dataset.chosen("target")))  # the run itself reads no labels
    folds = make_folds(dataset, FOLDS, 0, classes)
    scores: dict[tuple[str, str], list[dict[str, Scores]]] = {}
    for fold in tqdm(folds, desc="folds"):
        tested = [fit(dataset, fold, replace(cfg, seed=seed)) for seed in range(seeds)]
        vectors = {
            "trained": [x.trained for x in tested],
            "untrained": [x.untrained for x in tested],
            "chance": random_vectors(tested[0].trained, DRAWS),
        }
        for name, runs in vectors.items():
            for right in ("pair", "group"):
                each = [score(dataset, fold.test, run, right == "group") for run in runs]
                scores.setdefault((right, name), []).append(mean_scores(each))
    clusters = group_codes(dataset).numpy()
    rows = []
    for (right, name), by_fold in sorted(scores.items(), key=lambda item: item[0][0] == "group"):
        for direction, pooled in pool(by_fold).items():
            query, _, answers = direction.partition("_to_")
            row: dict[str, Any] = {"right": right, "vectors": name}
            row |= {"query": query, "answers": answers}
            row |= {"queries": len(pooled.rows), "seeds": DRAWS if name == "chance" else seeds}
            figures = intervals(pooled, clusters)
            for figure in FIGURES:
                interval = figures[figure]
                row |= {figure: f"{interval.mean:.4f}"}
                row |= {f"{figure}_low": f"{interval.low:.4f}"}
                row |= {f"{figure}_high": f"{interval.high:.4f}"}
            rows.append(row)
    return rows


def main() -> None:
    """Measure and write results/retrieval.csv."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("flags", nargs="*", help="after --: settings of train.py")
    parsed = parser.parse_args()
    cfg = from_args(RunConfig, ["--config", str(CONFIG), *parsed.flags])
    dataset = open_dataset(cfg.data, targets_of(cfg))
    origin = {"commit": commit(), "hardware": hardware(torch.get_num_threads())}
    rows = [row | origin for row in measure(dataset, cfg, parsed.seeds)]
    with parsed.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {parsed.out}")


if __name__ == "__main__":
    main()
