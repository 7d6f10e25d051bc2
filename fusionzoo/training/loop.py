"""Around the steps: loaders, evaluation, an epoch's batches, signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fusionzoo.config import RunConfig
from fusionzoo.datasets import PairedBatchSampler, PairedDataset, make_sampler
from fusionzoo.evaluation.retrieval import any_pair, retrieval_figures
from fusionzoo.structures import Batch

from .distributed import World, gather
from .objectives import Objective, Step, blank_batch
from .sharding import sharded
from .step import Stepper, autocast

Metrics = dict[str, Any]


def num_workers(wanted: int | None, world: World) -> int:
    """Choose how many processes load: none on a small machine, where each would cost a core."""
    if wanted is not None:
        return wanted
    cores = len(os.sched_getaffinity(0)) // world.size
    return 0 if cores <= 2 else min(8, cores - 1)


def build_loader(
    dataset: PairedDataset, collate: Any, cfg: RunConfig, world: World, split: str
) -> DataLoader[Batch]:
    """Build the loader of one split; the order is a function of the seed and the epoch alone."""
    train = split == "train"
    weights: Literal["class"] | None = (
        "class" if train and cfg.train.sampler == "class_weighted" else None
    )
    sampler = make_sampler(
        dataset,
        shuffle=train,
        distributed=(world.rank, world.size),
        weights=weights,
        seed=cfg.seed,
        pad=train,
    )
    size = cfg.train.batch_size if train else cfg.train.eval_batch_size or cfg.train.batch_size
    lengths = dataset.lengths() if cfg.train.group_by_length else None
    workers = num_workers(cfg.train.num_workers, world)
    return DataLoader(
        dataset,  # type: ignore[arg-type]
        batch_sampler=PairedBatchSampler(sampler, size, lengths=lengths),
        collate_fn=collate,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=world.device.type == "cuda",
        generator=torch.Generator(),  # its own, so that making an iterator draws nothing from ours
    )


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


def chunks(
    loader: DataLoader[Batch], size: int, epoch: int, skip: int = 0
) -> Iterator[list[Batch]]:
    """Yield an epoch's batches, `size` at a time, but for the first `skip` lists; the last may be
    shorter. What is skipped is not even loaded."""
    sampler = loader.batch_sampler
    assert isinstance(sampler, PairedBatchSampler)
    sampler.set_epoch(epoch)
    sampler.set_start(skip * size)
    batches = iter(loader)
    while held := list(islice(batches, size)):
        yield held


def exit_code(signals: list[int]) -> int:
    """Return 130 after Ctrl-C, as shells do, else 75, which sysexits.h reads as "try again"."""
    return 130 if signals[:1] == [signal.SIGINT] else 75


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collect what asks a run to stop, so that it ends after a whole step, with a checkpoint."""
    caught: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: caught.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    }
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
