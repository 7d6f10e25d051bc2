"""Write the parts as one file: Parquet, NumPy or Lance, or a folder of Parquet files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.embedding_files import ROWS_SUFFIX, import_lance
from fusionzoo.evaluation.embeddings import array_path, vector_columns
from fusionzoo.evaluation.list_columns import matrix_of
from fusionzoo.files import replacing

from .parts import Parts

FORMATS = (".parquet", ".npy", ".lance", "")
PLAIN = ("id", "split", "target")  # columns worth compressing


def check_out(out: Path) -> None:
    """Refuse a name whose format is unknown, and one whose library is not installed."""
    if out.suffix not in FORMATS:
        raise FusionZooError(
            f"--out {out}: embeddings are written as .parquet, .npy or .lance, or into a folder,"
            " whose name has no suffix"
        )
    if out.suffix == ".lance":
        import_lance()
    is_folder = out.suffix in ("", ".lance")
    if out.exists() and out.is_dir() != is_folder:
        raise FusionZooError(f"--out {out} is a {'folder' if out.is_dir() else 'file'}")


def merge(parts: Parts, schema: pa.Schema, num_parts: int) -> None:
    """Write all parts, in order; each becomes a row group. The old file is replaced at the end."""
    missing = sorted({*range(num_parts)} - {*parts.finished()})
    if missing:
        raise FusionZooError(
            f"{len(missing)} of {num_parts} parts are missing, the first is {missing[0]}: the same"
            " command computes them"
        )
    tables = (parts.read(part) for part in range(num_parts))
    write = {".npy": _write_arrays, ".lance": _write_lance, "": _write_shards}
    write.get(parts.out.suffix, _write_parquet)(tables, schema, parts.out)
    parts.remove()


def _parquet_writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    # Numbers that hardly repeat: neither a dictionary nor compression makes them smaller.
    return pq.ParquetWriter(
        path,
        schema,
        use_dictionary=list(PLAIN),
        compression={name: "snappy" for name in PLAIN},
        write_page_checksum=True,
    )


def _write_parquet(tables: Iterator[pa.Table], schema: pa.Schema, out: Path) -> None:
    with replacing(out) as partial, _parquet_writer(partial, schema) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(1, len(table)))


def _write_shards(tables: Iterator[pa.Table], schema: pa.Schema, out: Path) -> None:
    names = set()
    out.mkdir(parents=True, exist_ok=True)
    for number, table in enumerate(tables):
        _write_parquet(iter([table]), schema, out / f"part-{number:05d}.parquet")
        names.add(f"part-{number:05d}.parquet")
    for path in out.glob("part-*.parquet"):  # of an earlier, longer table
        if path.name not in names:
            path.unlink()


def _write_lance(tables: Iterator[pa.Table], schema: pa.Schema, out: Path) -> None:
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    batches = (batch for table in tables for batch in table.to_batches())
    reader = pa.RecordBatchReader.from_batches(schema, batches)
    import_lance().write_dataset(reader, str(partial), schema=schema)
    shutil.rmtree(out, ignore_errors=True)
    partial.replace(out)


def _write_arrays(tables: Iterator[pa.Table], schema: pa.Schema, out: Path) -> None:
    """Write each vector column as an .npy file, and the other columns as Parquet."""
    vectors = vector_columns(schema)
    rows = pa.schema([f for f in schema if f.name not in vectors], schema.metadata)
    with ExitStack() as stack:
        # Entered first, so renamed last: its presence says that the others are complete.
        partial = stack.enter_context(replacing(out.with_suffix(ROWS_SUFFIX)))
        paths = {name: stack.enter_context(replacing(array_path(out, name))) for name in vectors}
        files = {name: stack.enter_context(path.open("w+b")) for name, path in paths.items()}
        writer = stack.enter_context(_parquet_writer(partial, rows))
        for name, file in files.items():
            _write_header(file, schema.field(name).type, 0)
        count = 0
        for table in tables:
            count += len(table)
            writer.write_table(table.select(rows.names), row_group_size=max(1, len(table)))
            for name, file in files.items():
                file.write(matrix_of(table[name].combine_chunks()).tobytes())
        for name, file in files.items():
            file.seek(0)
            _write_header(file, schema.field(name).type, count)


def _write_header(file: Any, kind: Any, count: int) -> None:
    """Write an .npy header, padded so that one for any number of rows has the same length."""
    header: Mapping[str, Any] = {
        "descr": np.lib.format.dtype_to_descr(np.dtype(kind.value_type.to_pandas_dtype())),
        "fortran_order": False,
        "shape": (count, kind.list_size),
    }
    np.lib.format.write_array_header_1_0(file, dict(header))
