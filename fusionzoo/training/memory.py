"""Keep freed memory instead of handing it back to the system and asking for it again."""

from __future__ import annotations

import ctypes
import ctypes.util

# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST = 2**30  # bytes: glibc's own limit is 32 MiB, and a batch's activations are larger


def keep_freed_memory() -> bool:
    """Let glibc reuse large blocks; return whether it could be told.

    By default glibc maps every block above 32 MiB anew and unmaps it when freed, so each
    convolution on a CPU pays for thousands of page faults: `benchmarks/memory.py` measures how
    much. Elsewhere (macOS, musl) nothing happens.
    """
    name = ctypes.util.find_library("c")
    mallopt = getattr(ctypes.CDLL(name), "mallopt", None) if name else None
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
