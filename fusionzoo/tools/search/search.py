"""Search a file of embeddings: by text, image, audio, the id of a sample, or a vector."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusionzoo.config.flags import Tree
from fusionzoo.config.load import run_command
from fusionzoo.config.schema import PLUGINS, Count, option
from fusionzoo.errors import FusionZooError
from fusionzoo.files import write_json
from fusionzoo.ground.plugins import load_plugins
from fusionzoo.model.fusion_model import FusionModel

from .found import Found, Hit, print_found
from .query import (
    check_fit,
    check_same_space,
    choose_column,
    embed_query,
    name_modalities,
    open_model,
)
from .samples import SearchedSamples, open_samples
from .vectors import (
    ALIGNED,
    BLOCK,
    PartsOfRows,
    Scale,
    VectorFile,
    array_blocks,
    nearest,
    open_vectors,
    unit,
)

HELP = """
Search a file of embeddings: `fusionzoo search emb.parquet --text "a red bird" --k 10`.

Several of --text, --image, --audio and --id make one query. docs/search.md says more.
"""
STANDARD_OUTPUT = "-"


class Searcher:
    """Searches one file repeatedly: the vectors are read once and stay in memory.

    `stream` reads the file again for each search instead: memory does not grow with the file.
    """

    def __init__(
        self,
        path: str | Path | VectorFile,
        *,
        model: FusionModel | str = "",
        data: Any = None,
        stream: bool = False,
        plugins: str | Sequence[str] = "",
    ) -> None:
        load_plugins(plugins)  # one may hold the file's format
        self._in_memory = not stream
        self.file = replace(open_vectors(path), keeps=self._in_memory)
        self._plugins, self._data = plugins, data
        self._model_source = model
        self._vectors: dict[str, tuple[Tensor, Tensor]] = {}
        self._parts: PartsOfRows | None = None

    @cached_property
    def model(self) -> FusionModel:
        """The model that embeds queries, loaded when it is first needed."""
        return open_model(self.file, self._model_source, self._plugins)

    @cached_property
    def samples(self) -> SearchedSamples:
        """The data behind the rows, opened when it is first needed."""
        return open_samples(self.file, self._data, self._plugins)

    def search(
        self,
        values: Mapping[str, Any] | None = None,
        *,
        ids: Sequence[str] = (),
        ids_from: str | Path = "",
        vector: Any = None,
        by: str = "",
        k: int = 10,
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
        column = choose_column(self.file, by, list(values))
        other = open_vectors(ids_from or self.file)
        check_same_space(self.file, other, column)
        rows = other.rows_of(ids)
        allowed = None if ids_from else self._without(rows)
        parts = [self._vectors_of(other, column, rows)] if rows else []
        query = self._query(values, vector, column, parts)
        scale = self._scale(query, column)
        scores, nearest_rows = self._nearest(query, column, k, allowed, scale)
        hits = self._hits(scores[0], nearest_rows[0], scale)
        words = [f"{name} {value}" for name, value in values.items()]
        words += [f"id {sample_id}" for sample_id in ids] + ["a vector"] * (vector is not None)
        notes = [self.samples.problem] if self.samples.problem else []
        if not hits:
            notes.append(f"no row has {column}")
        notes += self._lacking(column, hits, allowed)
        searched = self.file.rows if allowed is None else int(allowed.sum())
        return Found(hits, " + ".join(words), column, searched, notes, self.samples)

    def nearest(self, queries: Tensor, column: str, k: int) -> tuple[Tensor, Tensor]:
        """Return cosines and rows of the k nearest of each query (Q, D): both (Q, k).

        By `aligned` in a file whose rows lack modalities, scores instead of cosines.
        """
        self.file.check_column(column)
        check_fit(self.file, column, queries, "the query")
        return self._nearest(queries, column, k, None, self._scale(queries, column))

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
        if len(parts) == 1 == len(parts[0]):
            return parts[0]
        mean = torch.cat(parts).mean(0, keepdim=True)
        check_fit(self.file, column, mean, "the query")
        return unit(mean)

    def _vectors_of(self, file: VectorFile, column: str, rows: Sequence[int]) -> Tensor:
        """Return the unit vectors (Q, D) of some rows of this file, or of another."""
        if self._in_memory and file is self.file:
            vectors, usable = (x[list(rows)] for x in self._matrix(column))
        else:
            vectors, usable = file.some(column, rows)
        if not usable.all():
            sample_id = file.take([rows[int((~usable).nonzero()[0, 0])]], ["id"])[0]["id"]
            raise FusionZooError(f"{file.path}: sample {sample_id!r} has no {column!r}: try --by")
        return unit(vectors)

    def _matrix(self, column: str) -> tuple[Tensor, Tensor]:
        """Return a column's vectors at length 1, (N, D), and which rows have one; read once."""
        if column not in self._vectors:
            vectors, usable = self.file.matrix(column)
            for block in vectors.split(BLOCK):
                block.div_(block.norm(dim=1, keepdim=True).clamp_(min=1e-12))
            self._vectors[column] = vectors, usable
        return self._vectors[column]

    def _without(self, rows: Sequence[int]) -> Tensor | None:
        """Return which rows are no rows of the query, bool (N,); None for all of them."""
        if not rows:
            return None
        allowed = torch.ones(self.file.rows, dtype=torch.bool)
        allowed[list(rows)] = False
        return allowed

    def _scale(self, query: Tensor, column: str) -> Scale | None:
        """Return what makes cosines of rows with different modalities comparable, if any are."""
        if not self.file.parts(column):
            return None
        if self._parts is None:
            self._parts = PartsOfRows(self.file, column)
        return None if self._parts.is_even else self._parts.scale(query)

    def _lacking(self, column: str, hits: Sequence[Hit], allowed: Tensor | None) -> list[str]:
        """Return how many rows and hits lack which modality of an `aligned` mean."""
        if column == ALIGNED and not self.file.parts(column):
            return ["the file stores `aligned` itself: rows that lack a modality may come first"]
        if self._parts is None or not self.file.parts(column):
            return []
        rows_have = self._parts.has if allowed is None else self._parts.has[allowed]
        hits_have = self._parts.has[[hit.row for hit in hits]]
        presence = zip(self._parts.modalities, rows_have.T, hits_have.T, strict=True)
        notes = [
            f"without {name}: {int((~in_rows).sum()):,} of {len(in_rows):,} rows,"
            f" {int((~in_hits).sum())} of {len(in_hits)} hits"
            for name, in_rows, in_hits in presence
            if not in_rows.all()
        ]
        ranked = "ranked by score: 0 is the median row with the same modalities, 1 the nearest 1 %"
        return [ranked, *notes] if not self._parts.is_even else notes

    def _nearest(
        self,
        query: Tensor,
        column: str,
        k: int,
        allowed: Tensor | None,
        scale: Scale | None,
    ) -> tuple[Tensor, Tensor]:
        """Return cosines, or the scores of a scale, and rows of the k nearest, both (Q, k)."""
        k = min(k, self.file.rows)
        if not self._in_memory:
            return nearest(self.file.blocks(column), query, k, allowed, scale=scale)
        vectors, usable = self._matrix(column)
        blocks = array_blocks(vectors.numpy(), usable.numpy(), BLOCK)
        return nearest(blocks, query, k, allowed, are_units=True, scale=scale)

    def _hits(self, scores: Tensor, rows: Tensor, scale: Scale | None) -> list[Hit]:
        """Return the hits of one query's scores and rows, both (k,)."""
        scores, rows = scores[rows >= 0], rows[rows >= 0]
        cosines = scores if scale is None else scale.cosines(scores[None], rows)[0]
        cells = self.file.take(rows.tolist(), self.file.columns)
        hits, numbers = [], (rows.tolist(), cells, cosines.tolist(), scores.tolist())
        for rank, (row, columns, cosine, score) in enumerate(zip(*numbers, strict=True), 1):
            sample_id = str(columns.pop("id"))
            sources = self.samples.sources(sample_id)
            shown = None if scale is None else round(score, 6)
            hits.append(Hit(rank, sample_id, round(cosine, 6), row, columns, sources, shown))
        return hits


