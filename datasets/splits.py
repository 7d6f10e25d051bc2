"""Assign samples to train, val and test by a hash, one by one or by groups."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

SPLITS = ("train", "val", "test")
SHARES = (0.70, 0.15, 0.15)  # of a data set that comes without a split column


def split_by_hash(key: str, shares: Sequence[float] = SHARES, salt: str = "") -> str:
    """Assign a key to train, val or test by its hash: stable when other samples come or go.

    >>> [split_by_hash(str(i)) for i in range(4)]
    ['train', 'train', 'val', 'train']
    """
    place = _place(f"{salt}{key}") * sum(shares)
    if place < shares[0]:
        return "train"
    return "val" if place < shares[0] + shares[1] else "test"


def split_groups(
    keys: Sequence[str], shares: Sequence[float] = SHARES
) -> tuple[dict[str, str], list[str]]:
    """Assign groups to splits by their hashes; also return those that were moved.

    Few groups may leave a split empty: it takes the group whose hash is nearest to its range, from
    a split that has several.

    >>> split_groups(["p1", "p2", "p3", "p2"])[0]
    {'p1': 'test', 'p2': 'train', 'p3': 'val'}
    """
    splits = {key: split_by_hash(key, shares) for key in keys}
    moved = []
    for number, split in enumerate(SPLITS):
        counts = Counter(splits.values())
        movable = [key for key in splits if counts[splits[key]] > 1]
        if shares[number] and not counts[split] and movable:
            middle = (sum(shares[:number]) + shares[number] / 2) / sum(shares)
            distances = {key: abs(_place(key) - middle) for key in movable}
            nearest = min(distances, key=distances.__getitem__)
            splits[nearest] = split
            moved.append(nearest)
    return splits, moved


def _place(key: str) -> float:
    """Return the hash of a key as a number from 0 to 1."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
