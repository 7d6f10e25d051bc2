"""The columns of a table by name: stripped, compared without case, and none of them lost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError, did_you_mean

READERS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")


class Columns:
    """The columns of a manifest, which remembers those that were used.

    `roles` are the user's names of columns, `{"target": "label"}`; a role without one is looked for
    under its own name.
    """

    def __init__(self, path: Path, table: pa.Table, roles: Mapping[str, str]) -> None:
        self.path, self.table, self.roles = path, table, roles
        self.used: set[int] = set()
        self._places: dict[str, int] = {}
        for place, name in enumerate(table.column_names):
            twin = self._places.setdefault(_fold(name), place)
            if twin != place:
                raise FusionZooError(
                    f"{path}: the columns {table.column_names[twin]!r} and {name!r} have one name"
                    " once spaces and case are left aside: rename one of them"
                )

    def __contains__(self, role: str) -> bool:
        return _fold(self.roles.get(role, role)) in self._places

    def name(self, role: str) -> str:
        """Return the name of a column as it stands in the table."""
        name: str = self.table.column_names[self.place(role)]
        return name

    def place(self, role: str) -> int:
        """Return the number of a column."""
        return self._places[_fold(self.roles.get(role, role))]

    def require(self, role: str, what: str) -> None:
        """Refuse a column that does not exist, naming the nearest one."""
        if role not in self:
            name, known = self.roles.get(role, role), self.table.column_names
            raise FusionZooError(
                f"{self.path} has no column {name!r} for {what}.{did_you_mean(name, known)}"
                f" Its columns: {', '.join(known)}"
            )

    def values(self, role: str) -> Any:
        """Return a column as it is."""
        self.used.add(self.place(role))
        return self.table.column(self.place(role))

    def text(self, role: str) -> Any:
        """Return a column as text without spaces around it, null where nothing is left.

        A list of labels becomes `sun;beach`, an empty one `;`.
        """
        column = self.values(role)
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            cells = column.to_pylist()
            joined = [None if x is None else ";".join(map(str, x)) or ";" for x in cells]
            return pa.array(joined, pa.string())
        stripped = pc.utf8_trim_whitespace(column.cast(pa.string()))
        return pc.if_else(pc.equal(stripped, ""), pa.scalar(None, pa.string()), stripped)

    def unused(self) -> tuple[str, ...]:
        """Return the names of the columns that nobody asked for."""
        names = enumerate(self.table.column_names)
        return tuple(name for place, name in names if place not in self.used)


def _fold(name: str) -> str:
    return name.strip().casefold()


def read_table(path: Path) -> pa.Table:
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
