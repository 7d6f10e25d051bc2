"""Search a file of embeddings: by text, image, audio, the id of a sample, or a vector."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from fusionzoo.config import merge
from fusionzoo.config.flags import Tree
from fusionzoo.config.load import run_command
from fusionzoo.config.schema import Count, option
from fusionzoo.console import print_table
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.media.arrays import ArrayItem
from fusionzoo.datasets.opening.naming import IN_MEMORY
from fusionzoo.embeddings.extract import model_digest
from fusionzoo.errors import FusionZooError, did_you_mean, one_line
from fusionzoo.files import write_json, write_text
from fusionzoo.html.samples import show_sample
from fusionzoo.html.template import template
from fusionzoo.inputs.data import data_settings, in_memory, open_dataset, read_data
from fusionzoo.loading import load
from fusionzoo.model import FusionModel
from fusionzoo.plugins import load_plugins
from fusionzoo.version import __version__

from .index import Index, UnevenRowsError, open_index
from .vectors import (
    ALIGNED,
    BLOCK,
    Block,
    PartsOfRows,
    Scale,
    VectorFile,
    nearest,
    open_vectors,
    unit,
)
from .where import Where

FUSED = "fused"
UNIT_LENGTH = 0.01  # by which a vector's length may differ from 1
LENGTHS_TRIED = 256  # rows whose lengths are compared with what the file says
MAX_VALUE = 60  # characters of a column's value on a card
MAX_EXACT = 3_000_000  # rows; larger files get an index
Method = Literal["auto", "exact", "index"]
HELP = """
Search a file of embeddings: `fusionzoo search emb.parquet --text "a red bird" --k 10`.

Several of --text, --image, --audio and --id make one query. docs/search.md says more.
"""
MAX_CELL = 60  # characters of a path or text in the table
STANDARD_OUTPUT = "-"


def choose_column(file: VectorFile, by: str, modalities: Sequence[str]) -> str:
    """Return the column to search: `by`, else aligned vectors for a query by media, else fused."""
    if by:
        file.check_column(by)
        return by
    if modalities and ALIGNED in file.dims:
        return ALIGNED
    if FUSED in file.dims:
        return FUSED
    raise FusionZooError(f"{file.path} has no fused vectors: --by {' | '.join(file.dims)}")


def open_model(file: VectorFile, model: FusionModel | str, plugins: Any = ()) -> FusionModel:
    """Load the model that embedded the file, and check that it is the same one."""
    if isinstance(model, FusionModel):
        check_model(file, model, "the model")
        return model
    folder = model or str(file.metadata.get("model") or "")
    if not folder:
        raise FusionZooError(
            f"{file.path} does not name the model that embedded it: --model says where it is"
        )
    if not Path(folder).is_dir():
        raise FusionZooError(
            f"{file.path} was embedded by {folder}, which is not there: --model says where it is"
        )
    loaded = load(folder, plugins=plugins)
    check_model(file, loaded, folder)
    return loaded


def check_model(file: VectorFile, model: FusionModel, name: str) -> None:
    """Raise if the file records the digest of another model."""
    recorded = file.metadata.get("model_digest")
    if recorded and (digest := model_digest(model)) != recorded:
        raise FusionZooError(
            f"{name} is not the model that embedded {file.path} (digest {digest[:12]}, not"
            f" {str(recorded)[:12]}): embed the data again, or name the model with --model"
        )


def name_modalities(model: FusionModel, values: Mapping[str, Any]) -> dict[str, Any]:
    """Map kinds (`text`, `image`, `audio`) to the model's modalities; names stay as they are."""
    named: dict[str, Any] = {}
    for key, value in values.items():
        of_kind = [name for name, kind in model.modalities.items() if kind == key]
        if key not in model.modalities and len(of_kind) > 1:
            raise FusionZooError(
                f"the model has several modalities of {key}: --query.<name> with one of"
                f" {', '.join(of_kind)}"
            )
        if key not in model.modalities and not of_kind:
            raise FusionZooError(
                f"the model has no modality {key!r}.{did_you_mean(key, model.modalities)} It reads:"
                f" {', '.join(model.modalities)}"
            )
        named[key if key in model.modalities else of_kind[0]] = value
    return named


