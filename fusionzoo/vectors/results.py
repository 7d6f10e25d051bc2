"""What a search finds: hits with their columns and sources, as a table, JSON or a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .page import write_page
from .samples import Samples


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
