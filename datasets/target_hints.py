"""Hints at targets that another objective would fit, or that differ by case alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from .paths import NUMBER

FRACTION = r"[.,]"
MANY = 20  # distinct integers, from which on they may be quantities
FEW_EACH = 10  # samples per integer on average, below which they may be quantities
SEPARATORS = (";", ",", "|", "/")


def objective_hint(labels: Any) -> str:
    """Return which objective would fit a column of targets better than classes, or nothing.

    `labels` is an Arrow array of text, where null is no label.

    >>> objective_hint(pa.array(["sun, sea", "sun", "sea"]))[:36]
    "targets such as 'sun, sea' look like"
    """
    counts = pc.value_counts(labels.drop_null())
    distinct, num_labels = counts.field("values"), len(labels) - labels.null_count
    if not num_labels:
        return ""
    per_class = num_labels / len(distinct)
    if pc.all(pc.match_substring_regex(distinct, f"^{NUMBER}$")).as_py():
        return _number_hint(distinct, per_class)
    for separator in SEPARATORS:
        several = distinct.filter(pc.match_substring(distinct, separator))
        if len(several) and _words_recur(distinct, separator):
            option = "" if separator == ";" else f" --data.label_separator {_shell(separator)}"
            return (
                f"targets such as {several[0].as_py()!r} look like several labels:"
                f" --objective.name multilabel{option}"
            )
    if len(distinct) == num_labels > 2:
        return (
            f"each of the {num_labels:,} targets occurs once, so there are no classes to learn:"
            " --data.columns.target names another column, --objective.name regression learns"
            " numbers, multilabel several labels in a cell"
        )
    return ""


def case_hint(classes: Sequence[str]) -> str:
    """Return a hint at classes that differ by case or spaces alone, or nothing.

    >>> case_hint(["Cat", "cat", "dog"])
    "the classes 'Cat', 'cat' differ by case alone: write them in the same way, if they are one"
    """
    spellings: dict[str, list[str]] = {}
    for name in classes:
        spellings.setdefault(" ".join(name.split()).casefold(), []).append(name)
    groups = [", ".join(map(repr, names)) for names in spellings.values() if len(names) > 1]
    if not groups:
        return ""
    more = f" (and {len(groups) - 3} more)" if len(groups) > 3 else ""
    return (
        f"the classes {'; '.join(groups[:3])}{more} differ by case alone: write them in the same"
        " way, if they are one"
    )


def separator_hint(name: str, classes: Sequence[str]) -> str:
    """Return a hint at labels of a multilabel target that look like several, or nothing."""
    labels = pa.array(classes, pa.string())
    for separator in SEPARATORS[1:]:
        several = [label for label in classes if separator in label]
        if several and _words_recur(labels, separator):
            return (
                f"labels of {name} such as {several[0]!r} look like several:"
                f" --data.label_separator {_shell(separator)}"
            )
    return ""


def _number_hint(distinct: Any, per_class: float) -> str:
    fractions = pc.any(pc.match_substring_regex(distinct, FRACTION)).as_py()
    if len(distinct) <= 2 or not (fractions or (len(distinct) > MANY and per_class < FEW_EACH)):
        return ""
    comma = pc.any(pc.match_substring(distinct, ",")).as_py()
    decimal = " --data.decimal ," if comma else ""
    return (
        f"the {len(distinct):,} different targets are numbers: --objective.name regression"
        f"{decimal} learns them as such"
    )


def _words_recur(cells: Any, separator: str) -> bool:
    """Return whether cells divide into words of which one is a cell, too, or that are few."""
    parts = pc.list_flatten(pc.split_pattern(cells, separator))
    words = pc.utf8_trim_whitespace(parts)
    distinct = words.unique()
    several = cells.filter(pc.match_substring(cells, separator))
    in_several = pc.utf8_trim_whitespace(pc.list_flatten(pc.split_pattern(several, separator)))
    alone = pc.any(pc.is_in(in_several, value_set=cells)).as_py()
    return bool(alone) or len(distinct) < len(cells) or len(distinct) < len(words) / 2


def _shell(separator: str) -> str:
    return f"'{separator}'" if separator in ";|" else separator