def embed_query(model: FusionModel, values: Mapping[str, Any], column: str) -> Tensor:
    """Return the unit vector (D,) of a query, `{modality: value}`, in the space of a column."""
    vectors = {name: x[0].cpu() for name, x in model.embed([values]).items()}
    return query_vector(model, vectors, list(values), column)


def query_vector(
    model: FusionModel, vectors: Mapping[str, Tensor], names: Sequence[str], column: str
) -> Tensor:
    """Return the unit vector (D,) of a sample with the modalities `names`, of what `embed` says."""
    if column == FUSED:
        return unit(vectors[FUSED])
    if column.partition("_")[0] == ALIGNED and column not in model.modalities:
        aligned = [f"{ALIGNED}_{name}" for name in names]
        absent = [name for name in aligned if name not in vectors]
        if absent:
            raise FusionZooError(
                f"the model has no aligned vectors of {absent[0].removeprefix(f'{ALIGNED}_')}: it"
                " was trained without --balance contrastive_align; use --by fused"
            )
        return unit(torch.stack([unit(vectors[name]) for name in aligned]).mean(0))
    if list(names) != [column]:
        raise FusionZooError(
            f"--by {column} compares vectors of {column} alone: the query must have {column} and"
            f" nothing else, and it has {', '.join(names)}"
        )
    return unit(vectors[column])


def query_from_rows(file: VectorFile, column: str, rows: Sequence[int]) -> Tensor:
    """Return the unit vectors (Q, D) of some rows of the file."""
    vectors, has_vector = file.some(column, rows)
    if not has_vector.all():
        row = rows[int((~has_vector).nonzero()[0, 0])]
        sample_id = file.take([row], ["id"])[0]["id"]
        raise FusionZooError(
            f"{file.path}: sample {sample_id!r} has no vector {column!r}; search by another: --by"
        )
    return unit(vectors)


def check_fit(file: VectorFile, column: str, query: Tensor, origin: str) -> None:
    """Raise if a query's vectors (Q, D) are no vectors of the column's space."""
    dim = file.dims[column]
    if query.ndim != 2 or query.shape[1] != dim:
        raise FusionZooError(
            f"{file.path}: {column!r} has vectors of {dim} numbers, and {origin} gives"
            f" {query.shape[-1] if query.ndim else 1}: search with the model that embedded the file"
        )
    if not query.isfinite().all() or (query == 0).all(1).any():
        raise FusionZooError(f"{origin}: the vector to search for has no direction (zeros or NaN)")


def check_lengths(file: VectorFile, column: str) -> None:
    """Raise if the file says that its vectors have length 1, and they do not."""
    if not normalised(file, column):
        return
    for block in file.blocks(column, LENGTHS_TRIED):
        lengths = block.vectors[block.usable].norm(dim=1)
        if len(lengths) and (lengths - 1).abs().max() > UNIT_LENGTH:
            raise FusionZooError(
                f"{file.path} says that {column!r} is normalised to length 1, and a vector has"
                f" length {lengths[(lengths - 1).abs().argmax()]:.3g}: embed the data again"
            )
        return


def normalised(file: VectorFile, column: str) -> bool | None:
    """Return whether the file says that a column's vectors have length 1; None: it does not say."""
    about = file.metadata.get("vectors")
    facts = about.get(column) if isinstance(about, Mapping) else None
    return facts.get("normalised") if isinstance(facts, Mapping) else None


def check_same_space(file: VectorFile, other: VectorFile, column: str) -> None:
    """Raise if two files' vectors were not made by the same model in the same way."""
    other.check_column(column)
    pairs = {
        "model digest": (other.metadata.get("model_digest"), file.metadata.get("model_digest")),
        "width": (other.dims[column], file.dims[column]),
        "normalised": (normalised(other, column), normalised(file, column)),
    }
    for name, (theirs, here) in pairs.items():
        if theirs != here and None not in (theirs, here):
            raise FusionZooError(
                f"{other.path} does not fit {file.path}: the {name} of {column!r} is {theirs!r}"
                f" there and {here!r} here"
            )


