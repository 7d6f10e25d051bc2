"""Where samples come from: source, row number, and the kinds that a file stores."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fusionzoo.errors import FusionZooError
from fusionzoo.ground.cells import fold

from .arrow import plain_column

MAX_LISTED = 3  # rows that a message names
FUSIONZOO = b"fusionzoo"  # key of a schema's metadata
MEDIA = {"Image": "image", "Audio": "audio"}  # features of Hugging Face -> kinds
SPLIT_RULE = "the keys of the DatasetDict"  # of a data set of Hugging Face
INDEX = "index"  # key in it of the column of a DataFrame's index
TARGET = "target"  # key in it of the column of labels
TYPES: dict[str, Callable[[str], Any]] = {  # how ids and labels are written -> as they came
    **{"": str, "int": int, "float": float},
    "bool": lambda word: word.lower() == "true",
}
MANY_OF = "list of "  # before one of these: of cells that are lists
UNNAMED = "__index_level_0__"  # that column, as pandas calls it


@dataclass(frozen=True, eq=False)
class RowNumbers:
    """The numbers by which messages name a table's rows.

    In a CSV file the header is row 1, and a row whose cells have several lines has the number of
    its first line. As these are needed in messages alone, the file is then read again.

    >>> RowNumbers(first=2).number(0)
    2
    """

    first: int = 1  # number of the table's first row
    read: Callable[[], Sequence[int]] | None = None  # numbers of all rows; None: they just count up
    positions: NDArray[np.int64] | None = None  # rows of the file that are in the table; None: all

    def number(self, row: int) -> int:
        """Return the number of a row of the table."""
        return self.numbers([row])[0]

    def numbers(self, rows: Sequence[int]) -> list[int]:
        """Return the numbers of several rows of the table."""
        positions = [row if self.positions is None else int(self.positions[row]) for row in rows]
        numbers = self.read() if self.read is not None and rows else ()
        return [
            numbers[position] if position < len(numbers) else self.first + position
            for position in positions
        ]

    def list_rows(self, rows: Sequence[int]) -> str:
        """Return the first few of several rows for a message.

        >>> RowNumbers(first=2).list_rows([0, 3])
        ' (rows 2, 5)'
        """
        numbers = ", ".join(map(str, self.numbers(rows[:MAX_LISTED])))
        return f" (rows {numbers}{', ...' if len(rows) > MAX_LISTED else ''})"

    def keep(self, mask: NDArray[np.bool_]) -> RowNumbers:
        """Return the numbers of the rows where `mask` is true."""
        if mask.all():
            return self
        positions: Any = np.flatnonzero(mask)
        return replace(
            self, positions=positions if self.positions is None else self.positions[positions]
        )


@dataclass(frozen=True)
class Amputation:
    """Values that were removed on purpose."""

    mechanism: str  # mcar, mar, mnar
    rate: float  # share of each modality's values
    seed: int
    modalities: tuple[str, ...]
    depends_on: str = ""  # mar: `label` or a modality


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """How a data set got its samples, splits and groups; shown in the data summary."""

    reading: tuple[str, ...] = ()  # how the file was read, where that is not what it usually is
    missing: str = ""  # words in cells that were read as missing, with their counts
    missing_labels: Mapping[str, str] = field(default_factory=dict)  # column -> such words in it
    types: Mapping[str, str] = field(default_factory=dict)  # id, target or column -> `TYPES`
    joined: str = ""  # which of the joined sources have how many rows
    numbered: bool = False  # whether ids are the rows' numbers, for want of a column
    id_column: str = "id"  # the name of the ids' column in the user's table
    # Id of a row -> that in the table, which an earlier row has too; None: such rows are an error.
    repeated_ids: Mapping[str, str] | None = None
    empty_rows: int = 0  # rows without any modality that were left out
    split_rule: str = ""  # how samples are assigned to splits
    split_shares: tuple[float, ...] | None = None  # of splits made by hash; None: the data's own
    group_rule: str = ""  # how samples are assigned to groups
    notes: tuple[tuple[str, str], ...] = ()  # (modality, where its values come from)
    unused: tuple[str, ...] = ()  # columns of the source that nothing uses
    inferred: tuple[str, ...] = ()  # roles and kinds of columns that the source declares
    deselected: tuple[str, ...] = ()  # modalities that `select` removed
    dropped: int = 0  # samples without any of the modalities that `select` kept
    amputations: tuple[Amputation, ...] = ()  # values removed on purpose, in that order
    row_numbers: RowNumbers | None = RowNumbers()  # in messages; None: samples have no row


@dataclass(frozen=True, kw_only=True)
class LoadedTable:
    """What `open_table` turns into a data set."""

    table: pa.Table
    source: str  # the table's name in messages
    root: Path | None = None  # the folder of its paths; None: the working directory
    # Column -> values; the table holds their row numbers, null where there is no value.
    memory: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)  # of columns whose values tell their kind
    provenance: Provenance = field(default_factory=Provenance)  # how the table was read
    has_nulls: bool = True  # whether the source marks missing values, rather than by words
    order: tuple[str, ...] = ()  # of the modalities, if the source stores one
    split_rule: str = ""  # where column `split` comes from, if the source has no such column

    def __post_init__(self) -> None:
        counts = Counter(name for name in self.table.column_names if name.strip())
        repeated = [name for name, count in counts.items() if count > 1]
        if repeated:
            raise FusionZooError(f"{self.source} has two columns {repeated[0]!r}: rename one")


def with_kinds(schema: pa.Schema, kinds: Mapping[str, str]) -> pa.Schema:
    """Return a schema whose metadata says of which kind the modalities are."""
    kinds_stored = json.dumps({"kinds": dict(kinds)}).encode()
    return schema.with_metadata({**(schema.metadata or {}), FUSIONZOO: kinds_stored})


def mark_index(table: pa.Table) -> pa.Table:
    """Return a table of pandas whose metadata names its index, if the labels there are ids.

    They are if there is no column `id`, and they are complete, all different, and do not just count
    the rows. Several levels are no ids.
    """
    metadata = table.schema.metadata or {}
    try:
        levels = json.loads(metadata.get(b"pandas", b"{}"))["index_columns"]
        stored = json.loads(metadata.get(FUSIONZOO, b"{}"))
    except (ValueError, KeyError, TypeError):
        return table
    is_known = isinstance(levels, list) and len(levels) == 1 and isinstance(stored, dict)
    if not is_known or any(fold(name) == "id" for name in table.column_names):
        return table
    table, name = (
        _with_range(table, levels[0]) if isinstance(levels[0], dict) else (table, levels[0])
    )
    if name not in table.column_names:
        return table
    labels = plain_column(table[name])
    counts_rows = labels.type == pa.int64() and labels.to_pylist() == [*range(len(table))]
    if counts_rows or labels.null_count or len(labels.unique()) < len(labels):
        return table
    facts = json.dumps({**stored, INDEX: name}).encode()
    return table.replace_schema_metadata({**metadata, FUSIONZOO: facts})


def _with_range(table: pa.Table, level: Mapping[str, Any]) -> tuple[pa.Table, str]:
    """Add the index that pandas stores as a range of numbers; return also its name."""
    bounds: list[Any] = [level.get(key) for key in ("start", "stop", "step")]
    name = level.get("name") or UNNAMED
    if not all(type(x) is int for x in bounds) or not bounds[2] or name in table.column_names:
        return table, ""
    labels = range(*bounds)
    if len(labels) != len(table) or labels == range(len(table)):
        return table, ""
    return table.append_column(str(name), pa.array([*labels], pa.int64())), str(name)
