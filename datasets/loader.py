"""The loader of a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from fusionzoo.structures import Batch


class _ClosingDataLoader(DataLoader[Batch]):
    """A DataLoader whose workers end with an iteration that ends by an error.

    torch leaves that to the garbage collector, and then waits five seconds for each worker. Where
    an iteration is left early, persistent workers stay for the next one. If `whole` returns all
    samples as one batch, batches are its rows, and there are no workers.
    """

    whole: Callable[[], Batch | None] = staticmethod(lambda: None)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        if (whole := self.whole()) is not None:
            batches: Any = self.batch_sampler
            return (whole.take(torch.tensor([row for row, _ in keys])) for keys in batches)
        return self._batches(super().__iter__())

    def _batches(self, batches: Any) -> Iterator[Batch]:
        try:
            yield from batches
        except (Exception, KeyboardInterrupt):
            if self.num_workers:
                batches._shutdown_workers()
                self._iterator = None  # of persistent workers
            raise


def make_loader(
    dataset: Any,
    batches: Iterable[list[Any]],
    collate: Any,
    *,
    num_workers: int = 0,
    device: torch.device | None = None,
    persistent: bool = False,
    generator: torch.Generator | None = None,
    whole: Callable[[], Batch | None] | None = None,
) -> DataLoader[Batch]:
    """Make the loader of a data set: `batches` are lists of keys, `collate` makes a batch of each.

    `device` is where the batches go to: memory is pinned for CUDA. `persistent` workers stay for
    the next epoch. `generator` draws the workers' seed; by default it is the loader's own, so that
    creating an iterator leaves the global one alone. `whole` returns all samples as one batch, of
    which the batches are rows; None: they are read one by one.
    """
    loader = _ClosingDataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=num_workers,
        persistent_workers=persistent and num_workers > 0,
        pin_memory=device is not None and device.type == "cuda",
        generator=generator or torch.Generator(),
    )
    if whole is not None:
        loader.whole = whole
    return loader
