"""Embeddings as Parquet: streamed in chunks, renamed into place when complete."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK = 4096  # rows per row group


class EmbeddingWriter:
    """Write id, split, target, `present_<modality>` and vectors as fixed-size lists of float32.

    The file is renamed into place when complete. `metadata` is stored under the key `fusionzoo`.
    """

    def __init__(self, path: Path, modalities: Sequence[str], metadata: Mapping[str, Any]) -> None:
        self.path, self.modalities, self.metadata = path, list(modalities), dict(metadata)
        self.partial = path.with_name(path.name + ".partial")
        self.rows = 0
        self._writer: Any = None
        self._pending: list[pa.Table] = []

    def __enter__(self) -> EmbeddingWriter:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self

    def add(
        self,
        ids: Sequence[str],
        splits: Sequence[str],
        targets: Sequence[str | None],
        present: Tensor,
        vectors: Mapping[str, Tensor],
    ) -> None:
        """Add a batch: present (B, M) in the order of `modalities`, each vector (B, D)."""
        import pyarrow as pa

        columns: dict[str, Any] = {
            "id": pa.array(ids, pa.string()),
            "split": pa.array(splits, pa.string()),
            "target": pa.array(targets, pa.string()),
        }
        for column, name in enumerate(self.modalities):
            columns[f"present_{name}"] = pa.array(present[:, column].cpu().numpy())
        for name, rows in vectors.items():
            flat = pa.array(rows.float().cpu().numpy().ravel(), pa.float32())
            columns[name] = pa.FixedSizeListArray.from_arrays(flat, rows.shape[1])
        self._pending.append(pa.table(columns))
        self.rows += len(ids)
        if sum(len(table) for table in self._pending) >= CHUNK:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.concat_tables(self._pending)
        self._pending = []
        if self._writer is None:
            schema = table.schema.with_metadata({"fusionzoo": json.dumps(self.metadata)})
            self._writer = pq.ParquetWriter(self.partial, schema)
        self._writer.write_table(table)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is None and self._pending:
            self._flush()
        if self._writer is not None:
            self._writer.close()
        if kind is None and self.rows:
            self.partial.replace(self.path)
        else:
            self.partial.unlink(missing_ok=True)
