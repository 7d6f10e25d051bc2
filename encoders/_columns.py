"""Columns of a table: how their cells become numbers and codes.

Shapes: `B` batch, `C` columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fusionzoo.cells import Cell, category_of, fold, is_number
from fusionzoo.errors import FusionZooError, did_you_mean

from .base import Item, Processor

UNKNOWN, MISSING, FIRST = 0, 1, 2  # codes: not among the training data, empty, first category
LIMIT = 100.0  # standard deviations; a number farther from the mean is moved to there


@dataclass(frozen=True)
class Numbers:
    """A column of numbers, with statistics of the training split."""

    name: str
    mean: float
    std: float

    def encode(self, cell: float | str) -> tuple[float, int]:
        """Return the standardised number, and 0."""
        number = float(cell) if is_number(cell) else math.nan
        if not math.isfinite(number):
            raise FusionZooError(
                f"column {self.name!r}: {cell!r} is not a number, which the model was trained on"
            )
        return max(-LIMIT, min(LIMIT, (number - self.mean) / self.std)), 0


@dataclass(frozen=True)
class Categories:
    """A column of categories, with those of the training split."""

    name: str
    values: tuple[str, ...]

    @cached_property
    def codes(self) -> dict[str, int]:
        """Category -> code."""
        return {value: code for code, value in enumerate(self.values, start=FIRST)}

    def encode(self, cell: float | str) -> tuple[float, int]:
        """Return 0, and the code of the category."""
        return 0.0, self.codes.get(category_of(cell), UNKNOWN)


Column = Numbers | Categories


def read_columns(settings: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    """Check the setting `columns` of an encoder; the order of the columns is kept."""
    columns = tuple(_read_column(setting) for setting in settings)
    names = [fold(column.name) for column in columns]
    for name in names:
        if names.count(name) > 1:
            raise FusionZooError(f"columns: {name!r} occurs twice")
    if not columns:
        raise FusionZooError(
            "columns are missing: what each column of the table holds, such as"
            " {'name': 'age', 'mean': 40, 'std': 12} or {'name': 'colour', 'values': ['red']}"
        )
    return columns


def _read_column(setting: Mapping[str, Any]) -> Column:
    name, keys = setting.get("name"), set(setting) - {"name"}
    if isinstance(name, str) and keys == {"values"}:
        values = setting["values"]
        if isinstance(values, list | tuple) and all(isinstance(value, str) for value in values):
            if len(set(values)) < len(values):
                raise FusionZooError(f"columns: {name!r} has a category twice")
            return Categories(name, tuple(values))
    elif isinstance(name, str) and keys == {"mean", "std"}:
        mean, std = setting["mean"], setting["std"]
        numbers = all(
            isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
            for x in (mean, std)
        )
        if numbers and std > 0:
            return Numbers(name, float(mean), float(std))
    raise FusionZooError(
        f"columns: {dict(setting)!r:.200} is neither {{name, mean, std}}, finite and std above 0,"
        " nor {name, values}, a list of text"
    )


class TabularProcessor(Processor):
    """Standardise numbers and encode categories; a column that a sample lacks is an error."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)
        self._last: tuple[list[str], list[int]] = [], []  # names of a sample, and their places

    def __call__(self, value: Mapping[str, Cell], generator: torch.Generator | None = None) -> Item:
        item = self.blank()
        for place, cell in zip(self._places(list(value)), value.values(), strict=True):
            if cell is not None:
                item["values"][place], item["codes"][place] = self.columns[place].encode(cell)
                item["known"][place] = True
        return item

    def _places(self, names: list[str]) -> list[int]:
        """Return the index of each name among the columns; each column must occur once."""
        if self._last[0] == names:
            return self._last[1]
        order = {fold(column.name): place for place, column in enumerate(self.columns)}
        folded, known = [fold(name) for name in names], [column.name for column in self.columns]
        for name, key in zip(names, folded, strict=True):
            if key not in order:
                raise FusionZooError(
                    f"the model reads no column {name!r}.{did_you_mean(name, known)}"
                    f" It reads: {', '.join(known)}"
                )
        for key, place in order.items():
            if folded.count(key) != 1:
                state = "missing" if key not in folded else "there twice"
                raise FusionZooError(
                    f"column {known[place]!r} is {state} among {', '.join(names)}, and the model"
                    " reads it; None stands for an empty cell"
                )
        self._last = names, [order[key] for key in folded]
        return self._last[1]

    def varies(self, value: Mapping[str, Cell]) -> bool:
        return False

    def blank(self) -> Item:
        """Return a sample whose cells are all empty."""
        count = len(self.columns)
        return {
            "values": torch.zeros(count),
            "codes": torch.full((count,), MISSING),
            "known": torch.zeros(count, dtype=torch.bool),
        }
