"""Train many small models in this process or several; what is done is never done again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fusionzoo.benchmark import executors as engines
from fusionzoo.config import BenchmarkConfig, RunConfig, from_tree
from fusionzoo.datasets import PairedDataset
from fusionzoo.distributed.process_group import World, seed_everything
from fusionzoo.structures import StepContext
from fusionzoo.training.build import build_objective
from fusionzoo.training.optim.optimizers import build_optimizer, set_rates
from fusionzoo.training.optim.param_groups import param_groups
from fusionzoo.training.optim.schedules import phased
from fusionzoo.training.trainer import Trainer

Cell = dict[str, Any]


def train(dataset: PairedDataset, settings: dict[str, Any], test: PairedDataset) -> float:
    """Train on the split `train` as train.py does, and return the accuracy on `test`.

    The last epoch counts: nothing is chosen, so nothing is chosen on the test split. The data is
    collated once, for it is small.
    """
    known = dataset.split("train")
    cfg = from_tree(RunConfig, {**settings, "encoders": dataset.default_encoders})
    seed_everything(cfg.seed)
    objective, _ = build_objective(cfg, known)
    groups = param_groups(objective.model, objective.heads, cfg.optim)
    trainer = Trainer(objective, build_optimizer(groups, cfg.optim), cfg, World())
    collate = objective.model.collate(train=True)
    whole = collate([known[row] for row in range(len(known))])
    epoch_steps = -(-len(known) // cfg.train.batch_size)
    plan = phased(
        cfg.optim, trainer.freeze_plan.phases, cfg.train.epochs * epoch_steps, epoch_steps
    )
    step = 0
    for _ in range(cfg.train.epochs):
        for rows in torch.randperm(len(known)).split(cfg.train.batch_size):
            phase, factors = plan(step)
            set_rates(trainer.optimizer, factors)
            trainer.step([whole.take(rows)], StepContext(step, step / epoch_steps, phase))
            step += 1
    asked = collate([test[row] for row in range(len(test))])
    objective.eval()
    with torch.no_grad():
        right = objective(asked).logits.argmax(-1) == asked.target
    return right.double().mean().item()


def run_all(
    cells: Sequence[Cell], work: Callable[[Cell], float], path: Path, jobs: int
) -> list[tuple[Cell, float]]:
    """Work off the cells; return all results of `path`, one line each, those of earlier runs too.

    A cell is known by its own entries: delete the file after a change to what is run.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.is_file() else []
    done = {json.dumps(one["cell"]): one["result"] for one in map(json.loads, lines)}
    todo = [cell for cell in cells if json.dumps(cell) not in done]
    engines.begin(threads=1)  # as in each process, for one that works here
    cfg = BenchmarkConfig(jobs=jobs)
    with path.open("a", buffering=1) as file:
        for cell, result in engines.work(cfg, work, todo, _call, "run"):
            done[json.dumps(cell)] = result
            file.write(json.dumps({"cell": cell, "result": result}) + "\n")
    return [(json.loads(cell), result) for cell, result in done.items()]


def _call(function: Callable[[Cell], float], cell: Cell) -> float:
    return function(cell)
