"""The data summary: samples, splits, classes and modalities of a run, and unused columns."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from .paired import PairedDataset
from .sources.infer import objective_hint, separator_hint
from .tables.arrow import ArrowColumn, flat
from .tables.provenance import Amputation
from .tables.splits import SPLITS
from .tables.table import case_hint
from .tables.tabular import describe_columns

MAX_CLASSES = 12  # shown with their counts
MAX_COLUMNS = 20  # unused ones that are named
MIN_WORDS = 5  # texts of fewer words are expected to recur
FEW_COPIES = 0.05  # share of val and test that may recur in train without a word
MOST_COMPARED = 100_000  # samples; of more, copies are not looked for


def data_summary(dataset: PairedDataset) -> list[str]:
    """Return the lines of the data summary.

    >>> from fusionzoo import create_dataset
    >>> for line in data_summary(create_dataset("interactions", samples=100)): print(line)
    data      interactions (xor): 100 samples
    splits    train 60, val 20, test 20 (fixed)
    classes   2: 0 55, 1 45
    have      a 100, b 100
    unused    no column
    """
    return [f"{title:<9} {text}" for title, text in data_facts(dataset)]


def data_facts(dataset: PairedDataset) -> list[tuple[str, str]]:
    """Return title and text of the lines of the data summary."""
    origin = dataset.provenance
    rule = f" ({origin.split_rule})" if origin.split_rule else ""
    present = dict(zip(dataset.modalities, dataset.present.sum(0).tolist(), strict=True))
    lines = [("data", f"{dataset.source}: {_samples(len(dataset))}")]
    counts = dataset.splits
    known = [name for name in SPLITS if name in counts]
    splits = {name: counts[name] for name in [*known, *counts]}
    lines += [("joined", origin.joined)] if origin.joined else []
    lines += [("read as", ", ".join(origin.reading))] if origin.reading else []
    lines += [("missing", f"{origin.missing} (--data.na)")] if origin.missing else []
    lines += [("splits", _counts(splits) + rule)]
    lines += [("groups", _groups(dataset))] if origin.group_rule else []
    lines += [("weights", _weights(dataset))] if dataset.weight_column is not None else []
    lines += [*_targets(dataset), ("have", _counts(present))]
    lines += [("inferred", note) for note in origin.inferred]
    hints = []
    for name, kind in dataset.modalities.items():
        if kind == "tabular":
            columns, decimal_hints = describe_columns(dataset, name)
            lines.append(("columns", columns))
            hints += decimal_hints
    lines += [("arrays", f"{name}: {note}") for name, note in origin.notes]
    if origin.deselected:
        names, remaining = ", ".join(origin.deselected), " or ".join(dataset.modalities)
        dropped = f"; {_samples(origin.dropped)} without {remaining}" if origin.dropped else ""
        lines.append(("left out", f"{names} (--data.modalities){dropped}"))
    lines += [("removed", _removed(amputation)) for amputation in origin.amputations]
    if origin.empty_rows:
        rows = f"{origin.empty_rows:,} row{'' if origin.empty_rows == 1 else 's'}"
        lines.append(("empty", f"{rows} left out (--data.drop_empty)"))
    lines.append(("unused", _unused(origin.unused)))
    hints += [*_file_names(dataset), *_target_hints(dataset), *_copies(dataset)]
    return [*lines, *(("hint", hint) for hint in hints)]


def _removed(amputation: Amputation) -> str:
    by = f" by {amputation.depends_on}" if amputation.depends_on else ""
    how = f"{amputation.mechanism}{by}, seed {amputation.seed}"
    return f"{amputation.rate:.3g} of {', '.join(amputation.modalities)} ({how})"


def _samples(number: int) -> str:
    return f"{number:,} sample{'' if number == 1 else 's'}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _groups(dataset: PairedDataset) -> str:
    """Count the groups, and those whose samples are in several splits."""
    splits_of: dict[str, set[str]] = {}
    for group, split in zip(dataset.groups, dataset.split_names, strict=True):
        splits_of.setdefault(group, set()).add(split)
    divided = sum(len(splits) > 1 for splits in splits_of.values())
    where = f"{divided:,} of them in more than one split" if divided else "each in one split"
    return f"{len(splits_of):,}, {where} ({dataset.provenance.group_rule})"


def _weights(dataset: PairedDataset) -> str:
    """Say which column weighs losses and metrics, and how far its weights differ."""
    weights = dataset.weight_values[dataset.rows]
    low, high, mean = (float(x) for x in (weights.min(), weights.max(), weights.double().mean()))
    return f"{low:g} to {high:g}, mean {mean:.4g} (column {dataset.weight_column!r})"


def _targets(dataset: PairedDataset) -> list[tuple[str, str]]:
    """Return the classes with their counts, or how many samples have a label of each target."""
    if dataset.scheme is None:
        counts = Counter(str(label) for label in dataset.labels)
        text = class_counts({name: counts[name] for name in dataset.classes})
        return [("classes", text or "none: there is no target column")]
    lines, labels, start = [], dataset.targets, 0
    for target in dataset.scheme:
        labelled = int((~labels[:, start].isnan()).sum())
        start += target.columns
        kind = f"{target.kind}, {len(target.classes)} classes" if target.classes else target.kind
        lines.append(("target", f"{target.name} ({kind}): {_samples(labelled)}"))
    return lines or [("target", "none: no label is read")]


def class_counts(counts: dict[str, int]) -> str:
    """Return the classes with their numbers of samples; of many the most frequent ones."""
    if len(counts) <= MAX_CLASSES:
        return f"{len(counts)}: {_counts(counts)}" if counts else ""
    ranked = sorted(counts, key=lambda name: -counts[name])
    shown = _counts({name: counts[name] for name in ranked[: MAX_CLASSES - 2]})
    others = len(ranked) - MAX_CLASSES + 2
    return f"{len(ranked)}: {shown}, and {others} more down to {ranked[-1]} {counts[ranked[-1]]:,}"


def _unused(columns: tuple[str, ...]) -> str:
    if not columns:
        return "no column"
    more = f" and {len(columns) - MAX_COLUMNS} more" if len(columns) > MAX_COLUMNS else ""
    noun = "column" if len(columns) == 1 else "columns"
    return f"{noun} {', '.join(map(repr, columns[:MAX_COLUMNS]))}{more}"


def _target_hints(dataset: PairedDataset) -> list[str]:
    """Return hints at classes that differ by case alone, and at objectives that fit better."""
    if dataset.scheme is None:
        hints = [case_hint(dataset.classes)]
        if dataset.classes:
            rows = pa.array(dataset.rows.numpy())
            hints.append(objective_hint(dataset.table["target"].take(rows)))
        return [hint for hint in hints if hint]
    hints = [case_hint(target.classes) for target in dataset.scheme]
    several = [target for target in dataset.scheme if target.standard_kind() == "multilabel"]
    hints += [separator_hint(target.name, target.classes) for target in several]
    return [hint for hint in hints if hint]


def _file_names(dataset: PairedDataset) -> list[str]:
    """Return hints at text that looks like file names, which --data.paths would read."""
    hints = []
    for name, kind in dataset.modalities.items():
        if kind != "text" or name in dataset.paths or name in dataset.memory:
            continue
        if not pa.types.is_string(dataset.table[name].type):
            continue  # decoding it raises an error
        files = pc.sum(pc.ends_with(dataset.table[name], ".txt")).as_py() or 0
        if files > dataset.table[name].is_valid().to_numpy().sum() / 2:
            hints.append(
                f"{files:,} cells of {name} end in .txt and are read as text:"
                f" --data.paths {name} reads the files"
            )
    return hints


def _copies(dataset: PairedDataset) -> list[str]:
    """Return hints at samples of val and test that train has too: in all their modalities, else by
    a text. Values are compared as the table has them, undecoded; those in memory never agree. Where
    most of train recur, as rows of a few categories do, that says nothing."""
    splits = np.array(dataset.split_names)
    held, train = np.isin(splits, ("val", "test")), splits == "train"
    if not held.any() or not train.any() or len(splits) > MOST_COMPARED:
        return []
    columns = {name: dataset.chosen(name) for name in dataset.modalities}
    codes = {name: _codes(column) for name, column in columns.items()}
    compared = {"all their values": (_joined_codes([*codes.values()]), held)}
    for name, kind in dataset.modalities.items():
        if kind == "text" and pa.types.is_string(columns[name].type):
            spaces = pc.fill_null(pc.count_substring(columns[name], " "), 0).to_numpy()
            compared[f"their {name}"] = (codes[name], held & (spaces >= MIN_WORDS - 1))
    for what, (values, rows) in compared.items():
        copies = int(np.isin(values[rows], values[train]).sum())
        differ = 2 * len(np.unique(values[train])) > train.sum()
        if differ and copies > FEW_COPIES * held.sum():
            return [
                f"{copies:,} of the {held.sum():,} samples of val and test have {what} in common"
                " with one of train: figures of copies are not those of new data; `fusionzoo data"
                " check` lists them, --data.group_column keeps them in one split"
            ]
    return []


def _codes(column: ArrowColumn) -> NDArray[np.int64]:
    """Number the values of a column so that equal ones have equal numbers, (N,); lists and bytes
    count as different."""
    if pa.types.is_struct(column.type):
        return _joined_codes([_codes(pc.struct_field(column, x.name)) for x in column.type])
    kinds = pa.types.is_nested, pa.types.is_binary, pa.types.is_large_binary
    if any(is_kind(column.type) for is_kind in kinds):
        return np.arange(len(column))
    encoded = flat(column).dictionary_encode()
    return np.asarray(encoded.indices.fill_null(len(encoded.dictionary)), np.int64)


def _joined_codes(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    joined = parts[0]
    for part in parts[1:]:
        joined = np.unique(joined * (part.max() + 1) + part, return_inverse=True)[1].ravel()
    return joined
