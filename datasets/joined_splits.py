"""Splits of joined sources: those of their columns before those made by a hash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from fusionzoo.errors import FusionZooError

from .join_rows import JoinedRows
from .table import SampleTable

MADE = "by a hash"  # how the rule of splits begins that are in no column


def join_splits(sources: Mapping[str, SampleTable], joined: JoinedRows) -> tuple[Any, str]:
    """Return the split of each sample, and the rule behind the splits.

    The splits of sources that have them must agree. A sample without one gets the split that a hash
    made in the first of the others; samples of one key get the same.
    """
    rules = {name: source.provenance.split_rule for name, source in sources.items()}
    cells = {name: source.split_names for name, source in sources.items()}
    real = [name for name in sources if not rules[name].startswith(MADE)]
    made = [name for name in sources if name not in real]
    # Hashes of groups keep the groups together; then those of sources with one sample per key.
    made.sort(key=lambda x: (not sources[x].provenance.group_rule, x == joined.repeated))
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
    if made and num_made == len(splits):
        rule = rules[made[0]]
    elif num_made:
        rule = f"{rule or 'fixed'}; {num_made:,} samples without one {rules[made[0]]}"
    return pa.array(splits, pa.string()), rule
