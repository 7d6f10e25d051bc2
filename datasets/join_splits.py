"""The splits of joined sources: those that come with their data, else made for the joined ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fusionzoo.errors import FusionZooError

from .splits import class_columns, make_splits
from .table import SampleTable

Sources = Mapping[str, SampleTable]


class SplitRule(NamedTuple):
    """Where the splits of joined samples come from."""

    text: str
    shares: tuple[float, ...] | None  # of splits made by hash


def sources_with_split(
    sources: Sources, key: str, rows: Mapping[str, Mapping[str, int]]
) -> dict[str, SampleTable]:
    """Return the sources that say which split an id is in.

    Those are the ones whose splits come with their data; only if none of these has the id, another
    one, whose splits are made by hash. Parts of sources, such as training splits, have to agree.
    """
    with_id = {name: source for name, source in sources.items() if key in rows[name]}
    fixed = {name: source for name, source in with_id.items() if not _is_made(source)}
    if fixed or any(_is_part(source) for source in with_id.values()):
        return fixed or with_id
    return dict([next(iter(with_id.items()))])


def remake_splits(
    sources: Sources, columns: Mapping[str, Any], kinds: Mapping[str, str] | None
) -> tuple[Any, SplitRule]:
    """Return the joined samples' splits and their rule; they are made for the joined ids if all
    sources made theirs by hash.

    The splits of a part of a source, such as its training split, are kept.
    """
    made = [name for name, source in sources.items() if _is_made(source)]
    rules = dict.fromkeys(
        source.provenance.split_rule
        for name, source in sources.items()
        if source.provenance.split_rule and (name not in made or len(made) == len(sources))
    )
    shares = {name: sources[name].provenance.split_shares for name in made}
    if len(made) < len(sources):
        alone = _count_alone(sources, columns["id"].to_pylist(), made)
        rest = f"; of {alone:,} only in {' or '.join(made)} by a hash" if alone else ""
        return columns["split"], SplitRule(", ".join(rules) + rest, None)
    if any(_is_part(source) for source in sources.values()):
        return columns["split"], SplitRule(", ".join(rules), next(iter(shares.values())))
    if len(set(shares.values())) > 1:
        raise FusionZooError(f"sources to join need the same shares of splits, found {shares}")
    labels = class_columns(columns, {"target": "classification"} if kinds is None else kinds)
    key = "group" if "group" in columns else "id"
    share = next(iter(shares.values()))
    splits = make_splits(columns[key], labels, share or (), unique=key == "id")
    return splits.splits, SplitRule(f"by a hash of the joined {key}s{splits.exceptions}", share)


def _is_made(source: SampleTable) -> bool:
    return source.provenance.split_shares is not None


def _is_part(source: SampleTable) -> bool:
    return len(source) < len(source.table)


def _count_alone(sources: Sources, ids: Sequence[str], made: Sequence[str]) -> int:
    """Count the ids that only sources with made splits have."""
    return len(set(ids).difference(*(x.ids for name, x in sources.items() if name not in made)))
