"""Samplers whose order depends only on seed, epoch and position."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Sampler

from fusionzoo.errors import FusionZooError, check_known, check_number
from fusionzoo.structures import seed_of

from .media.audio import is_video
from .paired import PairedDataset
from .shards.order import Blocking, sort_by_window, window_sizes

Key = tuple[int, int]  # index of a sample, and the seed of its augmentation in this epoch
WINDOW = 50  # batches whose samples are sorted by length together


def weights_of(dataset: Any, weights: str | Sequence[float] | Tensor) -> Tensor:
    """Return the weights of the samples."""
    if isinstance(weights, str):
        if weights != "class":
            raise FusionZooError(f"weights={weights!r}; the only named scheme is 'class'")
        targets = dataset.targets
        if targets.ndim > 1:
            raise FusionZooError("class_weighted needs a target of one class, in column `target`")
        return (1.0 / torch.bincount(targets).double())[targets]
    values = torch.as_tensor(weights, dtype=torch.float64)
    if values.shape != (len(dataset),) or not bool((values.isfinite() & (values >= 0)).all()):
        raise FusionZooError(f"{values.numel()} weights for {len(dataset)} samples: one each")
    if not values.any():
        raise FusionZooError("all weights are 0: there is nothing to sample from")
    return values


class PairedSampler(Sampler[int]):
    """One process's share of an order that is the same in all; see `make_sampler`."""

    def __init__(
        self,
        size: int,
        *,
        shuffle: bool,
        weights: Tensor | None,
        rank: int,
        world: int,
        pad: bool,
        seed: int,
        blocking: Blocking | None = None,
    ) -> None:
        self.size, self.shuffle, self.weights = size, shuffle, weights
        self.rank, self.world, self.pad, self.seed = rank, world, pad, seed
        self.blocking = blocking
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self.epoch = epoch

    def generator(self) -> torch.Generator:
        """Return this epoch's random generator, the same on all processes."""
        return torch.Generator().manual_seed(seed_of(self.seed, self.epoch, 0))

    @property
    def is_random(self) -> bool:
        """Whether each epoch has another order."""
        return self.shuffle or self.weights is not None

    def windows(self) -> Tensor | None:
        """Return the window of blocks that each sample is read in; None: they are in no blocks."""
        if self.blocking is None:
            return None
        seed = seed_of(self.seed, self.epoch, 0, "blocks")
        generator = torch.Generator().manual_seed(seed) if self.is_random else None
        return self.blocking.windows(torch.arange(self.size), generator)

    def order(self) -> Tensor:
        """Return the epoch's order before it is divided between processes."""
        if self.weights is not None:
            order = torch.multinomial(self.weights, self.size, True, generator=self.generator())
        elif self.shuffle:
            order = torch.randperm(self.size, generator=self.generator())
        else:
            order = torch.arange(self.size)
        windows = self.windows() if self.is_random else None
        if windows is not None:
            order = sort_by_window(order, windows)
        more = -self.size % self.world if self.pad else 0
        return torch.cat([order, order.repeat(self.world)[:more]]) if more else order

    def __iter__(self) -> Iterator[int]:
        yield from self.order()[self.rank :: self.world].tolist()

    def __len__(self) -> int:
        return len(range(self.rank, len(self.order()), self.world))


def make_sampler(
    dataset: Any,
    *,
    shuffle: bool,
    distributed: tuple[int, int] | None = None,
    weights: Literal["class"] | Sequence[float] | Tensor | None = None,
    pad: bool | None = None,
    seed: int = 0,
) -> PairedSampler:
    """Return a sampler over `dataset`, which needs a length (and `targets` for class weights).

    `distributed=(rank, world)` divides the order between processes. `weights`, one per sample, draw
    with replacement in proportion; `"class"` draws all classes equally often. If the number of
    samples is not divisible by that of processes, the remainder is padded with samples from the
    start (`pad`, the default when shuffling or weighting) or kept. Kept, processes differ by up to
    one sample and none counts twice, which is right for evaluation and the default otherwise.

    Samples in shards are shuffled in windows of some blocks, which are chosen at random: the order
    is that of one shuffle where a window holds all blocks.
    """
    rank, world = distributed or (0, 1)
    if not 0 <= rank < world:
        raise FusionZooError(f"distributed=({rank}, {world}): the rank must be below {world}")
    if not len(dataset):
        raise FusionZooError("there is nothing to sample from: 0 samples")
    return PairedSampler(
        len(dataset),
        shuffle=shuffle,
        weights=None if weights is None else weights_of(dataset, weights),
        rank=rank,
        world=world,
        pad=(shuffle or weights is not None) if pad is None else pad,
        seed=seed,
        blocking=dataset.blocking() if hasattr(dataset, "blocking") else None,
    )


