"""Encoders of columns of a table: numbers and categories, of which some are missing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, check_heads, check_known, check_number
from fusionzoo.ground.cells import Cell, category_of, fold, is_number
from fusionzoo.structures import Features
from fusionzoo.targets import decimal_hint

from .base import ENCODERS, Encoder, Item, Processor, one_token, unmasked

UNKNOWN, MISSING, FIRST = 0, 1, 2  # codes: not among the training data, empty, first category
LIMIT = 100.0  # standard deviations; a number farther from the mean is moved to there
NumberCode = Literal["linear", "piecewise", "periodic", "periodic_lite"]


@dataclass(frozen=True)
class Numbers:
    """A column of numbers, with statistics of the training split.

    edges: bounds of its bins, ascending, in its own unit; none unless numbers are coded piecewise
    range: the smallest and the largest number, if they are known
    """

    name: str
    mean: float
    std: float
    edges: tuple[float, ...] = ()
    range: tuple[float, float] | None = None

    def encode(self, cell: float | str) -> tuple[float, int]:
        """Return the standardised number, and 0."""
        number = float(cell) if is_number(cell) else math.nan
        if not math.isfinite(number):
            raise FusionZooError(
                f"column {self.name!r}: {cell!r} is not a number, which the model was trained on"
                f"{decimal_hint(cell) if isinstance(cell, str) else ''}"
            )
        return max(-LIMIT, min(LIMIT, (number - self.mean) / self.std)), 0

    def is_strange(self, cell: float | str) -> bool:
        """Whether a number lies outside of three times the range of the training split."""
        if self.range is None or not is_number(cell):
            return False
        low, high = self.range
        return not low - (high - low) <= float(cell) <= high + (high - low)


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

    def is_strange(self, cell: float | str) -> bool:
        """Whether the training split has no such category."""
        return category_of(cell) not in self.codes


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
    elif isinstance(name, str) and {"mean", "std"} <= keys <= {"mean", "std", "edges", "range"}:
        lists = edges, bounds = [setting.get(key, ()) for key in ("edges", "range")]
        numbers = [setting["mean"], setting["std"]]
        if all(isinstance(x, list | tuple) for x in lists):
            numbers += [*edges, *bounds]
            fits = all(map(_is_finite, numbers)) and numbers[1] > 0 and len(bounds) in (0, 2)
            if fits and all(x < y for x, y in pairwise(edges)) and ("edges" not in keys or edges):
                mean, std, *rest = map(float, numbers)
                low_high = (rest[-2], rest[-1]) if bounds else None
                return Numbers(name, mean, std, tuple(rest[: len(edges)]), low_high)
    raise FusionZooError(
        f"columns: {dict(setting)!r:.200} is neither {{name, mean, std}}, finite and std above 0"
        " (and edges, ascending numbers, and range, two), nor {name, values}, a list of text"
    )


def _is_finite(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


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
        last_names, last_places = self._last  # in one step: `serve` prepares in several threads
        if last_names == names:
            return last_places
        order = {fold(column.name): place for place, column in enumerate(self.columns)}
        folded, known = [fold(name) for name in names], [column.name for column in self.columns]
        for name, key in zip(names, folded, strict=True):
            if key not in order:
                check_known(name, known, f"the model reads no column {name!r}", "It reads")
        for key, place in order.items():
            if folded.count(key) != 1:
                state = "missing" if key not in folded else "there twice"
                raise FusionZooError(
                    f"column {known[place]!r} is {state} among {', '.join(names)}, and the model"
                    " reads it; None stands for an empty cell"
                )
        places = [order[key] for key in folded]
        self._last = names, places
        return places

    def varies(self, value: Mapping[str, Cell]) -> bool:
        return False

    def strange(self, value: Mapping[str, Cell]) -> list[str]:
        """Return the names in `value` whose cells differ from all that training saw."""
        columns = (self.columns[place] for place in self._places(list(value)))
        pairs = zip(columns, value.items(), strict=True)
        return [name for column, (name, x) in pairs if x is not None and column.is_strange(x)]

    def blank(self) -> Item:
        """Return a sample whose cells are all empty."""
        count = len(self.columns)
        return {
            "values": torch.zeros(count),
            "codes": torch.full((count,), MISSING),
            "known": torch.zeros(count, dtype=torch.bool),
        }


class CategoryEmbedding(nn.Module):
    """Embed categories, each column with rows of its own: codes (B, C - N) -> (B, C - N, D).

    Unknown categories, and missing ones, start as zeros, so that they are neutral if the training
    data has none.
    """

    offsets: Tensor

    def __init__(self, columns: Sequence[Categories], dim: int) -> None:
        super().__init__()
        sizes = torch.tensor([0, *(FIRST + len(column.values) for column in columns)])
        offsets = sizes.cumsum(0)
        self.register_buffer("offsets", offsets[:-1], persistent=False)
        self.rows = nn.Embedding(int(offsets[-1]), dim)
        nn.init.uniform_(self.rows.weight, -(dim**-0.5), dim**-0.5)
        with torch.no_grad():
            for code in (UNKNOWN, MISSING):
                self.rows.weight[offsets[:-1] + code] = 0

    def forward(self, codes: Tensor, known: Tensor) -> Tensor:
        rows: Tensor = self.rows(codes.where(known, MISSING) + self.offsets)
        return rows


class PiecewiseLinear(nn.Module):
    """Code numbers by their place among the bins of their column: (B, N) -> (B, N, K).

    Of bin t, from b_t to b_(t+1), the component is (x - b_t) / (b_(t+1) - b_t), between 0 and 1;
    the first may be less than 0 and the last more than 1 (arXiv:2203.05556, equation 1), here by at
    most `LIMIT`. A column with fewer than K bins has zeros at its end; a constant one has one bin,
    a standard deviation wide. Edges are standardised as the numbers are.
    """

    left: Tensor
    width: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, columns: Sequence[Numbers]) -> None:
        super().__init__()
        bins = [self._bins(column) for column in columns]
        self.num_bins = max(len(left) for left, _ in bins)
        shape = len(columns), self.num_bins
        left, width = torch.zeros(shape), torch.ones(shape)
        low, high = torch.zeros(shape), torch.zeros(shape)
        for row, (starts, widths) in enumerate(bins):
            count = len(starts)
            left[row, :count], width[row, :count], high[row, :count] = starts, widths, 1
            low[row, 0], high[row, count - 1] = -LIMIT, LIMIT
        for name, x in (("left", left), ("width", width), ("low", low), ("high", high)):
            self.register_buffer(name, x, persistent=False)

    @staticmethod
    def _bins(column: Numbers) -> tuple[Tensor, Tensor]:
        """Return where the bins of a column start, and their widths, in standard deviations."""
        if not column.edges:
            raise FusionZooError(
                f"columns: {column.name!r} has no edges, which numbers='piecewise' needs: bounds of"
                " bins, such as quantiles of the training data; training learns them from the data"
            )
        scaled = torch.tensor([(edge - column.mean) / column.std for edge in column.edges])
        edges = scaled.clamp(-LIMIT, LIMIT).unique()
        return (edges[:-1], edges.diff()) if len(edges) > 1 else (edges, torch.ones(1))

    def forward(self, numbers: Tensor) -> Tensor:
        places = (numbers[..., None] - self.left) / self.width
        return torch.minimum(torch.maximum(places, self.low), self.high)


class Periodic(nn.Module):
    """Code numbers by sine and cosine of 2 pi c x: (B, N) -> (B, N, 2 K).

    The K frequencies c of each column are learned and start as N(0, sigma), cut at 3 sigma
    (arXiv:2203.05556, section 3.3).
    """

    def __init__(self, num_numbers: int, frequencies: int, sigma: float) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(torch.empty(num_numbers, frequencies))
        nn.init.trunc_normal_(self.frequencies, std=sigma, a=-3 * sigma, b=3 * sigma)

    def forward(self, numbers: Tensor) -> Tensor:
        angles = 2 * math.pi * self.frequencies * numbers[..., None]
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class NumberEmbedding(nn.Module):
    """Embed numbers by ReLU(W_j code(x_j) + b_j): standardised numbers (B, N) -> (B, N, D).

    `piecewise` and `periodic` have a matrix for each column, `periodic_lite` one for all.
    """

    def __init__(
        self,
        columns: Sequence[Numbers],
        dim: int,
        code: NumberCode,
        *,
        frequencies: int,
        sigma: float,
    ) -> None:
        super().__init__()
        self.code: PiecewiseLinear | Periodic
        if code == "piecewise":
            self.code = PiecewiseLinear(columns)
            width = self.code.num_bins
        else:
            self.code = Periodic(len(columns), frequencies, sigma)
            width = 2 * frequencies
        count, limit = 1 if code == "periodic_lite" else len(columns), width**-0.5
        self.weight = nn.Parameter(torch.empty(count, width, dim).uniform_(-limit, limit))
        self.bias = nn.Parameter(torch.empty(count, dim).uniform_(-limit, limit))

    def forward(self, numbers: Tensor) -> Tensor:
        codes = self.code(numbers)
        weight = self.weight.expand(codes.shape[1], -1, -1)
        return (torch.einsum("bnk,nkd->bnd", codes, weight) + self.bias).relu()


class TabularEncoder(Encoder):
    """Base of the tabular encoders: checks `columns` and tells numbers from categories."""

    kind = "tabular"
    number_places: Tensor
    category_places: Tensor

    def __init__(self, columns: Sequence[Mapping[str, Any]]) -> None:
        super().__init__()
        self.columns = read_columns(columns)
        places = {
            kind: [i for i, column in enumerate(self.columns) if isinstance(column, kind)]
            for kind in (Numbers, Categories)
        }
        self.categories = [column for column in self.columns if isinstance(column, Categories)]
        self.num_numbers = len(places[Numbers])
        for name, kind in (("number_places", Numbers), ("category_places", Categories)):
            place = torch.tensor(places[kind], dtype=torch.int64)
            self.register_buffer(name, place, persistent=False)

    def embed_numbers(
        self, dim: int, code: NumberCode, *, bins: int, frequencies: int, sigma: float
    ) -> NumberEmbedding | None:
        """Return the embedding of numbers, None for `linear` or without numbers."""
        check_number("bins", bins, 1)
        check_number("frequencies", frequencies, 1)
        if not (math.isfinite(sigma) and sigma > 0):
            raise FusionZooError(f"sigma={sigma}: it must be above 0")
        columns = [column for column in self.columns if isinstance(column, Numbers)]
        if code == "linear" or not columns:
            return None
        return NumberEmbedding(columns, dim, code, frequencies=frequencies, sigma=sigma)

    def processor(self, train: bool) -> Processor:
        return TabularProcessor(self.columns)

    def numbers(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return numbers (B, N), the mean (0) where missing, and whether each is missing."""
        missing = ~inputs["known"][:, self.number_places]
        return inputs["values"][:, self.number_places].masked_fill(missing, 0), missing

    def codes(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the codes of the categories (B, C - N), and whether each is known."""
        places = self.category_places
        return inputs["codes"][:, places], inputs["known"][:, places]

    def linear_inputs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return what a linear model reads: numbers, indicators of missing ones, and an indicator
        for each code of each category, (B, D)."""
        numbers, missing = self.numbers(inputs)
        codes, known = self.codes(inputs)
        sizes = [FIRST + len(column.values) for column in self.categories]
        seen = codes.where(known, MISSING).unbind(1)
        hot = [F.one_hot(code.long(), size) for code, size in zip(seen, sizes, strict=True)]
        return torch.cat([numbers, missing, *hot], 1)


class FlatEncoder(TabularEncoder):
    """Base of those that read all columns as one vector, and give one token."""

    embed: CategoryEmbedding | None
    number_embedding: NumberEmbedding | None
    gaps: slice  # of the vector: the indicators of missing numbers

    def embed_columns(
        self,
        category_dim: int,
        number_dim: int,
        code: NumberCode,
        *,
        bins: int,
        frequencies: int,
        sigma: float,
    ) -> int:
        """Set up what `flat` needs; return the width of its vectors."""
        self.embed = CategoryEmbedding(self.categories, category_dim) if self.categories else None
        self.number_embedding = self.embed_numbers(
            number_dim, code, bins=bins, frequencies=frequencies, sigma=sigma
        )
        width = self.num_numbers * (1 if self.number_embedding is None else number_dim)
        self.gaps = slice(width, width + self.num_numbers)
        return self.gaps.stop + category_dim * len(self.categories)

    def flat(self, numbers: Tensor, missing: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return numbers or their embeddings, indicators and embedded categories, (B, D)."""
        parts = [numbers, missing.to(numbers.dtype)]
        if self.number_embedding is not None:
            parts[0] = self.number_embedding(numbers).flatten(1)
        if self.embed is not None:
            parts.append(self.embed(*self.codes(inputs)).flatten(1))
        return torch.cat(parts, dim=1)


@ENCODERS.register("tabular/mlp", family="tabular")
class TabularMLP(FlatEncoder):
    """Encode columns by a perceptron with one hidden layer, as one token.

    It reads the standardised numbers (0 where missing) or an embedding of each, an indicator for
    each number that is missing and an embedding of each category.

    Settings:
        columns: name and mean, std or values of each column; data sets fill it in
        dim: width of the output
        hidden: width of the hidden layer
        category_dim: width of the embedding of a category
        dropout: after the hidden layer, 0 to 1
        numbers: how numbers are embedded: `linear`, `piecewise` (place among bins of quantiles),
            `periodic` (sines and cosines) or `periodic_lite`, whose matrix all columns share
        bins: most bins of a column, of `piecewise`
        frequencies: sines of a column, and as many cosines, of the periodic ones
        sigma: standard deviation of the first frequencies, per standard deviation of the column
        number_dim: width of the embedding of a number, unless `linear`

    Shapes: inputs["values"], ["codes"], ["known"] (B, C) -> Features of (B, 1, dim), (B, 1),
        (B, dim)
    """

    def __init__(
        self,
        *,
        columns: Sequence[Mapping[str, Any]] = (),
        dim: int = 256,
        hidden: int = 256,
        category_dim: int = 16,
        dropout: float = 0.1,
        numbers: NumberCode = "linear",
        bins: int = 48,
        frequencies: int = 48,
        sigma: float = 0.01,
        number_dim: int = 24,
    ) -> None:
        super().__init__(columns)
        self.dim = dim
        width = self.embed_columns(
            category_dim, number_dim, numbers, bins=bins, frequencies=frequencies, sigma=sigma
        )
        first = nn.Linear(width, hidden)
        with torch.no_grad():  # indicators start without effect, should training have no gaps
            first.weight[:, self.gaps] = 0
        self.net = nn.Sequential(first, nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, dim))

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        return one_token(self.net(self.flat(*self.numbers(inputs), inputs)))


def random_signs(*shape: int) -> Tensor:
    """Return 1 or -1 with equal chances."""
    return torch.empty(shape).uniform_(-1, 1).sign()


class SharedLayer(nn.Module):
    """Linear layers of k members that share a matrix: (B, k, D_in) -> (B, k, D_out).

    Member i computes s_i * (W (r_i * x)) + b_i: BatchEnsemble (Wen et al. 2020, arXiv:2002.06715).
    The factors r start as 1, or as random signs with `signs`; the factors s start as 1.
    """

    def __init__(self, members: int, width_in: int, width_out: int, *, signs: bool = False) -> None:
        super().__init__()
        limit = width_in**-0.5
        self.weight = nn.Parameter(torch.empty(width_in, width_out).uniform_(-limit, limit))
        self.bias = nn.Parameter(torch.empty(members, width_out).uniform_(-limit, limit))
        scale = random_signs(members, width_in) if signs else torch.ones(members, width_in)
        self.scale_in = nn.Parameter(scale)
        self.scale_out = nn.Parameter(torch.ones(members, width_out))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale_in) @ self.weight * self.scale_out + self.bias


@ENCODERS.register("tabular/tabm", family="tabular")
class TabM(FlatEncoder):
    """Encode columns by k perceptrons that share their matrices (Gorishniy et al. 2024).

    Each reads the numbers, embedded as `numbers` says, an indicator for each number that is missing
    and an embedding of each category. From arXiv:2410.24210: BatchEnsemble layers, whose first
    factors are random signs. Other than there the fusion reads the mean of the members' last hidden
    layers, each times factors that start as random signs, so that the loss is that of the mean, not
    the mean of the members' losses. A linear map of numbers, indicators and categories, zero at
    first, is added to the mean.

    Settings:
        columns: name and mean, std or values of each column; data sets fill it in
        dim: width of the layers and of the output
        members: perceptrons, k
        num_layers: hidden layers
        dropout: after each hidden layer, 0 to 1
        category_dim: width of the embedding of a category
        numbers: how numbers are embedded: `linear`, `piecewise` (place among bins of quantiles),
            `periodic` (sines and cosines) or `periodic_lite`, whose matrix all columns share
        bins: most bins of a column, of `piecewise`
        frequencies: sines of a column, and as many cosines, of the periodic ones
        sigma: standard deviation of the first frequencies, per standard deviation of the column
        number_dim: width of the embedding of a number, unless `linear`

    Shapes: inputs["values"], ["codes"], ["known"] (B, C) -> Features of (B, 1, dim), (B, 1),
        (B, dim)
    """

    def __init__(
        self,
        *,
        columns: Sequence[Mapping[str, Any]] = (),
        dim: int = 128,
        members: int = 16,
        num_layers: int = 2,
        dropout: float = 0.1,
        category_dim: int = 16,
        numbers: NumberCode = "piecewise",
        bins: int = 48,
        frequencies: int = 48,
        sigma: float = 0.01,
        number_dim: int = 16,
    ) -> None:
        super().__init__(columns)
        for name, count in (("dim", dim), ("members", members), ("num_layers", num_layers)):
            check_number(name, count, 1)
        self.dim = dim
        width = self.embed_columns(
            category_dim, number_dim, numbers, bins=bins, frequencies=frequencies, sigma=sigma
        )
        first = SharedLayer(members, width, dim, signs=True)
        others = (SharedLayer(members, dim, dim) for _ in range(num_layers - 1))
        self.layers = nn.ModuleList([first, *others])
        self.dropout = nn.Dropout(dropout)
        self.factors = nn.Parameter(random_signs(members, dim))
        self.linear = nn.Parameter(torch.zeros(2 * self.num_numbers, dim))
        self.linear_of_category = CategoryEmbedding(self.categories, dim) if self.embed else None
        with torch.no_grad():
            first.weight[self.gaps] = 0  # as of `TabularMLP`
            if self.linear_of_category is not None:
                self.linear_of_category.rows.weight.zero_()

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        numbers, missing = self.numbers(inputs)
        x = self.flat(numbers, missing, inputs)[:, None]  # of which the first layer makes k
        for layer in self.layers:
            x = self.dropout(layer(x).relu())
        linear = torch.cat([numbers, missing.to(numbers.dtype)], dim=1) @ self.linear
        pooled = (x * self.factors).mean(1) + linear
        if self.linear_of_category is not None:
            pooled = pooled + self.linear_of_category(*self.codes(inputs)).sum(1)
        return one_token(pooled)

    @torch.no_grad()
    def add_linear(self, weight: Tensor) -> None:
        """Add to the linear map of the columns: (D, dim), in the order of `linear_inputs`."""
        numbers, codes = weight.tensor_split([self.linear.shape[0]])
        self.linear.add_(numbers)
        if self.linear_of_category is not None:
            self.linear_of_category.rows.weight.add_(codes)


class ColumnTokens(nn.Module):
    """Make a token of each column: a number times a vector, or a category's vector, plus a bias.

    `number_embedding`, if any, takes the place of the product.

    Shapes: numbers (B, N) with `missing` (B, N); codes (B, C - N) with `known` -> (B, C, D), in the
        order of the columns
    """

    order: Tensor

    def __init__(
        self, encoder: TabularEncoder, dim: int, number_embedding: NumberEmbedding | None
    ) -> None:
        super().__init__()
        places = torch.cat([encoder.number_places, encoder.category_places])
        self.register_buffer("order", places.argsort(), persistent=False)
        limit = dim**-0.5
        self.bias = nn.Parameter(torch.empty(len(places), dim).uniform_(-limit, limit))
        self.embed = CategoryEmbedding(encoder.categories, dim) if encoder.categories else None
        self.num_numbers, self.number_embedding = encoder.num_numbers, number_embedding
        if self.num_numbers:
            shape = encoder.num_numbers, dim
            if number_embedding is None:
                self.weight = nn.Parameter(torch.empty(shape).uniform_(-limit, limit))
            # Added to the mean's token where a number is missing; zeros are neutral.
            self.missing = nn.Parameter(torch.zeros(shape))

    def forward(self, numbers: Tensor, missing: Tensor, codes: Tensor, known: Tensor) -> Tensor:
        tokens = []
        if self.num_numbers:
            embed = self.number_embedding
            embedded = numbers[..., None] * self.weight if embed is None else embed(numbers)
            gaps = missing[..., None].to(self.missing.dtype)
            tokens.append(embedded + gaps * self.missing)
        if self.embed is not None:
            tokens.append(self.embed(codes, known))
        return torch.cat(tokens, dim=1)[:, self.order] + self.bias


class ReGLUBlock(nn.Module):
    """Pre-norm transformer layer with ReGLU; `norm` false omits the norm before the attention."""

    def __init__(
        self, dim: int, num_heads: int, attention_dropout: float, dropout: float, norm: bool
    ) -> None:
        super().__init__()
        hidden = int(dim * 4 / 3)
        self.norm_attention = nn.LayerNorm(dim) if norm else nn.Identity()
        self.attention = nn.MultiheadAttention(
            dim, num_heads, dropout=attention_dropout, batch_first=True
        )
        self.norm_hidden = nn.LayerNorm(dim)
        self.expand, self.contract = nn.Linear(dim, 2 * hidden), nn.Linear(hidden, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm_attention(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        values, gates = self.expand(self.norm_hidden(x)).chunk(2, dim=-1)
        return x + self.contract(self.dropout(values * gates.relu()))


@ENCODERS.register("tabular/ft-transformer", family="tabular")
class FTTransformer(TabularEncoder):
    """Encode columns by a transformer with a token per column (Gorishniy et al. 2021).

    A number x of column j becomes x w_j + b_j (unless `linear`, its embedding plus b_j), a category
    its embedding plus b_j; [CLS] comes first, and is the pooled vector after the last norm. From
    arXiv:2106.11959: pre-norm, of which the first layer's attention has none, and ReGLU. Added to
    it: a missing number has the mean's token plus a learned vector, missing and unknown categories
    have embeddings of their own.

    Settings:
        columns: name and mean, std or values of each column; data sets fill it in
        dim: width of tokens and pooled vector, divisible by `num_heads`
        num_layers: transformer layers
        num_heads: attention heads
        attention_dropout: of attention weights, 0 to 1
        dropout: in the feed-forward layers, 0 to 1
        numbers: how numbers are embedded: `linear`, `piecewise` (place among bins of quantiles),
            `periodic` (sines and cosines) or `periodic_lite`, whose matrix all columns share
        bins: most bins of a column, of `piecewise`
        frequencies: sines of a column, and as many cosines, of the periodic ones
        sigma: standard deviation of the first frequencies, per standard deviation of the column

    Shapes: inputs["values"], ["codes"], ["known"] (B, C) -> Features of (B, 1 + C, dim),
        (B, 1 + C), (B, dim)
    """

    def __init__(
        self,
        *,
        columns: Sequence[Mapping[str, Any]] = (),
        dim: int = 192,
        num_layers: int = 3,
        num_heads: int = 8,
        attention_dropout: float = 0.2,
        dropout: float = 0.1,
        numbers: NumberCode = "linear",
        bins: int = 48,
        frequencies: int = 48,
        sigma: float = 0.01,
    ) -> None:
        super().__init__(columns)
        check_heads(dim, num_heads)
        self.dim = dim
        embedding = self.embed_numbers(
            dim, numbers, bins=bins, frequencies=frequencies, sigma=sigma
        )
        self.tokens = ColumnTokens(self, dim, embedding)
        self.cls = nn.Parameter(torch.empty(dim).uniform_(-(dim**-0.5), dim**-0.5))
        self.layers = nn.ModuleList(
            ReGLUBlock(dim, num_heads, attention_dropout, dropout, norm=number > 0)
            for number in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        tokens = self.tokens(*self.numbers(inputs), *self.codes(inputs))
        x = torch.cat([self.cls.expand(tokens.shape[0], 1, -1), tokens], dim=1)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return unmasked(x, x[:, 0])
