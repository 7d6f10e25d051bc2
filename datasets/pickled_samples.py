"""The samples in a pickle of features: splits, ids, features, labels and texts.

Shapes: `N` samples, `T` steps, `D` width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fusionzoo.cells import read_cell
from fusionzoo.errors import FusionZooError

from .restricted_pickle import Array, plain, read_pickle
from .splits import SPLITS

SPLIT_NAMES = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLIT_NAMES |= dict.fromkeys(("val", "valid", "validation", "dev"), "val")
ID_KEYS = ("id", "ids", "ID")
TOKENS = {"text_bert": "token ids of BERT, no features"}
EXPECTED = "{'train': {'id': [...], 'audio': array (N, T, D), 'labels': array (N,), ...}, ...}"


@dataclass(frozen=True)
class PickledSamples:
    """The values of each key, a part for each split, and the number of samples in each split."""

    parts: Mapping[str, Sequence[Any]]  # key -> by split, arrays (N, ...) or lists of N values
    counts: Mapping[str, int]  # split -> samples; a single "" if there are no splits

    @property
    def keys(self) -> list[str]:
        """The keys of features, labels and texts: not those of ids and lengths."""
        return [key for key in self.parts if key not in ID_KEYS and not self._is_lengths(key)]

    def _is_lengths(self, key: str) -> bool:
        return key.endswith("_lengths") and key.removesuffix("_lengths") in self.parts

    @property
    def splits(self) -> list[str]:
        """The split of each sample."""
        return [split for split, count in self.counts.items() for _ in range(count)]

    @property
    def ids(self) -> list[str]:
        """The id of each sample: split and number if there are no ids."""
        key = next((key for key in ID_KEYS if key in self.parts), None)
        if key is None:
            counts = self.counts.items()
            return [f"{split or 'sample'}-{n}" for split, count in counts for n in range(count)]
        cells = [read_cell(_single(value)) for part in self.parts[key] for value in list(part)]
        return [f"{cell:.17g}" if isinstance(cell, float) else str(cell or "") for cell in cells]

    def values(self, key: str) -> list[np.ndarray] | pa.Array | str:
        """Return the features of each sample, (D,) or (T, D), or their labels or texts as a column;
        or the reason why there are neither."""
        if key in TOKENS:
            return TOKENS[key]
        rows: list[Any] = []
        for part, (split, count) in zip(self.parts[key], self.counts.items(), strict=True):
            is_scalar = isinstance(part, np.ndarray) and not part.ndim
            if is_scalar or not isinstance(part, list | tuple | np.ndarray):
                return "one value for all samples"
            if len(part) != count:
                return f"{len(part):,} values of {count:,} samples ({split or 'all'})"
            rows += [plain(value) for value in part]
        if all(np.size(row) == 1 for row in rows if isinstance(row, np.ndarray)):
            return _column(rows)
        if not all(isinstance(row, np.ndarray) and row.dtype.kind in "biuf" for row in rows):
            return "neither features nor one value per sample"
        return self._features(key, rows)

    def _features(self, key: str, rows: Sequence[np.ndarray]) -> list[np.ndarray] | str:
        shapes = {(row.ndim, row.shape[-1]) for row in rows if row.size}
        if len(shapes) != 1 or next(iter(shapes))[0] not in (1, 2):
            return f"values of {len(shapes)} shapes, such as {rows[0].shape}"
        lengths = [step for part in self.parts.get(f"{key}_lengths", ()) for step in part]
        if not lengths:
            return list(rows)
        steps = [read_cell(_single(step)) for step in lengths]
        if len(steps) != len(rows) or not all(isinstance(step, float) for step in steps):
            return f"{len(steps):,} lengths of {len(rows):,} samples"
        return [row[: int(step or 0)] for row, step in zip(rows, steps, strict=True)]


def read_samples(path: Path) -> PickledSamples:
    """Read a pickle that maps splits to keys to values, or keys to values."""
    data = read_pickle(path)
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise FusionZooError(f"{path} holds a {type(data).__name__}; expected a dict, {EXPECTED}")
    splits = _splits(data, path)
    keys = dict.fromkeys(key for values in splits.values() for key in values)
    for key in keys:
        lacking = [split for split, values in splits.items() if key not in values]
        if lacking or not isinstance(key, str):
            raise FusionZooError(f"{path}: split {''.join(lacking[:1])!r} has no key {key!r}")
    counts = {split: _count(values, path, split) for split, values in splits.items()}
    parts = {key: [plain(values[key]) for values in splits.values()] for key in keys}
    return PickledSamples(parts, counts)


def _splits(data: Mapping[str, Any], path: Path) -> dict[str, dict[str, Any]]:
    """Return the splits under our names; a single "" if there are none."""
    names = {key: SPLIT_NAMES.get(key.lower()) for key in data}
    if not any(isinstance(data[key], dict) for key, name in names.items() if name):
        return {"": dict(data)}
    splits = {
        name: data[key] for key, name in names.items() if name and isinstance(data[key], dict)
    }
    if len(splits) < len(data):
        raise FusionZooError(
            f"{path}: its keys {', '.join(map(repr, data))} are not one each of the splits"
            f" {', '.join(SPLITS)}"
        )
    return splits


def _count(values: Mapping[str, Any], path: Path, split: str) -> int:
    """Return the number of samples: that of the ids, else the most frequent length."""
    sizes = {
        key: len(plain(value))
        for key, value in values.items()
        if isinstance(value, list | tuple) or (isinstance(value, Array) and value.value.ndim)
    }
    if not sizes:
        raise FusionZooError(
            f"{path}: split {split!r} holds no arrays or lists; expected {EXPECTED}"
        )
    lengths = [sizes[key] for key in ID_KEYS if key in sizes]
    return lengths[0] if lengths else Counter(sizes.values()).most_common(1)[0][0]


def _column(rows: Sequence[Any]) -> pa.Array | str:
    """Return one number or text per sample as a column, or the reason why that is impossible."""
    try:
        cells = [read_cell(_single(row)) for row in rows]
    except FusionZooError as error:
        return str(error)
    if any(isinstance(cell, str) for cell in cells):
        return pa.array([f"{x:g}" if isinstance(x, float) else x for x in cells], pa.string())
    return pa.array(cells, pa.float64())


def _single(value: Any) -> Any:
    """Return the only element of an array; other values stay."""
    value = plain(value)
    return value.item() if isinstance(value, np.ndarray) and value.size == 1 else value
