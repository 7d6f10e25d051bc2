"""Decode every value of a data set once, and measure what the checks need."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.media import decode
from fusionzoo.datasets.refusals import Refusal
from fusionzoo.datasets.row_numbers import RowNumbers
from fusionzoo.errors import FusionZooError, one_line

from .measure import Measurement, measure

CHUNK = 512  # values that are handed to the threads at a time


@dataclass
class Values:
    """The measured values of one modality; all arrays are aligned with `rows`."""

    name: str
    kind: str
    rows: NDArray[np.int64]  # of the table, of the values that could be decoded
    digests: NDArray[np.void]  # hash of the decoded content
    numbers: dict[str, NDArray[np.float64]]  # words, seconds, width, ...
    prints: NDArray[Any] | None  # fingerprints (N, D); None if there are none
    texts: list[str]  # of text only
    errors: dict[int, str] = field(default_factory=dict)  # row -> why it cannot be decoded

    @property
    def total(self) -> int:
        """The number of values, readable or not."""
        return len(self.rows) + len(self.errors)


@dataclass
class Scan:
    """A data set with the measurements of its values; what each check reads."""

    dataset: PairedDataset
    refusals: Sequence[Refusal]
    values: Mapping[str, Values]
    files_are_listed: bool  # whether every media file of the folder should be a sample's
    manifest: str = ""  # the file with the table, if there is one

    def __post_init__(self) -> None:
        table = self.dataset.table
        self.ids: list[str] = table["id"].to_pylist()
        self.splits = np.array([str(x) if x else "" for x in table["split"].to_pylist()], object)
        labels = table["target"].to_pylist() if "target" in table.column_names else []
        self.labels = np.array(labels or [None] * len(table), object)
        self.rows: NDArray[np.int64] = self.dataset.rows.numpy()

    def row_number(self, row: int) -> int:
        """Return the number by which messages name a row of the table."""
        return self._row_numbers[row]

    @cached_property
    def _row_numbers(self) -> list[int]:
        numbers = self.dataset.provenance.row_numbers or RowNumbers()
        return numbers.numbers(range(len(self.dataset.table)))

    @property
    def split_names(self) -> list[str]:
        """The splits: train, val and test first; rows without a split have none."""
        names = {x for x in self.splits[self.rows] if x}
        order = ("train", "val", "test")
        return [*(x for x in order if x in names), *sorted(names - {*order})]

    @property
    def classes(self) -> list[str]:
        """The classes, by falling size; none where labels are numbers or lists of labels."""
        labels = [str(x) for x in self.labels[self.rows] if x is not None]
        names, counts = np.unique(np.array(labels, object).astype(str), return_counts=True)
        if not len(names) or _are_numbers(names, len(labels)) or any(";" in x for x in names):
            return []
        return [str(name) for name in names[np.argsort(-counts, kind="stable")]]


def _are_numbers(names: NDArray[np.str_], num_labels: int) -> bool:
    """Return whether labels are numbers to predict: some have decimals, or most occur once."""
    try:
        numbers = names.astype(float)
    except ValueError:
        return False
    return bool((numbers % 1 != 0).any()) or len(names) > max(20, num_labels / 3)


def scan_values(
    dataset: PairedDataset, *, threads: int | None = None, progress: bool = True
) -> dict[str, Values]:
    """Decode and measure every value of the samples; show a progress bar with rate and ETA."""
    present = dataset.present.numpy()
    rows = dataset.rows.numpy()
    bar = tqdm(total=int(present.sum()), unit="value", disable=not progress, dynamic_ncols=True)
    workers = threads or min(8, os.cpu_count() or 1)
    with bar, ThreadPoolExecutor(workers) as pool:
        return {
            name: _scan_modality(dataset, name, rows[present[:, column]], pool, bar.update)
            for column, name in enumerate(dataset.modalities)
        }


def _scan_modality(
    dataset: PairedDataset,
    name: str,
    rows: NDArray[np.int64],
    pool: ThreadPoolExecutor,
    advance: Callable[[int], Any],
) -> Values:
    kind = dataset.modalities[name]

    def read(row: int) -> Measurement | str:
        try:
            return measure(kind, decode(kind, dataset.reference(name, row)))
        except FusionZooError as error:
            return str(error)
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            return f"{type(error).__name__}: {one_line(error)}"

    readable: list[int] = []
    measurements: list[Measurement] = []
    errors: dict[int, str] = {}
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK].tolist()
        # Threads help where a decoder releases the lock; text is measured by Python itself.
        results = map(read, chunk) if kind == "text" else pool.map(read, chunk)
        for row, result in zip(chunk, results, strict=True):
            if isinstance(result, str):
                errors[row] = result
            else:
                readable.append(row)
                measurements.append(result)
            advance(1)
    return _gather(name, kind, readable, measurements, errors)


def _gather(
    name: str,
    kind: str,
    rows: list[int],
    measurements: list[Measurement],
    errors: dict[int, str],
) -> Values:
    keys = measurements[0].numbers if measurements else {}
    prints = [x.print for x in measurements if x.print is not None]
    return Values(
        name=name,
        kind=kind,
        rows=np.array(rows, np.int64),
        digests=np.array([x.digest for x in measurements], "V16"),
        numbers={key: np.array([x.numbers[key] for x in measurements]) for key in keys},
        prints=np.stack(prints) if prints else None,
        texts=[x.text for x in measurements] if kind == "text" else [],
        errors=errors,
    )
