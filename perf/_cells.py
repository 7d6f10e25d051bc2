"""Train many small models, in one or several processes; finished ones are not run again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fusionzoo.benchmark import executors
from fusionzoo.config import BenchmarkConfig, RunConfig, from_tree
from fusionzoo.datasets import PairedDataset
from fusionzoo.machine.devices import seed_everything
from fusionzoo.machine.distributed import World
from fusionzoo.structures import StepContext
from fusionzoo.training.build import build_objective
from fusionzoo.training.optim import build_optimizer, param_groups, set_rates
from fusionzoo.training.schedules import phased
from fusionzoo.training.trainer import Trainer

Cell = dict[str, Any]


def train(dataset: PairedDataset, settings: dict[str, Any], test: PairedDataset) -> float:
    """Train on the split `train` as train.py does, and return the accuracy on `test`.

    The last epoch is tested, so that no choice is made on the test split. The data is small and
    collated once.
    """
    train_set = dataset.split("train")
    cfg = from_tree(RunConfig, {**settings, "encoders": dataset.default_encoders})
    seed_everything(cfg.seed)
    objective, _ = build_objective(cfg, train_set)
    groups = param_groups(objective.model, objective.heads, cfg.optim)
    trainer = Trainer(objective, build_optimizer(groups, cfg.optim), cfg, World())
    collate = objective.model.collate(train=True)
    batch_of_all = collate([train_set[row] for row in range(len(train_set))])
    epoch_steps = -(-len(train_set) // cfg.train.batch_size)
    plan = phased(
        cfg.optim, trainer.freeze_plan.phases, cfg.train.epochs * epoch_steps, epoch_steps
    )
    step = 0
    for _ in range(cfg.train.epochs):
        for rows in torch.randperm(len(train_set)).split(cfg.train.batch_size):
            phase, factors = plan(step)
            set_rates(trainer.optimizer, factors)
            trainer.step([batch_of_all.take(rows)], StepContext(step, step / epoch_steps, phase))
            step += 1
    asked = collate([test[row] for row in range(len(test))])
    objective.eval()
    with torch.no_grad():
        right = objective(asked).logits.argmax(-1) == asked.target
    return right.double().mean().item()


def run_all(
    cells: Sequence[Cell], work: Callable[[Cell], float], path: Path, jobs: int
) -> list[tuple[Cell, float]]:
    """Run the cells that `path` has no result for; return all its results, also of earlier runs.

    Cells are identified by their entries: delete the file after a change to the code.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.is_file() else []
    results = {json.dumps(record["cell"]): record["result"] for record in map(json.loads, lines)}
    todo = [cell for cell in cells if json.dumps(cell) not in results]
    executors.set_up_process(threads=1)  # as each worker does, for runs in this process
    cfg = BenchmarkConfig(jobs=jobs)
    with path.open("a", buffering=1) as file:
        for cell, result in executors.map_unordered(cfg, work, todo, _call, "run"):
            results[json.dumps(cell)] = result
            file.write(json.dumps({"cell": cell, "result": result}) + "\n")
    return [(json.loads(cell), result) for cell, result in results.items()]


def _call(function: Callable[[Cell], float], cell: Cell) -> float:
    return function(cell)