class Samples:
    """The data set that was embedded; `problem` says why it cannot be opened."""

    def __init__(self, dataset: PairedDataset | None, problem: str = "") -> None:
        self.dataset, self.problem = dataset, problem
        self._row_of: dict[str, int] | None = None

    def row(self, sample_id: str) -> int | None:
        """Return a sample's row in the data set's table."""
        if self.dataset is None:
            return None
        if self._row_of is None:
            rows = self.dataset.rows.tolist()
            self._row_of = dict(zip(self.dataset.ids, rows, strict=True))
        return self._row_of.get(sample_id)

    def sources(self, sample_id: str) -> dict[str, str]:
        """Return the path or text of each modality that a sample has."""
        row, dataset = self.row(sample_id), self.dataset
        if row is None or dataset is None:
            return {}
        values = {name: dataset.reference(name, row) for name in dataset.modalities}
        return {name: str(x) for name, x in values.items() if isinstance(x, str | Path | ArrayItem)}

    def previews(self, sample_id: str, *, plays: bool = False) -> list[Any]:
        """Return thumbnail, waveform or excerpt of each modality; `plays` adds players."""
        row = self.row(sample_id)
        if row is None or self.dataset is None:
            return []
        return show_sample(self.dataset, row, plays=plays)

    def column(self, name: str, ids: pa.Array) -> pa.Array:
        """Return a column of the data set's table for some ids, null where it lacks the id."""
        if self.dataset is None or name not in self.dataset.table.column_names:
            has = [] if self.dataset is None else self.dataset.table.column_names
            reason = f" ({self.problem})" if self.problem else f": it has {', '.join(has)}"
            raise FusionZooError(
                f"--where: neither the file nor its data has a column {name!r}{reason}"
            )
        places = pc.index_in(ids.cast(pa.string()), self.dataset.table["id"].combine_chunks())
        return self.dataset.table[name].combine_chunks().take(places)


def open_samples(file: VectorFile, data: Any = None, plugins: str | Sequence[str] = ()) -> Samples:
    """Open the data that a file was made of: `data` if given, else what its metadata names."""
    settings: Mapping[str, Any] = {}
    try:
        recorded = file.metadata.get("data")
        recorded = recorded if isinstance(recorded, Mapping) else {}
        if isinstance(data, Mapping) and data and not data.get("name") and recorded.get("name"):
            data = merge(recorded, data)  # `--data.root` alone: the data has moved
        if data:
            data = read_data(data)
            dataset = in_memory(data)
            if dataset is not None:
                return Samples(dataset)
            settings = data_settings(data)
        else:
            settings = recorded
            if settings.get("name") in (None, "", IN_MEMORY):
                return Samples(None, "the file does not name its data: --data says where it is")
        load_plugins(plugins)
        return Samples(open_dataset(dict(settings), {}))
    except (FusionZooError, OSError) as error:
        if data:
            raise
        return Samples(None, f"its data cannot be opened: {one_line(error)}")


@dataclass(frozen=True)
class Hit:
    """A row of the file that is near the query."""

    rank: int  # from 1
    id: str
    cosine: float
    row: int
    columns: dict[str, Any]  # split, target and whatever else the file has
    sources: dict[str, str]  # modality -> path or text
    score: float | None = None  # what ranks `aligned` means of different modalities


@dataclass(frozen=True)
class Found:
    """The nearest rows, best first."""

    hits: list[Hit]
    query: str  # the query in words
    column: str  # the vectors that were compared
    method: str  # "exact", or the index with its measured recall
    searched: int  # rows that the filter left
    notes: list[str] = field(default_factory=list)
    samples: Samples = field(default_factory=lambda: Samples(None), repr=False, compare=False)

    def __iter__(self) -> Iterator[Hit]:
        return iter(self.hits)

    def __len__(self) -> int:
        return len(self.hits)

    @property
    def ids(self) -> list[str]:
        """The ids of the hits."""
        return [hit.id for hit in self.hits]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
        facts = ("query", "column", "method", "searched", "notes")
        return {name: getattr(self, name) for name in facts} | {
            "hits": [asdict(hit) for hit in self.hits]
        }

    def to_html(self, path: str | Path) -> Path:
        """Write a page with thumbnails, texts and players."""
        return write_page(self, Path(path))


