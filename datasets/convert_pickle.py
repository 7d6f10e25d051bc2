"""Convert a pickle of features, as MMSA distributes them, to a manifest and .npy files.

Shapes: `T` steps, `D` width.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fusionzoo.errors import FusionZooError

from .pickled_samples import read_samples
from .stored_kinds import with_kinds

TARGETS = ("annotations", "classification_labels", "labels", "label", "regression_labels")
NonFinite = Literal["raise", "zero"]


@dataclass(frozen=True)
class Converted:
    """The manifest that was written, and lines that say what is in it."""

    manifest: Path
    notes: list[str]


def convert_pickle(source: Path, out: Path, *, nonfinite: NonFinite = "raise") -> Converted:
    """Convert the pickle `source` to `out/manifest.parquet` and a .npy file of each feature.

    Features that are not finite are an error or, with `nonfinite="zero"`, become zeros.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FusionZooError(f"{out} exists and is not an empty folder: name another one")
    partial = out.resolve().with_name(f"{out.resolve().name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        notes = _write(source, partial, nonfinite)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        raise FusionZooError(f"{out} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Converted(out / "manifest.parquet", notes)


def _write(source: Path, folder: Path, nonfinite: NonFinite) -> list[str]:
    """Write manifest and features; return lines that say what they hold."""
    samples = read_samples(source)
    columns: dict[str, Any] = {"id": pa.array(samples.ids, pa.string())}
    if any(samples.splits):
        columns["split"] = pa.array(samples.splits)
    kinds, notes = {}, []
    for key in samples.keys:
        name, values = _column_name(key, {*columns, "split", "target"}), samples.values(key)
        if isinstance(values, str):
            notes.append(f"left out: {key!r}, {values}")
        elif isinstance(values, list):
            columns[name], note = _write_features(
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
    notes.append(_about_columns(columns, kinds, labels))
    table = pa.table(columns)
    table = table.replace_schema_metadata(with_kinds(table.schema, kinds).metadata)
    pq.write_table(table, folder / "manifest.parquet", write_page_checksum=True)
    return notes


def _about_columns(columns: dict[str, Any], kinds: Collection[str], labels: list[str]) -> str:
    """Say which columns there are besides the features, and how to learn others."""
    others = [name for name in columns if name not in (*kinds, "id", "split", "target")]
    target = f"target: {labels[0]}" if labels else "no target is known"
    choice = f" (--data.columns.target chooses among {', '.join(others)})" if others else ""
    return f"{target}{choice}"


def _write_features(
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


def _column_name(key: str, taken: Collection[str]) -> str:
    """Return a key as the name of a column and of a file: letters, digits, `_` and `-`."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", key)[:60] or "values"
    while name.lower() in (other.lower() for other in taken):
        name += "_"
    return name
