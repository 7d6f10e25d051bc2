"""Load batches; workers send them through shared memory that is used again.

PyTorch puts every tensor that a worker sends into new shared memory, whose pages the system clears
and maps one by one: on a virtual machine 4 us for 4 KB, a fifth of what decoding an image and a
clip takes. Here each worker has a few blocks, in which its batches take turns.
"""

from __future__ import annotations

import math
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, finalize

import numpy as np
import torch
from torch import Tensor, UntypedStorage
from torch.utils.data import DataLoader, get_worker_info

from .files import is_running
from .structures import Batch, Sample

MOST_BLOCKS = 5  # of a worker: two wait in the queue, two are in use, one is written
ALIGNMENT = 64  # bytes; the first ones of a block hold its state
SMALL = 1 << 16  # bytes of a tensor that is copied, so that keeping it does not keep a block
FREE, BUSY, RETIRED = 0, 1, 2  # states of a block; a worker replaces one that is retired
SHARED_FOLDER = "/dev/shm"

Collate = Callable[[Sequence[Sample | None]], Batch]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Key = tuple[int, str, int]  # of a block: process, a name of it that is unique, number


def make_loader(
    dataset: Any,
    batches: Iterable[list[Any]],
    collate: Any,
    *,
    num_workers: int = 0,
    device: torch.device | None = None,
    persistent: bool = False,
    generator: torch.Generator | None = None,
) -> DataLoader[Batch]:
    """Make the loader of a data set: `batches` are lists of keys, `collate` makes a batch of each.

    `device` is where the batches go to: memory is pinned for CUDA. `persistent` workers stay for
    the next epoch. `generator` draws the workers' seed; by default it is the loader's own, so that
    creating an iterator leaves the global one alone.
    """
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=ReusedMemory.of(collate),
        num_workers=num_workers,
        persistent_workers=persistent and num_workers > 0,
        pin_memory=device is not None and device.type == "cuda",
        generator=generator or torch.Generator(),
    )


class ReusedMemory:
    """A collate function whose batches come from workers in memory that is used again.

    Without workers it is `collate` itself. A block is written again once nothing that was made of
    its batch is left in the receiving process. Where all are in use, shared memory is short, or the
    data set says `reuse_memory = False`, a batch is sent as PyTorch does.

    The tensors of a batch read a lease, a view of the block in the buffer protocol, so that all
    that may still be read keeps it alive: tensors, storages, arrays, a thread that builds the
    batch. As their memory is not PyTorch's shared memory, a queue to another process copies it.
    """

    def __init__(self, collate: Collate, name: str = "") -> None:
        self.collate = collate
        self._name = name or uuid.uuid4().hex
        self._lock = threading.Lock()  # a thread that pins memory may receive, too
        self._blocks: dict[Key, Bytes] = {}  # received from workers
        self._leases: WeakValueDictionary[Key, Bytes] = WeakValueDictionary()
        self._sender: _Sender | None = None  # in a worker
        _receivers[self._name] = self

    @classmethod
    def of(cls, collate: Any) -> ReusedMemory:
        """Wrap a collate function, unless it is wrapped."""
        return collate if isinstance(collate, cls) else cls(collate)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReusedMemory, (self.collate, self._name)

    def __call__(self, samples: Sequence[Sample | None]) -> Any:
        """Collate samples; in a worker, return what becomes a `Batch` where it is received."""
        worker = get_worker_info()
        if worker is None or not getattr(worker.dataset, "reuse_memory", True):
            return self.collate(samples)
        if self._sender is None or self._sender.process != os.getpid():
            self._sender = _Sender(self._name)
        return self._sender.collate(self.collate, samples)

    def receive(self, key: Key, block: Tensor | None) -> Bytes:
        """Return a lease of a worker's block, whose handle comes with its first batch."""
        with self._lock:
            if block is not None:
                self._forget_ended()
                self._blocks[key] = block.numpy()
            lease = self._blocks[key][:]
            self._leases[key] = lease
        finalize(lease, _free, self._blocks[key], os.getpid()).atexit = False
        return lease

    def retire_leases(self) -> None:
        """Have no worker write again into the blocks that are in use."""
        for lease in list(self._leases.values()):
            lease[0] = RETIRED

    def _forget_ended(self) -> None:
        """Forget the blocks of workers that have ended."""
        for key in list(self._blocks):
            if not is_running(key[0]):
                del self._blocks[key]


def _free(block: Bytes, process: int) -> None:
    """Let the worker write into a block again, unless this is a fork of the lease's process."""
    if process == os.getpid() and block[0] == BUSY:
        block[0] = FREE


_receivers: WeakValueDictionary[str, ReusedMemory] = WeakValueDictionary()


