"""Checks for the same or nearly the same content in several splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from fusionzoo.datasets.summary import MIN_WORDS

from .scan import (
    GRID,
    TOLERATED,
    Finding,
    ScannedData,
    Values,
    counted,
    normalised,
    shingles,
)

BANDS = 64  # of the bits of a vector; two neighbours agree in all bits of at least one
MOST_BITS = 16  # per band
MAX_BUCKET = 32  # in a larger bucket each entry is compared with the next 32 only
CHUNK = 1 << 16  # pairs verified at a time
MAX_DIFFERENT = 0.3  # share of bits in which neighbours may differ
MINHASH_ROWS = 4  # entries of a MinHash per band

Pairs = NDArray[np.int64]  # (n, 2), the smaller index first
POPCOUNT = np.array([bin(x).count("1") for x in range(256)], np.uint8)
LEAST_IMAGE = 0.95  # cosine of two images' grey cells
MOST_COLOUR = 14.0  # mean difference of their colours, grey levels of 255
MOST_ASPECT = 0.05  # difference of the logarithms of their aspect ratios
LEAST_AUDIO = 0.9  # cosine of two clips' fingerprints
MOST_SECONDS = 0.1  # difference of the logarithms of their durations without quiet ends
LEAST_TEXT = 0.7  # share of common pieces of two texts (Jaccard index)
LEAST_MINHASH = 0.5  # its estimate, which has a standard deviation of 0.06
KINDS = {"image": "images", "text": "texts", "audio": "clips"}
ADVICE = "keep copies in one split, with a column `group` or --data.group_column"


def near_vectors(vectors: NDArray[Any], least: float) -> Pairs:
    """Return the pairs of vectors whose cosine is at least `least`.

    A vector of zeros has no neighbours. Of pairs with a cosine of 0.97, more than 99 % are found
    among 10,000 vectors (`tests/tools/test_audit.py` measures it).
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
    return _kept(pairs, lambda a, b: np.einsum("nd,nd->n", units[a], units[b]) >= least)


def near_sets(hashes: NDArray[np.uint32], least: float) -> Pairs:
    """Return the pairs of MinHashes (N, P) that agree in at least a share `least` of entries."""
    num_bands = hashes.shape[1] // MINHASH_ROWS
    grouped = hashes.reshape(-1, num_bands, MINHASH_ROWS).astype(np.uint64)
    keys = np.zeros(grouped.shape[:2], np.uint64)
    for place in range(MINHASH_ROWS):
        keys = (keys ^ grouped[..., place]) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(31)
    return _kept(bucket_pairs(keys), lambda a, b: (hashes[a] == hashes[b]).mean(1) >= least)


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
    return _kept(pairs, lambda a, b: POPCOUNT[codes[a] ^ codes[b]].sum(1, dtype=np.int64) <= most)


def _kept(pairs: Pairs, are_close: Callable[..., NDArray[np.bool_]]) -> Pairs:
    """Keep the pairs of which `are_close(first, second)` says so, some at a time."""
    parts = [pairs[start : start + CHUNK] for start in range(0, len(pairs), CHUNK)]
    return np.concatenate([pairs[:0], *(part[are_close(*part.T)] for part in parts)])


def duplicates(scan: ScannedData) -> Iterator[Finding]:
    """Contents that occur in several splits: exactly, or nearly.

    An error where an image or a whole sample is copied, or where more than 5 % of val and test
    have a copy elsewhere; else a warning: people write the same sentence twice.
    """
    reported: set[int] = set()
    whole = _across(scan, _same_samples(scan))
    copied = {row for group in whole for row in group}
    for name, values in scan.values.items():
        groups = _across(scan, _groups(values, _exact_pairs(values)))
        rows = {row for group in groups for row in group}
        reported |= rows
        noun = KINDS.get(values.kind, "values")
        if groups:
            severe = values.kind == "image" or bool(rows & copied) or _many(scan, groups)
            yield _finding(groups, "same_content", f"have the same {noun}", name, is_error=severe)
        known = {frozenset(group) for group in groups}
        # Copies of copies: groups of nearly the same content that hold more than exact copies.
        near = _across(scan, _groups(values, near_pairs(values)))
        groups = [group for group in near if frozenset(group) not in known]
        if groups:
            what, severe = f"have nearly the same {noun}", _many(scan, groups)
            yield _finding(groups, "similar_content", what, name, is_error=severe)
    # A short text alone is expected to recur, but not with all else that its sample has.
    groups = [group for group in whole if group[0] not in reported]
    if groups:
        what = "are the same in all their modalities"
        yield _finding(groups, "same_sample", what, is_error=_many(scan, groups))


def _same_samples(scan: ScannedData) -> list[tuple[int, ...]]:
    """Return the rows of samples that agree in all their modalities, however little these say."""
    codes = np.full((len(scan.ids), len(scan.values)), -1)
    for column, values in enumerate(scan.values.values()):
        codes[values.rows, column] = np.unique(values.digests, return_inverse=True)[1].ravel()
    damaged = {row for values in scan.values.values() for row in values.errors}
    members: dict[bytes, list[int]] = {}
    for row in np.flatnonzero((codes >= 0).any(1)).tolist():
        if row not in damaged:
            members.setdefault(codes[row].tobytes(), []).append(row)
    return [tuple(rows) for rows in members.values()]


