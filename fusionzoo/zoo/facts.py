"""The zoo's facts, from a file of the package: reading them imports no torch and builds no fusion.

`make docs` writes facts.json from docstrings, signatures and forward passes; a test holds it to
them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fusionzoo.errors import check_known
from fusionzoo.ground.plugins import installed_plugins, load_plugins, plugin_list

from .cards import BalanceCard, Card, EncoderCard, SettingCard

FILE = Path(__file__).with_name("facts.json")
MEASURED = Path(__file__).with_name("measured.json")


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


def measured(data: str | None = None) -> dict[str, dict[str, Any]]:
    """Return what every fusion reached at its default settings on a data set, the best first.

    `{"gmu": {"accuracy": 0.97, ...}}`, a row of results/zoo.csv each; without a data set those of
    all, by their names.
    """
    table: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    if data is None:
        return table
    check_known(data, table, f"no fusion was measured on {data!r}", "There are")
    return dict(table[data])


def list_fusions(
    pattern: str | None = None, /, *, family: str | None = None, by: str | None = None
) -> list[str]:
    """Return the names of all fusions, or of those that match, sorted.

    `pattern` is a shell pattern, or the name of a family: early, late, attention or hybrid. A word
    that is both a family and a fusion is the family. `by` is a data set of results/zoo.csv: only
    what was measured there is listed, the best first.
    """
    from fusionzoo.fusion import FUSIONS

    names = FUSIONS.names(pattern, family)
    return names if by is None else [name for name in measured(by) if name in names]


def measured_lines(name: str) -> list[str]:
    """Say what a fusion reached on each data set."""
    lines = []
    for data, table in measured().items():
        if name in table:
            figures, rank = table[name], [*table].index(name) + 1
            lines.append(
                f"{data}: accuracy {figures['accuracy']:.3f} ({figures['low']:.3f} to"
                f" {figures['high']:.3f}), {100 * figures['gain_difference']:+.1f} points over the"
                f" best modality alone, {rank} of {len(table)}"
            )
    return lines


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