def search(
    embeddings: str | Path | VectorFile | Searcher,
    *,
    text: str | None = None,
    image: Any = None,
    audio: Any = None,
    id: str | Sequence[str] = (),
    query: Mapping[str, Any] | None = None,
    vector: Any = None,
    **settings: Any,
) -> Found:
    """Return the rows of a file of embeddings that are nearest to a query.

    `search("emb.parquet", text="a red bird", k=5)`. Several of `text`, `image`, `audio`, `id` (one
    or several), `query` ({modality: value}) and `vector` make one query. Further settings are those
    of `Searcher.search` (`by`, `k`) and of `Searcher`, which answers many queries faster.
    """
    names = [x for x in ("by", "k", "ids_from") if x in settings]
    asked = {name: settings.pop(name) for name in names}
    if isinstance(embeddings, Searcher):
        if settings:
            raise FusionZooError(f"give {', '.join(settings)} to the Searcher")
        searcher = embeddings
    else:
        searcher = Searcher(embeddings, **{"stream": True, **settings})
    values = {"text": text, "image": image, "audio": audio, **(query or {})}
    ids = [id] if isinstance(id, str) else list(id)
    return searcher.search(values, ids=ids, vector=vector, **asked)


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Settings of `fusionzoo search`."""

    embeddings: str = option("", "file that `fusionzoo embed` wrote (required)")
    text: str | int | float | None = option(None, "text to search for")
    image: str = option("", "file of an image to search for")
    audio: str = option("", "file of a clip to search for")
    query: dict[str, Any] = option({}, "modality -> value, by name: --query.speech x.ogg")
    id: str | int | list[str | int] = option("", "sample of the file, or a [list] of them")
    ids_from: str = option("", "file of embeddings that has --id, if it is another one")
    k: Count = option(10, "number of results")
    by: str = option("", "fused | <modality> | aligned | aligned_<modality>; empty = chosen")
    model: str = option("", "model that embeds the query; empty = the one that the file names")
    data: Tree = option({}, "data set with paths and thumbnails; empty = that the file names")
    plugins: str | list[str] = option("", PLUGINS)
    json: str = option("", "file for the results as JSON; - prints them")
    html: str = option("", "file for a page with thumbnails and players")


def search_command(args: Sequence[str]) -> int:
    """Run `fusionzoo search FILE ...`; return 0, or 2 after a user's mistake."""
    return run_command(SearchConfig, HELP, args, _search, words=("embeddings",))


def _search(cfg: SearchConfig) -> int:
    if not cfg.embeddings:
        raise FusionZooError("no file of embeddings: it comes first, or as --embeddings")
    searcher = Searcher(
        cfg.embeddings,
        model=cfg.model,
        data=cfg.data or None,
        stream=True,
        plugins=cfg.plugins,
    )
    text = None if cfg.text is None else str(cfg.text)
    media = {"text": text, "image": cfg.image or None, "audio": cfg.audio or None}
    ids = cfg.id if isinstance(cfg.id, list) else [cfg.id] if cfg.id != "" else []
    result = searcher.search(
        {**media, **cfg.query},
        ids=[str(sample_id) for sample_id in ids],
        ids_from=cfg.ids_from,
        by=cfg.by,
        k=cfg.k,
    )
    if cfg.json == STANDARD_OUTPUT:
        print(json.dumps(result.to_dict(), indent=2, ensure_ascii=False, default=str))
        return 0
    print_found(result)
    if cfg.json:
        write_json(Path(cfg.json), json.loads(json.dumps(result.to_dict(), default=str)))
        print(f"wrote {cfg.json}")
    if cfg.html:
        print(f"wrote {result.to_html(cfg.html)}")
    return 0
