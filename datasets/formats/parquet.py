"""Read Parquet files, after estimating what they take in memory.

A column that repeats a long text a million times has a file of a few bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..budgets import BUDGETS, check_expansion

WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}  # bytes
OFFSET = 8  # bytes per value of text and lists, besides their contents


def read_parquet(path: Path) -> pa.Table:
    """Read a Parquet file; one that would take far more memory than its size is an error."""
    import pyarrow.parquet as pq

    # `read_table` would import pandas, and make columns of folder names like `a=b`.
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        check_parquet(str(path), path.stat().st_size, file, path)
        return file.read()


def check_parquet(
    name: str, size: int, file: Any, source: Any, columns: Collection[str] | None = None
) -> None:
    """Raise an error if the columns of an open file of `size` bytes would take too much memory.

    `source` is what it was opened from; without `columns` all count.
    """
    chosen = [
        column
        for column in range(file.metadata.num_columns)
        if columns is None or file.schema.column(column).path.partition(".")[0] in columns
    ]
    check_expansion(name, size, sum(_column_bytes(source, file, column) for column in chosen))


def _column_bytes(path: Any, file: Any, column: int) -> int:
    """Return an upper bound of a column's bytes in memory; an exact sum where that is large."""
    groups = [file.metadata.row_group(i).column(column) for i in range(file.num_row_groups)]
    num_values = sum(group.num_values for group in groups)
    description = file.schema.column(column)
    if description.physical_type != "BYTE_ARRAY":
        width = WIDTHS.get(description.physical_type) or description.length
        return int(num_values * (width + OFFSET * (description.max_repetition_level > 0)))
    plain = sum(group.total_uncompressed_size for group in groups) + num_values * OFFSET
    if not any("DICTIONARY" in word for group in groups for word in group.encodings):
        return int(plain)
    longest = max((_longest_entry(path, column, i) for i in range(len(groups))), default=0)
    bound = plain + num_values * longest
    if bound <= BUDGETS["table"].limit:
        return int(bound)
    return int(plain + _text_bytes(path, column))


def _longest_entry(path: Any, column: int, group: int) -> int:
    """Return the bytes of the longest entry in a column's dictionary, from its first value."""
    for values in _dictionaries(path, column, 1, [group]):
        return int(pc.max(pc.binary_length(values.dictionary)).as_py() or 0)
    return 0


def _text_bytes(path: Any, column: int) -> int:
    """Return the bytes of all texts of a column; each distinct one is in memory once."""
    total = 0
    for values in _dictionaries(path, column, 1 << 16, None):
        lengths = pc.binary_length(values.dictionary).cast(pa.int64())
        total += pc.sum(lengths.take(values.indices)).as_py() or 0
    return total


def _dictionaries(path: Any, column: int, batch: int, groups: list[int] | None) -> Any:
    """Yield a column's values as dictionary arrays, those in lists one after another."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        name = file.schema.column(column).path
    options: Any = {"read_dictionary": [name], "page_checksum_verification": True}
    with pq.ParquetFile(path, **options) as file:
        for rows in file.iter_batches(batch, row_groups=groups, columns=[name]):
            values = rows.column(0)
            while not pa.types.is_dictionary(values.type):
                if not hasattr(values, "flatten") or pa.types.is_struct(values.type):
                    return  # neither text nor a list of texts: never read as a modality
                values = values.flatten()
            yield values
