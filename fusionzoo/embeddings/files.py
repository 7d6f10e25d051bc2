"""Formats of embeddings: Parquet, folders, NumPy; read without a copy where possible."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fusionzoo.errors import FusionZooError, check_known, explained
from fusionzoo.files import replacing
from fusionzoo.ground.registry import Entry, Registry

if TYPE_CHECKING:
    import pyarrow as pa


Matrix = np.ndarray[Any, Any]
FORMATS: Registry[EmbeddingFile, Entry[EmbeddingFile]] = Registry(
    "embedding format", "fusionzoo embed --help", Entry, ("file", "folder")
)
NO_SUFFIX = "parts"  # the format of a folder without a suffix
PLAIN = ("id", "split", "target")  # columns worth compressing
ROWS_SUFFIX = ".rows.parquet"  # beside an .npy file: the columns that are no vectors


def matrix_of(array: pa.Array, width: int | None = None) -> Matrix:
    """View lists of one width as a matrix; null ones are NaN, for which a copy is made.

    `width` is that of lists whose type does not tell.
    """
    import pyarrow as pa

    kind = array.type
    dtype = kind.value_type.to_pandas_dtype()
    width = kind.list_size if pa.types.is_fixed_size_list(kind) else width or 0
    if not len(array):
        return np.empty((0, width), dtype)
    if pa.types.is_fixed_size_list(kind) and not array.values.null_count:
        start = array.offset * width + array.values.offset
        flat = np.frombuffer(array.values.buffers()[1], dtype)
        matrix = flat[start : start + len(array) * width].reshape(len(array), width)
        if array.null_count:
            matrix = matrix.copy()
    else:
        rows = array.drop_null()
        widths = pa.compute.unique(pa.compute.list_value_length(rows)).to_pylist()
        if widths not in ([], [width]):
            raise FusionZooError(f"there are vectors of {sorted(widths)} numbers")
        matrix = np.zeros((len(array), width), dtype)
        numbers = rows.flatten().to_numpy(zero_copy_only=False)
        matrix[np.asarray(array.is_valid())] = numbers.reshape(-1, width)
    if array.null_count:
        matrix[np.asarray(array.is_null())] = np.nan
    return matrix


class EmbeddingFile(ABC):
    """Embeddings in one format: a class writes and reads it. Vectors are in columns of lists.

    A subclass is registered under its suffix without the dot, in the family `file` or `folder`. It
    needs `write`, `schema` and `read`; the other methods are there to be faster. Errors of the
    libraries pass through: whoever opens a file says what it was to be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @abstractmethod
    def write(cls, tables: Iterator[pa.Table], schema: pa.Schema, out: Path) -> None:
        """Write tables one below another, with the schema's metadata; what was there is replaced
        once all is written."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns, and the metadata."""

    @abstractmethod
    def read(self, columns: Sequence[str]) -> pa.Table:
        """Return some columns whole, each as one piece of memory where possible."""

    @property
    def files(self) -> list[Path]:
        """All files that it is made of."""
        if self.path.is_dir():
            return [path for path in self.path.rglob("*") if path.is_file()]
        return [self.path]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.read(["id"]))

    def batches(self, columns: Sequence[str], size: int) -> Iterator[pa.RecordBatch]:
        """Yield some columns in batches of at most `size` rows."""
        yield from self.read(columns).to_batches(size)

    def take(self, rows: Sequence[int], columns: Sequence[str]) -> pa.Table:
        """Return some rows, whose numbers ascend."""
        import pyarrow as pa

        return self.read(columns).take(pa.array(rows, pa.int64()))

    def matrix(self, column: str) -> Matrix:
        """Return a column of vectors; read-only, without a copy where the format allows it."""
        import pyarrow as pa

        read = self.read([column])[column]
        chunks = read.chunks or [pa.array([], read.type)]
        matrix = matrix_of(chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks))
        matrix.flags.writeable = False  # it is Arrow's memory
        return matrix


