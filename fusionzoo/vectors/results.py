"""What a search finds: hits with their columns and sources, as a table, JSON or a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fusionzoo.files import write_text
from fusionzoo.version import __version__

from .page import template
from .samples import Samples

MAX_VALUE = 60  # characters of a column's value on a card


@dataclass(frozen=True)
class Hit:
    """A row of the file that is near the query."""

    rank: int  # from 1
    id: str
    cosine: float
    row: int
    columns: dict[str, Any]  # split, target and whatever else the file has
    sources: dict[str, str]  # modality -> path or text


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


def write_page(found: Found, path: Path) -> Path:
    """Write the hits as a page."""
    cards = []
    for hit in found.hits:
        pictures = found.samples.pictures(hit.id)
        players = {x.modality: found.samples.player(hit.id, x.modality) for x in pictures}
        shown = {name: str(x)[:MAX_VALUE] for name, x in hit.columns.items() if _is_shown(name, x)}
        texts = {x.modality for x in pictures if x.image is None and x.wave is None and x.text}
        paths = {name: source for name, source in hit.sources.items() if name not in texts}
        cards.append({"hit": hit, "pictures": pictures, "players": players})
        cards[-1] |= {"columns": shown, "paths": paths}
    path.parent.mkdir(parents=True, exist_ok=True)
    title = f"{len(found)} of {found.searched:,} samples nearest to {found.query}"
    page = template("search.html").render(
        title=title, found=found, cards=cards, version=__version__
    )
    write_text(path, page)
    return path


def _is_shown(name: str, value: Any) -> bool:
    return value is not None and value != "" and not name.startswith("present_")
