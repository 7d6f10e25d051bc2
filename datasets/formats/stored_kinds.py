"""The kinds of a manifest's modalities, stored in the schema of a Parquet file."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pyarrow as pa

KEY = b"fusionzoo"  # of the schema's metadata


def with_kinds(table: pa.Table, kinds: Mapping[str, str]) -> pa.Table:
    """Return a table whose schema says of which kind its modalities are, `{"pose": "sequence"}`."""
    metadata = {**(table.schema.metadata or {}), KEY: json.dumps({"kinds": dict(kinds)}).encode()}
    return table.replace_schema_metadata(metadata)


def stored_kinds(table: pa.Table) -> dict[str, str]:
    """Return the kinds that a table's schema stores, of columns that it has; most have none."""
    stored = (table.schema.metadata or {}).get(KEY)
    if stored is None:
        return {}
    try:
        kinds = json.loads(stored)["kinds"]
    except (ValueError, KeyError, TypeError):
        return {}
    if not isinstance(kinds, dict):
        return {}
    return {
        name: kind
        for name, kind in kinds.items()
        if name in table.column_names and isinstance(kind, str)
    }
