"""Data loaders of a run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal

from torch.utils.data import DataLoader

from fusionzoo.config import RunConfig
from fusionzoo.datasets import PairedBatchSampler, PairedDataset, make_sampler
from fusionzoo.datasets.loader import make_loader
from fusionzoo.datasets.samplers import group_values
from fusionzoo.devices import num_cores
from fusionzoo.distributed import World
from fusionzoo.structures import Batch


def num_workers(setting: int | None, world: World) -> int:
    """Choose the number of loader processes: 0 on small machines, where each would cost a core."""
    if setting is not None:
        return setting
    cores = num_cores() // world.size
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
    similar = group_values(dataset, cfg.train.group_by) if cfg.train.group_by else None
    return make_loader(
        dataset,
        PairedBatchSampler(sampler, cfg.train.batch_size, lengths=similar),
        collate,
        num_workers=num_workers(cfg.train.num_workers, world),
        device=world.device,
        persistent=True,
    )


def chunks(
    loader: DataLoader[Batch],
    size: int,
    epoch: int,
    *,
    skip: int = 0,
    max_chunks: int | None = None,
) -> Iterator[list[Batch]]:
    """Yield an epoch's batches, `size` at a time; the last list may be shorter.

    The first `skip` lists are left out (not even loaded), and no more than `max_chunks` follow.
    """
    sampler = loader.batch_sampler
    assert isinstance(sampler, PairedBatchSampler)
    stop = None if max_chunks is None else (skip + max_chunks) * size
    sampler.set_part(epoch, skip * size, stop)
    batches = iter(loader)
    while chunk := list(islice(batches, size)):
        yield chunk
