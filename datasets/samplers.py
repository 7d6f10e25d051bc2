"""Which samples, in which order: a function of (seed, epoch, position) and of nothing else.

So a run resumes exactly where it stopped, with any number of workers, and N processes with batch B
see the very rows that one process with batch N x B sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Sampler

from fusionzoo.errors import FusionZooError

Key = tuple[int, int]  # index, seed of this visit
WINDOW = 50  # batches that are sorted by length together


class PairedSampler(Sampler[int]):
    """One process's share of an order that all processes agree on; `make_sampler` explains it."""

    def __init__(
        self,
        indices: Tensor,
        *,
        shuffle: bool,
        weights: Tensor | None,
        rank: int,
        world: int,
        tail: Literal["pad", "drop", "keep"],
        seed: int,
    ) -> None:
        self.indices, self.shuffle, self.weights = indices, shuffle, weights
        self.rank, self.world, self.tail, self.seed = rank, world, tail, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self.epoch = epoch

    def generator(self) -> torch.Generator:
        """Return this epoch's source of chance, the same on all processes."""
        return torch.Generator().manual_seed(visit_seed(self.seed, self.epoch, 0))

    def order(self) -> Tensor:
        """Return the whole epoch's order, before it is shared out."""
        size = len(self.indices)
        if self.weights is not None:
            chosen = torch.multinomial(self.weights, size, True, generator=self.generator())
        elif self.shuffle:
            chosen = torch.randperm(size, generator=self.generator())
        else:
            chosen = torch.arange(size)
        order = self.indices[chosen]
        rest = size % self.world
        if self.tail == "drop":
            return order[: size - rest]
        if self.tail == "pad" and rest:
            return torch.cat([order, order.repeat(self.world)[: self.world - rest]])
        return order

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
    subset: Sequence[int] | Tensor | None = None,
    drop_last: bool = False,
    pad: bool | None = None,
    seed: int = 0,
) -> PairedSampler:
    """Return a sampler over `dataset`, which needs a length (and `targets` for class weights).

    `distributed=(rank, world)` shares the order out. `weights` draws with replacement, in
    proportion (one per sample of the data set, or `"class"`: each class as often as any other).
    `subset` keeps some indices. A tail that does not divide by the number of processes is dropped
    (`drop_last`), padded by starting over (`pad`, the default when shuffling or weighting) or kept,
    so that processes may differ by one sample and none counts twice (the default otherwise, right
    for evaluation).
    """
    rank, world = distributed or (0, 1)
    if not 0 <= rank < world:
        raise FusionZooError(
            f"distributed=({rank}, {world}): the rank must be within 0 to {world - 1}"
        )
    indices = torch.arange(len(dataset)) if subset is None else torch.as_tensor(subset)
    if not len(indices):
        raise FusionZooError("there is nothing to sample from: 0 samples")
    if int(indices.min()) < 0 or int(indices.max()) >= len(dataset):
        raise FusionZooError(f"subset holds indices outside 0 to {len(dataset) - 1}")
    if drop_last and len(indices) < world:
        raise FusionZooError(
            f"{len(indices)} samples for {world} processes: drop_last leaves nothing"
        )
    chances = None if weights is None else _weights(dataset, weights, indices)
    pad = (shuffle or weights is not None) if pad is None else pad
    tail: Literal["pad", "drop", "keep"] = "drop" if drop_last else "pad" if pad else "keep"
    return PairedSampler(
        indices, shuffle=shuffle, weights=chances, rank=rank, world=world, tail=tail, seed=seed
    )


def _weights(dataset: Any, weights: str | Sequence[float] | Tensor, indices: Tensor) -> Tensor:
    """Return the weights of the samples at `indices`."""
    if isinstance(weights, str):
        if weights != "class":
            raise FusionZooError(f"weights={weights!r}; the one scheme with a name is 'class'")
        targets = dataset.targets[indices]
        if targets.ndim > 1:
            raise FusionZooError("class_weighted needs a target of one class, in column `target`")
        return (1.0 / torch.bincount(targets).double())[targets]
    given = torch.as_tensor(weights, dtype=torch.float64)
    if given.shape != (len(dataset),) or not bool((given.isfinite() & (given >= 0)).all()):
        raise FusionZooError(
            f"{given.numel()} weights for {len(dataset)} samples; one each, finite, none negative"
        )
    if not given[indices].any():
        raise FusionZooError("all weights are 0: there is nothing to sample from")
    return given[indices]


