"""Metrics of a split: the fusion, each modality's own head, the fusion given one modality."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fusionzoo.distributed.fsdp import sharded
from fusionzoo.distributed.process_group import gather
from fusionzoo.evaluation.retrieval import any_pair, retrieval_figures
from fusionzoo.structures import Batch

from .objective import Objective, Step, blank_batch
from .trainer import Stepper, autocast

Metrics = dict[str, Any]


@torch.no_grad()
def evaluate(learn: Stepper, loader: DataLoader[Batch], each_alone: bool = False) -> Metrics:
    """Return the metrics of the fusion, and under `unimodal` those of each modality's own head.

    With `each_alone` also, under `given_only`, those of the fusion given each modality only.
    Each process sees its own share, and no sample counts twice.
    """
    plain, world = learn.plain, learn.world
    plain.eval()
    learn.share_statistics()
    learn.heap.trim()
    seen: dict[str, list[Tensor]] = {}
    for batch, counts in evenly(loader, learn):
        batch = batch.to(world.device)
        with autocast(learn.cfg.train, world.device):
            step: Step = plain(batch, each_alone=each_alone)
        if not counts:
            continue
        assert batch.target is not None
        seen.setdefault("target", []).append(batch.target)
        seen.setdefault("present", []).append(batch.present)
        for name, logits in {"": step.logits, **step.unimodal}.items():
            seen.setdefault(f"logits/{name}", []).append(logits.float())
        for name, logits in step.given_only.items():
            seen.setdefault(f"given_only/{name}", []).append(logits.float())
        for name, vectors in step.common.items():
            seen.setdefault(f"common/{name}", []).append(vectors.float())
        learn.heap.after_batch()
    shards = gather({name: torch.cat(rows).cpu() for name, rows in seen.items()}, world)
    found = {name: torch.cat([one[name] for one in shards if one]) for name in max(shards, key=len)}
    return _figures(plain, found)


def _figures(plain: Objective, found: dict[str, Tensor]) -> Metrics:
    """Measure what all processes saw."""
    figures = {
        name: plain.tasks.figures(found[f"logits/{name}"], found["target"])
        for name in ("", *plain.heads.heads)
    }
    fused = figures.pop("")
    given_only = {
        name: plain.tasks.figures(found[f"given_only/{name}"], found["target"])
        for name in plain.model.encoders
        if f"given_only/{name}" in found
    }
    common = {n.partition("/")[2]: x for n, x in found.items() if n.startswith("common/")}
    if common and any_pair(found["present"]):
        fused |= retrieval_figures(common, found["present"])
    return fused | {"unimodal": figures} | ({"given_only": given_only} if given_only else {})


def evenly(loader: DataLoader[Batch], learn: Stepper) -> Iterator[tuple[Batch, bool]]:
    """Yield the batches and whether they count; with shared weights every process must run as many
    as any other, so blank ones follow that do not."""
    yield from ((batch, True) for batch in loader)
    if sharded(learn.plain):
        own = len(loader)
        blank = blank_batch(learn.plain.model)
        yield from ((blank, False) for _ in range(max(gather(own, learn.world)) - own))
