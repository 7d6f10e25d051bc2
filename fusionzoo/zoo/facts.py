"""The zoo's facts, kept on disk: reading them imports no torch and builds no fusion.

The file is made anew when a source file of fusionzoo, or a library that the facts depend on, is
another one than when it was written.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fusionzoo.files import cache_root, replacing
from fusionzoo.plugins import installed_plugins, load_plugins, plugin_list

from .cards import BalanceCard, Card, EncoderCard, SettingCard

LIBRARIES = ("torch", "torchvision", "torchaudio", "timm", "transformers")
LINKED = ("encoders", "fusion", "datasets")


@dataclass(frozen=True)
class Facts:
    """All cards, in the order in which they are shown."""

    fusions: list[Card]
    strategies: list[BalanceCard]
    encoders: list[EncoderCard]


def facts(plugins: str = "") -> Facts:
    """Read the facts, or gather and keep them; a cache that cannot be written costs time only.

    Those of `plugins`, which `load_plugins` imports, are gathered each time.
    """
    known = _stored_facts()
    return known if not plugin_list(plugins) else _with_plugins(known, plugins)


def _stored_facts() -> Facts:
    file = cache_root() / "zoo.json"
    stamp = sources_stamp()
    with suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored["stamp"] == stamp:
            return _from_plain(stored["facts"])
    gathered = gather_facts()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.write_text(json.dumps({"stamp": stamp, "facts": asdict(gathered)}), "utf-8")
    return gathered


def _with_plugins(known: Facts, plugins: str) -> Facts:
    from fusionzoo.fusion import list_fusions

    from .cards import FAMILIES, balance_cards, card, encoder_cards

    load_plugins(plugins)
    names = {fusion.name for fusion in known.fusions}
    fusions = [*known.fusions, *(card(name) for name in list_fusions() if name not in names)]
    fusions.sort(key=lambda fusion: (FAMILIES.index(fusion.family), fusion.name))
    return Facts(fusions, balance_cards(), encoder_cards())


def gather_facts() -> Facts:
    """Import everything, and read the facts from docstrings, signatures and forward passes."""
    from .cards import balance_cards, cards, encoder_cards

    return Facts(cards(), balance_cards(), encoder_cards())


def sources_stamp() -> str:
    """Return a digest of every source file's name, size and time, and of libraries' versions."""
    marks = [sys.version, *(f"{name} {_version(name)}" for name in LIBRARIES)]
    top = Path(__file__).parents[1]
    # In a checkout three folders are links; without links they stand beside the package.
    tops = [top, *(top.parent / name for name in LINKED if not (top / name).is_dir())]
    for point in installed_plugins():
        marks.append(f"{point.name} {point.value}")
        spec = find_spec(point.module.partition(".")[0])  # of the package: imports nothing
        tops += map(Path, (spec.submodule_search_locations or [str(spec.origin)]) if spec else [])
    for path in [file for place in tops for file in _sources(place)]:
        about = os.stat(path)
        marks.append(f"{path} {about.st_size} {about.st_mtime_ns}")
    return hashlib.sha256("\n".join(sorted(marks)).encode()).hexdigest()


def _sources(place: Path) -> list[str]:
    """Return the Python files below a folder, or the one file."""
    folders = os.walk(place, followlinks=True)
    files = [os.path.join(folder, name) for folder, _, names in folders for name in names]
    return [path for path in files or [str(place)] if path.endswith(".py")]


def _from_plain(stored: dict[str, Any]) -> Facts:
    for fields in (*stored["fusions"], *stored["strategies"], *stored["encoders"]):
        settings = fields["settings"].items()
        fields["settings"] = {name: SettingCard(**setting) for name, setting in settings}
    return Facts(
        [Card(**fields) for fields in stored["fusions"]],
        [BalanceCard(**fields) for fields in stored["strategies"]],
        [EncoderCard(**fields) for fields in stored["encoders"]],
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"
