"""A FAISS index beside the file: cells of int8 codes, whose candidates are ranked again exactly.

The folder holds the codes (`cells.faiss`), the vectors at length 1 (`vectors.npy`, mapped rather
than read), and `about.json`: of which file and column it is, and the recall that was measured.
Shapes: `N` rows, `D` width, `Q` queries, `k` results.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError, explained
from fusionzoo.files import replacing_folder, write_json

from .vectors import BLOCK, PartsOfRows, VectorFile, array_blocks, nearest, unit

FORMAT = 2  # raised when an index of another version must be built again
TRAINING_VECTORS = 64  # per cell, from which its centre is learnt
ROUNDS = 10  # of k-means
MIN_PER_CELL = 39  # vectors; with fewer, FAISS warns that centres are poor
TRIALS = 200  # rows that serve as queries when the number of cells to visit is chosen
RECALL = 0.98  # at 10, that is aimed at in these trials
CANDIDATES = 10  # per result, ranked again exactly
MIN_CANDIDATES = 100


@dataclass(frozen=True)
class IndexFacts:
    """What an index was made of, and how it is searched."""

    column: str
    dim: int
    file: dict[str, Any]  # size, time and rows of the file of embeddings
    cells: int
    visited: int  # cells per query
    recall: float  # at 10, measured on rows of the file as queries
    format: int = FORMAT


def index_folder(file: VectorFile, column: str) -> Path:
    """Return where the index of a column stands: `emb.parquet.fused.index`."""
    return file.path.with_name(f"{file.path.name}.{column}.index")


class UnevenRowsError(FusionZooError):
    """Rows of a column are means of different modalities, which an index cannot compare."""


class Index:
    """An index that was built or read; `search` answers queries."""

    def __init__(self, folder: Path, about: IndexFacts) -> None:
        self.about, faiss = about, import_faiss()
        with explained(f"{folder} is damaged; remove it", OSError, RuntimeError, ValueError):
            self._cells = faiss.read_index(str(folder / "cells.faiss"))
            # Copy-on-write, so that torch takes it; nothing is written.
            self.vectors = np.load(folder / "vectors.npy", mmap_mode="c")
            self.usable = np.load(folder / "usable.npy")

    def search(
        self, queries: Tensor, k: int, allowed: Tensor | None = None, visited: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and rows of about the k nearest, both (Q, k), see `nearest`."""
        faiss, queries = import_faiss(), unit(queries)
        chosen: dict[str, Any] = {"nprobe": visited or self.about.visited}
        if allowed is not None:
            bits = np.packbits(allowed.numpy(), bitorder="little")
            chosen["sel"] = faiss.IDSelectorBitmap(bits)
        count = min(max(CANDIDATES * k, MIN_CANDIDATES), self._cells.ntotal)
        parameters = faiss.SearchParametersIVF(**chosen)
        _, rows = self._cells.search(queries.numpy(), count, params=parameters)
        return self._rank(queries, torch.from_numpy(rows), k)

    def exact(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k nearest of all vectors, in blocks."""
        return nearest(array_blocks(self.vectors, self.usable, BLOCK), queries, k, are_units=True)

    def _rank(self, queries: Tensor, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Rank candidates (Q, C), -1 where there is none, by their full vectors."""
        vectors = torch.from_numpy(self.vectors[rows.clamp(min=0).numpy()])
        cosines = torch.einsum("q d, q c d -> q c", queries, vectors)
        cosines = cosines.masked_fill(rows < 0, -torch.inf)
        if rows.shape[1] < k:
            extra = k - rows.shape[1]
            cosines = torch.nn.functional.pad(cosines, (0, extra), value=-torch.inf)
            rows = torch.nn.functional.pad(rows, (0, extra), value=-1)
        top = cosines.topk(k, dim=1)
        return top.values, rows.gather(1, top.indices)


def open_index(file: VectorFile, column: str, say: Any = print) -> Index:
    """Open the index of a column; build it where there is none, or where the file has changed."""
    import_faiss()
    folder = index_folder(file, column)
    about = _read(folder)
    if about is not None and about.file == file.state() and about.dim == file.dims[column]:
        return Index(folder, about)
    if about is not None:
        say(f"{folder} is of another state of {file.path}: building it again")
    return build_index(file, column, say)


def build_index(file: VectorFile, column: str, say: Any = print) -> Index:
    """Build the index of a column of vectors."""
    faiss, folder = import_faiss(), index_folder(file, column)
    if file.parts(column) and not PartsOfRows(file, column).is_even:
        raise UnevenRowsError(
            f"{file.path}: rows lack modalities, and an index of {column!r} would find the"
            " incomplete ones first: --method exact, or --by aligned_<modality>"
        )
    say(f"building an index of {file.rows:,} x {file.dims[column]} vectors: {folder}")
    with replacing_folder(folder) as partial:
        vectors, usable = _store_vectors(file, column, partial)
        rows = np.flatnonzero(usable)
        if not len(rows):
            raise FusionZooError(f"{file.path}: no row has a vector {column!r}")
        cells = max(1, min(int(4 * len(rows) ** 0.5), len(rows) // MIN_PER_CELL))
        codes = _train(vectors, rows, cells)
        for start in range(0, len(vectors), BLOCK):
            chosen = rows[(rows >= start) & (rows < start + BLOCK)]
            codes.add_with_ids(vectors[chosen], chosen)
        faiss.write_index(codes, str(partial / "cells.faiss"))
        about = IndexFacts(column, file.dims[column], file.state(), cells, cells, 1.0)
        about = _choose_visits(Index(partial, about), rows)
        write_json(partial / "about.json", asdict(about))
    say(f"{about.cells:,} cells, {about.visited:,} visited: recall@10 {about.recall:.3f} on rows")
    return Index(folder, about)


def import_faiss() -> Any:
    """Import FAISS, which the extra `search` installs."""
    with explained("an index needs FAISS, pip install 'fusionzoo[search]'", ImportError):
        import faiss
    return faiss


def _store_vectors(file: VectorFile, column: str, folder: Path) -> tuple[Any, Any]:
    """Write the vectors at length 1 and which rows have one; return both, mapped."""
    shape, usable = (file.rows, file.dims[column]), np.zeros(file.rows, bool)
    stored: Any = np.lib.format.open_memmap(folder / "vectors.npy", "w+", np.float32, shape)
    for block in file.blocks(column):
        rows = slice(block.start, block.start + len(block.usable))
        stored[rows] = unit(block.vectors).numpy()
        usable[rows] = block.usable.numpy()
    stored.flush()
    np.save(folder / "usable.npy", usable)
    return stored, usable


def _train(vectors: Any, rows: Any, cells: int) -> Any:
    """Return an empty index whose cells and scales of codes are learnt from a sample of rows."""
    faiss, dim = import_faiss(), vectors.shape[1]
    quantizer = faiss.IndexFlatIP(dim)
    codes = faiss.IndexIVFScalarQuantizer(
        quantizer, dim, cells, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
    )
    codes.cp.niter, codes.cp.max_points_per_centroid = ROUNDS, TRAINING_VECTORS
    codes.cp.seed, codes.cp.spherical = 0, True
    count = min(len(rows), max(TRAINING_VECTORS * cells, 10_000))
    sample = np.sort(np.random.default_rng(0).choice(rows, count, replace=False))
    codes.train(np.ascontiguousarray(vectors[sample]))
    return codes


def _choose_visits(index: Index, rows: Any) -> IndexFacts:
    """Raise the number of cells to visit by halves until the neighbours of rows are found."""
    chosen = np.random.default_rng(1).choice(rows, min(TRIALS, len(rows)), replace=False)
    queries = torch.from_numpy(index.vectors[chosen])
    k = min(11, len(rows))  # a row's nearest neighbour is itself
    _, true = index.exact(queries, k)
    visited = 1
    while True:
        _, rows_found = index.search(queries, k, visited=visited)
        hits = (rows_found[:, :, None] == true[:, None]).any(1)
        others = true != torch.from_numpy(chosen)[:, None]
        recall = float((hits & others).sum() / max(1, int(others.sum())))
        if recall >= RECALL or visited >= index.about.cells:
            return replace(index.about, visited=visited, recall=recall)
        visited = min(visited + max(1, visited // 2), index.about.cells)


def _read(folder: Path) -> IndexFacts | None:
    """Return what an index was made of; None if it is missing or of another format."""
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        return IndexFacts(**about) if about.get("format") == FORMAT else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None