def format_of(path: Path) -> type[EmbeddingFile]:
    """Return the format of a suffix; with any other, a Parquet file or a folder of them."""
    name = path.suffix[1:]
    is_known = name in FORMATS and name != NO_SUFFIX
    if not is_known or (path.is_dir() and FORMATS[name].family == "file"):
        is_file = path.suffix or path.is_file()
        name = "parquet" if is_file and not path.is_dir() else NO_SUFFIX
    cls: Any = FORMATS[name].cls
    return cls


def check_out(out: Path) -> None:
    """Refuse a name whose format is unknown, and a folder in place of a file."""
    suffixes = [f".{name}" for name in FORMATS if name != NO_SUFFIX]
    if out.suffix and out.suffix not in suffixes:
        raise FusionZooError(
            f"--out {out}: embeddings are written as {', '.join(suffixes[:-1])} or {suffixes[-1]},"
            " or into a folder, whose name has no suffix; --plugins names the file of a format of"
            " your own"
        )
    is_folder = FORMATS[out.suffix[1:] or NO_SUFFIX].family == "folder"
    if out.exists() and out.is_dir() != is_folder:
        raise FusionZooError(f"--out {out} is a {'folder' if out.is_dir() else 'file'}")


def open_embedding_file(path: Path) -> EmbeddingFile:
    """Open what `fusionzoo embed` wrote, by its suffix; a folder by the Parquet files in it."""
    if not path.exists():
        raise FusionZooError(f"{path}: no such file of embeddings; `fusionzoo embed` writes one")
    return format_of(path)(path)


def _parquet_writer(path: Path, schema: pa.Schema) -> Any:
    import pyarrow.parquet as pq

    # Numbers that hardly repeat: neither a dictionary nor compression makes them smaller.
    return pq.ParquetWriter(
        path,
        schema,
        use_dictionary=list(PLAIN),
        compression={name: "snappy" for name in PLAIN},
        write_page_checksum=True,
    )


@FORMATS.register("parquet", family="file")
class ParquetFile(EmbeddingFile):
    """A Parquet file; subclasses read several as one."""

    def __init__(self, path: Path, parquets: Sequence[Path] = ()) -> None:
        super().__init__(path)
        self.parquets = list(parquets) or [path]

    @classmethod
    def write(cls, tables: Iterator[pa.Table], schema: pa.Schema, out: Path) -> None:
        with replacing(out) as partial, _parquet_writer(partial, schema) as writer:
            for table in tables:
                writer.write_table(table, row_group_size=max(1, len(table)))

    @property
    def files(self) -> list[Path]:
        return self.parquets

    @cached_property
    def schema(self) -> pa.Schema:
        first = self._opened[0].schema_arrow
        for path, parquet in zip(self.parquets, self._opened, strict=True):
            if not parquet.schema_arrow.equals(first):
                raise FusionZooError(f"{path} has other columns than {self.parquets[0].name}")
        return first

    @property
    def rows(self) -> int:
        return sum(parquet.metadata.num_rows for parquet in self._opened)

    @cached_property
    def _opened(self) -> list[Any]:
        import pyarrow.parquet as pq

        return [pq.ParquetFile(path, page_checksum_verification=True) for path in self.parquets]

    def batches(self, columns: Sequence[str], size: int) -> Iterator[pa.RecordBatch]:
        # One by one: Arrow keeps what it has read of all that it was asked for.
        for parquet, group in self._row_groups():
            yield from parquet.iter_batches(size, row_groups=[group], columns=list(columns))

    def take(self, rows: Sequence[int], columns: Sequence[str]) -> pa.Table:
        # Only the row groups of these rows are read.
        import pyarrow as pa

        wanted, first = np.asarray(rows, np.int64), 0
        tables = []
        for parquet, group in self._row_groups():
            size = parquet.metadata.row_group(group).num_rows
            low, high = np.searchsorted(wanted, [first, first + size])
            if low < high:
                table = parquet.read_row_group(group, columns=list(columns))
                tables.append(table.take(pa.array(wanted[low:high] - first)))
            first += size
        return pa.concat_tables(tables) if tables else self.schema.empty_table().select(columns)

    def read(self, columns: Sequence[str]) -> pa.Table:
        import pyarrow as pa
        import pyarrow.parquet as pq

        mapped = [
            pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
            for path in self.parquets
        ]
        return pa.concat_tables([parquet.read(columns=list(columns)) for parquet in mapped])

    def _row_groups(self) -> Iterator[tuple[Any, int]]:
        for parquet in self._opened:
            for group in range(parquet.num_row_groups):
                yield parquet, group


