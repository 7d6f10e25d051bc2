"""Kinds of targets: parse a column of labels, encode it as numbers, decode logits.

A missing label is NaN in all its columns.

Shapes: `N` rows; `K` classes, labels or levels; a target has `width` logits and `columns` numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .errors import FusionZooError, did_you_mean
from .structures import Labels, predictions


@dataclass(frozen=True)
class Target:
    """A column of labels, with its classes or statistics in the training split."""

    name: str
    classes: tuple[str, ...] = ()  # sorted; levels: from the lowest
    mean: float = 0.0  # of a number, in the training split
    deviation: float = 1.0  # standard deviation of a number
    kind: ClassVar[str] = ""
    numbers: ClassVar[int] = 0  # numbers that encode a label; 0 = one per class

    @classmethod
    def learn(cls, name: str, cells: Sequence[str]) -> Target:
        """Build the target from the labels of the training split."""
        return cls(name, classes=tuple(sorted_words({x for cell in cells for x in words(cell)})))

    @staticmethod
    def check(cell: str) -> None:
        """Raise if a label cannot be parsed."""

    @property
    def width(self) -> int:
        """The number of logits."""
        return len(self.classes)

    @property
    def columns(self) -> int:
        """The number of columns of an encoded label."""
        return self.numbers or len(self.classes)

    @property
    def spec(self) -> dict[str, Any]:
        """A description in plain values, for `from_spec`."""
        return {"kind": self.kind, **asdict(self)}

    def encode(self, cell: str) -> list[float]:
        """Turn a label into numbers."""
        raise NotImplementedError

    def decode(self, logits: Tensor) -> list[Any]:
        """Turn logits (N, width) into a prediction for each row."""
        raise NotImplementedError

    def index(self, word: str) -> int:
        """Return the index of a class."""
        if word not in self.classes:
            raise FusionZooError(f"{word!r} is a label that no sample of split 'train' has")
        return self.classes.index(word)


class OneOf(Target):
    """One class of several, as its index."""

    kind, numbers = "classification", 1

    @classmethod
    def learn(cls, name: str, cells: Sequence[str]) -> Target:
        return cls(name, classes=tuple(sorted_words(set(cells))))

    def encode(self, cell: str) -> list[float]:
        return [self.index(cell)]

    def decode(self, logits: Tensor) -> list[Any]:
        return predictions(self.classes, logits.float().softmax(-1))


class AnyOf(Target):
    """Any number of labels (`sun;beach`), encoded as 0 or 1 per label; `;` means no label."""

    kind = "multilabel"

    def encode(self, cell: str) -> list[float]:
        indices = {self.index(word) for word in words(cell)}
        return [float(number in indices) for number in range(len(self.classes))]

    def decode(self, logits: Tensor) -> list[Any]:
        rows = [dict(zip(self.classes, x, strict=True)) for x in logits.float().sigmoid().tolist()]
        return [Labels([word for word, p in row.items() if p > 0.5], row) for row in rows]


class Number(Target):
    """A number, standardised by mean and standard deviation of the training split."""

    kind, numbers = "regression", 1

    @staticmethod
    def check(cell: str) -> None:
        number(cell)

    @classmethod
    def learn(cls, name: str, cells: Sequence[str]) -> Target:
        numbers = torch.tensor([number(cell) for cell in cells], dtype=torch.float64)
        deviation = numbers.std(correction=0).item() or 1.0
        return cls(name, mean=numbers.mean().item(), deviation=deviation)

    @property
    def width(self) -> int:
        return 1

    def encode(self, cell: str) -> list[float]:
        return [(number(cell) - self.mean) / self.deviation]

    def original(self, values: Tensor) -> Tensor:
        """Undo the standardisation, in double precision."""
        return values.double() * self.deviation + self.mean

    def decode(self, logits: Tensor) -> list[Any]:
        return self.original(logits[:, 0]).tolist()


class Level(Target):
    """One of K ordered levels, given as numbers, as its rank from 0.

    Logit k is that of P(level > k | level >= k): conditional training, CORN (Shi, Cao and Raschka
    2023, arXiv:2111.08851). Their products P(level > k) fall with k whatever the logits are.
    """

    kind, numbers = "ordinal", 1

    @staticmethod
    def check(cell: str) -> None:
        number(cell)

    @classmethod
    def learn(cls, name: str, cells: Sequence[str]) -> Target:
        levels = sorted({number(cell) for cell in cells})
        if len(levels) < 2:
            raise FusionZooError("split 'train' has one level only; levels need to be 2 or more")
        return cls(name, classes=tuple(f"{level:.12g}" for level in levels))

    @property
    def width(self) -> int:
        return len(self.classes) - 1

    def encode(self, cell: str) -> list[float]:
        return [self.index(f"{number(cell):.12g}")]

    @staticmethod
    def above(logits: Tensor) -> Tensor:
        """Return P(level > k): (N, K - 1) -> (N, K - 1), falling along each row."""
        return logits.float().sigmoid().cumprod(-1)

    def rank(self, logits: Tensor) -> Tensor:
        """Return the predicted level, the median of the distribution: (N,) int64."""
        return (self.above(logits) > 0.5).sum(-1)

    def decode(self, logits: Tensor) -> list[Any]:
        above = self.above(logits)
        edge = above[:, :1]
        steps = torch.cat([torch.ones_like(edge), above, torch.zeros_like(edge)], dim=1)
        shares = (steps[:, :-1] - steps[:, 1:]).clamp(min=0)
        return predictions(self.classes, shares, self.rank(logits).tolist())


KINDS: dict[str, type[Target]] = {target.kind: target for target in (OneOf, AnyOf, Number, Level)}


def kind_of(kind: str) -> type[Target]:
    """Return the subclass of `Target` for `kind`."""
    if kind not in KINDS:
        raise FusionZooError(
            f"{kind!r} is no kind of target.{did_you_mean(kind, KINDS)}"
            f" There are: {', '.join(KINDS)}."
        )
    return KINDS[kind]


def from_spec(spec: Mapping[str, Any]) -> Target:
    """Build a target from its `spec`, validated because it may come from a file."""
    from pydantic import TypeAdapter, ValidationError

    fields = {name: value for name, value in spec.items() if name != "kind"}
    kind = kind_of(str(spec.get("kind")))
    try:
        return TypeAdapter(kind).validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise FusionZooError(f"{key}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None


def decode(targets: Sequence[Target], logits: Tensor) -> list[Any]:
    """Return each row's prediction; by column, unless the one column is `target`."""
    slices = logits.split([target.width for target in targets], dim=-1)
    columns = [
        target.decode(target_logits) for target, target_logits in zip(targets, slices, strict=True)
    ]
    names = [target.name for target in targets]
    if names == ["target"]:
        return columns[0]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def words(cell: str) -> list[str]:
    """Split `sun; beach` at semicolons."""
    return [word.strip() for word in cell.split(";") if word.strip()]


def number(cell: str) -> float:
    """Read a finite number."""
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise FusionZooError(f"{cell!r} is no finite number{decimal_hint(cell)}")
    return value


def decimal_hint(cell: str) -> str:
    """Return a hint for a cell that is a number with a decimal comma, or nothing.

    >>> decimal_hint("25,06")
    '; --data.decimal , reads it as 25.06'
    """
    if not re.fullmatch(r"[+-]?[0-9]*,[0-9]+([eE][+-]?[0-9]+)?", cell.strip()):
        return ""
    return f"; --data.decimal , reads it as {cell.strip().replace(',', '.')}"


def sorted_words(names: set[str]) -> list[str]:
    """Sort names; integers by their value."""
    integers = all(word.removeprefix("-").isdecimal() and word.isascii() for word in names)
    return sorted(names, key=(lambda word: (int(word), word)) if integers else None)
