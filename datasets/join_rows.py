"""Match the rows of sources to join: which rows of which source make up a sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, combinations, compress
from typing import Literal, NamedTuple, get_args

from fusionzoo.errors import FusionZooError

from .table import SampleTable

How = Literal["inner", "left", "outer"]  # keys that all sources have, those of the first, or all
RowsByKey = Mapping[str, Mapping[str, list[int | None]]]  # source -> key -> positions in it


class JoinedRows(NamedTuple):
    """The samples of joined sources."""

    ids: list[str]
    keys: list[str]  # of the column on which the sources are joined
    rows: dict[str, list[int | None]]  # source -> position in it of each sample, None: has none
    repeated: str  # the source with several samples per key; empty if there is none
    overlap: str = ""  # how many rows are in which sources, for the data summary

    def keep(self, mask: Sequence[bool]) -> JoinedRows:
        """Return the samples where `mask` is true."""
        return self._replace(
            ids=list(compress(self.ids, mask)),
            keys=list(compress(self.keys, mask)),
            rows={name: list(compress(rows, mask)) for name, rows in self.rows.items()},
        )


def match_rows(
    sources: Mapping[str, SampleTable], columns: Mapping[str, str], how: How
) -> JoinedRows:
    """Match rows by the key in `columns`; at most one source may have several rows of one key.

    Ids are those of the source with several rows per key, else of the first source. A sample that
    this source lacks has the id `<source>/<id>` of the first one that has it.
    """
    if how not in get_args(How):
        raise FusionZooError(f"how={how!r} is neither 'inner' nor 'left' nor 'outer'")
    by_key = {name: _rows_by_key(name, sources[name], columns[name]) for name in sources}
    repeated = _repeated(by_key, columns)
    keys = _common_keys(by_key, how, columns)
    overlap = _overlap(by_key, repeated, how)
    rows: dict[str, list[int | None]] = {name: [] for name in sources}
    sample_keys = []
    for key in keys:
        for row in by_key[repeated].get(key, [None]) if repeated else [None]:
            sample_keys.append(key)
            for name in sources:
                rows[name].append(row if name == repeated else by_key[name].get(key, [None])[0])
    if set(columns.values()) == {"id"}:
        return JoinedRows(sample_keys, sample_keys, rows, repeated, overlap)
    order = sorted(sources, key=lambda name: name != (repeated or next(iter(sources))))
    ids = {name: sources[name].ids for name in sources}
    sample_ids = []
    for position in range(len(sample_keys)):
        name = next(name for name in order if rows[name][position] is not None)
        sample_id = ids[name][rows[name][position] or 0]
        sample_ids.append(sample_id if name == order[0] else f"{name}/{sample_id}")
    return JoinedRows(sample_ids, sample_keys, rows, repeated, overlap)


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


def _repeated(by_key: RowsByKey, columns: Mapping[str, str]) -> str:
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


def _common_keys(by_key: RowsByKey, how: How, columns: Mapping[str, str]) -> list[str]:
    """Return the keys of the joined samples, in the order in which the sources list them."""
    sets = [set(rows_of) for rows_of in by_key.values()]
    in_all = set.intersection(*sets)
    if not in_all and how != "outer":
        examples = {name: next(iter(rows_of)) for name, rows_of in by_key.items()}
        column = " or ".join(dict.fromkeys(columns.values()))
        raise FusionZooError(f"no {column} is in all sources; they have, for instance, {examples}")
    common = {"inner": in_all, "left": sets[0], "outer": set.union(*sets)}[how]
    return [
        key
        for key in dict.fromkeys(k for rows_of in by_key.values() for k in rows_of)
        if key in common
    ]


def _overlap(by_key: RowsByKey, repeated: str, how: How) -> str:
    """Count the rows that all sources have, and those that only some have: `in both 3, ...`."""
    counts = Counter[tuple[str, ...]]()
    for key in dict.fromkeys(key for rows_of in by_key.values() for key in rows_of):
        having = tuple(name for name, rows_of in by_key.items() if key in rows_of)
        counts[having] += len(by_key[repeated].get(key, [None])) if repeated else 1
    first, *others = by_key
    parts = [f"in {'both' if len(others) == 1 else 'all'} {counts.pop(tuple(by_key), 0):,}"]
    sizes = range(1, len(by_key))
    for having in chain.from_iterable(combinations(by_key, size) for size in sizes):
        if not counts[having] and len(having) > 1:
            continue
        is_left_out = how == "inner" or (how == "left" and first not in having)
        note = " (left out)" if is_left_out and counts[having] else ""
        parts.append(f"only in {' and '.join(having)} {counts[having]:,}{note}")
    return f"{', '.join(parts)} (--data.how {how})"
