"""Columns of a table that are neither roles nor modalities: for `with_targets`, joins, sampling."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import pyarrow as pa

from ..table import ROLES
from .columns import TEXT_TYPES, Columns

SCALAR_TYPES = (
    *TEXT_TYPES,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_boolean,
    pa.types.is_temporal,
    pa.types.is_decimal,
)


def other_columns(table: Columns, taken: Container[str]) -> dict[str, Any]:
    """Return text and numbers of unused columns as text, but for names that are `taken`."""
    columns = {}
    used = set(table.used)
    for name in table.unused():
        if not name.strip() or name.strip() in taken or name.strip() in ROLES:
            continue
        if _is_kept(table.table.schema.field(name).type):
            columns[name.strip()] = table.text(name)
    table.used = used
    return columns


def _is_kept(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return any(is_type(kind.value_type) for is_type in TEXT_TYPES)
    return any(is_type(kind) for is_type in SCALAR_TYPES)
