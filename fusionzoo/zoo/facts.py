"""The zoo's facts, from a file of the package: reading them imports no torch and builds no fusion.

`make docs` writes facts.json from docstrings, signatures and forward passes; a test holds it to
them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fusionzoo.plugins import installed_plugins, load_plugins, plugin_list

from .cards import BalanceCard, Card, EncoderCard, SettingCard

FILE = Path(__file__).with_name("facts.json")


@dataclass(frozen=True)
class Facts:
    """All cards, in the order in which they are shown."""

    fusions: list[Card]
    strategies: list[BalanceCard]
    encoders: list[EncoderCard]

    def to_json(self) -> str:
        """Return what facts.json holds."""
        return json.dumps(asdict(self), indent=1) + "\n"


def facts(plugins: str = "") -> Facts:
    """Read the facts; those of `plugins` and of installed packages' plugins are gathered."""
    known = _from_plain(json.loads(FILE.read_text(encoding="utf-8")))
    return _with_plugins(known, plugins) if plugin_list(plugins) or installed_plugins() else known


def _with_plugins(known: Facts, plugins: str) -> Facts:
    from fusionzoo.fusion import list_fusions

    from .cards import FAMILIES, balance_cards, card, encoder_cards

    load_plugins(plugins)
    names = {fusion.name for fusion in known.fusions}
    fusions = [*known.fusions, *(card(name) for name in list_fusions() if name not in names)]
    fusions.sort(key=lambda fusion: (FAMILIES.index(fusion.family), fusion.name))
    return Facts(fusions, balance_cards(), encoder_cards())


def _from_plain(stored: dict[str, Any]) -> Facts:
    for fields in (*stored["fusions"], *stored["strategies"], *stored["encoders"]):
        settings = fields["settings"].items()
        fields["settings"] = {name: SettingCard(**setting) for name, setting in settings}
    return Facts(
        [Card(**fields) for fields in stored["fusions"]],
        [BalanceCard(**fields) for fields in stored["strategies"]],
        [EncoderCard(**fields) for fields in stored["encoders"]],
    )
