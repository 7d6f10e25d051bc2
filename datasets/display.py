"""How a data set shows itself: a few lines in a console, small tables in a notebook."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fusionzoo.errors import FusionZooError, one_line

from .arrays import ArrayItem
from .splits import SPLITS
from .stretch import Stretch
from .table import SampleTable

MAX_CLASSES = 8  # shown with their counts
MAX_TEXT = 60  # characters of a value


class Displayed(SampleTable):
    """A `SampleTable` with `repr`, and with tables of HTML for notebooks."""

    def __repr__(self) -> str:
        present = self.present.sum(0).tolist()
        names = [_modality(name, kind) for name, kind in self.modalities.items()]
        have = ", ".join(f"{name} {count:,}" for name, count in zip(names, present, strict=True))
        splits = ", ".join(f"{name} {count:,}" for name, count in _splits(self).items())
        lines = [
            f"{type(self).__name__} {self.source}: {len(self):,} samples ({splits})",
            f"  have    {have}",
            f"  {_targets(self)}",
        ]
        if len(self):
            values = ", ".join(f"{name} {value}" for name, value in _sample(self, 0).items())
            lines.append(f"  first   {values}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        present = self.present.sum(0).tolist()
        shares = [f"{count:,} ({count / max(len(self), 1):.0%})" for count in present]
        modalities = [
            (name, kind, share)
            for (name, kind), share in zip(self.modalities.items(), shares, strict=True)
        ]
        splits = [(name, f"{count:,}") for name, count in _splits(self).items()]
        parts = [
            f"<p><b>{_escape(self.source)}</b>: {len(self):,} samples</p>",
            _table(("split", "samples"), splits),
            _table(("modality", "kind", "present"), modalities),
            f"<p>{_escape(_targets(self))}</p>",
        ]
        if len(self):
            parts.append(_table(("first sample", ""), list(_sample(self, 0).items())))
        return "\n".join(parts)


def _splits(dataset: SampleTable) -> dict[str, int]:
    counts = dataset.splits
    return {name: counts[name] for name in [*(x for x in SPLITS if x in counts), *counts]}


def _modality(name: str, kind: str) -> str:
    return name if name == kind else f"{name} ({kind})"


def _targets(dataset: SampleTable) -> str:
    """Return the classes with their counts, or the other targets."""
    if dataset.scheme is not None:
        names = [f"{target.name} ({target.kind})" for target in dataset.scheme]
        return f"targets {', '.join(names) or 'none is read'}"
    counts = Counter(str(label) for label in dataset.labels)
    shown = [f"{label} {counts[label]:,}" for label in dataset.classes[:MAX_CLASSES]]
    more = len(dataset.classes) - len(shown)
    rest = f", and {more} more" if more > 0 else ""
    return f"classes {len(dataset.classes)}: {', '.join(shown)}{rest}" if shown else "classes none"


def _sample(dataset: SampleTable, position: int) -> dict[str, str]:
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
    if hasattr(value, "getbands"):  # a PIL picture
        return f"{value.width} x {value.height} {value.mode}"
    if hasattr(value, "shape"):
        return f"{' x '.join(map(str, value.shape))} {value.dtype}"
    if isinstance(value, Stretch):
        return str(value)
    if isinstance(value, list) and value and not isinstance(value[0], int | float | list):
        return f"{len(value):,} items, the first {_described(value[0])}"
    return f"{len(value):,} values" if isinstance(value, list) else type(value).__name__


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{_escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _escape(text: str) -> str:
    return html.escape(text)
