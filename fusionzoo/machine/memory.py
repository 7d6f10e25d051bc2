"""Memory that glibc keeps for the next batch, within bounds."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# Tolerated growth from fragmentation: 32 MiB above the first batch after the last trim.
SLACK = 2**25
STATM = Path("/proc/self/statm")
LARGEST = 2**30  # bytes: glibc's own limit is 32 MiB, and a batch's activations are larger


def _c_library() -> ctypes.CDLL | None:
    """Return the C library of this process (`find_library` would start ldconfig to search it)."""
    return ctypes.CDLL(None) if os.name == "posix" else None


def keep_freed_memory() -> bool:
    """Let glibc reuse large blocks; return whether that succeeded.

    By default glibc maps every block above 32 MiB anew and unmaps it when freed, so each
    convolution on a CPU costs thousands of page faults: a frozen encoder of images is 3.2 times
    as fast with it (results/LOG.md). No effect without glibc (macOS, musl).
    """
    mallopt = getattr(_c_library(), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


class Heap:
    """Bound the memory that `keep_freed_memory` keeps.

    Batches differ in size (text lengths, missing modalities), so the heap fragments and free memory
    that is not returned grows: on the stamps to 2.4 GB beside 0.35 GB in use. When a batch leaves
    more than `SLACK` above the resident memory of the first batch after the last trim, all free
    memory is returned to the system. Less than `SLACK` in all is not worth it: the next batch would
    map the same pages again, which took 3 % of a training of small models. No effect without glibc.
    """

    def __init__(self) -> None:
        self._libc = _c_library()
        self._supported = hasattr(self._libc, "malloc_trim") and STATM.is_file()
        self._floor: int | None = None  # resident bytes right after the last trim
        self._usual: int | None = None  # resident bytes that the first batch after it added

    def resident(self) -> int:
        """Return the resident memory of this process in bytes (malloc's own statistics still count
        trimmed blocks)."""
        return int(STATM.read_text().split()[1]) * mmap.PAGESIZE

    def release(self) -> None:
        """Return all free memory to the system."""
        self._libc.malloc_trim(0)  # type: ignore[union-attr]

    def trim(self) -> None:
        """Release free memory, if there may be much, and measure the next batch's growth, say
        before evaluation."""
        if not self._supported:
            return
        if self._floor is None or self.resident() - self._floor > SLACK:
            self.release()
            self._floor = self.resident()
        self._usual = None

    def after_batch(self) -> None:
        """Trim if the resident memory has grown; called after each batch."""
        if not self._supported:
            return
        if self._floor is None:
            self.trim()
        elif self._usual is None:
            self._usual = self.resident() - self._floor
        elif self.resident() - self._floor > self._usual + SLACK:
            self.trim()
