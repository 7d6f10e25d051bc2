"""Running statistics cross processes before they are read, not at every step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fusionzoo.config import DistConfig, RunConfig, from_tree
from fusionzoo.machine.distributed import World, process_group, wrap
from fusionzoo.model.fusion_model import UnimodalHeads, create_model
from fusionzoo.structures import Batch, StepContext
from fusionzoo.training.fit import evaluate
from fusionzoo.training.objective import Objective, freeze_unused
from fusionzoo.training.optim import build_optimizer, param_groups
from fusionzoo.training.trainer import Trainer
from helpers import ranks

pytestmark = pytest.mark.slow


def make(world: World) -> Trainer:
    torch.manual_seed(0)
    encoders = {"image": {"name": "timm/resnet10t", "pretrained": False, "size": 32}}
    model = create_model({"name": "sum", "dim": 8}, encoders, 3)
    dims = {"image": model.encoders["image"].dim}
    objective = Objective(model, UnimodalHeads(dims, 8, torch.full((3,), 1 / 3)))
    freeze_unused(objective)
    cfg = from_tree(RunConfig, {})
    groups = param_groups(model, objective.heads, cfg.optim)
    return Trainer(wrap(objective, cfg.dist, world), build_optimizer(groups, cfg.optim), cfg, world)


def make_batch(rank: int) -> Batch:
    draw = torch.Generator().manual_seed(rank)
    pixels = torch.randint(256, (6, 3, 32, 32), generator=draw, dtype=torch.uint8)
    present = torch.ones(6, 1, dtype=torch.bool)
    target = torch.arange(6) % 3
    return Batch([f"{rank}/{i}" for i in range(6)], {"image": {"pixels": pixels}}, present, target)


def statistics(trainer: Trainer) -> torch.Tensor:
    buffers = trainer.module.model.encoders.buffers()
    return torch.cat([b.flatten() for b in buffers if b.is_floating_point()])


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    cfg = DistConfig(init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=60)
    with process_group(cfg, "cpu") as world:
        trainer = make(world)
        seen: dict[str, Any] = {}
        broadcast = torch.distributed._broadcast_coalesced
        calls: list[int] = []

        def counted(group: Any, tensors: Any, *rest: Any) -> None:
            calls.append(len(tensors))
            broadcast(group, tensors, *rest)

        torch.distributed._broadcast_coalesced = counted
        for step in range(3):
            trainer.step([make_batch(rank)], StepContext(step))
        seen["broadcasts"] = list(calls)
        seen["apart"] = statistics(trainer).clone()
        loader: Any = DataLoader([make_batch(rank)], batch_size=None)
        evaluate(trainer, loader)
        seen["shared"] = statistics(trainer).clone()
        torch.save(seen, folder / f"seen-{rank}")


def test_statistics_cross_before_evaluation_and_at_no_step(tmp_path: Path) -> None:
    ranks.run(__file__, 2, tmp_path, timeout=200)
    first, second = (torch.load(tmp_path / f"seen-{rank}", weights_only=True) for rank in range(2))
    assert first["broadcasts"] == second["broadcasts"] == []
    assert not torch.equal(first["apart"], second["apart"])  # each of its own batches
    assert torch.equal(first["shared"], first["apart"])
    assert torch.equal(second["shared"], first["apart"])


if __name__ == "__main__":
    work(int(sys.argv[1]), Path(sys.argv[2]))
