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
from itertools import chain
from pathlib import Path
from typing import Any

from fusionzoo.files import cache_root

from .cards import BalanceCard, Card, EncoderCard, SettingCard

LIBRARIES = ("torch", "torchvision", "torchaudio", "timm", "transformers")
LINKED = ("encoders", "fusion", "datasets")


@dataclass(frozen=True)
class Facts:
    """All cards, in the order in which they are shown."""

    fusions: list[Card]
    strategies: list[BalanceCard]
    encoders: list[EncoderCard]


def facts() -> Facts:
    """Read the facts, or gather and keep them; a cache that cannot be written costs time only."""
    file = cache_root() / "zoo.json"
    stamp = sources_stamp()
    with suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored["stamp"] == stamp:
            return _from_plain(stored["facts"])
    gathered = gather_facts()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"zoo.json.{os.getpid()}")  # a kill leaves the old file or the new
        partial.write_text(json.dumps({"stamp": stamp, "facts": asdict(gathered)}), "utf-8")
        partial.replace(file)
    return gathered


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
    for folder, _, names in chain.from_iterable(os.walk(path, followlinks=True) for path in tops):
        for name in names:
            if name.endswith(".py"):
                about = os.stat(os.path.join(folder, name))
                marks.append(f"{folder}/{name} {about.st_size} {about.st_mtime_ns}")
    return hashlib.sha256("\n".join(sorted(marks)).encode()).hexdigest()


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
