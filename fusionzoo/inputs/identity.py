"""What identifies a data set, by part: digests of its ids, splits, labels and values.

Checkpoints, parts of an extraction and trials of a benchmark are kept with it, so that data that
changed behind a path are noticed, and what changed has a name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.join import SourceValues
from fusionzoo.datasets.shards.blocks import StoredCells
from fusionzoo.datasets.tables.paths import holds_paths
from fusionzoo.features.encode import value_bytes

ROWS_AT_ONCE = 65_536
MOST_NAMES = 3  # of classes in a message
COLUMNS = {"ids": "id", "splits": "split", "targets": "target", "groups": "group"}


def data_identity(dataset: PairedDataset) -> dict[str, str]:
    """Return what identifies a data set: part -> digest; of modalities and classes their names.

    Of texts, tables and values in memory the contents count; of files their place below the root,
    size and time; of shards their index. Some rows are read at a time, so memory does not grow with
    the table.
    """
    columns = {part: x for part, x in COLUMNS.items() if x in dataset.table.column_names}
    if dataset.weight_column is not None:
        columns["weights"] = dataset.weight_column
    digests = {part: hashlib.sha256() for part in columns}
    digests |= {f"values of {name}": hashlib.sha256() for name in dataset.modalities}
    for start in range(0, len(dataset), ROWS_AT_ONCE):
        rows = dataset.subset(range(start, min(start + ROWS_AT_ONCE, len(dataset))))
        for part, column in columns.items():
            _add_column(digests[part], rows.chosen(column))
        digests["targets"].update(rows.label_values[rows.rows].numpy().tobytes())
        for name in dataset.modalities:
            _add_values(digests[f"values of {name}"], rows, name)
    answers = dataset.classes if dataset.scheme is None else [x.spec for x in dataset.scheme]
    names = {"modalities": json.dumps(dataset.modalities), "classes": json.dumps(answers)}
    return {**{part: digest.hexdigest()[:24] for part, digest in digests.items()}, **names}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Name the parts of the data that differ; an empty text where none does.

    >>> changes({"ids": "1", "targets": "2"}, {"ids": "3", "targets": "4"})
    'ids and targets'
    """
    differ = [part for part in {**before, **now} if before.get(part) != now.get(part)]
    if "classes" in differ and {"classes"} <= before.keys() & now.keys():
        was, is_now = (json.loads(x["classes"]) for x in (before, now))
        differ[differ.index("classes")] = f"classes ({_few(was)}; now {_few(is_now)})"
    return " and ".join([", ".join(differ[:-1]), differ[-1]] if len(differ) > 1 else differ)


def _few(answers: list[Any]) -> str:
    names = [x if isinstance(x, str) else str(x.get("name")) for x in answers]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more or "none"


def _add_column(digest: Any, column: Any) -> None:
    """Hash an Arrow column's cells, whatever the chunks they are stored in."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # too large for one array
        array = pa.concat_arrays(array.chunks)
    batch = pa.record_batch([array], names=["cells"])
    digest.update(str(array.type).encode())
    digest.update(batch.serialize())


def _add_values(digest: Any, rows: Any, name: str) -> None:
    """Hash a modality's undecoded values in some rows."""
    kind, column, values = rows.modalities[name], rows.chosen(name), rows.memory.get(name)
    for edge in (f"{name}_start", f"{name}_end"):  # of a part of a file
        if edge in rows.table.column_names:
            _add_column(digest, rows.chosen(edge))
    if values is None and not (name in rows.paths and holds_paths(kind, column.type)):
        _add_column(digest, column)
        return
    digest.update(bytes(column.is_valid().to_pylist()))
    cells: Any = [] if values is None else pc.drop_null(column).to_numpy().copy()  # writable
    if isinstance(values, SourceValues):
        _add_values(digest, values.source.subset(cells), values.modality)  # type: ignore[attr-defined]
    elif isinstance(values, StoredCells):  # reading them would be a pass over the shards
        digest.update(json.dumps(values.blocks.identity()).encode())
        digest.update(cells.tobytes())
    elif isinstance(values, Tensor):
        digest.update(values[cells].contiguous().view(-1).view(torch.uint8).numpy())
    else:
        for value in rows.references(name):
            digest.update(b"\0")
            for part in value_bytes(value, kind, rows.root):
                digest.update(part)
