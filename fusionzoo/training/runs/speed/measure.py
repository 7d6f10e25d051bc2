"""Measure samples per second of a loader and of what a model does with its batches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from fusionzoo.datasets import PairedDataset
from fusionzoo.distributed.process_group import World
from fusionzoo.model import FusionModel
from fusionzoo.structures import Batch
from fusionzoo.worker_memory import ReusedMemory

from .choose import Option, Timing

DISTINCT = 4  # batches of samples; longer measurements repeat them
SECONDS = 0.5  # that one measurement takes at least
MOST_BATCHES = 64

Keys = list[tuple[int, int]]


def measure_loading(
    dataset: PairedDataset,
    collate: Any,
    keys: Sequence[Keys],
    workers: int,
    work: Callable[[Batch], None],
    device: torch.device,
) -> Timing:
    """Time loading and `work` together, after a batch for each worker, and one more.

    At least half a second and three batches, or two for each worker, so that what the workers
    prepared beforehand does not count.
    """
    warm, least = 1 + workers, max(3, 2 * workers)
    batches: Any = DataLoader(
        dataset,
        batch_sampler=list(islice(cycle(keys), warm + MOST_BATCHES)),
        collate_fn=ReusedMemory.of(collate),
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # so that creating an iterator leaves the global one alone
    )
    iterator = iter(batches)
    started = time.perf_counter()
    for batch in islice(iterator, warm):
        work(batch.to(device))
    _wait(device)
    start, samples, number = time.perf_counter(), 0, 0
    for batch in iterator:
        work(batch.to(device))
        samples, number = samples + len(batch.ids), number + 1
        if number >= least and time.perf_counter() - start >= SECONDS:
            break
    _wait(device)
    seconds = (time.perf_counter() - start) / max(samples, 1)
    rows = sum(len(batch) for batch in islice(cycle(keys), warm))
    return Timing(max(seconds, 1e-9), max(0.0, start - started - rows * seconds))


def _wait(device: torch.device) -> None:
    """Wait for the device, whose calls return before their work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def same_randomness(device: torch.device) -> Iterator[None]:
    """Leave the global generators as they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


def worker_options(setting: int | None, default: int, world: World) -> list[Option]:
    """Return numbers of loader processes to try, unless the user set one."""
    if setting is not None:
        return []
    cores = max(1, len(os.sched_getaffinity(0)) // world.size)
    values = [count for count in (1, 2, 4, 8) if count <= cores and count > default]
    fewer = [0] if default else []
    return [Option("num_workers", part) for part in (values, fewer) if part]


def format_options(model: FusionModel, *, channels_last: bool, bf16: bool) -> list[Option]:
    """Return what to try of memory format and precision, where the encoders have any use for it."""
    has_images = any(encoder.kind in ("image", "audio") for _, encoder in model.named_encoders())
    options = []
    if has_images and not channels_last:
        options.append(Option("channels_last", (True,)))
    if not bf16:
        options.append(Option("amp", ("bf16",)))
    return options


def set_memory_format(model: FusionModel, *, channels_last: bool) -> None:
    """Set the memory format of the encoders of images and sound, in place."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    for _, encoder in model.named_encoders():
        if encoder.kind in ("image", "audio"):
            encoder.to(memory_format=memory_format)  # type: ignore[call-overload]
