"""Find nearly equal fingerprints without comparing all pairs: bucket bits, verify candidates.

Locality-sensitive hashing: signs of random projections for vectors (Charikar 2002), bands of a
MinHash for sets (Broder 1997).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BANDS = 64  # of the bits of a vector; two neighbours agree in all bits of at least one
MOST_BITS = 16  # per band
MAX_BUCKET = 32  # in a larger bucket each entry is compared with the next 32 only
CHUNK = 1 << 16  # pairs verified at a time
MAX_DIFFERENT = 0.3  # share of bits in which neighbours may differ
MINHASH_ROWS = 4  # entries of a MinHash per band

Pairs = NDArray[np.int64]  # (n, 2), the smaller index first
POPCOUNT = np.array([bin(x).count("1") for x in range(256)], np.uint8)


def near_vectors(vectors: NDArray[Any], least: float) -> tuple[Pairs, NDArray[np.float32]]:
    """Return the pairs of vectors whose cosine is at least `least`, and the cosines.

    A vector of zeros has no neighbours. Of pairs with a cosine of 0.97, more than 99 % are found
    among 10,000 vectors (`tests/test_audit.py` measures it).
    """
    units = vectors.astype(np.float32)
    norms = np.linalg.norm(units, axis=1)
    units /= np.maximum(norms, 1e-12)[:, None]
    valid = np.flatnonzero(norms > 0)
    num_bits = int(np.clip(np.ceil(np.log2(max(len(valid), 2))) - 2, 8, MOST_BITS))
    centred = units[valid] - units[valid].mean(0) if len(valid) > 2 else units[valid]
    directions = np.random.default_rng(0).standard_normal((vectors.shape[1], BANDS * num_bits))
    bits = centred @ directions.astype(np.float32) > 0
    weights = (1 << np.arange(num_bits)).astype(np.uint32)
    keys = (bits.reshape(-1, BANDS, num_bits) * weights).sum(-1, dtype=np.uint32)
    pairs = valid[_close_codes(bucket_pairs(keys), np.packbits(bits, axis=1))]
    cosines = np.concatenate(
        [np.zeros(0, np.float32)]
        + [
            np.einsum("nd,nd->n", units[part[:, 0]], units[part[:, 1]])
            for part in _parts(pairs, CHUNK)
        ]
    )
    return pairs[cosines >= least], cosines[cosines >= least]


def near_sets(hashes: NDArray[np.uint32], least: float) -> Pairs:
    """Return the pairs of MinHashes (N, P) that agree in at least a share `least` of entries."""
    num_bands = hashes.shape[1] // MINHASH_ROWS
    grouped = hashes.reshape(-1, num_bands, MINHASH_ROWS).astype(np.uint64)
    keys = np.zeros(grouped.shape[:2], np.uint64)
    for place in range(MINHASH_ROWS):
        keys = (keys ^ grouped[..., place]) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(31)
    close = [
        part[(hashes[part[:, 0]] == hashes[part[:, 1]]).mean(1) >= least]
        for part in _parts(bucket_pairs(keys), CHUNK)
    ]
    return np.concatenate([np.zeros((0, 2), np.int64), *close])


def bucket_pairs(keys: NDArray[Any]) -> Pairs:
    """Return the pairs of rows that agree in a column of `keys` (N, BANDS), each pair once."""
    num_rows = len(keys)
    codes = [np.zeros(0, np.int64)]
    for column in keys.T:
        order = np.argsort(column, kind="stable")
        ordered = column[order]
        starts = np.arange(num_rows)
        for offset in range(1, min(MAX_BUCKET, num_rows - 1) + 1):
            starts = starts[starts + offset < num_rows]
            starts = starts[ordered[starts] == ordered[starts + offset]]
            if not len(starts):
                break
            codes.append(order[starts] * num_rows + order[starts + offset])
    # A stable order keeps the smaller index first.
    unique = np.unique(np.concatenate(codes))
    return np.stack([unique // max(num_rows, 1), unique % max(num_rows, 1)], axis=1)


def _close_codes(pairs: Pairs, codes: NDArray[np.uint8]) -> Pairs:
    """Keep the pairs whose codes differ in few bits."""
    most = MAX_DIFFERENT * codes.shape[1] * 8
    close = [
        part[POPCOUNT[codes[part[:, 0]] ^ codes[part[:, 1]]].sum(1, dtype=np.int64) <= most]
        for part in _parts(pairs, CHUNK)
    ]
    return np.concatenate([np.zeros((0, 2), np.int64), *close])


def _parts(pairs: Pairs, size: int) -> list[Pairs]:
    return [pairs[start : start + size] for start in range(0, len(pairs), size)]