def write_page(result: Found, path: Path) -> Path:
    """Write the hits as a page."""
    cards = []
    for hit in result.hits:
        previews = result.samples.previews(hit.id, plays=True)
        shown = {name: str(x)[:MAX_VALUE] for name, x in hit.columns.items() if _is_shown(name, x)}
        texts = {x.modality for x in previews if x.image is None and x.wave is None and x.text}
        paths = {name: source for name, source in hit.sources.items() if name not in texts}
        cards.append({"hit": hit, "previews": previews, "columns": shown, "paths": paths})
    path.parent.mkdir(parents=True, exist_ok=True)
    title = f"{len(result)} of {result.searched:,} samples nearest to {result.query}"
    page = template("search.html", "fusionzoo.tools.search").render(
        title=title, found=result, cards=cards, version=__version__
    )
    write_text(path, page)
    return path


def _is_shown(name: str, value: Any) -> bool:
    return value is not None and value != "" and not name.startswith("present_")


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
        load_plugins(plugins)  # one may hold the file's format
        self.file = open_vectors(path)
        if method not in ("auto", "exact", "index"):
            raise FusionZooError(f"method={method!r} is none of auto, exact, index")
        self.method, self.indexed = method, method == "index"
        self.indexed |= method == "auto" and self.file.rows > MAX_EXACT
        self.stream, self.say, self._plugins, self._data = stream, say, plugins, data
        self._model_source, self._model = model, None if isinstance(model, str) else model
        self._samples: Samples | None = None
        self._vectors: dict[str, tuple[Tensor, Tensor]] = {}
        self._indexes: dict[str, Index | None] = {}  # None: exact search instead
        self._parts: PartsOfRows | None = None

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
        scale = self._scale(query, column)
        scores, nearest_rows = self._nearest(query, column, k, allowed, visited, scale)
        hits = self._hits(scores[0], nearest_rows[0], scale)
        words = [f"{name} {value}" for name, value in values.items()]
        words += [f"id {sample_id}" for sample_id in ids] + ["a vector"] * (vector is not None)
        notes = [self.samples.problem] if self.samples.problem else []
        if not hits:
            notes.append("no row matches the filter" if where else f"no row has {column}")
        notes += self._lacking(column, hits, allowed)
        searched = self.file.rows if allowed is None else int(allowed.sum())
        return Found(
            *(hits, " + ".join(words), column, self._how(column), searched, notes, self.samples)
        )

    def nearest(
        self, queries: Tensor, column: str, k: int, visited: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and rows of the k nearest of each query (Q, D): both (Q, k).

        By `aligned` in a file whose rows lack modalities, scores instead of cosines.
        """
        self.file.check_column(column)
        check_fit(self.file, column, queries, "the query")
        scale = self._scale(queries, column)
        return self._nearest(queries, column, k, None, visited, scale)

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

    def _index(self, column: str) -> Index | None:
        """Return the index of a column; None where the search is exact."""
        if self.indexed and column not in self._indexes:
            try:
                self._indexes[column] = open_index(self.file, column, self.say)
            except UnevenRowsError:
                if self.method == "index":
                    raise
                self._indexes[column] = None
        return self._indexes.get(column)

    def _scale(self, query: Tensor, column: str) -> Scale | None:
        """Return what makes cosines of rows with different modalities comparable, if any are."""
        if not self.file.parts(column) or self._index(column) is not None:
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
        visited: int | None,
        scale: Scale | None,
    ) -> tuple[Tensor, Tensor]:
        """Return cosines, or the scores of a scale, and rows of the k nearest, both (Q, k)."""
        k = min(k, self.file.rows)
        if index := self._index(column):
            return index.search(query, k, allowed, visited)
        if self.stream or self.indexed:  # too large for memory
            return nearest(self.file.blocks(column), query, k, allowed, scale=scale)
        if column not in self._vectors:
            vectors, usable = self.file.matrix(column)
            for block in vectors.split(BLOCK):
                block.div_(block.norm(dim=1, keepdim=True).clamp_(min=1e-12))
            self._vectors[column] = vectors, usable
        blocks = tensor_blocks(*self._vectors[column])
        return nearest(blocks, query, k, allowed, are_units=True, scale=scale)

    def _hits(self, scores: Tensor, rows: Tensor, scale: Scale | None) -> list[Hit]:
        """Return the hits of one query's scores and rows, both (k,)."""
        scores, rows = scores[rows >= 0], rows[rows >= 0]
        cosines = scores if scale is None else scale.cosines(scores[None], rows)[0]
        cells = self.file.take(rows.tolist(), self.file.columns)
        hits = []
        for place, (row, columns) in enumerate(zip(rows.tolist(), cells, strict=True)):
            sample_id = str(columns.pop("id"))
            sources = self.samples.sources(sample_id)
            cosine, score = (round(float(x[place]), 6) for x in (cosines, scores))
            shown = None if scale is None else score
            hits.append(Hit(place + 1, sample_id, cosine, row, columns, sources, shown))
        return hits

    def _how(self, column: str) -> str:
        if (index := self._index(column)) is None:
            return "exact"
        about = index.about
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
    where: str = option("", "filter on columns, of the file or its data: 'split == \"test\"'")
    method: Literal["auto", "exact", "index"] = option(
        "auto", "exact | index (FAISS, built beside the file) | auto: index beyond 3,000,000 rows"
    )
    visited: Count | None = option(None, "cells of the index per query; none = as measured")
    model: str = option("", "model that embeds the query; empty = the one that the file names")
    data: Tree = option({}, "data set with paths and thumbnails; empty = that the file names")
    plugins: str | list[str] = option("", "files or modules with components of your own")
    json: str = option("", "file for the results as JSON; - prints them")
    html: str = option("", "file for a page with thumbnails and players")


def search_command(args: Sequence[str]) -> int:
    """Run `fusionzoo search FILE ...`; return 0, or 2 after a user's mistake."""
    is_flag = not args or args[0].startswith("-")
    flags = list(args) if is_flag else [f"--embeddings={args[0]}", *args[1:]]
    return run_command(SearchConfig, HELP, flags, _search)


def _search(cfg: SearchConfig) -> int:

    if not cfg.embeddings:
        raise FusionZooError("no file of embeddings: it comes first, or as --embeddings")
    quiet = cfg.json == STANDARD_OUTPUT
    searcher = Searcher(
        cfg.embeddings,
        model=cfg.model,
        data=cfg.data or None,
        method=cfg.method,
        stream=True,
        plugins=cfg.plugins,
        say=(lambda line: None) if quiet else print,
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
        where=cfg.where,
        visited=cfg.visited,
    )
    if quiet:
        print(json.dumps(result.to_dict(), indent=2, ensure_ascii=False, default=str))
        return 0
    print_found(result)
    if cfg.json:
        write_json(Path(cfg.json), json.loads(json.dumps(result.to_dict(), default=str)))
        print(f"wrote {cfg.json}")
    if cfg.html:
        print(f"wrote {result.to_html(cfg.html)}")
    return 0


def print_found(result: Found) -> None:
    """Print the hits as a table."""
    from rich.markup import escape

    names = list(result.hits[0].columns) if result.hits else []
    names = [name for name in names if not name.startswith("present_") and _any(result, name)]
    sources = list(dict.fromkeys(name for hit in result.hits for name in hit.sources))
    root = result.samples.dataset.root if result.samples.dataset is not None else None
    folder = f"{root}/" if root else ""
    has_scores = any(hit.score is not None for hit in result.hits)
    rows = [
        (
            escape(hit.id),
            *([f"{hit.score:.2f}"] if has_scores else []),
            f"{hit.cosine:.3f}",
            *(_cell(hit.columns, name) for name in names),
            *(_cell(hit.sources, name, folder) for name in sources),
        )
        for hit in result.hits
    ]
    title = (
        f"Nearest to {escape(result.query)} by {result.column} vectors, of {result.searched:,} rows"
    )
    measures = ["score"] * has_scores + ["cosine"]
    print_table(f"{title} ({result.method})", ("id", *measures, *names, *sources), rows)
    if folder and sources:
        print(f"paths start from {root}")
    for note in result.notes:
        print(f"note: {note}")


def _any(result: Found, name: str) -> bool:
    return any(hit.columns[name] not in (None, "") for hit in result.hits)


def _cell(cells: Mapping[str, Any], name: str, folder: str = "") -> str:
    from rich.markup import escape

    value = cells.get(name)
    text = "" if value is None else " ".join(str(value).split()).removeprefix(folder)
    return escape(text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 3]}...")
