"""Convert pickles of features, as MMSA distributes them; nothing in one is imported or called."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fusionzoo.datasets.sources.pickle_files import Array, plain, read_pickle
from fusionzoo.datasets.tables.provenance import with_kinds
from fusionzoo.datasets.tables.splits import SPLITS, USUAL_NAMES
from fusionzoo.errors import FusionZooError, explained
from fusionzoo.files import replacing_folder
from fusionzoo.ground.cells import read_cell

ID_KEYS = ("id", "ids", "ID")
TOKENS = {"text_bert": "token ids of BERT, no features"}
EXPECTED = "{'train': {'id': [...], 'audio': array (N, T, D), 'labels': array (N,), ...}, ...}"
TARGETS = ("annotations", "classification_labels", "labels", "label", "regression_labels")
NonFinite = Literal["raise", "zero"]


@dataclass(frozen=True)
class PickledSamples:
    """The values of each key, a part for each split, and the number of samples in each split."""

    parts: Mapping[str, Sequence[Any]]  # key -> by split, arrays (N, ...) or lists of N values
    counts: Mapping[str, int]  # split -> samples; a single "" if there are no splits

    @property
    def keys(self) -> list[str]:
        """The keys of features, labels and texts: not those of ids and lengths."""
        lengths = {f"{key}_lengths" for key in self.parts}
        return [key for key in self.parts if key not in lengths and key not in ID_KEYS]

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
    """Read a pickle that maps splits to keys to values, or keys to values.

    Samples may be tuples, too, as the CMU-MultimodalSDK's users store them: `_by_key`.
    """
    data = read_pickle(path)
    if _are_tuples(data):
        data = _by_key(data, path)
    elif isinstance(data, dict) and any(map(_are_tuples, data.values())):
        data = {
            name: _by_key(part, path) if _are_tuples(part) else part for name, part in data.items()
        }
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


def _are_tuples(part: Any) -> bool:
    """Whether a split is a list of samples ((words, vision, audio, ...), label, ...)."""
    first = part[0] if isinstance(part, list) and part else None
    if not isinstance(first, tuple) or len(first) not in (2, 3):
        return False
    return isinstance(first[0], tuple) and len(first[0]) in (3, 4)


def _by_key(samples: Sequence[Any], path: Path) -> dict[str, Any]:
    """Return by key the samples ((words, vision, audio[, words]), label[, id]) of a split.

    `text` is the words joined, or the features of words; numbers of a vocabulary are left out. Of
    several labels (sentiment and emotions of MOSEI) the others are `labels_2`, `labels_3`, ...
    """
    values: dict[str, list[Any]] = {}
    for number, sample in enumerate(samples, start=1):
        if not _are_tuples([sample]):
            raise FusionZooError(
                f"{path}: sample {number} is no ((words, vision, audio), label, id) as the first"
            )
        (words, vision, audio, *more), label, *ids = sample
        row = {"vision": vision, "audio": audio, **({"id": ids[0]} if ids else {})}
        for text in (*more, words):
            cells = plain(text)
            if isinstance(cells, np.ndarray) and cells.dtype.kind == "f":
                row["text"] = text
            elif isinstance(cells, list | np.ndarray) and all(isinstance(x, str) for x in cells):
                row["text"] = " ".join(map(str, cells))
                break
        labels = plain(label)
        labels = labels.ravel().tolist() if isinstance(labels, np.ndarray) else [labels]
        for place, x in enumerate(labels, start=1):
            row["labels" if place == 1 else f"labels_{place}"] = x
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return values


def _splits(data: Mapping[str, Any], path: Path) -> dict[str, dict[str, Any]]:
    """Return the splits under our names; a single "" if there are none."""
    names = {key: USUAL_NAMES.get(key.lower()) for key in data}
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


@dataclass(frozen=True)
class Conversion:
    """The manifest that was written, and lines that say what is in it."""

    manifest: Path
    notes: list[str]


def convert_pickle(source: Path, out: Path, *, nonfinite: NonFinite = "raise") -> Conversion:
    """Convert the pickle `source` to a manifest in `out`, Parquet, and a .npy file of each feature.

    Features that are not finite are an error or, with `nonfinite="zero"`, become zeros.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FusionZooError(f"{out} exists and is not an empty folder: name another one")
    with explained(f"{out} cannot be written", OSError), replacing_folder(out) as folder:
        notes = _write(source, folder, nonfinite)
    return Conversion(out / "manifest.parquet", notes)


