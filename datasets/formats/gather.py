"""Give every modality of a table one column, whatever it is made of."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from fusionzoo.errors import FusionZooError

from .array_columns import ArrayColumns, gather_arrays
from .cell_columns import Roles, gather_columns
from .cells import CellRules


def gather(
    table: pa.Table,
    source: str,
    root: Path | None,
    *,
    columns: Roles,
    kinds: Mapping[str, str],
    arrays: Mapping[str, str | Sequence[str]],
    labels: Collection[str],
    categorical: str | Sequence[str],
    allow_outside: bool,
    sample_rate: int | None,
    group_column: str | None,
    cells: CellRules | None,
) -> ArrayColumns:
    """Return a table in which every modality has one column; for the settings see `manifest`.

    `labels` are columns of labels.
    """
    if "group" in {*columns, *kinds, *arrays}:
        raise FusionZooError(
            f"{source}: a group is no modality: --data.group_column names its column"
        )
    table, roles, missing = gather_columns(
        table, source, columns, kinds, targets=labels, categorical=categorical, cells=cells
    )
    if group_column is not None:
        roles["group"] = group_column
    gathered = gather_arrays(
        table,
        source,
        root or Path(),
        arrays,
        roles=roles,
        kinds=kinds,
        allow_outside=allow_outside or root is None,
        sample_rate=sample_rate,
    )
    return gathered._replace(missing=missing)
