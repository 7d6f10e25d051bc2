"""Metrics of a split: the fusion, each modality's own head, the fusion given one modality."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fusionzoo.config import TrainConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.distributed.fsdp import sharded
from fusionzoo.distributed.process_group import World, gather
from fusionzoo.evaluation.answers import GROUP, answer_keys
from fusionzoo.evaluation.retrieval import any_pair, retrieval_figures
from fusionzoo.structures import Batch

from .objective import Objective, ObjectiveOutput, dummy_batch
from .optim.precision import autocast
from .tasks.multitask import Tasks
from .trainer import Trainer

Metrics = dict[str, Any]


def evaluate(trainer: Trainer, loader: DataLoader[Batch], each_alone: bool = False) -> Metrics:
    """Return the metrics of the fusion, and under `unimodal` those of each modality's own head.

    With `each_alone` also, under `given_only`, those of the fusion given each modality only, among
    the samples that have it; of the same samples, under `where_present`, those of its own head.
    Each process evaluates its own share, and no sample counts twice.
    """
    trainer.share_statistics()
    trainer.heap.trim()
    return evaluate_module(
        trainer.module,
        loader,
        trainer.cfg.train,
        trainer.world,
        each_alone=each_alone,
        after_batch=trainer.heap.after_batch,
    )


@torch.no_grad()
def evaluate_module(
    module: Objective,
    loader: DataLoader[Batch],
    cfg: TrainConfig,
    world: World,
    *,
    each_alone: bool = False,
    after_batch: Callable[[], None] = lambda: None,
) -> Metrics:
    """Return the metrics of a split; `evaluate` says which. Leaves the module in eval mode."""
    module.eval()
    collected: dict[str, list[Tensor]] = {}
    for batch, counts in _equally_many(loader, module, world):
        batch = batch.to(world.device)
        with autocast(cfg, world.device):
            output: ObjectiveOutput = module(batch, each_alone=each_alone)
        if not counts:
            continue
        tensors = _named_tensors(batch, output)
        if output.aligned and isinstance(loader.dataset, PairedDataset):
            tensors |= answer_keys(loader.dataset).of(batch.ids)
        for name, tensor in tensors.items():
            collected.setdefault(name, []).append(tensor)
        after_batch()
    shards = gather({name: torch.cat(parts).cpu() for name, parts in collected.items()}, world)
    names = max(shards, key=len)
    return _metrics(module, {name: torch.cat([s[name] for s in shards if s]) for name in names})


def _named_tensors(batch: Batch, output: ObjectiveOutput) -> dict[str, Tensor]:
    """Name everything that the metrics of a split are computed from."""
    assert batch.target is not None
    logits = {"": output.logits, **output.unimodal_logits}
    return {
        "target": batch.target,
        "present": batch.present,
        **{f"logits/{name}": x.float() for name, x in logits.items()},
        **{f"given_only/{name}": x.float() for name, x in output.given_only.items()},
        **{f"aligned/{name}": x.float() for name, x in output.aligned.items()},
    }


def _metrics(module: Objective, tensors: dict[str, Tensor]) -> Metrics:
    """Compute the metrics of a whole split, whose tensors `_named_tensors` named."""
    tasks, target = module.tasks, tensors["target"]
    metrics: Metrics = tasks.metrics(tensors["logits/"], target)
    aligned = {n.partition("/")[2]: x for n, x in tensors.items() if n.startswith("aligned/")}
    if aligned and any_pair(tensors["present"]):
        content = {n.partition("/")[2]: x for n, x in tensors.items() if n.startswith("content/")}
        groups = tensors.get(GROUP)
        metrics |= retrieval_figures(aligned, tensors["present"], content=content, groups=groups)
    unimodal = {n: tasks.metrics(tensors[f"logits/{n}"], target) for n in module.heads.heads}
    metrics["unimodal"] = unimodal
    given_only: Metrics = {}
    where_present: Metrics = {}
    for name, rows in zip(module.model.encoders, tensors["present"].unbind(1), strict=True):
        if f"given_only/{name}" not in tensors or not measurable(tasks, target, rows):
            continue
        given_only[name] = tasks.metrics(tensors[f"given_only/{name}"][rows], target[rows])
        head = {}
        if name in unimodal:
            head = tasks.metrics(tensors[f"logits/{name}"][rows], target[rows])
        where_present[name] = {"samples": int(rows.sum()), "of": len(rows), "unimodal": head}
    if given_only:
        metrics |= {"given_only": given_only, "where_present": where_present}
    return metrics


def measurable(tasks: Tasks, target: Tensor, rows: Tensor) -> bool:
    """Whether each target has a label among these samples: targets of a split, (N,) bool."""
    return bool(rows.any()) and not tasks.unlabelled(target[rows])


def _equally_many(
    loader: DataLoader[Batch], module: Objective, world: World
) -> Iterator[tuple[Batch, bool]]:
    """Yield the batches and whether they count.

    With sharded weights every process must run the same number, so dummy batches that do not count
    are appended.
    """
    yield from ((batch, True) for batch in loader)
    if sharded(module):
        num_batches = len(loader)
        dummy = dummy_batch(module.model)
        yield from ((dummy, False) for _ in range(max(gather(num_batches, world)) - num_batches))
