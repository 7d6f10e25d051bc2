"""Data loaders of a run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any, Literal

from torch.utils.data import DataLoader

from fusionzoo.config import RunConfig
from fusionzoo.datasets import Collate, PairedBatchSampler, PairedDataset, make_sampler
from fusionzoo.datasets.loader import make_loader
from fusionzoo.datasets.samplers import group_values
from fusionzoo.encoders import varies
from fusionzoo.features.frozen import StoredModality
from fusionzoo.machine.devices import num_cores
from fusionzoo.machine.distributed import World
from fusionzoo.structures import Batch, Features

FIXED_SHAPE = ("tabular", "vector")  # kinds whose samples need no padding
WHOLE_BYTES = 2**27  # of the inputs of a split that is prepared once


def num_workers(setting: int | None, world: World) -> int:
    """Choose the number of loader processes: 0 on small machines, where each would cost a core."""
    if setting is not None:
        return setting
    cores = num_cores() // world.size
    return 0 if cores <= 2 else min(8, cores - 1)


def whole_batch(dataset: PairedDataset, collate: Any) -> Batch | None:
    """Return all samples as one batch; None if a step would read something else of it, by padding,
    augmentation, skipped samples or a collate of another kind, or if it is too large."""
    if not isinstance(collate, Collate) or collate.second_view or dataset.edits:
        return None
    fixed = all(
        not x.with_tokens if isinstance(x, StoredModality) else kind in FIXED_SHAPE
        for x, kind in ((x, dataset.modalities[name]) for name, x in collate.processors.items())
    )
    first = dataset[0] if fixed else None
    if first is None or len(dataset) * _bytes(collate([first])) > WHOLE_BYTES:
        return None
    samples = [first, *(dataset[row] for row in range(1, len(dataset)))]
    for name, processor in collate.processors.items():
        if not isinstance(processor, StoredModality):
            values = [None if sample is None else sample.values[name] for sample in samples]
            if any(x is not None and varies(processor, x) for x in values):
                return None
    batch = collate(samples)
    return batch if len(batch.ids) == len(samples) else None


def _bytes(batch: Batch) -> int:
    """Return the bytes of a batch's inputs."""
    return sum(
        tensor.nbytes
        for inputs in batch.inputs.values()
        for tensor in (inputs if isinstance(inputs, Features) else inputs.values())
    )


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

    @cache
    def whole() -> Batch | None:
        batch = whole_batch(dataset, collate)
        # Presence stays on the CPU, where steps read and edit it.
        return batch and batch.to(world.device)._replace(present=batch.present)

    similar = group_values(dataset, cfg.train.group_by) if cfg.train.group_by else None
    return make_loader(
        dataset,
        PairedBatchSampler(sampler, cfg.train.batch_size, lengths=similar),
        collate,
        num_workers=num_workers(cfg.train.num_workers, world),
        device=world.device,
        persistent=True,
        whole=whole,
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
