"""Remove values of a data set on purpose: at random, or depending on labels or contents.

Terms: Rubin 1976, "Inference and missing data". Probabilities follow a logistic curve in the rank
of the quantity they depend on, as in `mice::ampute` and pyampute (Schouten et al. 2018).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from fusionzoo.errors import FusionZooError, check_choice, check_number
from fusionzoo.structures import seed_of

from .tables.provenance import Amputation
from .tables.table import Samples, presence, word_list

Mechanism = Literal["mcar", "mar", "mnar"]
STRENGTH = 2.0  # log-odds by which the highest and the lowest rank differ from the middle one
LABEL = "label"  # what MAR may depend on, besides modalities
QUANTITIES = ("image", "text", "audio", "vector", "sequence")  # kinds that have one
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def amputated(
    dataset: Samples,
    mechanism: Mechanism,
    rate: float,
    seed: int,
    modalities: str | Sequence[str] | None,
    depends_on: str | None,
) -> tuple[pa.Table, Amputation]:
    """Return the table without the removed values, and the record; see `PairedDataset.amputate`."""
    chosen = [] if modalities is None else word_list(modalities)
    depends_on = _check_amputation(dataset, mechanism, rate, chosen, depends_on)
    names = chosen or [name for name in dataset.modalities if name != depends_on]
    if not names:
        raise FusionZooError(f"{dataset.source} has nothing but {depends_on}, which stays complete")
    keep = dataset.present.numpy().copy()
    observed = _quantity(dataset, depends_on) if mechanism == "mar" else None
    for name in names:
        column = list(dataset.modalities).index(name)
        scores = _quantity(dataset, name) if mechanism == "mnar" else observed
        generator = np.random.default_rng(seed_of(seed, mechanism, name))
        may_go = keep[:, column] & (keep.sum(1) > 1)
        count = round(rate * int(keep[:, column].sum()))
        if count > may_go.sum():
            raise FusionZooError(f"rate={rate}: of {name} only {int(may_go.sum()):,} values may go")
        keep[_draw_rows(may_go, scores, count, generator), column] = False
    record = Amputation(mechanism, rate, seed, tuple(names), depends_on)
    remains = presence(dataset.table, dataset.modalities).numpy()
    remains[dataset.rows.numpy()] &= keep
    return _masked(dataset.table, dataset.modalities, remains), record


def _check_amputation(
    dataset: Samples, mechanism: str, rate: float, names: Sequence[str], depends_on: str | None
) -> str:
    """Return what the probabilities depend on; raise an error for what does not exist."""
    check_choice("mechanism", mechanism, get_args(Mechanism))
    check_number("rate", rate, 0, 1)
    for name in names:
        dataset.check_modality(name)
    if mechanism != "mar":
        if depends_on is not None:
            raise FusionZooError(f"depends_on={depends_on!r} is for mechanism='mar' only")
        return ""
    has_labels = bool(dataset.classes) or dataset.label_values.shape[1] > 0
    if depends_on is None:
        depends_on = LABEL if has_labels else next(iter(dataset.modalities))
    choices = [*([LABEL] if has_labels else []), *dataset.modalities]
    if depends_on not in choices:
        raise FusionZooError(f"depends_on={depends_on!r} is none of {', '.join(choices)}")
    if depends_on in names:
        raise FusionZooError(f"depends_on={depends_on!r} is removed itself: mechanism='mnar'")
    return depends_on


def _draw_rows(
    may_go: Flags, scores: Floats | None, count: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Draw exactly `count` of the rows that may go, by systematic sampling: more of high scores."""
    rows = np.flatnonzero(may_go)
    if not count:
        return rows[:0]
    ranks = np.zeros(len(rows)) if scores is None else _ranks(scores[rows])
    probabilities = _calibrated(STRENGTH * ranks, count)
    order = generator.permutation(len(rows))
    ends = np.cumsum(probabilities[order])
    ends *= count / ends[-1]
    # One row is drawn at each of the points u, u + 1, ..., u + count - 1.
    places = np.searchsorted(ends, generator.random() + np.arange(count), side="right")
    return rows[order[np.minimum(places, len(rows) - 1)]]


def _calibrated(logits: Floats, count: int) -> Floats:
    """Return sigmoid(logits + shift), with the shift that makes them add up to `count`."""
    low, high = -60.0, 60.0
    for _ in range(80):
        middle = (low + high) / 2
        total = (1 / (1 + np.exp(-(logits + middle)))).sum()
        low, high = (middle, high) if total < count else (low, middle)
    return np.minimum(1 / (1 + np.exp(-(logits + high))), 1.0)


def _ranks(scores: Floats) -> Floats:
    """Return ranks from -1 to 1, ties sharing theirs; unknown scores get 0."""
    known = np.isfinite(scores)
    ranks = np.zeros(len(scores))
    values, inverse, counts = np.unique(scores[known], return_inverse=True, return_counts=True)
    if len(values) > 1:
        middles = np.cumsum(counts) - counts / 2
        shares = (middles - middles[0]) / (middles[-1] - middles[0])
        ranks[known] = (2 * shares - 1)[inverse]
    return ranks


def _quantity(dataset: Samples, name: str) -> Floats:
    """Return the number on which probabilities depend, NaN where it is unknown."""
    if name == LABEL and name not in dataset.modalities:
        labels = dataset.targets.double().numpy()
        return labels if labels.ndim == 1 else labels[:, 0]
    kind = dataset.modalities[name]
    if kind not in QUANTITIES:
        raise FusionZooError(f"{name} is {kind}, which has no quantity: name another one")
    quantities = np.full(len(dataset), np.nan)
    for position, reference in enumerate(dataset.references(name)):
        if reference is not None:
            try:
                quantities[position] = _measure(kind, dataset.decode(name, reference))
            except FusionZooError:
                continue  # `on_error` decides about the value when it is used
    return quantities


def _measure(kind: str, value: Any) -> float:
    if isinstance(value, list):  # of several images or clips
        return sum(_measure(kind, item) for item in value) / len(value)
    if kind == "text":
        return float(len(value))
    if kind == "audio":
        return float(value.samples.square().mean().sqrt())
    return float(torch.as_tensor(value).double().abs().mean())


def drop_values(table: pa.Table, modalities: Mapping[str, str], rate: float, seed: int) -> pa.Table:
    """Remove each value with probability `rate`; a row that would lose everything keeps one."""
    generator = torch.Generator().manual_seed(seed)
    present = presence(table, modalities)
    order = torch.rand(present.shape, generator=generator)
    keep = present & (torch.rand(present.shape, generator=generator) >= rate)
    fallback = order.masked_fill(~present, 2.0).argmin(1)
    keep[torch.arange(len(keep)), fallback] |= ~keep.any(1)
    return _masked(table, modalities, keep.numpy())


def _masked(table: pa.Table, modalities: Mapping[str, str], keep: Flags) -> pa.Table:
    """Return a table with null for the values of the modalities that are not kept, (rows, M)."""
    for column, name in enumerate(modalities):
        mask = pa.array(keep[:, column])
        values = pc.if_else(mask, table[name], pa.scalar(None, table[name].type))
        table = table.set_column(table.column_names.index(name), name, values)
    return table
