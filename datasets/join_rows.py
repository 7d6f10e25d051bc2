"""Match the rows of sources to join: which rows of which source make up a sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fusionzoo.errors import FusionZooError

from .table import SampleTable


class JoinedRows(NamedTuple):
    """The samples of joined sources."""

    ids: list[str]
    keys: list[str]  # of the column on which the sources are joined
    rows: dict[str, list[int | None]]  # source -> position in it of each sample, None: has none
    repeated: str  # the source with several samples per key; empty if there is none


def match_rows(
    sources: Mapping[str, SampleTable], columns: Mapping[str, str], how: str
) -> JoinedRows:
    """Match rows by the key in `columns`; at most one source may have several rows of one key.

    Ids are those of the source with several rows per key, else of the first source. A sample that
    this source lacks has the id `<source>/<id>` of the first one that has it.
    """
    by_key = {name: _rows_by_key(name, sources[name], columns[name]) for name in sources}
    repeated = _repeated(by_key, columns)
    keys = _common_keys(by_key, how, columns)
    rows: dict[str, list[int | None]] = {name: [] for name in sources}
    sample_keys = []
    for key in keys:
        for row in by_key[repeated].get(key, [None]) if repeated else [None]:
            sample_keys.append(key)
            for name in sources:
                rows[name].append(row if name == repeated else by_key[name].get(key, [None])[0])
    if set(columns.values()) == {"id"}:
        return JoinedRows(sample_keys, sample_keys, rows, repeated)
    order = sorted(sources, key=lambda name: name != (repeated or next(iter(sources))))
    ids = {name: sources[name].ids for name in sources}
    sample_ids = []
    for position in range(len(sample_keys)):
        name = next(name for name in order if rows[name][position] is not None)
        sample_id = ids[name][rows[name][position] or 0]
        sample_ids.append(sample_id if name == order[0] else f"{name}/{sample_id}")
    return JoinedRows(sample_ids, sample_keys, rows, repeated)


def _rows_by_key(name: str, source: SampleTable, column: str) -> dict[str, list[int | None]]:
    by_key: dict[str, list[int | None]] = {}
    for row, key in enumerate(source.column(column)):
        if key is None:
            raise FusionZooError(
                f"{source.source}, sample {source.ids[row]!r}: its {column!r}, on which source"
                f" {name!r} is joined, is empty: fill it in, or remove the row"
            )
        by_key.setdefault(str(key), []).append(row)
    return by_key


def _repeated(
    by_key: Mapping[str, Mapping[str, list[int | None]]], columns: Mapping[str, str]
) -> str:
    """Return the source with several rows of one key."""
    examples = {}
    for name, rows_of in by_key.items():
        for key, rows in rows_of.items():
            if len(rows) > 1:
                examples[name] = f"{name} has {len(rows)} with {columns[name]} {key!r}"
                break
    if len(examples) > 1:
        raise FusionZooError(
            f"only one source may have several samples per key: {'; '.join(examples.values())};"
            " join on another column, or keep one sample of each key in the others"
        )
    return next(iter(examples), "")


def _common_keys(
    by_key: Mapping[str, Mapping[str, list[int | None]]], how: str, columns: Mapping[str, str]
) -> list[str]:
    """Return the keys of the joined samples, in the order in which the sources list them."""
    sets = [set(rows_of) for rows_of in by_key.values()]
    common = set.intersection(*sets) if how == "inner" else set.union(*sets)
    if not common:
        examples = {name: next(iter(rows_of)) for name, rows_of in by_key.items()}
        column = " or ".join(dict.fromkeys(columns.values()))
        raise FusionZooError(f"no {column} is in all sources; they have, for instance, {examples}")
    return [
        key
        for key in dict.fromkeys(k for rows_of in by_key.values() for k in rows_of)
        if key in common
    ]
