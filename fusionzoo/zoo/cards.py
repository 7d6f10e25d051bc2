"""A card for every component, from docstring, signature and one forward pass."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import dedent
from typing import Any

from fusionzoo.ground.console import print_columns
from fusionzoo.ground.registry import Entry, sections, settings_class

FAMILIES = ("early", "late", "attention", "hybrid")
BALANCE_FAMILIES = {  # what a training strategy changes
    "data": "the batch",
    "loss": "the losses",
    "gradient": "how fast each encoder learns",
    "schedule": "who learns when",
}


def settings_block(docstring: str | None) -> dict[str, str]:
    """Return the meaning of each setting in a docstring's `Settings:` block.

    Each line of the block is `name: meaning`; further lines of a meaning are indented deeper.

    >>> settings_block("Add.\\n\\nSettings:\\n  rank: terms,\\n    1 or more\\n  k: factors")
    {'rank': 'terms, 1 or more', 'k': 'factors'}
    """
    text = inspect.cleandoc(docstring or "")
    block = re.search(r"^Settings:\n((?: +.*\n?|\n)*)", text, flags=re.MULTILINE)
    meanings: dict[str, str] = {}
    name = ""
    for line in dedent(block[1]).splitlines() if block else ():
        if match := re.match(r"(\w+): +(.+)", line):
            name, meanings[match[1]] = match[1], match[2]
        elif name and line:
            meanings[name] += f" {line.strip()}"
    return meanings


def described_settings(component: Callable[..., Any]) -> dict[str, str]:
    """Return the meaning of each setting of a class or function.

    Base classes are included, so that settings common to several classes are described once, in
    the docstring of their base class; so is the dataclass that a function takes as `settings`.
    """
    classes = component.__mro__ if isinstance(component, type) else (component,)
    whole = settings_class(component)
    meanings: dict[str, str] = settings_block(whole.__doc__) if whole else {}
    for cls in reversed(classes):
        meanings |= settings_block(cls.__doc__)
    return meanings


@dataclass(frozen=True, kw_only=True)
class SettingCard:
    """Default and meaning of one setting of a component."""

    default: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class About:
    """What a docstring and a signature say."""

    name: str
    family: str
    paper: str
    summary: str
    equation: str
    missing: str
    pitfall: str
    use_when: str
    settings: dict[str, SettingCard]


@dataclass(frozen=True, kw_only=True)
class Card(About):
    """What there is to know about one fusion."""

    reads: str
    synergy: bool
    parameters: int  # of the standard case
    macs: int  # of one complete sample of the standard case


@dataclass(frozen=True, kw_only=True)
class BalanceCard(About):
    """What there is to know about one training strategy."""

    surgery: bool  # of these a run takes one


@dataclass(frozen=True, kw_only=True)
class EncoderCard:
    """What there is to know about one family of encoders."""

    name: str  # `chars`, or `timm/*` where a model's name follows
    kind: str
    summary: str
    settings: dict[str, SettingCard]
    further: bool  # whether other settings go on to the library


def about(entry: Entry[Any]) -> dict[str, Any]:
    """Read what every card holds."""
    part = sections(inspect.getdoc(entry.cls) or "")
    return {
        "name": entry.name,
        "family": entry.family,
        "paper": entry.paper or "-",
        "summary": entry.summary,
        "equation": part[""],
        "missing": part["Missing"],
        "pitfall": part["Pitfall"],
        "use_when": part["Use when"],
        "settings": setting_cards(entry.parameters.values(), described_settings(entry.cls)),
    }


def setting_cards(
    parameters: Iterable[inspect.Parameter], meanings: Mapping[str, str]
) -> dict[str, SettingCard]:
    """Return the default and the meaning of each setting, by its name."""
    return {
        p.name: SettingCard(
            default="(required)" if p.default is inspect.Parameter.empty else repr(p.default),
            meaning=meanings.get(p.name, ""),
        )
        for p in parameters
        if p.name != "assets"  # set by the model folder, not by users
    }


def show_settings(prefix: str, settings: Mapping[str, SettingCard]) -> None:
    """Print flag, default and meaning of each setting."""
    print_columns(
        [(f"{prefix}.{name}", f"default {x.default}", x.meaning) for name, x in settings.items()]
    )


def show_data_settings(names: Sequence[str] = ("manifest", "folders")) -> None:
    """Print the settings of data sets, by default of those of one's own files; shared ones once."""
    from fusionzoo.datasets import DATASETS
    from fusionzoo.datasets.base import SHARED, SharedSettings

    for entry in (DATASETS[name] for name in names):
        specific = [p for p in entry.parameters.values() if p is not SHARED.get(p.name)]
        print(f"\n{entry.name}: {entry.summary}")
        show_settings("--data", setting_cards(specific, described_settings(entry.cls)))
    print("\nevery data set:")
    show_settings("--data", setting_cards(SHARED.values(), described_settings(SharedSettings)))


def balance_cards() -> list[BalanceCard]:
    """Read the cards of all training strategies, by family and name."""
    from fusionzoo.training.balance import BALANCE

    entries = [BALANCE[name] for name in BALANCE]
    strategies = [
        BalanceCard(**about(entry), surgery=bool(getattr(entry.cls, "surgery", False)))
        for entry in entries
    ]
    return sorted(strategies, key=lambda x: ([*BALANCE_FAMILIES].index(x.family), x.name))


def encoder_cards() -> list[EncoderCard]:
    """Read the cards of all encoders, by kind and name."""
    from fusionzoo.encoders import ENCODERS, create_encoder

    parameters = inspect.signature(create_encoder).parameters.values()
    shared = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    meanings = described_settings(create_encoder)
    return [
        EncoderCard(
            name=entry.pattern,
            kind=entry.family,
            summary=entry.summary,
            settings=setting_cards(
                [*entry.parameters.values(), *shared], meanings | described_settings(entry.cls)
            ),
            further=entry.open_ended,
        )
        for name, entry in sorted((name, ENCODERS[name]) for name in ENCODERS)
    ]


def card(name: str) -> Card:
    """Read one fusion's card."""
    from fusionzoo.evaluation.cost import STANDARD, cost, standard_fusion
    from fusionzoo.fusion import fusion_info
    from fusionzoo.fusion.base import LINEAR_SKIP

    entry = fusion_info(name)
    needed = cost(standard_fusion(name), STANDARD)
    known = about(entry)
    if entry.linear_skip:
        shared = known["settings"][LINEAR_SKIP.name]
        known["settings"][LINEAR_SKIP.name] = replace(
            shared, default="False; True in training and benchmarks"
        )
    return Card(
        **known,
        reads=entry.reads,
        synergy=entry.synergy,
        parameters=needed.parameters,
        macs=needed.macs,
    )


def cards() -> list[Card]:
    """Read all cards, by family and name."""
    from fusionzoo.fusion import list_fusions

    fusions = [card(name) for name in list_fusions()]
    return sorted(fusions, key=lambda x: (FAMILIES.index(x.family), x.name))


def count(number: int) -> str:
    """Shorten a count.

    >>> count(999), count(1_881_104), count(457_070_592)
    ('999', '1.9 M', '457 M')
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            value = number / size
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    return str(number)