class PairedBatchSampler(Sampler[list[Key]]):
    """Cut a sampler's order into batches of `(index, seed)` keys.

    Batches are formed over all processes and then shared out. With `lengths` (one per sample)
    similar lengths meet: sorted within windows of 50 batches when the sampler shuffles, else over
    the whole order. With `num_iters` a pass goes on until that many batches were drawn, beginning
    with batch `start_iter`, however many epochs that takes; training uses it to resume within an
    epoch and for `--train.max_steps`.
    """

    def __init__(
        self,
        sampler: PairedSampler,
        batch_size: int,
        *,
        lengths: Tensor | None = None,
        drop_last: bool = False,
        num_iters: int | None = None,
        start_iter: int = 0,
    ) -> None:
        if batch_size < 1:
            raise FusionZooError(f"batch_size={batch_size}; it must be at least 1")
        self.sampler, self.batch_size, self.lengths = sampler, batch_size, lengths
        self.drop_last, self.num_iters, self.start = drop_last, num_iters, start_iter
        if num_iters is not None and not self.epoch_length():
            raise FusionZooError(
                f"{len(sampler.indices)} samples make no batch of {batch_size}:"
                " iterations would never end (drop_last?)"
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self.sampler.set_epoch(epoch)

    def set_iters(self, start_iter: int, num_iters: int) -> None:
        """Make passes go from batch `start_iter` until before `num_iters`, counted over epochs."""
        self.start, self.num_iters = start_iter, num_iters

    def batches(self) -> list[Tensor]:
        """Return this epoch's batches of this process."""
        sampler, whole = self.sampler, self.batch_size * self.sampler.world
        order = sampler.order()
        if self.lengths is not None:
            order = self._by_length(order, whole)
        cut = list(order.split(whole))
        if self.drop_last and len(cut[-1]) < whole:
            cut.pop()
        if self.lengths is not None and (sampler.shuffle or sampler.weights is not None):
            # The last, shorter batch stays last, so that positions mean the same on all processes.
            full = len(cut) - (len(cut[-1]) < whole if cut else 0)
            draw = torch.randperm(full, generator=sampler.generator()).tolist()
            cut = [cut[i] for i in draw] + cut[full:]
        shares = (batch[sampler.rank :: sampler.world] for batch in cut)
        return [share for share in shares if len(share)]

    def _by_length(self, order: Tensor, whole: int) -> Tensor:
        assert self.lengths is not None
        lengths = self.lengths[order]
        shuffled = self.sampler.shuffle or self.sampler.weights is not None
        size = WINDOW * whole if shuffled else len(order)
        parts = zip(order.split(size), lengths.split(size), strict=True)
        return torch.cat([rows[own.argsort(stable=True)] for rows, own in parts])

    def __iter__(self) -> Iterator[list[Key]]:
        if self.num_iters is None:
            yield from self._keys(self.start)
            return
        done = self.start
        while done < self.num_iters:
            epoch, position = divmod(done, self.epoch_length())
            self.set_epoch(epoch)
            for batch in self._keys(position):
                yield batch
                done += 1
                if done == self.num_iters:
                    return

    def _keys(self, start: int) -> Iterator[list[Key]]:
        seed, epoch = self.sampler.seed, self.sampler.epoch
        for batch in self.batches()[start:]:
            yield [(index, visit_seed(seed, epoch, index + 1)) for index in batch.tolist()]

    def epoch_length(self) -> int:
        """Return the number of batches of one epoch."""
        sampler = self.sampler
        rows, whole = len(sampler.indices), self.batch_size * sampler.world
        if sampler.tail == "drop":
            rows -= rows % sampler.world
        elif sampler.tail == "pad":
            rows += -rows % sampler.world
        full, rest = divmod(rows, whole)
        return full + (rest > sampler.rank and not self.drop_last)

    def __len__(self) -> int:
        return self.epoch_length() if self.num_iters is None else self.num_iters - self.start


def visit_seed(seed: int, epoch: int, index: int) -> int:
    """Mix three numbers into a seed that no other visit has (splitmix64's finaliser); never 0."""
    mask = (1 << 64) - 1
    x = (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + index * 0x94D049BB133111EB) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & mask
    return (x ^ (x >> 31)) >> 1 or 1
