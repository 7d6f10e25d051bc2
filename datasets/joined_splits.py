"""Splits of joined sources: those of their columns, else made for the joined samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from fusionzoo.errors import FusionZooError

from .join_rows import JoinedRows
from .splits import class_columns, make_splits
from .table import SampleTable

Sources = Mapping[str, SampleTable]


class SplitRule(NamedTuple):
    """Where the splits of joined samples come from."""

    text: str
    shares: tuple[float, ...] | None  # of splits made by hash; None: the sources' own


def join_splits(
    sources: Sources,
    joined: JoinedRows,
    columns: Mapping[str, Any],
    kinds: Mapping[str, str] | None,
) -> tuple[Any, SplitRule]:
    """Return the split of each sample, and the rule behind the splits.

    If no source has splits, they are made for the joined samples; parts of sources, such as a
    training split, keep theirs. Otherwise the splits of sources that have them must agree, and a
    sample without one gets the split that a hash made in the first of the others; samples of one
    key get the same. `kinds` says what the label columns hold.
    """
    made = [name for name in sources if is_made(sources[name])]
    is_part = any(len(source) < len(source.table) for source in sources.values())
    if len(made) == len(sources) and not is_part:
        return _make_splits(sources, columns, kinds)
    return _collect_splits(sources, joined, made)


def is_made(source: SampleTable) -> bool:
    """Whether a source's splits were made by a hash."""
    return source.provenance.split_shares is not None


def _make_splits(
    sources: Sources, columns: Mapping[str, Any], kinds: Mapping[str, str] | None
) -> tuple[Any, SplitRule]:
    shares = {name: source.provenance.split_shares for name, source in sources.items()}
    if len(set(shares.values())) > 1:
        raise FusionZooError(f"sources to join need the same shares of splits, found {shares}")
    labels = class_columns(columns, {"target": "classification"} if kinds is None else kinds)
    key = "group" if "group" in columns else "id"
    share = next(iter(shares.values()))
    splits = make_splits(columns[key], labels, share or (), unique=key == "id")
    return splits.splits, SplitRule(f"by a hash of the joined {key}s{splits.exceptions}", share)


def _collect_splits(sources: Sources, joined: JoinedRows, made: list[str]) -> tuple[Any, SplitRule]:
    """Take each sample's split from the sources that have it."""
    rules = {name: source.provenance.split_rule for name, source in sources.items()}
    cells = {name: source.split_names for name, source in sources.items()}
    real = [name for name in sources if name not in made]
    # Hashes of groups keep the groups together; then those of sources with one sample per key.
    made = sorted(made, key=lambda x: (not sources[x].provenance.group_rule, x == joined.repeated))
    splits: list[str] = []
    by_key: dict[str, str] = {}
    num_made = 0
    for position, key in enumerate(joined.keys):
        rows = {name: joined.rows[name][position] for name in sources}
        values = {name: cells[name][row] for name in real if (row := rows[name]) is not None}
        if len(set(values.values())) > 1:
            raise FusionZooError(
                f"id {joined.ids[position]!r}: the sources disagree on its split: {values}"
            )
        if not values:
            num_made += 1
            split = next(cells[name][row] for name in made if (row := rows[name]) is not None)
            splits.append(by_key.setdefault(key, split))
        else:
            splits.append(next(iter(values.values())))
    rule = ", ".join(dict.fromkeys(rules[name] for name in real if rules[name]))
    shares = None
    if made and num_made == len(splits):
        rule, shares = rules[made[0]], sources[made[0]].provenance.split_shares
    elif num_made:
        how = rules[made[0]].split(";")[0]
        rule = f"{rule or 'fixed'}; {num_made:,} samples without one {how}"
    return pa.array(splits, pa.string()), SplitRule(rule, shares)
