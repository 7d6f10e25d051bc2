"""A table's columns by name, ignoring case and spaces, and which of them are used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError, did_you_mean, one_line

from .checked import check_depth, check_unicode, list_names
from .parquet import read_parquet

READERS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
TEXT_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)


class Columns:
    """The columns of a manifest by role; records which of them are used.

    `roles` maps roles to the user's names of columns, `{"target": "label"}`. A role without one is
    looked up under its own name. Case and spaces around names do not matter.
    """

    def __init__(self, source: str, table: pa.Table, roles: Mapping[str, str]) -> None:
        self.source, self.table, self.roles = source, table, roles
        self.used: set[int] = set()
        self._positions: dict[str, int] = {}
        for position, name in enumerate(table.column_names):
            first = self._positions.setdefault(_fold(name), position)
            if first != position:
                raise FusionZooError(
                    f"{source}: the columns {table.column_names[first]!r} and {name!r} have the"
                    " same name if spaces and case are ignored: rename one of them"
                )

    def __contains__(self, role: str) -> bool:
        return _fold(self.roles.get(role, role)) in self._positions

    def name(self, role: str) -> str:
        """Return the name of a column as the table spells it."""
        name: str = self.table.column_names[self.position(role)]
        return name

    def position(self, role: str) -> int:
        """Return the index of a column in the table."""
        return self._positions[_fold(self.roles.get(role, role))]

    def require(self, role: str, purpose: str) -> None:
        """Raise an error that names the nearest column, if the column does not exist."""
        if role not in self:
            name, known = self.roles.get(role, role), self.table.column_names
            raise FusionZooError(
                f"{self.source} has no column {name!r} for {purpose}.{did_you_mean(name, known)}"
                f" Its columns: {list_names(known)}"
            )

    def values(self, role: str) -> Any:
        """Return a column unchanged."""
        self.used.add(self.position(role))
        return self.table.column(self.position(role))

    def text(self, role: str) -> Any:
        """Return a column as text without spaces around it, null where that is empty.

        A list of labels becomes `sun;beach`, an empty list `;`.
        """
        column = self.values(role)
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            cells = column.to_pylist()
            joined = [None if x is None else ";".join(map(str, x)) or ";" for x in cells]
            return pa.array(joined, pa.string())
        stripped = pc.utf8_trim_whitespace(column.cast(pa.string()))
        return pc.if_else(pc.equal(stripped, ""), pa.scalar(None, pa.string()), stripped)

    def unused(self) -> tuple[str, ...]:
        """Return the names of the columns that are not used."""
        names = enumerate(self.table.column_names)
        return tuple(name for position, name in names if position not in self.used)


def _fold(name: str) -> str:
    return name.strip().casefold()


def read_table(path: Path) -> pa.Table:
    """Read a CSV, TSV, JSON lines or Parquet file, chosen by its suffix."""
    if not path.is_file():
        raise FusionZooError(f"no manifest {path}: --data.root names the file")
    if path.suffix not in READERS:
        raise FusionZooError(f"{path} is none of {', '.join(READERS)}")
    try:
        return check_unicode(_read(path), str(path))
    except FusionZooError:
        raise
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise FusionZooError(f"{path} cannot be read: {one_line(error)}") from error


def _read(path: Path) -> pa.Table:
    if path.suffix == ".parquet":
        return read_parquet(path)
    if path.suffix in (".jsonl", ".ndjson"):
        import pyarrow.json as pj

        check_depth(path)
        return pj.read_json(path)
    import pyarrow.csv as pv

    delimiter = "\t" if path.suffix == ".tsv" else ","
    header = pv.open_csv(path, parse_options=pv.ParseOptions(delimiter=delimiter)).schema.names
    # All cells are read as text, so that the id 007 stays 007; an empty cell is null.
    convert = pv.ConvertOptions(
        column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=True, null_values=[""]
    )
    parse = pv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    return pv.read_csv(path, parse_options=parse, convert_options=convert)
