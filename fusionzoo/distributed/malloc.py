"""Keep freed memory instead of handing it back to the system, but not ever more of it."""

from __future__ import annotations

import ctypes
import ctypes.util
import mmap
from pathlib import Path

# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# Fragmentation: 32 MiB more than the first batch since the last trim took.
SLACK = 2**25
STATM = Path("/proc/self/statm")
LARGEST = 2**30  # bytes: glibc's own limit is 32 MiB, and a batch's activations are larger


def keep_freed_memory() -> bool:
    """Let glibc reuse large blocks; return whether it could be told.

    By default glibc maps every block above 32 MiB anew and unmaps it when freed, so each
    convolution on a CPU pays for thousands of page faults: `perf/memory.py` measures how
    much. Elsewhere (macOS, musl) nothing happens.
    """
    name = ctypes.util.find_library("c")
    mallopt = getattr(ctypes.CDLL(name), "mallopt", None) if name else None
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


class Heap:
    """Bound the memory that `keep_freed_memory` keeps.

    Batches differ in size (texts are longer or shorter, modalities are missing), so their blocks
    leave gaps that later ones do not fit in, and what is free but still held grows: on the stamps
    to 2.4 GB beside 0.35 GB in use. Once a batch leaves clearly more memory resident than the first
    one after the last trim did, all that is free is given back. Nothing happens without glibc.
    """

    def __init__(self) -> None:
        name = ctypes.util.find_library("c")
        self._libc = ctypes.CDLL(name) if name else None
        self._known = hasattr(self._libc, "malloc_trim") and STATM.is_file()
        self._floor: int | None = None  # resident bytes right after the last trim
        self._usual: int | None = None  # resident bytes that the first batch after it added

    def resident(self) -> int:
        """Return the resident memory of this process in bytes (free blocks that were trimmed still
        count in malloc's own figures)."""
        return int(STATM.read_text().split()[1]) * mmap.PAGESIZE

    def release(self) -> None:
        """Give all free memory back to the system."""
        self._libc.malloc_trim(0)  # type: ignore[union-attr]

    def trim(self) -> None:
        """Release what is free, as before batches of another kind; measure from there on."""
        if self._known:
            self.release()
            self._floor, self._usual = self.resident(), None

    def after_batch(self) -> None:
        """Trim if the resident memory has grown; called after each batch."""
        if not self._known:
            return
        if self._floor is None:
            self.trim()
        elif self._usual is None:
            self._usual = self.resident() - self._floor
        elif self.resident() - self._floor > self._usual + SLACK:
            self.trim()