@FORMATS.register("npy", family="file")
class NumpyFiles(ParquetFile):
    """An .npy file per column of vectors, mapped, beside a Parquet file of the other columns."""

    def __init__(self, path: Path) -> None:
        rows = path.with_suffix(ROWS_SUFFIX)
        if not rows.is_file():
            raise FusionZooError(
                f"{path} needs {rows.name} beside it, with the ids of its rows: `fusionzoo embed"
                " --out x.npy` writes both"
            )
        super().__init__(rows, [rows])
        self._paths = {"fused": path} | {
            file.name[len(path.stem) + 1 : -4]: file
            for file in sorted(path.parent.iterdir())
            if file.name.startswith(f"{path.stem}.") and file.suffix == ".npy" and file != path
        }
        self._matrices: dict[str, Matrix] = {}

    @classmethod
    def write(cls, tables: Iterator[pa.Table], schema: pa.Schema, out: Path) -> None:
        import pyarrow as pa

        vectors = vector_columns(schema)
        rows = pa.schema([f for f in schema if f.name not in vectors], schema.metadata)
        with ExitStack() as stack:
            # Entered first, so renamed last: its presence says that the others are complete.
            partial = stack.enter_context(replacing(out.with_suffix(ROWS_SUFFIX)))
            paths = {x: stack.enter_context(replacing(array_path(out, x))) for x in vectors}
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

    @property
    def files(self) -> list[Path]:
        return [*self.parquets, *self._paths.values()]

    @cached_property
    def schema(self) -> pa.Schema:
        import pyarrow as pa

        schema = self._opened[0].schema_arrow
        recorded = json.loads((schema.metadata or {}).get(b"fusionzoo", b"{}")).get("vectors", {})
        place = {name: number for number, name in enumerate(recorded)}
        for name in sorted(self._paths, key=lambda name: place.get(name, len(place))):
            stored = self._stored(name)
            kind = pa.list_(pa.from_numpy_dtype(stored.dtype), stored.shape[1])
            schema = schema.append(pa.field(name, kind))
        return schema

    def batches(self, columns: Sequence[str], size: int) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        names, start = [name for name in columns if name not in self._paths], 0
        for batch in super().batches(names or ["id"], size):
            rows = slice(start, start + len(batch))
            yield self._with_vectors(pa.table(batch), columns, rows)
            start += len(batch)

    def take(self, rows: Sequence[int], columns: Sequence[str]) -> pa.Table:
        import pyarrow as pa

        names = [name for name in columns if name not in self._paths]
        table = super().take(rows, names or ["id"])
        return pa.table(self._with_vectors(table, columns, np.asarray(rows, np.int64)))

    def matrix(self, column: str) -> Matrix:
        self._stored(column)  # refuses a file of another extraction
        return np.load(self._paths[column], mmap_mode="r")

    def _stored(self, column: str) -> Matrix:
        """Return a column's file, mapped so that torch takes it as it is."""
        if column not in self._matrices:
            matrix = np.load(self._paths[column], mmap_mode="c")
            if matrix.ndim != 2 or len(matrix) != self.rows:
                raise FusionZooError(
                    f"{self._paths[column]} has the shape {matrix.shape}, and {self.path.name}"
                    f" {self.rows} rows: they are not of one extraction"
                )
            self._matrices[column] = matrix
        return self._matrices[column]

    def _with_vectors(self, table: pa.Table, columns: Sequence[str], rows: Any) -> Any:
        """Return a batch of some columns, those of vectors as lists over the mapped files."""
        import pyarrow as pa

        arrays = []
        for name in columns:
            if name not in self._paths:
                arrays.append(table[name].combine_chunks())
                continue
            part = self._stored(name)[rows]
            flat = pa.array(part.reshape(-1))
            arrays.append(pa.FixedSizeListArray.from_arrays(flat, part.shape[1]))
        return pa.record_batch(arrays, names=list(columns))


