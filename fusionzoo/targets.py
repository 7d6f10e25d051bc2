"""Kinds of targets: parse a column of labels, encode it as numbers, decode logits.

A missing label is NaN in all its columns.

Shapes: `N` rows; `K` classes, labels or levels; a target has `width` logits and `columns` numbers.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from .errors import FusionZooError, check_known, first_problem
from .ground.cells import category_of
from .ground.plugins import definition_of
from .structures import Labels, predictions

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T", bound="type[Target]")
MAX_NUMBER = 3.4e38  # of float32
EDGE = 1e-12  # averaged probabilities are kept this far from 0 and 1
QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
NUMPY_SCALAR = re.compile(rf"np\.\w+\(({QUOTED}|[^()'\"]*)\)")  # np.int64(1), np.str_('a')
PRINTED = {"True": True, "False": False, "np.True_": True, "np.False_": False, "None": None}


@dataclass(frozen=True)
class Target:
    """A column of labels, with its classes or statistics in the training split."""

    name: str
    classes: tuple[str, ...] = ()  # sorted; levels: from the lowest
    mean: float = 0.0  # of a number, in the training split
    deviation: float = 1.0  # standard deviation of a number
    kind: ClassVar[str] = ""
    numbers: ClassVar[int] = 0  # numbers that encode a label; 0 = one per class
    examples: ClassVar[tuple[str, ...]] = ()  # cells on which `fusionzoo.testing` tries objectives

    @classmethod
    def standard_kind(cls) -> str:
        """Return the built-in kind that this one is or derives from; empty: no target.

        What differs by kind, say the metric of a benchmark, is looked up by it.
        """
        return next((parent.kind for parent in cls.__mro__ if parent in STANDARD), "")

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

    def average(self, logits: Tensor, weights: Tensor) -> Tensor:
        """Return the logits of several models' mean prediction: (S, N, width) -> (N, width).

        `weights` (S, N, 1) sum to 1 over the models. Here the logits are averaged, as those of
        numbers may be; kinds whose logits stand for probabilities average the probabilities.
        """
        return (weights * logits.double()).sum(0)

    def misfit(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return how badly each prediction fits its label: (N, width), (N, C) -> (N,) float64.

        The score of split conformal prediction: what `region` returns for a limit holds the labels
        whose score is at most that.
        """
        raise NotImplementedError

    def region(self, logits: Tensor, limit: float) -> dict[str, list[Any]]:
        """Return columns of the labels whose `misfit` is at most `limit`: (N, width) float64.

        `set` with the names of classes, joined by `;`, or `lower` and `upper`.
        """
        raise NotImplementedError

    def strata(self, labels: Tensor) -> Tensor:
        """Return the classes by which folds are stratified: encoded labels (N, C) -> (N,) int64."""
        return labels[:, 0].long()

    def index(self, word: str) -> int:
        """Return the index of a class."""
        if word not in self.classes:
            raise FusionZooError(f"{word!r} is a label that no sample of split 'train' has")
        return self.classes.index(word)