class PairedBatchSampler(Sampler[list[Key]]):
    """Divide a sampler's order into batches of `(index, seed)` keys.

    Batches are formed over all processes and then divided between them. With `lengths`, one per
    sample, batches have samples of similar lengths: sorted within windows of 50 batches if the
    sampler shuffles, else over the whole order.
    """

    def __init__(
        self, sampler: PairedSampler, batch_size: int, *, lengths: Tensor | None = None
    ) -> None:
        check_number("batch_size", batch_size, 1)
        self.sampler, self.batch_size, self.lengths = sampler, batch_size, lengths
        self.part = slice(None)  # of the epoch's batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self.sampler.set_epoch(epoch)

    def set_part(self, epoch: int, start: int, stop: int | None) -> None:
        """Make passes go from an epoch's batch `start` until before `stop`, or to its end."""
        self.sampler.set_epoch(epoch)
        self.part = slice(start, stop)

    def batches(self) -> list[Tensor]:
        """Return this epoch's batches of this process."""
        sampler, global_size = self.sampler, self.batch_size * self.sampler.world
        order = sampler.order()
        if self.lengths is not None:
            order = self._sort_by_length(order, global_size)
        batches = list(order.split(global_size))
        if self.lengths is not None and sampler.is_random:
            # A shorter last batch stays last, so that positions mean the same on all processes.
            num_full = len(batches) - (len(batches[-1]) < global_size)
            shuffled = torch.randperm(num_full, generator=sampler.generator())
            windows = sampler.windows()
            if windows is not None and num_full:
                firsts = torch.stack([batch[0] for batch in batches[:num_full]])
                shuffled = sort_by_window(shuffled, windows[firsts])
            batches = [batches[i] for i in shuffled.tolist()] + batches[num_full:]
        shares = (batch[sampler.rank :: sampler.world] for batch in batches)
        return [share for share in shares if len(share)]

    def _sort_by_length(self, order: Tensor, global_size: int) -> Tensor:
        assert self.lengths is not None
        sampler, windows = self.sampler, self.sampler.windows()
        parts: int | list[int] = WINDOW * global_size if sampler.is_random else len(order)
        if windows is not None:
            order = sort_by_window(order, windows)
            parts = window_sizes(order, windows)
        pairs = zip(order.split(parts), self.lengths[order].split(parts), strict=True)
        return torch.cat([rows[lengths.argsort(stable=True)] for rows, lengths in pairs])

    def __iter__(self) -> Iterator[list[Key]]:
        seed, epoch = self.sampler.seed, self.sampler.epoch
        for batch in self.batches()[self.part]:
            yield [(index, seed_of(seed, epoch, index + 1)) for index in batch.tolist()]

    def __len__(self) -> int:
        sampler = self.sampler
        rows = sampler.size + (-sampler.size % sampler.world if sampler.pad else 0)
        num_full, remainder = divmod(rows, self.batch_size * sampler.world)
        return len(range(num_full + (remainder > sampler.rank))[self.part])


def group_values(dataset: PairedDataset, by: str) -> Tensor:
    """Return what similar samples share, float64 (N,): for `PairedBatchSampler(lengths=...)`.

    `length`: the sizes of texts, clips and sequences, so that batches need little padding;
    `aspect_ratio`: width / height of the first modality of images, 1 where one is missing; else
    the name of a column of the data, numbers as they are and text in alphabetical order.
    """
    if by == "length":
        return dataset.lengths()
    if by != "aspect_ratio":
        return _column_values(dataset, by)
    images = [name for name, kind in dataset.modalities.items() if kind == "image"]
    if not images:
        raise FusionZooError(f"{dataset.source} has no images: --train.group_by length")
    ratios = [_aspect_ratio(value) for value in dataset.references(images[0])]
    return torch.tensor(ratios, dtype=torch.float64)


def _aspect_ratio(value: Any) -> float:
    """Return width / height, of a file by its header; of several images the first; of videos 1."""
    if isinstance(value, list):
        return _aspect_ratio(value[0]) if value else 1.0
    if value is None or is_video(value):
        return 1.0
    if isinstance(value, Path | bytes):
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(value) if isinstance(value, bytes) else value) as image:
                width, height = image.size
        except (OSError, UnidentifiedImageError):
            return 1.0  # a drawing, or a file whose decoding reports the error
        return width / height
    if hasattr(value, "width"):  # a PIL image
        return float(value.width / value.height)
    shape = value.shape[:2] if value.shape[-1] in (1, 3, 4) else value.shape[-2:]
    return float(shape[1] / shape[0])


def _column_values(dataset: PairedDataset, name: str) -> Tensor:
    columns = [c for c in dataset.table.column_names if c not in dataset.modalities]
    check_known(name, columns, f"--train.group_by {name}: {dataset.source} has no such column")
    cells = dataset.column(name)
    try:
        return torch.tensor([float(c) if c is not None else 0.0 for c in cells]).double()
    except ValueError:
        order = {value: rank for rank, value in enumerate(sorted({str(c or "") for c in cells}))}
        return torch.tensor([order[str(c or "")] for c in cells], dtype=torch.float64)