def _retire_all() -> None:
    """Before a fork: the new process keeps what is in use, and nothing tells until when."""
    for receiver in list(_receivers.values()):
        receiver.retire_leases()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_retire_all)


class _Sent:
    """A batch as it is sent: in a block, with places instead of tensors; or as it is, key None."""

    def __init__(self, name: str, key: Key | None, batch: Batch, block: Tensor | None) -> None:
        self.parts = (name, key, batch, block)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, self.parts


def _received(name: str, key: Key | None, batch: Batch, block: Tensor | None) -> Batch:
    """Return what a sent batch becomes in the receiving process."""
    if key is None:
        return batch
    lease = _receivers[name].receive(key, block)

    def tensor_at(place: Any) -> Tensor:
        tensor: Tensor = place.leased(lease)
        return tensor

    return batch.map(tensor_at)


class Place(NamedTuple):
    """Where a tensor is in a block."""

    start: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self, block: UntypedStorage) -> Tensor:
        """Return the tensor, a view of the block."""
        whole = torch.empty(0, dtype=self.dtype).set_(block)
        first = self.start // self.dtype.itemsize
        return whole[first : first + math.prod(self.shape)].view(self.shape)

    def leased(self, lease: Bytes) -> Tensor:
        """Return the tensor, which keeps the lease of a block; a copy where it is small."""
        size = math.prod(self.shape)
        if not size:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(lease, dtype=self.dtype, count=size, offset=self.start)
        return (flat.clone() if flat.nbytes <= SMALL else flat).view(self.shape)


class _Space:
    """The part of a block that is not in use yet."""

    def __init__(self, block: UntypedStorage) -> None:
        self.block, self.end = block, ALIGNMENT  # up to which the block is in use

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Place | None:
        """Take room for a tensor; None: there is not enough, but `end` counts it."""
        start = self.end
        self.end += math.ceil(math.prod(shape) * dtype.itemsize / ALIGNMENT) * ALIGNMENT
        return Place(start, shape, dtype) if self.end <= self.block.nbytes() else None

    def put(self, tensor: Tensor) -> Any:
        """Return the place of a tensor in the block, where it is copied unless it is there."""
        start = tensor.data_ptr() - self.block.data_ptr()
        if 0 < start < self.block.nbytes() and tensor.is_contiguous():
            return Place(start, tensor.shape, tensor.dtype)
        place = self.take(tensor.shape, tensor.dtype)
        if place is not None:
            place.tensor(self.block).copy_(tensor)
        return place


_space: ContextVar[_Space | None] = ContextVar("space of the batch being collated", default=None)


def reserve(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """Return memory for a tensor of a batch, as `out` of what computes it; None: anywhere."""
    space = _space.get()
    place = None if space is None else space.take(shape, dtype)
    return None if place is None or space is None else place.tensor(space.block)


class _Sender:
    """The blocks of a worker."""

    def __init__(self, name: str) -> None:
        self.name, self.process, self.session = name, os.getpid(), uuid.uuid4().hex
        self.blocks: list[UntypedStorage] = []

    def collate(self, collate: Collate, samples: Sequence[Sample | None]) -> _Sent:
        """Collate samples in a block, if one is free; return what to send."""
        states = [int(block[0]) for block in self.blocks]
        free, retired = ([n for n, s in enumerate(states) if s == x] for x in (FREE, RETIRED))
        if not free and not retired and len(self.blocks) == MOST_BLOCKS:
            return _Sent(self.name, None, collate(samples), None)
        number = [*free, *retired, len(self.blocks)][0]
        space = _Space(self.blocks[number] if free else UntypedStorage(0))
        token = _space.set(space)
        try:
            batch = collate(samples)
        finally:
            _space.reset(token)
        return self._pack(batch, number, space)

    def _pack(self, batch: Batch, number: int, space: _Space) -> _Sent:
        """Copy what is not in the block of that number yet; a larger one takes its place."""
        handle = None
        places = batch.map(space.put)
        if space.end > space.block.nbytes():
            if not _has_shared_memory(space.end):
                return _Sent(self.name, None, batch.map(Tensor.clone), None)
            space = _Space(UntypedStorage._new_shared(space.end))
            self.blocks[number : number + 1] = [space.block]
            handle = torch.empty(0, dtype=torch.uint8).set_(space.block)
            places = batch.map(space.put)
        space.block[0] = BUSY
        return _Sent(self.name, (self.process, self.session, number), places, handle)


def _has_shared_memory(size: int) -> bool:
    """Whether shared memory has room for another block, and as much again for others."""
    try:
        folder = os.statvfs(SHARED_FOLDER)
    except OSError:  # not on this system
        return True
    return folder.f_bavail * folder.f_frsize > 2 * MOST_BLOCKS * size