class OneOf(Target):
    """One class of several, as its index."""

    kind, numbers = "classification", 1
    examples = ("a", "b", "a", "c", "b", "a")

    @classmethod
    def learn(cls, name: str, cells: Sequence[str]) -> Target:
        return cls(name, classes=tuple(sorted_words({label_word(cell) for cell in cells})))

    def encode(self, cell: str) -> list[float]:
        return [self.index(label_word(cell))]

    def decode(self, logits: Tensor) -> list[Any]:
        return predictions(self.classes, logits.float().softmax(-1))

    def average(self, logits: Tensor, weights: Tensor) -> Tensor:
        return (weights * logits.double().softmax(-1)).sum(0).clamp(min=EDGE).log()

    def misfit(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return 1 - p of the label's class (Sadinle et al. 2019, arXiv:1609.00451).

        0 of the most probable class, so that every set has it.
        """
        return self._misfits(logits).gather(-1, labels[:, :1].long())[:, 0]

    def region(self, logits: Tensor, limit: float) -> dict[str, list[Any]]:
        return {"set": named_sets(self.classes, self._misfits(logits) <= limit)}

    @staticmethod
    def _misfits(logits: Tensor) -> Tensor:
        shares = logits.double().softmax(-1)
        return (1 - shares).where(shares < shares.amax(-1, keepdim=True), 0.0)


class AnyOf(Target):
    """Any number of labels (`sun;beach`), encoded as 0 or 1 per label; `;` means no label."""

    kind = "multilabel"
    examples = ("b;c", "c", ";", "a;b", "c", "b;c")

    @classmethod
    def learn(cls, name: str, cells: Sequence[str]) -> Target:
        vectors = [vector for cell in cells if (vector := read_vector(cell)) is not None]
        if not vectors:
            return cls(name, classes=super().learn(name, cells).classes)
        lengths = sorted({len(vector) for vector in vectors})
        if len(lengths) > 1 or len(vectors) < len(cells):
            raise FusionZooError(
                "some cells are vectors of 0 and 1, of"
                f" {' and '.join(map(str, lengths))} entries, and others are not alike: write all"
                " as vectors of one length, or all as the names of labels"
            )
        return cls(name, classes=tuple(map(str, range(lengths[0]))))

    @staticmethod
    def check(cell: str) -> None:
        labels = words(cell)
        if len({*labels}) < len(labels) and {*labels} <= {"0", "1"}:
            raise FusionZooError(
                f"{cell!r} holds a label twice, as a vector of 0 and 1 does: open the data with"
                " this column as multilabel, which reads such vectors by their positions"
            )

    def encode(self, cell: str) -> list[float]:
        vector = read_vector(cell)
        if vector is not None and self.classes != tuple(map(str, range(len(vector)))):
            raise FusionZooError(
                f"{cell!r} is a vector of {len(vector)} labels without names, but the labels are"
                f" {', '.join(self.classes):.60}: write their names"
            )
        indices = {self.index(word) for word in words(cell)}
        return [float(number in indices) for number in range(len(self.classes))]

    def decode(self, logits: Tensor) -> list[Any]:
        rows = [dict(zip(self.classes, x, strict=True)) for x in logits.float().sigmoid().tolist()]
        return [Labels([word for word, p in row.items() if p > 0.5], row) for row in rows]

    def average(self, logits: Tensor, weights: Tensor) -> Tensor:
        return (weights * logits.double().sigmoid()).sum(0).logit(EDGE)

    def misfit(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return 1 - p of the least probable of the labels; 0 without labels.

        A set thus holds all of a sample's labels, or fails.
        """
        return ((1 - logits.double().sigmoid()) * labels).amax(-1)

    def region(self, logits: Tensor, limit: float) -> dict[str, list[Any]]:
        return {"set": named_sets(self.classes, 1 - logits.double().sigmoid() <= limit)}

    def strata(self, labels: Tensor) -> Tensor:
        """Return each row's rarest label."""
        import torch

        rarity = labels.sum(0).argsort().argsort()  # 0 = the rarest
        return torch.where(labels > 0, rarity, len(rarity)).min(1).values


class Number(Target):
    """A number, standardised by mean and standard deviation of the training split."""

    kind, numbers = "regression", 1
    examples = ("3.5", "-1", "4", "2.2", "7.3", "0.4")

    @staticmethod
    def check(cell: str) -> None:
        number(cell)

    @classmethod
    def learn(cls, name: str, cells: Sequence[str]) -> Target:
        import torch

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

    def predicted(self, logits: Tensor) -> Tensor:
        """Return the numbers that logits predict, in the data's unit: (N, 1) -> (N,) float64."""
        return self.original(logits[:, 0])

    def logits_of(self, labels: Tensor) -> Tensor:
        """Return the logits that predict encoded labels, the inverse of `predicted`: (N, 1)."""
        return labels

    def decode(self, logits: Tensor) -> list[Any]:
        return self.predicted(logits).tolist()

    def misfit(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the absolute error, in the data's unit."""
        return (self.original(labels[:, 0]) - self.predicted(logits)).abs()

    def region(self, logits: Tensor, limit: float) -> dict[str, list[Any]]:
        numbers = self.predicted(logits)
        return {"lower": (numbers - limit).tolist(), "upper": (numbers + limit).tolist()}

    def strata(self, labels: Tensor) -> Tensor:
        """Return each number's fifth, cut at the quintiles."""
        import torch

        cuts = torch.quantile(labels[:, 0].double(), torch.tensor([0.2, 0.4, 0.6, 0.8]).double())
        return torch.bucketize(labels[:, 0].double(), cuts)


class Level(Target):
    """One of K ordered levels, given as numbers, as its rank from 0.

    Logit k is that of P(level > k | level >= k): conditional training, CORN (Shi, Cao and Raschka
    2023, arXiv:2111.08851). Their products P(level > k) fall with k whatever the logits are.
    """

    kind, numbers = "ordinal", 1
    examples = ("1", "2", "2", "4", "3", "2")

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

    def average(self, logits: Tensor, weights: Tensor) -> Tensor:
        import torch

        above = (weights * logits.double().sigmoid().cumprod(-1)).sum(0)
        before = torch.cat([torch.ones_like(above[:, :1]), above[:, :-1]], 1)
        return (above / before.clamp(min=EDGE)).logit(EDGE)

    def mean_rank(self, logits: Tensor) -> Tensor:
        """Return the mean of the ranks, weighted by their probabilities: (N,) float64."""
        return logits.double().sigmoid().cumprod(-1).sum(-1)

    def misfit(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the distance of the label's rank from the mean rank; 0 of the nearest rank."""
        mean, rank = self.mean_rank(logits), labels[:, 0].double()
        return (rank - mean).abs().where(rank != mean.round(), 0.0)

    def region(self, logits: Tensor, limit: float) -> dict[str, list[Any]]:
        """Return the lowest and the highest level near the mean rank, or the nearest one twice."""
        mean, last = self.mean_rank(logits), len(self.classes) - 1
        lower, upper = (mean - limit).ceil(), (mean + limit).floor()
        nearest = mean.round()
        lower, upper = lower.minimum(nearest).clamp(min=0), upper.maximum(nearest).clamp(max=last)
        ends = {"lower": lower.long().tolist(), "upper": upper.long().tolist()}
        return {name: [self.classes[rank] for rank in ranks] for name, ranks in ends.items()}

    def rank(self, logits: Tensor) -> Tensor:
        """Return the predicted level, the median of the distribution: (N,) int64."""
        return (self.above(logits) > 0.5).sum(-1)

    def decode(self, logits: Tensor) -> list[Any]:
        import torch

        above = self.above(logits)
        edge = above[:, :1]
        steps = torch.cat([torch.ones_like(edge), above, torch.zeros_like(edge)], dim=1)
        shares = (steps[:, :-1] - steps[:, 1:]).clamp(min=0)
        return predictions(self.classes, shares, self.rank(logits).tolist())


STANDARD: tuple[type[Target], ...] = (OneOf, AnyOf, Number, Level)
KINDS: dict[str, type[Target]] = {target.kind: target for target in STANDARD}


def target_kind(cls: T) -> T:
    """Add the decorated class to the kinds of targets; it derives from a built-in kind."""
    where = f"kind of target {cls.kind!r} ({definition_of(cls)})"
    if not cls.standard_kind():
        names = ", ".join(target.__name__ for target in STANDARD)
        raise FusionZooError(f"{where} derives from none of {names}: derive it from the nearest")
    known = KINDS.get(cls.kind)
    if known is not None and definition_of(known) != definition_of(cls):
        raise FusionZooError(f"{where} is there already, {definition_of(known)}: set another kind")
    KINDS[cls.kind] = cls
    return cls


def kind_of(kind: str) -> type[Target]:
    """Return the subclass of `Target` for `kind`."""
    check_known(kind, KINDS, f"{kind!r} is no kind of target", "There are")
    return KINDS[kind]


def from_spec(spec: Mapping[str, Any]) -> Target:
    """Build a target from its `spec`, validated because it may come from a file."""
    from pydantic import TypeAdapter, ValidationError

    fields = {name: value for name, value in spec.items() if name != "kind"}
    kind = kind_of(str(spec.get("kind")))
    try:
        return TypeAdapter(kind).validate_python(fields)
    except ValidationError as error:
        raise FusionZooError(first_problem(error)) from None


def named_sets(classes: Sequence[str], inside: Tensor) -> list[str]:
    """Return the names of the classes in each row of (N, K) bool, joined by `;`."""
    return [
        join_words([name for name, is_in in zip(classes, row, strict=True) if is_in])
        for row in inside.tolist()
    ]


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


def mean_prediction(
    targets: Sequence[Target], logits: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Return the logits of several models' mean prediction: (S, N, K) -> (N, K).

    `weights` (S, N, 1) sum to 1 over the models; None: all weigh the same.
    """
    import torch

    if weights is None:
        weights = torch.full((len(logits), 1, 1), 1 / len(logits), dtype=torch.float64)
    parts = logits.split([target.width for target in targets], dim=-1)
    averages = [x.average(part, weights) for x, part in zip(targets, parts, strict=True)]
    return torch.cat(averages, dim=-1).to(logits.dtype)


def words(cell: str) -> list[str]:
    """Split `sun; beach` at semicolons; read a list in brackets, and a vector by its ones.

    >>> words("sun; beach"), words("['sun', 'beach']"), words("[1 0 1]")
    (['sun', 'beach'], ['sun', 'beach'], ['0', '2'])
    """
    entries = read_list(cell)
    if entries is not None:
        positions = [str(position) for position, bit in enumerate(entries) if bit]
        return positions if is_vector(entries) else label_words(entries)
    return [label_word(word) for word in cell.split(";") if word.strip()]


def join_words(labels: Sequence[str]) -> str:
    """Return labels as `words` reads them: joined by semicolons, as JSON where one would be split.

    >>> join_words(["sun", "beach"]), join_words(["sun; beach", "sea"])
    ('sun;beach', '["sun; beach", "sea"]')
    """
    if any(";" in label or label.startswith("[") for label in labels):
        return json.dumps([*labels], ensure_ascii=False)
    return ";".join(labels)


def label_words(entries: Sequence[Any]) -> list[str]:
    """Return the entries of a list of labels as text, without missing and empty ones."""
    labels = []
    for entry in entries:
        if entry is None or entry != entry:  # NaN
            continue
        if not isinstance(entry, str | int | float):
            raise FusionZooError(
                f"a list of labels holds {entry!r:.60}, a {type(entry).__name__}: its entries must"
                " be text or numbers"
            )
        labels.append(label_word(entry))
    return [label for label in labels if label]


def label_word(label: str | float) -> str:
    """Return a label in the one spelling of all formats: `1.0` is 1, `True` is true."""
    if isinstance(label, bool):
        return str(label).lower()
    return category_of(label.strip() if isinstance(label, str) else label)


def read_list(cell: str) -> list[Any] | None:
    """Return the entries of a list in brackets, as JSON, Python and NumPy write it, or of Python's
    set; None: it is neither.

    >>> read_list('["a", "b"]'), read_list("['a' 'b']"), read_list("[1 0 1]"), read_list("a;b")
    (['a', 'b'], ['a', 'b'], [1, 0, 1], None)
    >>> read_list("{'b', 'a'}"), read_list("set()"), read_list("{a: b}")
    (['a', 'b'], [], None)
    """
    cell = cell.strip()
    if cell == "set()":
        return []
    if cell[:1] == "{":
        try:
            entries = ast.literal_eval(cell)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
        return sorted(entries, key=str) if isinstance(entries, set) else None
    if len(cell) < 2 or cell[0] != "[" or cell[-1] != "]":
        return None
    try:
        entries = json.loads(cell)
    except (ValueError, RecursionError):
        entries = _printed_entries(NUMPY_SCALAR.sub(r"\1", cell[1:-1]).strip())
    return entries


def _printed_entries(text: str) -> list[Any]:
    """Return what stands in the brackets: divided by commas, or quoted texts and numbers by spaces.

    Words without quotation marks and commas are one label: `[Science Fiction]`.
    """
    if "," in re.sub(QUOTED, "", text):
        parts = re.findall(rf"\s*((?:{QUOTED})(?=\s*(?:,|$))|[^,]*[^,\s])\s*(?:,|$)", text)
        return [_printed_entry(part) for part in parts]
    entries = [_printed_entry(part) for part in re.findall(rf"(?:{QUOTED})(?=\s|$)|\S+", text)]
    is_divided = re.fullmatch(rf"(?:(?:{QUOTED})(?:\s+|$))*", text) or not any(
        isinstance(entry, str) for entry in entries
    )
    return entries if is_divided else [text]


def _printed_entry(part: str) -> Any:
    if part == "...":
        raise FusionZooError(
            "a list of labels is cut off by '...', as NumPy prints a long one: store whole lists"
        )
    if part[0] in "'\"" and part[-1] == part[0]:
        return ast.literal_eval(part)
    if part in PRINTED:
        return PRINTED[part]
    for read in (int, float):
        try:
            return read(part)
        except ValueError:
            pass
    return part


def is_vector(entries: Sequence[Any]) -> bool:
    """Return whether all entries of a list are 0 or 1, and there are several."""
    return len(entries) > 1 and all(not isinstance(x, str) and x in (0, 1) for x in entries)


def read_vector(cell: str) -> list[Any] | None:
    """Return the entries of a vector of 0 and 1, such as `[1 0 1]`; None: it is none."""
    entries = read_list(cell)
    return entries if entries is not None and is_vector(entries) else None


def join_vector(bits: Sequence[Any]) -> str:
    """Return a vector of 0 and 1 as `words` reads it.

    >>> join_vector([1.0, False, 1])
    '[1 0 1]'
    """
    return f"[{' '.join('1' if bit else '0' for bit in bits)}]"


def length_of_vectors(cells: Sequence[Sequence[Any] | None]) -> int:
    """Return the length of lists that are vectors of 0 and 1; 0 for lists of labels.

    Lists of numbers are vectors if all of them are 0 or 1 and of one length, or if one has a number
    twice or a fraction; other vectors than the former are an error.

    >>> length_of_vectors([[1, 0, 1], None, [0, 0, 0]]), length_of_vectors([[0], [0, 2]])
    (3, 0)
    """
    lists = [cell for cell in cells if cell is not None]
    if any(not isinstance(x, int | float) for cell in lists for x in cell):
        return 0
    lengths = {len(cell) for cell in lists}
    are_bits = all(x in (0, 1) for cell in lists for x in cell)
    if are_bits and len(lengths) == 1 and max(lengths) > 1:
        return max(lengths)
    vector = next((x for x in lists if len({*x}) < len(x) or any(y % 1 for y in x)), None)
    if vector is None:
        return 0
    if are_bits:
        reason = f"the vectors of 0 and 1 have {' and '.join(map(str, sorted(lengths)))} entries"
        raise FusionZooError(f"{reason}: they must be of one length, one entry for each label")
    raise FusionZooError(
        f"{[*vector]!r:.60} is a vector of other numbers than 0 and 1: give the names of labels, or"
        " 0 and 1 for each"
    )


def number(cell: str) -> float:
    """Read a finite number."""
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise FusionZooError(f"{cell!r} is no finite number{decimal_hint(cell)}")
    if abs(value) > MAX_NUMBER:
        raise FusionZooError(f"{cell!r} is beyond what float32 can hold: correct or empty it")
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
