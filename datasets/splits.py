"""Assign samples to train, val and test by a hash of their id or group."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

SPLITS = ("train", "val", "test")
SHARES = (0.70, 0.15, 0.15)  # of data sets without a split column


def split_by_hash(key: str, shares: Sequence[float] = SHARES, salt: str = "") -> str:
    """Assign a key to train, val or test by its hash, whatever other keys there are.

    >>> [split_by_hash(str(i)) for i in range(4)]
    ['train', 'train', 'val', 'train']
    """
    position = _hash_fraction(f"{salt}{key}") * sum(shares)
    if position < shares[0]:
        return "train"
    return "val" if position < shares[0] + shares[1] else "test"


def split_groups(
    keys: Sequence[str], shares: Sequence[float] = SHARES
) -> tuple[dict[str, str], list[str]]:
    """Assign groups to splits by their hashes; return the splits and the moved groups.

    If there are few groups, a split may be empty. It then gets the group whose hash is nearest to
    its range, from a split with several groups.

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
            distances = {key: abs(_hash_fraction(key) - middle) for key in movable}
            nearest = min(distances, key=distances.__getitem__)
            splits[nearest] = split
            moved.append(nearest)
    return splits, moved


def _hash_fraction(key: str) -> float:
    """Return the hash of a key as a number from 0 to 1."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
