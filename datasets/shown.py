"""What a data set shows of itself: `repr`, and tables in notebooks."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fusionzoo.errors import FusionZooError, one_line

from .media.arrays import ArrayItem
from .media.audio import Segment
from .tables.splits import SPLITS
from .tables.table import Samples

MAX_CLASSES = 8  # shown with their counts
MAX_TEXT = 60  # characters of a value


def as_text(dataset: Samples) -> str:
    """Return what `repr` shows of a data set."""
    present = dataset.present.sum(0).tolist()
    kinds = dataset.modalities.items()
    names = [name if name == kind else f"{name} ({kind})" for name, kind in kinds]
    have = ", ".join(f"{name} {count:,}" for name, count in zip(names, present, strict=True))
    splits = ", ".join(f"{name} {count:,}" for name, count in _splits(dataset).items())
    lines = [
        f"{type(dataset).__name__} {dataset.source}: {len(dataset):,} samples ({splits})",
        f"  have    {have}",
        f"  {_targets(dataset)}",
    ]
    if len(dataset):
        values = ", ".join(f"{name} {value}" for name, value in _sample(dataset, 0).items())
        lines.append(f"  first   {values}")
    return "\n".join(lines)


def as_html(dataset: Samples) -> str:
    """Return tables of HTML for notebooks."""
    present = dataset.present.sum(0).tolist()
    shares = [f"{count:,} ({count / max(len(dataset), 1):.0%})" for count in present]
    modalities = [
        (name, kind, share)
        for (name, kind), share in zip(dataset.modalities.items(), shares, strict=True)
    ]
    splits = [(name, f"{count:,}") for name, count in _splits(dataset).items()]
    parts = [
        f"<p><b>{html.escape(dataset.source)}</b>: {len(dataset):,} samples</p>",
        _table(("split", "samples"), splits),
        _table(("modality", "kind", "present"), modalities),
        f"<p>{html.escape(_targets(dataset))}</p>",
    ]
    if len(dataset):
        parts.append(_table(("first sample", ""), list(_sample(dataset, 0).items())))
    return "\n".join(parts)


def _splits(dataset: Samples) -> dict[str, int]:
    counts = dataset.splits
    return {name: counts[name] for name in [*(x for x in SPLITS if x in counts), *counts]}


def _targets(dataset: Samples) -> str:
    """Return the classes with their counts, or the other targets."""
    if dataset.scheme is not None:
        names = [f"{target.name} ({target.kind})" for target in dataset.scheme]
        return f"targets {', '.join(names) or 'none is read'}"
    counts = Counter(str(label) for label in dataset.labels)
    shown = [f"{label} {counts[label]:,}" for label in dataset.classes[:MAX_CLASSES]]
    more = len(dataset.classes) - len(shown)
    rest = f", and {more} more" if more > 0 else ""
    return f"classes {len(dataset.classes)}: {', '.join(shown)}{rest}" if shown else "classes none"


def _sample(dataset: Samples, position: int) -> dict[str, str]:
    """Describe a sample's id, target and undecoded values."""
    row = int(dataset.rows[position])
    cells = {"id": repr(dataset.table["id"][row].as_py())}
    if dataset.scheme is None and dataset.classes:
        cells["target"] = repr(dataset.table["target"][row].as_py())
    for name in dataset.modalities:
        try:
            cells[name] = _described(dataset.reference(name, row))
        except FusionZooError as error:
            cells[name] = f"unreadable: {one_line(error)[:MAX_TEXT]}"
    return cells


def _described(value: Any) -> str:
    """Describe an undecoded value in a few words."""
    if value is None:
        return "missing"
    if isinstance(value, Path | ArrayItem):
        return str(value)
    if isinstance(value, str):
        short = value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 3] + "..."
        return repr(short)
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, tuple) and len(value) == 2:
        return f"{len(value[0]):,} samples at {value[1]} Hz"
    if isinstance(value, Mapping):  # cells by column
        shown = ", ".join(f"{column} {cell}" for column, cell in value.items() if cell is not None)
        return shown if len(shown) <= MAX_TEXT else shown[: MAX_TEXT - 3] + "..."
    if hasattr(value, "getbands"):  # a PIL image
        return f"{value.width} x {value.height} {value.mode}"
    if hasattr(value, "shape"):
        return f"{' x '.join(map(str, value.shape))} {value.dtype}"
    if isinstance(value, Segment):
        return str(value)
    if isinstance(value, list) and value and not isinstance(value[0], int | float | list):
        return f"{len(value):,} items, the first {_described(value[0])}"
    return f"{len(value):,} values" if isinstance(value, list) else type(value).__name__


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
