"""Search a file of embeddings: by text, picture, sound, the id of a sample, or a vector."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.model import FusionModel

from .file import BLOCK, Block, VectorFile, open_vectors, unit
from .index import Index, open_index
from .nearest import nearest
from .queries import (
    check_fit,
    check_lengths,
    check_same_space,
    choose_column,
    embed_query,
    name_modalities,
    open_model,
    query_from_rows,
)
from .results import Found, Hit
from .samples import Samples, open_samples
from .where import Where

MAX_EXACT = 3_000_000  # rows; larger files get an index
Method = Literal["auto", "exact", "index"]


class Searcher:
    """Searches one file repeatedly: the vectors are read once and stay in memory, or indexed.

    `method`: "exact"; "index", which builds a FAISS index beside the file (extra `search`); "auto",
    an index beyond 3,000,000 rows. `stream` reads the file again for each search instead: memory
    does not grow with the file.
    """

    def __init__(
        self,
        path: str | Path | VectorFile,
        *,
        model: FusionModel | str = "",
        data: Any = None,
        method: Method = "auto",
        stream: bool = False,
        plugins: str | Sequence[str] = "",
        say: Callable[[str], Any] = print,
    ) -> None:
        self.file = open_vectors(path)
        if method not in ("auto", "exact", "index"):
            raise FusionZooError(f"method={method!r} is none of auto, exact, index")
        self.indexed = method == "index" or (method == "auto" and self.file.rows > MAX_EXACT)
        self.stream, self.say, self._plugins, self._data = stream, say, plugins, data
        self._model_source, self._model = model, None if isinstance(model, str) else model
        self._samples: Samples | None = None
        self._vectors: dict[str, tuple[Tensor, Tensor]] = {}
        self._indexes: dict[str, Index] = {}

    @property
    def model(self) -> FusionModel:
        """The model that embeds queries, loaded when it is first needed."""
        if self._model is None:
            self._model = open_model(self.file, self._model_source, self._plugins)
        return self._model

    @property
    def samples(self) -> Samples:
        """The data behind the rows, opened when it is first needed."""
        if self._samples is None:
            self._samples = open_samples(self.file, self._data, self._plugins)
        return self._samples

    def search(
        self,
        values: Mapping[str, Any] | None = None,
        *,
        ids: Sequence[str] = (),
        ids_from: str | Path = "",
        vector: Any = None,
        by: str = "",
        k: int = 10,
        where: str = "",
        visited: int | None = None,
    ) -> Found:
        """Return the k rows nearest to a query of media by modality or kind, of ids, of a vector.

        Several parts make one query: media are embedded together, and what they, each id and the
        vector give is averaged at length 1. Rows of `ids` are no hits, unless they are those of
        another file, `ids_from`. `by` names the vectors to compare: `fused`, a modality,
        `aligned_<modality>`, or `aligned`, the mean of those.
        """
        values = {name: value for name, value in (values or {}).items() if value is not None}
        if not values and not ids and vector is None:
            raise FusionZooError("nothing to search for: --text, --image, --audio or --id")
        if k < 1:
            raise FusionZooError(f"k={k}; it must be at least 1")
        condition = Where(where) if where else None  # its mistakes come before a model is loaded
        column = choose_column(self.file, by, list(values))
        check_lengths(self.file, column)
        other = open_vectors(ids_from or self.file)
        check_same_space(self.file, other, column)
        rows = other.rows_of(ids)
        allowed = self._allowed(condition, [] if ids_from else rows)
        parts = [query_from_rows(other, column, rows)] if rows else []
        query = self._query(values, vector, column, parts)
        cosines, found = self._nearest(query, column, k, allowed, visited)
        hits = self._hits(cosines[0].tolist(), found[0].tolist())
        words = [f"{name} {value}" for name, value in values.items()]
        words += [f"id {sample_id}" for sample_id in ids] + ["a vector"] * (vector is not None)
        notes = [self.samples.problem] if self.samples.problem else []
        if not hits:
            notes.append("no row matches the filter" if where else f"no row has {column}")
        searched = self.file.rows if allowed is None else int(allowed.sum())
        return Found(
            *(hits, " + ".join(words), column, self._how(column), searched, notes, self.samples)
        )

    def nearest(
        self, queries: Tensor, column: str, k: int, visited: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and rows of the k nearest of each query (Q, D): both (Q, k)."""
        self.file.check_column(column)
        check_fit(self.file, column, queries, "the query")
        return self._nearest(queries, column, k, None, visited)

    def _query(
        self, values: Mapping[str, Any], vector: Any, column: str, parts: list[Tensor]
    ) -> Tensor:
        """Return the query as one unit vector, (1, D); `parts` are those of rows, (Q, D)."""
        if values:
            embedded = embed_query(self.model, name_modalities(self.model, values), column)
            check_fit(self.file, column, embedded[None], "the model")
            parts.append(embedded[None])
        if vector is not None:
            array = torch.as_tensor(vector, dtype=torch.float32).reshape(1, -1)
            check_fit(self.file, column, array, "the query")
            parts.append(unit(array))
        mean = torch.cat(parts).mean(0, keepdim=True)
        check_fit(self.file, column, mean, "the query")
        return unit(mean)

    def _allowed(self, where: Where | None, excluded: Sequence[int]) -> Tensor | None:
        """Return the rows that the filter leaves, bool (N,); None for all of them."""
        if where is None and not excluded:
            return None
        allowed = torch.ones(self.file.rows, dtype=torch.bool)
        if where is not None:
            allowed = self._filter(where)
        allowed[list(excluded)] = False
        return allowed

    def _filter(self, where: Where) -> Tensor:
        names = [name for name in where.columns if name in self.file.columns]
        others = [name for name in where.columns if name not in names]
        allowed, start = torch.zeros(self.file.rows, dtype=torch.bool), 0
        for batch in self.file.batches(list(dict.fromkeys([*names, "id"])), BLOCK):
            columns = {name: batch.column(name) for name in names}
            columns |= {name: self.samples.column(name, batch.column("id")) for name in others}
            table = pa.table({**columns, "": pa.array(range(start, start + len(batch)))})
            rows = where.rows(table)[""].to_numpy()
            allowed[torch.from_numpy(rows.copy())] = True
            start += len(batch)
        return allowed

    def _nearest(
        self, query: Tensor, column: str, k: int, allowed: Tensor | None, visited: int | None
    ) -> tuple[Tensor, Tensor]:
        k = min(k, self.file.rows)
        if self.indexed:
            if column not in self._indexes:
                self._indexes[column] = open_index(self.file, column, self.say)
            return self._indexes[column].search(query, k, allowed, visited)
        if self.stream:
            return nearest(self.file.blocks(column), query, k, allowed)
        if column not in self._vectors:
            vectors, usable = self.file.matrix(column)
            for block in vectors.split(BLOCK):
                block.div_(block.norm(dim=1, keepdim=True).clamp_(min=1e-12))
            self._vectors[column] = vectors, usable
        blocks = tensor_blocks(*self._vectors[column])
        return nearest(blocks, query, k, allowed, are_units=True)

    def _hits(self, cosines: Sequence[float], rows: Sequence[int]) -> list[Hit]:
        pairs = [(cosine, row) for cosine, row in zip(cosines, rows, strict=True) if row >= 0]
        cells = self.file.take([row for _, row in pairs], self.file.columns)
        hits = []
        for rank, ((cosine, row), columns) in enumerate(zip(pairs, cells, strict=True), start=1):
            sample_id = str(columns.pop("id"))
            sources = self.samples.sources(sample_id)
            hits.append(Hit(rank, sample_id, round(cosine, 6), row, columns, sources))
        return hits

    def _how(self, column: str) -> str:
        if column not in self._indexes:
            return "exact"
        about = self._indexes[column].about
        return f"index, recall@10 {about.recall:.3f} measured on rows of the file"


