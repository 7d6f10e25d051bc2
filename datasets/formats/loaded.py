"""A source of samples, read: its table, values outside of the table, its name in messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..provenance import Provenance


@dataclass(frozen=True, kw_only=True)
class Loaded:
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
