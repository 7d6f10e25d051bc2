"""Convert computational sequences (.csd) of the CMU-MultimodalSDK, aligned to their labels.

A .csd is HDF5: `<name>/data/<id>/features` (S, D) and `intervals` (S, 2), in seconds. The labels
are such a sequence, too, of which each row is a segment: `id[3]` is the fourth of `id`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from fusionzoo.datasets.media.arrays import MAX_LOADED, hdf5, is_stored_elsewhere
from fusionzoo.errors import FusionZooError, one_line
from fusionzoo.tools.pickles import (
    Converted,
    NonFinite,
    column_name,
    write_features,
    write_folder,
    write_manifest,
)

SILENCE = "sp"  # what the SDK's word files call a pause
EPSILON = 10e-6  # s; shorter overlaps are none, as in the SDK


@dataclass(frozen=True)
class LabelledSegment:
    """A row of the labels: `start` and `end` in seconds, `labels` (K,)."""

    video: str
    number: int
    start: float
    end: float
    labels: np.ndarray

    @property
    def id(self) -> str:
        """The id of the segment in the SDK's aligned files."""
        return f"{self.video}[{self.number}]"


class CsdFile:
    """A .csd file: features and intervals by id."""

    def __init__(self, path: Path) -> None:
        h5py = hdf5()
        self.path = path
        try:
            file = h5py.File(path, "r")
        except OSError as error:
            raise FusionZooError(f"{path} is no HDF5 file: {one_line(error)}") from error
        self.name = next(iter(file), "")
        data = file.get(f"{self.name}/data")
        if len(file) != 1 or not isinstance(data, h5py.Group):
            raise FusionZooError(f"{path} has no <name>/data/<id>: expected a .csd of the SDK")
        self.file, self.data = file, data
        self.intervals: dict[str, np.ndarray] = {}

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def read(self, key: str, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Return rows of `features` or `intervals` of an id, (S, D)."""
        part = self.part(key, name)
        stop = len(part) if last is None else last
        if (stop - first) * part.shape[1] * part.dtype.itemsize > MAX_LOADED:
            raise FusionZooError(f"{self.path}: {key!r}, {name}: {part.shape} is too large to load")
        try:
            return np.asarray(part[first:stop])
        except (OSError, RuntimeError) as error:
            raise FusionZooError(
                f"{self.path}: {key!r}, {name} cannot be read: {one_line(error)}"
            ) from error

    def part(self, key: str, name: str) -> Any:
        """Return the dataset `features` or `intervals` of an id."""
        h5py = hdf5()
        group = self.data[key]
        is_group = isinstance(group, h5py.Group) and group.file.filename == self.data.file.filename
        is_here = is_group and isinstance(group.get(name, getlink=True), h5py.HardLink)
        if not is_here or not isinstance(group[name], h5py.Dataset):
            raise FusionZooError(f"{self.path}: {key!r} has no dataset {name!r} of its own")
        shape = group[name].shape
        is_pairs = name == "features" or shape[1:] == (2,)
        if is_stored_elsewhere(group[name]) or len(shape) != 2 or not is_pairs:
            raise FusionZooError(
                f"{self.path}: {key!r}, {name}, of shape {shape}: expected a matrix in this file,"
                " of intervals with start and end"
            )
        return group[name]

    def rows(self, segment: LabelledSegment) -> np.ndarray:
        """Return the features of a segment, (S, D): those whose intervals overlap with it."""
        if segment.id in self.data:
            return self.read(segment.id, "features")
        if segment.video not in self.data:
            return np.zeros((0, 0))
        if segment.video not in self.intervals:
            self.intervals = {segment.video: self.read(segment.video, "intervals")}
        start, end = self.intervals[segment.video].T
        overlap = np.minimum(end, segment.end) - np.maximum(start, segment.start)
        (places,) = np.nonzero(overlap > EPSILON)
        if not len(places):
            return np.zeros((0, 0))
        count = len(self.part(segment.video, "features"))
        if count != len(start):
            raise FusionZooError(
                f"{self.path}: {segment.video!r} has {count:,} features,"
                f" but {len(start):,} intervals"
            )
        first, last = int(places[0]), int(places[-1]) + 1
        return self.read(segment.video, "features", first, last)[places - first]


class Aligned(Sequence[np.ndarray]):
    """The features of each segment, read when they are asked for."""

    def __init__(self, sequences: CsdFile, segments: Sequence[LabelledSegment]) -> None:
        self.sequences, self.segments = sequences, segments

    def __len__(self) -> int:
        return len(self.segments)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | Sequence[np.ndarray]:
        if isinstance(index, slice):
            return Aligned(self.sequences, self.segments[index])
        return self.sequences.rows(self.segments[index])


def convert_csd(source: Path, out: Path, *, nonfinite: NonFinite = "raise") -> Converted:
    """Convert a folder of .csd files to a manifest in `out`, Parquet, and a .npy file of each.

    The file whose name has `label` in it gives the segments, and its columns the targets. Features
    that are not finite are an error or, with `nonfinite="zero"`, become zeros.
    """
    paths = sorted(source.glob("*.csd"))
    labels = [path for path in paths if "label" in path.name.lower()]
    if len(labels) != 1 or len(paths) < 2:
        raise FusionZooError(
            f"{source} has {len(paths)} .csd files, {len(labels)} of them with `label` in the name:"
            " expected one of labels and at least one of features"
        )
    with ExitStack() as stack:
        files = {path: stack.enter_context(closing(CsdFile(path))) for path in paths}
        segments = _segments(files.pop(labels[0]))
        others = [*files.values()]
        return write_folder(out, lambda folder: _write(segments, others, folder, nonfinite))


def _segments(labels: CsdFile) -> list[LabelledSegment]:
    """Return the rows of the labels, each with the id of its segment."""
    segments: list[LabelledSegment] = []
    for key in labels.data:
        video, bracket, number = key.rpartition("[")
        video, first = (video, number.rstrip("]")) if bracket else (key, "0")
        intervals, rows = labels.read(key, "intervals"), labels.read(key, "features")
        if rows.dtype.kind not in "biuf" or len(rows) != len(intervals) or not first.isdigit():
            raise FusionZooError(f"{labels.path}: {key!r} is not one row of numbers per interval")
        for place, ((start, end), values) in enumerate(zip(intervals, rows, strict=True)):
            segments.append(
                LabelledSegment(video, int(first) + place, float(start), float(end), values)
            )
    if len({len(segment.labels) for segment in segments}) != 1:
        raise FusionZooError(f"{labels.path} has no labels, or rows of several widths")
    return segments


def _write(
    segments: list[LabelledSegment], others: Sequence[CsdFile], folder: Path, nonfinite: NonFinite
) -> list[str]:
    """Write manifest and features; return lines that say what they hold."""
    columns: dict[str, Any] = {
        "id": pa.array([segment.id for segment in segments], pa.string()),
        "group": pa.array([segment.video for segment in segments], pa.string()),
    }
    for place, values in enumerate(np.stack([x.labels for x in segments]).T):
        columns["target" if not place else f"label_{place + 1}"] = pa.array(values, pa.float64())
    kinds, notes = {}, []
    for sequences in others:
        values = Aligned(sequences, segments)
        name = column_name(sequences.name, columns)
        first = next((row for row in values if len(row)), None)
        if first is None:
            raise FusionZooError(f"{sequences.path} has no row within a segment of the labels")
        if first.dtype.kind in "biuf":
            columns[name], note = write_features(
                values, folder / f"{name}.npy", nonfinite, str(sequences.path)
            )
            kinds[name] = "sequence"
        else:
            texts = [_words(row) or None for row in values]
            columns[name], kinds[name] = pa.array(texts, pa.string()), "text"
            note = f"{len(texts):,} samples, {texts.count(None):,} of them missing"
        notes.append(f"{kinds[name]}: {name}, {note}")
    write_manifest(columns, kinds, folder)
    more = ", ".join(name for name in columns if name.startswith("label_"))
    notes.append(f"target: the first of the labels{more and f', also {more}'}")
    notes.append("splits: by a hash of the video, as .csd files have none")
    return notes


def _words(row: np.ndarray) -> str:
    """Return the words of a segment as one text, without pauses."""
    words = (x.decode("utf-8", "replace") if isinstance(x, bytes) else str(x) for x in row.flat)
    return " ".join(word for word in words if word != SILENCE)
