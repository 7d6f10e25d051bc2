"""The kinds of a manifest's modalities, stored in the metadata of a Parquet file."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pyarrow as pa

FUSIONZOO = b"fusionzoo"  # key of a schema's metadata


def with_kinds(schema: pa.Schema, kinds: Mapping[str, str]) -> pa.Schema:
    """Return a schema whose metadata says of which kind the modalities are."""
    kinds_stored = json.dumps({"kinds": dict(kinds)}).encode()
    return schema.with_metadata({**(schema.metadata or {}), FUSIONZOO: kinds_stored})
