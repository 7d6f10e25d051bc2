"""What a search found: shown as a table, as a page, as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fusionzoo.files import write_text
from fusionzoo.ground.console import print_table
from fusionzoo.html.template import template

from .samples import SearchedSamples

MAX_VALUE = 60  # characters of a column's value on a card
MAX_CELL = 60  # characters of a path or text in the table


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
    searched: int  # rows that the filter left
    notes: list[str] = field(default_factory=list)
    samples: SearchedSamples = field(
        default_factory=lambda: SearchedSamples(None), repr=False, compare=False
    )

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
        names = ("query", "column", "searched", "notes")
        facts = {name: getattr(self, name) for name in names}
        return facts | {"hits": [asdict(hit) for hit in self.hits]}

    def to_html(self, path: str | Path) -> Path:
        """Write a page with thumbnails, texts and players."""
        path, cards = Path(path), []
        for hit in self.hits:
            previews = self.samples.previews(hit.id)
            columns = {n: x for n, x in hit.columns.items() if not n.startswith("present_")}
            shown = {n: str(x)[:MAX_VALUE] for n, x in columns.items() if x not in (None, "")}
            texts = {x.modality for x in previews if x.image is None and x.wave is None and x.text}
            paths = {name: source for name, source in hit.sources.items() if name not in texts}
            cards.append({"hit": hit, "previews": previews, "columns": shown, "paths": paths})
        title = f"{len(self)} of {self.searched:,} samples nearest to {self.query}"
        page = template("search.html", "fusionzoo.tools.search").render(
            title=title, found=self, cards=cards
        )
        write_text(path, page)
        return path


def print_found(result: Found) -> None:
    """Print the hits as a table."""
    from rich.markup import escape

    names = [x for x in (result.hits[0].columns if result.hits else ()) if x[:8] != "present_"]
    names = [x for x in names if any(hit.columns[x] not in (None, "") for hit in result.hits)]
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
    by = f"{result.column} vectors, of {result.searched:,} rows"
    header = ["id", *["score"] * has_scores, "cosine", *names, *sources]
    print_table(f"Nearest to {escape(result.query)} by {by}", header, rows)
    if folder and sources:
        print(f"paths start from {root}")
    for note in result.notes:
        print(f"note: {note}")


def _cell(cells: Mapping[str, Any], name: str, folder: str = "") -> str:
    from rich.markup import escape

    value = cells.get(name)
    text = "" if value is None else " ".join(str(value).split()).removeprefix(folder)
    return escape(text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 3]}...")