def tensor_blocks(vectors: Tensor, usable: Tensor) -> Iterator[Block]:
    """Yield a matrix in memory in blocks, without a copy."""
    for start in range(0, len(vectors), BLOCK):
        yield Block(start, vectors[start : start + BLOCK], usable[start : start + BLOCK])


def search(
    embeddings: str | Path | VectorFile | Searcher,
    *,
    text: str | None = None,
    image: Any = None,
    audio: Any = None,
    id: str | Sequence[str] = (),
    query: Mapping[str, Any] | None = None,
    vector: Any = None,
    by: str = "",
    k: int = 10,
    where: str = "",
    **settings: Any,
) -> Found:
    """Return the rows of a file of embeddings that are nearest to a query.

    `search("emb.parquet", text="a red bird", k=5, where='split == "test"')`. Several of `text`,
    `image`, `audio`, `id` (one or several), `query` ({modality: value}) and `vector` make one
    query. Further settings are those of `Searcher`, which answers many queries faster.
    """
    if isinstance(embeddings, Searcher):
        if settings:
            raise FusionZooError(f"give {', '.join(settings)} to the Searcher")
        searcher = embeddings
    else:
        searcher = Searcher(embeddings, **{"stream": True, **settings})
    values = {"text": text, "image": image, "audio": audio, **(query or {})}
    ids = [id] if isinstance(id, str) else list(id)
    return searcher.search(values, ids=ids, vector=vector, by=by, k=k, where=where)