def _write(source: Path, folder: Path, nonfinite: NonFinite) -> list[str]:
    """Write manifest and features; return lines that say what they hold."""
    samples = read_samples(source)
    columns: dict[str, Any] = {"id": pa.array(samples.ids, pa.string())}
    if any(samples.splits):
        columns["split"] = pa.array(samples.splits)
    kinds, notes = {}, []
    for key in samples.keys:
        name, values = column_name(key, {*columns, "split", "target"}), samples.values(key)
        if isinstance(values, str):
            notes.append(f"left out: {key!r}, {values}")
        elif isinstance(values, list):
            columns[name], note = write_features(
                values, folder / f"{name}.npy", nonfinite, f"{source}, {key!r}"
            )
            kinds[name] = "vector" if values[0].ndim == 1 else "sequence"
            notes.append(f"{kinds[name]}: {name}, {note}")
        else:
            columns[name] = values
    if not kinds:
        raise FusionZooError(f"{source} holds no features: arrays (N, D) or (N, T, D) per split")
    labels = [name for name in TARGETS if name in columns]
    if labels:
        columns["target"] = columns[labels[0]]
    notes.append(about_columns(columns, kinds, labels))
    write_manifest(columns, kinds, folder)
    return notes


def write_manifest(columns: Mapping[str, Any], kinds: Mapping[str, str], folder: Path) -> None:
    """Write the columns as a manifest, Parquet, with the kinds of its modalities."""
    table = pa.table(dict(columns))
    table = table.replace_schema_metadata(with_kinds(table.schema, kinds).metadata)
    pq.write_table(table, folder / "manifest.parquet", write_page_checksum=True)


def about_columns(columns: dict[str, Any], kinds: Collection[str], labels: list[str]) -> str:
    """Say which columns there are besides the features, and how to learn others."""
    others = [name for name in columns if name not in (*kinds, "id", "split", "target")]
    target = f"target: {labels[0]}" if labels else "no target is known"
    choice = f" (--data.columns.target chooses among {', '.join(others)})" if others else ""
    return f"{target}{choice}"


def write_features(
    values: Sequence[np.ndarray], path: Path, nonfinite: NonFinite, where: str
) -> tuple[pa.Array, str]:
    """Write features one behind the other; return each sample's cell, and a note.

    A sequence without steps is missing: its cell is null.
    """
    width, is_vector = next(row.shape[-1] for row in values if row.size), values[0].ndim == 1
    steps = [1 if is_vector else len(row) for row in values]
    array = np.lib.format.open_memmap(path, "w+", np.float32, (sum(steps), width))
    cells: list[str | None] = []
    start = replaced = 0
    for number, (row, count) in enumerate(zip(values, steps, strict=True)):
        numbers = row.astype(np.float32)
        wrong = ~np.isfinite(numbers)
        if wrong.any():
            if nonfinite == "raise":
                raise FusionZooError(
                    f"{where}, sample {number + 1}: {int(wrong.sum()):,} of {row.size:,} values"
                    " are not finite: --nonfinite zero puts zeros in their place"
                )
            numbers[wrong], replaced = 0, replaced + 1
        array[start : start + count] = numbers
        rows = start if is_vector else f"{start}:{start + count}"
        cells.append(f"{path.name}[{rows}]" if row.size else None)
        start += count
    array.flush()
    missing = f", {cells.count(None):,} of them missing" * (None in cells)
    zeros = f", with zeros for values that are not finite in {replaced:,}" * (replaced > 0)
    return pa.array(cells, pa.string()), f"{len(cells):,} samples, width {width}{missing}{zeros}"


def column_name(key: str, taken: Collection[str]) -> str:
    """Return a key as the name of a column and of a file: letters, digits, `_` and `-`."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", key)[:60] or "values"
    while name.lower() in (other.lower() for other in taken):
        name += "_"
    return name
