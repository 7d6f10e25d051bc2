"""A table with a row per sample: CSV, TSV, JSON lines or Parquet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...errors import FusionZooError, did_you_mean
from ...structures import KINDS
from ..paired import DATASETS, MAX_ERRORS, SHARES, OnError, PairedDataset, split_by_hash, tidy

READERS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")


@DATASETS.register("manifest", family="own")
def manifest(
    *,
    root: str = "",
    columns: Mapping[str, str] | None = None,
    kinds: Mapping[str, str] | None = None,
    shares: Sequence[float] = SHARES,
    on_error: OnError = "raise",
    max_errors: float = MAX_ERRORS,
    modalities: str | Sequence[str] | None = None,
    missing: float = 0.0,
    targets: Mapping[str, str] | None = None,
) -> PairedDataset:
    """One's own data: a CSV, TSV, JSONL or Parquet file with a row per sample.

    Columns: `id` (default: the row's number), `split` (default: by a hash of the id, in the
    `shares` of train, val, test), `target` (may be absent: then one can only embed), and one per
    modality. Those named image, text, audio, vector, sequence are found; others are named by
    `columns={"xray": "file_2"}` (also `id`, `split`, `target`) and `kinds={"xray": "image"}`. An
    empty cell is a missing modality. Paths are relative to the manifest; text stands in its cell,
    or in the .txt file that the cell names; vectors and sequences are lists (JSONL, Parquet) or
    .npy files. `targets` names columns of labels and what they hold (`{"age": "regression"}`), for
    `target` too; train.py sets it by its objective.
    """
    path = Path(root)
    table = read(path)
    columns = dict(columns or {})
    for role, column in columns.items():
        if column not in table.column_names:
            _no_column(path, table, column, f"--data.columns.{role}")
    for name in kinds or {}:
        if columns.get(name, name) not in table.column_names:
            _no_column(path, table, name, f"--data.kinds.{name}")
    wanted = [name for name in columns if name not in ("id", "split", "target")]
    found = [name for name in (*KINDS, *(kinds or {})) if name in table.column_names]
    wanted += [name for name in found if name not in columns]
    labels = _labels(path, table, targets or {}, columns)
    taken = {*_roles(columns), *labels}
    wanted = [name for name in wanted if columns.get(name, name) not in taken]
    if not wanted:
        _no_column(path, table, "image", "a modality (image, text, audio, vector, sequence)")
    made = {"id": _strings(table, columns.get("id", "id"))}
    if made["id"] is None:
        made["id"] = pa.array([str(row) for row in range(len(table))])
    made["split"] = _splits(path, table, columns.get("split", "split"), made["id"], shares)
    made["target"] = _strings(table, columns.get("target", "target"))
    if made["target"] is None:
        made["target"] = pa.nulls(len(table), pa.string())
    made |= labels
    own = {name: (kinds or {}).get(name, name) for name in wanted}
    for name, kind in own.items():
        if kind not in KINDS:
            raise FusionZooError(
                f"{path}: what does column {name!r} hold?"
                f" --data.kinds.{name} image (or {', '.join(KINDS[1:])})"
            )
        made[name] = _references(table[columns.get(name, name)])
    dataset = PairedDataset(
        pa.table(made),
        own,
        root=path.parent,
        source=str(path),
        on_error=on_error,
        max_errors=max_errors,
        targets=targets,
    )
    return tidy(dataset, modalities, missing)


def read(path: Path) -> pa.Table:
    """Read a table by its suffix."""
    if not path.is_file():
        raise FusionZooError(f"no manifest {path}: --data.root names the file")
    if path.suffix not in READERS:
        raise FusionZooError(f"{path} is none of {', '.join(READERS)}")
    try:
        return _read(path)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise FusionZooError(f"{path} cannot be read: {error}") from error


def _read(path: Path) -> pa.Table:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return pq.read_table(path)
    if path.suffix in (".jsonl", ".ndjson"):
        import pyarrow.json as pj

        return pj.read_json(path)
    import pyarrow.csv as pv

    comma = "\t" if path.suffix == ".tsv" else ","
    header = pv.open_csv(path, parse_options=pv.ParseOptions(delimiter=comma)).schema.names
    # Everything is text: an id 007 stays 007, and an empty cell is a missing value.
    convert = pv.ConvertOptions(
        column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=True, null_values=[""]
    )
    quoted = pv.ParseOptions(delimiter=comma, newlines_in_values=True)
    return pv.read_csv(path, parse_options=quoted, convert_options=convert)


def _roles(columns: Mapping[str, str]) -> set[str]:
    return {columns[role] for role in ("id", "split", "target") if role in columns}


def _labels(
    path: Path, table: pa.Table, targets: Mapping[str, str], columns: Mapping[str, str]
) -> dict[str, Any]:
    """Return the columns of labels besides `target`, as text."""
    found = {}
    for name in targets:
        if name in columns and name not in ("id", "split", "target"):
            raise FusionZooError(f"{path}: {name!r} is a modality by --data.columns, and a target")
        if columns.get(name, name) not in table.column_names:
            _no_column(path, table, columns.get(name, name), f"--targets.{name}")
        if name in ("id", "split"):
            raise FusionZooError(f"{path}: {name!r} cannot be a target")
        if name != "target":
            found[name] = _strings(table, name)
    return found


def _strings(table: pa.Table, name: str) -> Any:
    """Return a column as text, or None; a list of labels as `sun;beach`, an empty one as `;`."""
    if name not in table.column_names:
        return None
    if pa.types.is_list(table[name].type) or pa.types.is_large_list(table[name].type):
        cells = table[name].to_pylist()
        joined = [None if x is None else ";".join(map(str, x)) or ";" for x in cells]
        return pa.array(joined, pa.string())
    return table[name].cast(pa.string())


def _splits(path: Path, table: pa.Table, name: str, ids: Any, shares: Sequence[float]) -> Any:
    given = _strings(table, name)
    if given is None:
        return pa.array([split_by_hash(key, shares) for key in ids.to_pylist()])
    if given.null_count:
        row = given.is_null().to_pylist().index(True)
        raise FusionZooError(
            f"{path}, row {row + 1}, sample {ids[row].as_py()!r}: {name} is empty; say train, val"
            " or test, or leave the whole column out for a split by hash"
        )
    return given


def _references(column: Any) -> Any:
    """Keep text and lists; empty text is a missing value."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not pa.types.is_string(column.type) and not pa.types.is_large_string(column.type):
        return column
    return pa.array([value or None for value in column.to_pylist()], pa.string())


def _no_column(path: Path, table: pa.Table, name: str, what: str) -> None:
    raise FusionZooError(
        f"{path} has no column {name!r} for {what}.{did_you_mean(name, table.column_names)}"
        f" Its columns: {', '.join(table.column_names)}"
    )
