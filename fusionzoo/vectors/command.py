"""The command `fusionzoo search`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fusionzoo.config.command import run_command
from fusionzoo.config.flags import Tree
from fusionzoo.config.schema import Count, option
from fusionzoo.console import print_table
from fusionzoo.errors import FusionZooError
from fusionzoo.files import write_json

if TYPE_CHECKING:
    from .results import Found

HELP = """
Search a file of embeddings: `fusionzoo search emb.parquet --text "a red bird" --k 10`.

Several of --text, --image, --audio and --id make one query. docs/search.md says more.
"""
MAX_CELL = 60  # characters of a path or text in the table
STANDARD_OUTPUT = "-"


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Settings of `fusionzoo search`."""

    embeddings: str = option("", "file that `fusionzoo embed` wrote (required)")
    text: str | int | float | None = option(None, "text to search for")
    image: str = option("", "file of a picture to search for")
    audio: str = option("", "file of a sound to search for")
    query: dict[str, Any] = option({}, "modality -> value, by name: --query.speech x.ogg")
    id: str | int | list[str | int] = option("", "sample of the file, or a [list] of them")
    ids_from: str = option("", "file of embeddings that has --id, if it is another one")
    k: Count = option(10, "number of results")
    by: str = option("", "fused | <modality> | aligned | aligned_<modality>; empty = chosen")
    where: str = option("", "filter on columns, of the file or its data: 'split == \"test\"'")
    method: Literal["auto", "exact", "index"] = option(
        "auto", "exact | index (FAISS, built beside the file) | auto: index beyond 3,000,000 rows"
    )
    visited: Count | None = option(None, "cells of the index per query; null = as measured")
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
    from .search import Searcher

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
    found = searcher.search(
        {**media, **cfg.query},
        ids=[str(sample_id) for sample_id in ids],
        ids_from=cfg.ids_from,
        by=cfg.by,
        k=cfg.k,
        where=cfg.where,
        visited=cfg.visited,
    )
    if quiet:
        print(json.dumps(found.to_dict(), indent=2, ensure_ascii=False, default=str))
        return 0
    print_found(found)
    if cfg.json:
        write_json(Path(cfg.json), json.loads(json.dumps(found.to_dict(), default=str)))
        print(f"wrote {cfg.json}")
    if cfg.html:
        print(f"wrote {found.to_html(cfg.html)}")
    return 0


def print_found(found: Found) -> None:
    """Print the hits as a table."""
    from rich.markup import escape

    names = list(found.hits[0].columns) if found.hits else []
    names = [name for name in names if not name.startswith("present_") and _any(found, name)]
    sources = list(dict.fromkeys(name for hit in found.hits for name in hit.sources))
    root = found.samples.dataset.root if found.samples.dataset is not None else None
    folder = f"{root}/" if root else ""
    rows = [
        (
            escape(hit.id),
            f"{hit.cosine:.3f}",
            *(_cell(hit.columns, name) for name in names),
            *(_cell(hit.sources, name, folder) for name in sources),
        )
        for hit in found.hits
    ]
    title = (
        f"Nearest to {escape(found.query)} by {found.column} vectors, of {found.searched:,} rows"
    )
    print_table(f"{title} ({found.method})", ("id", "cosine", *names, *sources), rows)
    if folder and sources:
        print(f"paths start from {root}")
    for note in found.notes:
        print(f"note: {note}")


def _any(found: Found, name: str) -> bool:
    return any(hit.columns[name] not in (None, "") for hit in found.hits)


def _cell(cells: Mapping[str, Any], name: str, folder: str = "") -> str:
    from rich.markup import escape

    value = cells.get(name)
    text = "" if value is None else " ".join(str(value).split()).removeprefix(folder)
    return escape(text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 3]}...")
