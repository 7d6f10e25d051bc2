"""Every setting of a component is described in its docstring, and nothing else is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from fusionzoo.cli import main
from fusionzoo.datasets import DATASETS
from fusionzoo.datasets.base import SharedSettings
from fusionzoo.datasets.sources.table_settings import TableSettings
from fusionzoo.encoders import ENCODERS, create_encoder
from fusionzoo.fusion import FUSIONS
from fusionzoo.ground.registry import SECTIONS, settings_class
from fusionzoo.training.balance import BALANCE, Balance
from fusionzoo.training.tasks import OBJECTIVES
from fusionzoo.zoo.cards import described_settings, settings_block

Component = Callable[..., Any]
REGISTRIES = (FUSIONS, ENCODERS, DATASETS, BALANCE, OBJECTIVES)
COMPONENTS: dict[str, Component] = {
    f"{registry.noun} {name}": registry[name].cls for registry in REGISTRIES for name in registry
}
NOT_FOR_USERS = {"assets", "shared"}  # set by model folders and by `DATASETS.create`


def keyword_only(component: Component) -> set[str]:
    parameters = inspect.signature(component).parameters.values()
    whole = settings_class(component)
    names = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    return names | (keyword_only(whole) if whole else set())


def undocumented(component: Component) -> set[str]:
    return keyword_only(component) - set(described_settings(component)) - NOT_FOR_USERS


def stale(component: Component) -> set[str]:
    return set(settings_block(component.__doc__)) - keyword_only(component)


def test_the_docstring_describes_exactly_the_settings() -> None:
    assert {name: x for name, cls in COMPONENTS.items() if (x := undocumented(cls))} == {}
    assert {name: x for name, cls in COMPONENTS.items() if (x := stale(cls))} == {}


def test_a_setting_is_described_by_more_than_its_name_and_default() -> None:
    short = [
        f"{component}: {name}"
        for component, cls in COMPONENTS.items()
        for name, meaning in described_settings(cls).items()
        if len(meaning.split()) < 2 or "default" in meaning
    ]
    assert short == []


@pytest.mark.parametrize("shared", [Balance, create_encoder, SharedSettings, TableSettings])
def test_common_settings_are_described_where_they_are_declared(shared: Component) -> None:
    described = set(settings_block(shared.__doc__))
    assert described - NOT_FOR_USERS == keyword_only(shared) - NOT_FOR_USERS


@pytest.mark.parametrize("command", ["train", "embed", "benchmark", "evaluate", "analyse"])
def test_help_of_commands_that_open_data_explains_each_setting_of_a_table_once(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help-all"]) == 0
    printed = capsys.readouterr().out.split()
    table = keyword_only(TableSettings) - {"root", "shares", "allow_outside"}  # of folders, too
    flags = {f"--data.{name}" for name in table | keyword_only(SharedSettings) - {"shares"}}
    assert {flag: printed.count(flag) for flag in flags} == dict.fromkeys(flags, 1)
    assert set(settings_block(TableSettings.__doc__)["decimal"].split()) <= set(printed)


def test_the_list_of_data_sets_explains_the_settings_of_the_one_that_it_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["data", "list", "digits"]) == 0
    printed = capsys.readouterr().out
    assert "--data.samples  default 1797  number of samples to keep" in printed
    assert "every data set:" in printed and "--data.decimal" not in printed


def test_the_parts_of_a_docstring_come_in_one_order_after_a_short_line() -> None:
    wrong = []
    for name, component in COMPONENTS.items():
        docstring = inspect.getdoc(component) or ""
        titles = re.findall(rf"^({'|'.join(SECTIONS)}):", docstring, flags=re.MULTILINE)
        is_ordered = titles == [title for title in SECTIONS if title in titles]
        if not (is_ordered and 0 < len(docstring.partition("\n")[0]) < 90):
            wrong.append(name)
    assert wrong == []


def test_a_missing_and_a_stale_line_are_found() -> None:
    class Base:
        """Shared.

        Settings:
            start: first epoch
        """

    class Sample(Base):
        """Do it.

        Settings:
            rank: number of terms,
                at least 1
            gone: removed setting
        Shapes: none
        """

        def __init__(self, *, rank: int = 1, start: int = 0, width: int = 2) -> None: ...

    assert described_settings(Sample)["rank"] == "number of terms, at least 1"
    assert undocumented(Sample) == {"width"}
    assert stale(Sample) == {"gone"}
