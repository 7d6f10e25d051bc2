"""The page of a search: thumbnails, texts and players in one self-contained file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionzoo.errors import FusionZooError
from fusionzoo.files import write_text
from fusionzoo.version import __version__

if TYPE_CHECKING:
    from .results import Found

MAX_VALUE = 60  # characters of a column's value on a card


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


def template(name: str, package: str = "fusionzoo.vectors") -> Any:
    """Return a template of a package, which may extend the audit's base.html."""
    try:
        from jinja2 import ChoiceLoader, Environment, PackageLoader
    except ImportError:
        raise FusionZooError("HTML pages need Jinja: pip install 'fusionzoo[benchmark]'") from None
    loaders = [PackageLoader(package, "."), PackageLoader("fusionzoo.audit", ".")]
    return Environment(
        loader=ChoiceLoader(loaders), autoescape=True, trim_blocks=True, lstrip_blocks=True
    ).get_template(name)


def _is_shown(name: str, value: Any) -> bool:
    return value is not None and value != "" and not name.startswith("present_")
