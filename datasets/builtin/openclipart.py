"""`openclipart`: in which folder of the Open Clip Art Library is a drawing? Drawing, title. Real.

Release 0.18 of the library (public domain), as Debian's openclipart-svg has it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from fusionzoo.errors import FusionZooError, explained
from fusionzoo.files import cache_root, replacing

from ..base import DATASETS
from ..packages import Package, find_table
from ..paired import PairedDataset
from ..tables.provenance import Provenance
from ..tables.splits import join_groups, split_by_hash
from . import stamps

DRAWINGS = Package(
    registry="debian",
    name="openclipart-svg",
    inside="usr/share/openclipart/svg",
    files="*.svg",
    size=25,
    sha256="b75598d5019bcd7538625ce1e982b9ee134fad8a399eaca6ea8a1fc5e368598e",
)
TABLE = "openclipart-1.parquet"  # raise the number where the rules below change
MIN_CLASS_SIZE = 40
SHARES = (0.6, 0.2, 0.2)
SALT = "openclipart-2232:"  # chosen only so that each class has its share of each split
PIXELS = 224  # of a drawing's longer side
# Folders whose drawings a program or a template made, or whose name is no kind of thing.
LEFT_OUT = re.compile(
    r"""^(computer/(icons|buttons)|people/smilies|recreation/games/cards|shapes/(jigsaw|stars)
    |signs_and_symbols/(aiga-symbols|flags|led|map_symbols)|special|unsorted)\b|\bduplicates\b""",
    re.VERBOSE,
)
DC = "{http://purl.org/dc/elements/1.1/}"
ENCODERS: dict[str, dict[str, Any]] = {k: stamps.ENCODERS[k] for k in ("image", "text")}


@DATASETS.register("openclipart", family="built-in", fetch=lambda root: fetch(root))  # noqa: PLW0108
def openclipart(*, root: str | None = None) -> PairedDataset:
    """Load drawings of the Open Clip Art Library: image, title and description; which folder?

    Real data. The class is the top folder (animals, food, ...). The text is what the draughtsman
    wrote: often a name, sometimes that of a whole series. The split is fixed, 60/20/20 by a hash of
    the `group`: drawings of a series stay together.

    Settings:
        root: folder of the data, instead of the cache that `fusionzoo data fetch openclipart` fills
    """
    return PairedDataset(
        pq.read_table(find_table("openclipart", TABLE, root), page_checksum_verification=True),
        {"image": "image", "text": "text"},
        source="openclipart",
        encoders=ENCODERS,
        provenance=Provenance(
            split_rule="by a hash of the group",
            group_rule="first word of the name within a class, title by a creator, equal content",
        ),
    )


def fetch(folder: Path | None = None) -> Path:
    """Download the drawings and build the table; what is there already is kept."""
    home = (folder or cache_root()).expanduser() / "openclipart"
    drawings = DRAWINGS.fetch(home / "svg")
    if not (home / TABLE).is_file():
        table = build(drawings)
        with replacing(home / TABLE) as partial:
            pq.write_table(table, partial, write_page_checksum=True)
    return home


# ---- building


@dataclass(frozen=True)
class Drawing:
    """What the file of a drawing says."""

    svg: str
    title: str
    text: str  # title and description
    creator: str


def build(folder: Path) -> pa.Table:
    """Return the table of samples: the drawings of large enough classes, in order of name."""
    drawings = {key: read(path) for key, path in list_files(folder)}
    sizes = Counter(class_of(key) for key in drawings)
    kept = {key: x for key, x in drawings.items() if sizes[class_of(key)] >= MIN_CLASS_SIZE}
    if not kept:
        raise FusionZooError(f"no folder in {folder} has {MIN_CLASS_SIZE} drawings")
    images = {
        key: render(drawing.svg, key)
        for key, drawing in tqdm(kept.items(), "rendering", unit="drawing")
    }
    groups = find_groups(kept, images)
    return pa.table(
        {
            "id": list(kept),
            "split": [split_by_hash(groups[key], SHARES, SALT) for key in kept],
            "group": [groups[key] for key in kept],
            "target": [class_of(key) for key in kept],
            "image": [images[key] for key in kept],
            "text": pa.array([drawing.text or None for drawing in kept.values()], pa.string()),
        }
    )


def list_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the drawings that can be asked for; a link is the same drawing in a second folder."""
    for path in sorted(folder.rglob("*.svg")):
        key = path.relative_to(folder).with_suffix("").as_posix()
        if "/" in key and not path.is_symlink() and not LEFT_OUT.search(key):
            yield key, path


def class_of(key: str) -> str:
    return key.partition("/")[0]


def read(path: Path) -> Drawing:
    """Read a drawing and its Dublin Core metadata, without keywords: they name the folder."""
    svg = path.read_text(encoding="utf-8")
    with explained(f"{path} cannot be read as XML", ElementTree.ParseError):
        tree = ElementTree.fromstring(svg)

    def words(place: str) -> str:
        return (
            " ".join("".join(element.itertext()).split())
            if (element := tree.find(place)) is not None
            else ""
        )

    title, description = words(f".//{DC}title"), words(f".//{DC}description")
    return Drawing(svg, title, join_text(title, description), words(f".//{DC}creator//{DC}title"))


def join_text(title: str, description: str) -> str:
    """Return title and description, one of them if they say the same.

    >>> join_text("Bat", "A bat, from below"), join_text("Bat", "bat.")
    ('Bat. A bat, from below', 'Bat')
    """
    parts = [part.strip(" .") for part in (title, description)]
    if parts[0].lower() == parts[1].lower():
        parts.pop()
    return ". ".join(filter(None, parts))


def render(svg: str, key: str) -> bytes:
    """Render a drawing as a PNG; the files are pinned, so it happens in this process."""
    with explained("an extra renders it, pip install 'fusionzoo[openclipart]'", ImportError):
        import resvg_py
    with explained(f"{key}.svg cannot be rendered", ValueError):
        # 96 dots per inch, as in CSS, for sizes in mm or inches.
        return bytes(resvg_py.svg_to_bytes(svg_string=svg, width=PIXELS, height=PIXELS, dpi=96))


def find_groups(drawings: Mapping[str, Drawing], images: Mapping[str, bytes]) -> dict[str, str]:
    """Return each drawing's group, named by a member: a series, or equal pictures or texts."""
    return join_groups(
        {
            key: (
                ("name", class_of(key), first_word(key)),
                ("series", x.creator, x.title) if x.title else key,
                ("text", x.text.lower()) if x.text else key,
                ("image", images[key]),
            )
            for key, x in drawings.items()
        }
    )


def first_word(key: str) -> str:
    """Return the first word of a file's name, or the whole of one without letters.

    >>> first_word("animals/2_dead_frogs_lumen_desig_01"), first_word("food/42")
    ('dead', '42')
    """
    name = key.rpartition("/")[2].lower()
    return next(iter(re.findall(r"[a-z]+", name)), name)
