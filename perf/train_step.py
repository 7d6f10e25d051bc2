"""CPU time of a training step against a bare PyTorch loop over the same model and tensors.

`python perf/train_step.py`. Bar: at most 1.03 times the bare loop. Both run the same forward
pass, loss, backward pass, clipping and fused AdamW; the unimodal heads, which a bare loop does not
have, are off. What is left is what fusionzoo adds: counts, rates, the walk through the loop.
"""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from _timing import ratio

from fusionzoo.config import RunConfig, from_args
from fusionzoo.distributed import World
from fusionzoo.structures import Batch
from fusionzoo.training.build import build_objective, open_dataset
from fusionzoo.training.optim import build_optimizer, param_groups, set_rates
from fusionzoo.training.trainer import Trainer

STEPS = 5


def main() -> None:
    """Print one JSON line for each batch size."""
    for size in (32, 128):
        cfg = from_args(RunConfig, ["--train.unimodal", "false"])
        dataset = open_dataset(cfg.data).split("train")
        cfg = from_args(
            RunConfig,
            ["--train.unimodal", "false", "--encoders", json.dumps(dataset.default_encoders)],
        )
        torch.manual_seed(0)
        objective, _ = build_objective(cfg, dataset)
        collate = objective.model.collate(train=True)
        batches = [collate([dataset[i * size + j] for j in range(size)]) for i in range(4)]

        groups = param_groups(objective.model, objective.heads, cfg.optim)
        trainer = Trainer(objective, build_optimizer(groups, cfg.optim), cfg, World())

        def ours(trainer: Trainer = trainer, batches: list[Batch] = batches) -> None:
            for step in range(STEPS):
                set_rates(trainer.optimizer, {"": 1e-3})
                trainer.step([batches[step % len(batches)]])

        model = objective.model.train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)

        def bare(
            model: torch.nn.Module = model,
            optimizer: torch.optim.Optimizer = optimizer,
            parameters: list[torch.nn.Parameter] = parameters,
            batches: list[Batch] = batches,
        ) -> None:
            for step in range(STEPS):
                batch = batches[step % len(batches)]
                loss = F.cross_entropy(model(batch).logits, batch.target)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        figures = ratio(ours, bare, rounds=31)
        print(json.dumps({"benchmark": "train_step", "batch_size": size, **figures}))


if __name__ == "__main__":
    main()
