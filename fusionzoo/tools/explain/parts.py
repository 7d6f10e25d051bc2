"""How the values of one kind fall into parts, and how some of these are hidden: a class each."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from math import ceil, isqrt
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.ground.plugins import definition_of
from fusionzoo.structures import KINDS, Audio, Clip

LONG = 4.0  # seconds of a clip whose stretches are seconds
SHORT_STRETCHES = 8  # of a shorter clip
# occlusion: the score of the whole value minus that without the part; shapley: the part's Shapley
# value, where hidden parts come from other samples, over which the scores are averaged
Method = Literal["occlusion", "shapley"]
Hidden = Collection[int]  # numbers of parts
Row = Mapping[str, Any]  # column -> cell
PARTS: dict[str, type[Parts]] = {}  # by kind
# Characters of scripts that write no spaces between words: each counts as a word.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
WORD = re.compile(f"[{UNSPACED}\U00020000-\U0003ffff]|[^\\s{UNSPACED}\U00020000-\U0003ffff]+")


class Place(NamedTuple):
    """A part of a value: its name, and where it is.

    `span`: of text, the first character and the one behind the last; of sound, start and end in
    seconds; of a picture, top, left, bottom and right in pixels; of a sequence, the step's number.
    """

    name: str
    span: tuple[float, ...] = ()


class PartEffect(NamedTuple):
    """What a part of a value adds to the score."""

    name: str  # the word; else where it is: `row 1, column 3`, `0.00 to 1.00 s`, a column's name
    value: float
    span: tuple[float, ...] = ()  # see `Place`
    error: float = 0.0  # standard error, where the value is estimated


class Parts(ABC):
    """One kind of value: its parts, and versions of it in which some are hidden."""

    method: ClassVar[Method] = "occlusion"
    hidden_by: ClassVar[str]  # how parts are hidden, in words

    def __init__(self, most: int) -> None:
        """A value has at most `most` parts; columns and items are never joined."""
        self.most = most

    @abstractmethod
    def split(self, value: Any) -> list[Place]:
        """Return the parts of a value, in order."""

    @abstractmethod
    def hide(self, value: Any, places: Sequence[Place], hidden: Hidden, other: Any) -> Any:
        """Return the value with some of its parts, given by their numbers, hidden.

        `other` is the value of another sample, for kinds whose method is "shapley"; else None.
        """


def parts_of(kind: str) -> Any:
    """Make the decorated subclass of `Parts` that of a kind of values."""

    def decorate(cls: type[Parts]) -> type[Parts]:
        if kind not in KINDS:
            raise FusionZooError(f"parts of {kind!r}: kinds are {', '.join(KINDS)}")
        known = PARTS.get(kind)
        if known is not None and definition_of(known) != definition_of(cls):
            both = f"{definition_of(known)} and {definition_of(cls)}"
            raise FusionZooError(f"parts of {kind} are defined twice: {both}")
        PARTS[kind] = cls
        return cls

    return decorate


@parts_of("text")
class Words(Parts):
    """Words of a text, neighbours together if there are many."""

    hidden_by = "each word is left out of the text"

    def split(self, value: str) -> list[Place]:
        spans = [match.span() for match in WORD.finditer(value)]
        size = max(1, ceil(len(spans) / self.most))
        groups = [spans[first : first + size] for first in range(0, len(spans), size)]
        joined = [(group[0][0], group[-1][1]) for group in groups]
        return [Place(value[start:end], (start, end)) for start, end in joined]

    def hide(self, value: str, places: Sequence[Place], hidden: Hidden, other: None) -> str:
        for number in sorted(hidden, reverse=True):
            start, end = map(int, places[number].span)
            value = value[:start] + value[end:]
        return value


@parts_of("image")
class Regions(Parts):
    """Cells of a grid over a picture, filled with its mean colour."""

    hidden_by = "each cell of a grid is filled with the picture's mean colour"

    def split(self, value: Tensor) -> list[Place]:
        _, height, width = value.shape
        side = max(1, isqrt(self.most))
        rows, columns = (_edges(size, min(side, size)) for size in (height, width))
        return [
            Place(f"row {row}, column {column}", (top, left, bottom, right))
            for row, (top, bottom) in enumerate(pairwise(rows), start=1)
            for column, (left, right) in enumerate(pairwise(columns), start=1)
        ]

    def hide(self, value: Tensor, places: Sequence[Place], hidden: Hidden, other: None) -> Tensor:
        mean = value.float().mean((1, 2), keepdim=True).round().to(value.dtype)
        image = value.clone()
        for number in hidden:
            top, left, bottom, right = map(int, places[number].span)
            image[:, top:bottom, left:right] = mean
        return image


@parts_of("audio")
class Stretches(Parts):
    """Stretches of a clip: seconds, shorter in a short clip and longer in a very long one."""

    hidden_by = "each stretch is silenced"

    def split(self, value: Clip) -> list[Place]:
        duration = value.frames / value.rate
        count = ceil(duration) if duration >= LONG else SHORT_STRETCHES
        width = 1.0 if duration >= LONG else duration / count
        if count > self.most:
            count, width = self.most, duration / self.most
        edges = [min(duration, number * width) for number in range(count + 1)]
        return [Place(f"{a:.2f} to {b:.2f} s", (a, b)) for a, b in pairwise(edges) if b > a]

    def hide(self, value: Clip, places: Sequence[Place], hidden: Hidden, other: None) -> Audio:
        samples = value.samples.clone()
        for number in hidden:
            start, end = (round(x * value.rate) for x in places[number].span)
            samples[start:end] = 0
        return Audio(samples, value.rate)


@parts_of("sequence")
class Steps(Parts):
    """Steps of a sequence of vectors, neighbours together if there are many; never all hidden."""

    hidden_by = "each step is left out of the sequence"

    def split(self, value: Tensor) -> list[Place]:
        edges = _edges(len(value), min(len(value), self.most))
        names = [
            f"step {a + 1}" if b - a == 1 else f"steps {a + 1} to {b}" for a, b in pairwise(edges)
        ]
        return [Place(n, span) for n, span in zip(names, pairwise(edges), strict=True)]

    def hide(self, value: Tensor, places: Sequence[Place], hidden: Hidden, other: None) -> Tensor:
        keep = torch.ones(len(value), dtype=torch.bool)
        for number in hidden:
            start, end = map(int, places[number].span)
            keep[start:end] = False
        return value[keep] if keep.any() else torch.zeros_like(value[:1])


@parts_of("tabular")
class RowCells(Parts):
    """Cells of a row; those hidden come from other samples."""

    method = "shapley"
    hidden_by = "cells come from other samples"

    def split(self, value: Row) -> list[Place]:
        return [Place(name) for name in value]

    def hide(
        self, value: Row, places: Sequence[Place], hidden: Hidden, other: Row
    ) -> dict[str, Any]:
        names = {places[number].name for number in hidden}
        return {name: other.get(name) if name in names else x for name, x in value.items()}


class SeveralItems(Parts):
    """Several pictures or clips of one sample: each is a part, and is left out as a whole."""

    hidden_by = "each item is left out"

    def split(self, value: Sequence[Any]) -> list[Place]:
        return [Place(f"item {number}") for number in range(1, len(value) + 1)]

    def hide(
        self, value: Sequence[Any], places: Sequence[Place], hidden: Hidden, other: None
    ) -> Any:
        rest = [item for number, item in enumerate(value) if number not in hidden]
        return rest[0] if len(rest) == 1 else rest


def _edges(size: int, count: int) -> list[int]:
    """Return the edges of `count` stretches of about the same size."""
    return [round(number * size / max(count, 1)) for number in range(count + 1)]
