"""Write the parts of every sample to a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from fusionzoo.errors import FusionZooError
from fusionzoo.files import replacing

from .decompose import Parts
from .pid import Pair


def check_suffix(path: Path) -> None:
    """Refuse a file that is neither .csv nor .parquet."""
    if path.suffix not in (".csv", ".parquet"):
        raise FusionZooError(f"--by_sample {path}: samples are written as .csv or .parquet")


def write_samples(path: Path, pairs: Iterable[Pair]) -> None:
    """Write a row for each sample and pair of sources: `id`, `first`, `second`, and the parts."""
    check_suffix(path)
    tables = []
    for pair in pairs:
        by_sample = pair.by_sample or {}
        columns: dict[str, pa.Array] = {
            "id": pa.array(by_sample, pa.string()),
            "first": pa.array([pair.first] * len(by_sample), pa.string()),
            "second": pa.array([pair.second] * len(by_sample), pa.string()),
        }
        parts = zip(*by_sample.values(), strict=True)
        columns |= {
            name: pa.array(values, pa.float64())
            for name, values in zip(Parts._fields, parts, strict=True)
        }
        tables.append(pa.table(columns))
    table = pa.concat_tables(tables)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        if path.suffix == ".parquet":
            from pyarrow.parquet import write_table

            write_table(table, partial)
        else:
            from pyarrow.csv import write_csv

            write_csv(table, partial)