def _write_header(file: Any, kind: Any, count: int) -> None:
    """Write an .npy header, padded so that one for any number of rows has the same length."""
    descr = np.lib.format.dtype_to_descr(np.dtype(kind.value_type.to_pandas_dtype()))
    header = {"descr": descr, "fortran_order": False, "shape": (count, kind.list_size)}
    np.lib.format.write_array_header_1_0(file, header)


@FORMATS.register(NO_SUFFIX, family="folder")
class ParquetFolder(ParquetFile):
    """A folder of Parquet files, one for each part."""

    def __init__(self, path: Path) -> None:
        files = sorted(x for x in path.rglob("*.parquet") if not x.name.startswith(("_", ".")))
        if not files:
            raise FusionZooError(f"{path} has no Parquet file: it is no folder of embeddings")
        super().__init__(path, files)

    @classmethod
    def write(cls, tables: Iterator[pa.Table], schema: pa.Schema, out: Path) -> None:
        names = set()
        out.mkdir(parents=True, exist_ok=True)
        for number, table in enumerate(tables):
            ParquetFile.write(iter([table]), schema, out / f"part-{number:05d}.parquet")
            names.add(f"part-{number:05d}.parquet")
        for path in out.glob("part-*.parquet"):  # of an earlier, longer table
            if path.name not in names:
                path.unlink()


class Embeddings(NamedTuple):
    """Rows in the order of the data set: ids (N,) and vectors (N, D)."""

    ids: list[str]
    vectors: np.ndarray[Any, Any]


def read_embeddings(path: str | os.PathLike[str], column: str = "fused") -> Embeddings:
    """Read the ids and one column of vectors: `ids, vectors = read_embeddings("emb.parquet")`.

    `column` is `fused`, a modality, `aligned_<modality>`, `fused_64`, ... An .npy file is mapped
    into memory; of a Parquet file the matrix is a read-only view of what Arrow decoded.
    Rows of which nothing could be read are NaN, for which a copy is made.
    """
    with explained(f"{path} cannot be read", OSError, ValueError):
        file = open_embedding_file(Path(path))
        check_known(column, vector_columns(file.schema), f"{path} has no vectors {column!r}")
        return Embeddings(file.read(["id"])["id"].to_pylist(), file.matrix(column))


def read_about(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a file of embeddings says of itself: model, data, versions, vectors, ..."""
    with explained(f"{path} cannot be read", OSError, ValueError):
        about = (open_embedding_file(Path(path)).schema.metadata or {}).get(b"fusionzoo")
    if about is None:
        raise FusionZooError(f"{path} was not written by `fusionzoo embed`")
    return dict(json.loads(about))


def vector_columns(schema: pa.Schema) -> list[str]:
    """Return the columns that hold vectors of one width, of floating-point numbers."""
    from pyarrow.types import is_fixed_size_list, is_floating

    lists = [field for field in schema if is_fixed_size_list(field.type)]
    return [field.name for field in lists if is_floating(field.type.value_type)]


def array_path(path: Path, column: str) -> Path:
    """Return the .npy file of a column: `emb.npy` for `fused`, else `emb.<column>.npy`."""
    return path if column == "fused" else path.with_suffix(f".{column}.npy")