def _many(scan: ScannedData, groups: list[tuple[int, ...]]) -> bool:
    """Return whether the groups hold many of the samples of val and test."""
    held_out = int(np.isin(scan.splits[scan.rows], ("val", "test")).sum())
    copies = sum(scan.splits[row] in ("val", "test") for group in groups for row in group)
    return copies > TOLERATED * held_out


def _finding(
    groups: list[tuple[int, ...]], check: str, what: str, modality: str = "", *, is_error: bool
) -> Finding:
    number = counted(sum(map(len, groups)), "sample")
    return Finding(
        check=check,
        severity="error" if is_error else "warning",
        modality=modality,
        message=f"{number} in {counted(len(groups), 'group')} {what} in several splits",
        advice=ADVICE,
        groups=tuple(groups),
    )


def _across(scan: ScannedData, groups: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Keep the groups with samples of several splits."""
    return [x for x in groups if len({scan.splits[row] for row in x if scan.splits[row]}) > 1]


def _groups(values: Values, pairs: Pairs) -> list[tuple[int, ...]]:
    """Join pairs of positions to groups of rows, in the order of their first row."""
    number = len(values.rows)
    if not len(pairs):
        return []
    ones = np.ones(len(pairs), bool)
    graph = coo_array((ones, (pairs[:, 0], pairs[:, 1])), shape=(number, number))
    _, labels = connected_components(graph, directed=False)
    members: dict[int, list[int]] = {}
    for position in np.unique(pairs).tolist():
        members.setdefault(int(labels[position]), []).append(int(values.rows[position]))
    return sorted(tuple(sorted(group)) for group in members.values())


def _exact_pairs(values: Values) -> Pairs:
    """Return each value with the first one of the same content."""
    if not len(values.rows):
        return np.zeros((0, 2), np.int64)
    _, first, inverse = np.unique(values.digests, return_index=True, return_inverse=True)
    positions = np.flatnonzero(_comparable(values))
    firsts = first[inverse.ravel()][positions]
    return np.stack([firsts, positions], axis=1)[firsts != positions].astype(np.int64)


def _comparable(values: Values) -> NDArray[np.bool_]:
    """Leave out values that say too little: blank images, silence, short texts."""
    numbers = values.numbers
    if values.kind == "text":
        return numbers["words"] >= MIN_WORDS
    if values.kind == "audio":
        return numbers["peak"] >= 1e-3
    if values.kind == "image":
        return numbers["spread"] > 1.0
    enough = numbers["length"] * np.maximum(numbers["dim"], 1) > 1
    return enough & (numbers["spread"] > 0) if "spread" in numbers else enough


def near_pairs(values: Values) -> Pairs:
    """Return pairs of positions with nearly the same content, exact copies of one included.

    Exact copies are compared once, by the first of them, and joined to it afterwards.
    """
    exact = _exact_pairs(values)
    if values.prints is None or values.kind not in KINDS:
        return exact
    is_copy = np.zeros(len(values.rows), bool)
    is_copy[exact[:, 1]] = True
    positions = np.flatnonzero(_comparable(values) & ~is_copy)
    find = {"image": _near_images, "audio": _near_clips, "text": _near_texts}[values.kind]
    pairs = positions[find(values, positions)] if len(positions) > 1 else exact[:0]
    return np.concatenate([exact, pairs]) if len(pairs) else exact


def _near_images(values: Values, positions: NDArray[np.int64]) -> Pairs:
    assert values.prints is not None
    prints = values.prints[positions].astype(np.float32)
    grey, colours = prints[:, : GRID**2], prints[:, GRID**2 :]
    pairs = near_vectors(grey - grey.mean(1, keepdims=True), LEAST_IMAGE)
    aspect = np.log(values.numbers["width"][positions] / values.numbers["height"][positions])
    first, second = pairs.T
    alike = np.abs(colours[first] - colours[second]).mean(1) <= MOST_COLOUR
    return pairs[alike & (np.abs(aspect[first] - aspect[second]) <= MOST_ASPECT)]


def _near_clips(values: Values, positions: NDArray[np.int64]) -> Pairs:
    assert values.prints is not None
    pairs = near_vectors(values.prints[positions], LEAST_AUDIO)
    seconds = np.log(np.maximum(values.numbers["active"][positions], 1e-3))
    return pairs[np.abs(seconds[pairs[:, 0]] - seconds[pairs[:, 1]]) <= MOST_SECONDS]


def _near_texts(values: Values, positions: NDArray[np.int64]) -> Pairs:
    assert values.prints is not None
    pairs = near_sets(values.prints[positions], LEAST_MINHASH)
    pieces = {
        position: shingles(normalised(values.texts[positions[position]]))
        for position in np.unique(pairs).tolist()
    }
    alike = [jaccard(pieces[a], pieces[b]) >= LEAST_TEXT for a, b in pairs.tolist()]
    return pairs[np.array(alike, bool)] if len(pairs) else pairs


def jaccard(first: NDArray[np.uint64], second: NDArray[np.uint64]) -> float:
    """Return the share of common elements of two sets, each sorted and without repeats.

    >>> jaccard(np.array([1, 2, 3]), np.array([2, 3, 4]))
    0.5
    """
    common = len(np.intersect1d(first, second, assume_unique=True))
    return common / max(1, len(first) + len(second) - common)
