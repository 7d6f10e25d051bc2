"""Pair the samples of separate sources by id or by another column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, combinations, compress
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa

from fusionzoo.errors import FusionZooError, check_choice, check_known

from .media.ranges import range_of
from .tables.arrow import ArrowColumn
from .tables.paths import is_collecting
from .tables.provenance import Provenance
from .tables.splits import class_columns, make_splits
from .tables.table import ROLES, Samples, check_unedited

How = Literal["inner", "left", "outer"]  # keys that all sources have, those of the first, or all
RowsByKey = Mapping[str, Mapping[str, list[int | None]]]  # source -> key -> positions in it
Sources = Mapping[str, Samples]
# Where splits come from, and the shares of those made by hash; None: the sources' own.
SplitRule = tuple[str, tuple[float, ...] | None]
Names = Mapping[str, Mapping[str, str]]  # source -> modality -> its name in the source


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


def match_rows(sources: Mapping[str, Samples], columns: Mapping[str, str], how: How) -> JoinedRows:
    """Match rows by the key in `columns`; at most one source may have several rows of one key.

    Ids are those of the source with several rows per key, else of the first source, or the keys if
    that has no ids of its own. A sample that this source lacks has the id `<source>/<id>` of the
    first one that has it.
    """
    check_choice("how", how, get_args(How))
    numbered = [x for x in sources if columns[x] == "id" and sources[x].provenance.numbered]
    if numbered and len(numbered) < len(sources):
        raise FusionZooError(
            f"{numbered[0]} has no column of ids, so its rows cannot be joined by id: name one by"
            " --data.columns.id, or another common column by --data.on"
        )
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
    if set(columns.values()) == {"id"} or _keys_are_ids(sources, repeated):
        return JoinedRows(sample_keys, sample_keys, rows, repeated, overlap)
    order = sorted(sources, key=lambda name: name != (repeated or next(iter(sources))))
    ids = {name: sources[name].ids for name in sources}
    sample_ids = []
    for position in range(len(sample_keys)):
        name = next(name for name in order if rows[name][position] is not None)
        sample_id = ids[name][rows[name][position] or 0]
        sample_ids.append(sample_id if name == order[0] else f"{name}/{sample_id}")
    return JoinedRows(sample_ids, sample_keys, rows, repeated, overlap)


def _keys_are_ids(sources: Mapping[str, Samples], repeated: str) -> bool:
    """Whether each key has one sample, whose other id would be but the number of its row."""
    return not repeated and next(iter(sources.values())).provenance.numbered


def _rows_by_key(name: str, source: Samples, column: str) -> dict[str, list[int | None]]:
    by_key: dict[str, list[int | None]] = {}
    for row, key in enumerate(source.column(column)):
        if key is None:
            raise FusionZooError(f"{source.sample_place(row)}: {column!r}, to join on, is empty")
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
            f"only one source may have several samples per key: {'; '.join(examples.values())}"
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


def key_columns(sources: Mapping[str, Samples], on: str | Mapping[str, str]) -> dict[str, str]:
    """Return the column of each source on which it is joined."""
    if not isinstance(on, str):
        for name in on:
            check_known(name, sources, f"on: there is no source {name!r} to join")
    columns = {name: on if isinstance(on, str) else on.get(name, "id") for name in sources}
    for name, source in sources.items():
        known = [x for x in source.table.column_names if x not in source.modalities]
        problem = f"source {name!r} ({source.source}) has no column {columns[name]!r} to join on"
        check_known(columns[name], known, problem)
    return columns


def modality_names(sources: Mapping[str, Samples]) -> dict[str, dict[str, str]]:
    """Return the modalities of each source, by their names in the joined data set.

    A source gives the modality it is named after, or its only one under its own name, else all. If
    several sources have a modality of one name, each gets its source's name before it.
    """
    names: dict[str, dict[str, str]] = {}
    for name, source in sources.items():
        if name in source.modalities or len(source.modalities) == 1:
            only = name if name in source.modalities else next(iter(source.modalities))
            names[name] = {name: only}
        else:
            names[name] = {modality: modality for modality in source.modalities}
    count = [modality for by_name in names.values() for modality in by_name]
    return {
        name: {
            modality
            if count.count(modality) == 1 or modality == name
            else f"{name}_{modality}": original
            for modality, original in by_name.items()
        }
        for name, by_name in names.items()
    }


def join_splits(
    sources: Sources,
    joined: JoinedRows,
    columns: Mapping[str, ArrowColumn],
    kinds: Mapping[str, str] | None,
) -> tuple[ArrowColumn, SplitRule]:
    """Return the split of each sample, and the rule behind the splits.

    If no source has splits, they are made for the joined samples; parts of sources, such as a
    training split, keep theirs. Otherwise the splits of sources that have them must agree, and a
    sample without one gets the split that a hash made in the first of the others; samples of one
    key get the same. `kinds` says what the label columns hold.
    """
    hashed = [x for x, source in sources.items() if source.provenance.split_shares is not None]
    is_part = any(len(source) < len(source.table) for source in sources.values())
    if len(hashed) == len(sources) and not is_part:
        return _make_splits(sources, columns, kinds)
    return _collect_splits(sources, joined, hashed)


def _make_splits(
    sources: Sources, columns: Mapping[str, ArrowColumn], kinds: Mapping[str, str] | None
) -> tuple[ArrowColumn, SplitRule]:
    shares = {name: source.provenance.split_shares for name, source in sources.items()}
    if len(set(shares.values())) > 1:
        raise FusionZooError(f"sources to join need the same shares of splits, found {shares}")
    labels = class_columns(columns, {"target": "classification"} if kinds is None else kinds)
    key = "group" if "group" in columns else "id"
    share = next(iter(shares.values()))
    splits = make_splits(columns[key], labels, share or (), unique=key == "id")
    return splits.splits, (f"by a hash of the joined {key}s{splits.rule}", share)


def _collect_splits(
    sources: Sources, joined: JoinedRows, hashed: list[str]
) -> tuple[ArrowColumn, SplitRule]:
    """Take each sample's split from the sources that have it."""
    rules = {name: source.provenance.split_rule for name, source in sources.items()}
    cells = {name: source.split_names for name, source in sources.items()}
    real = [name for name in sources if name not in hashed]
    # Hashes of groups keep the groups together; then those of sources with one sample per key.
    hashed = sorted(
        hashed, key=lambda x: (not sources[x].provenance.group_rule, x == joined.repeated)
    )
    splits: list[str] = []
    by_key: dict[str, str] = {}
    num_made = 0
    for position, key in enumerate(joined.keys):
        rows = {name: joined.rows[name][position] for name in sources}
        values = {name: cells[name][row] for name in real if (row := rows[name]) is not None}
        if len(set(values.values())) > 1:
            raise FusionZooError(f"id {joined.ids[position]!r}: splits disagree: {values}")
        if not values:
            num_made += 1
            split = next(cells[name][row] for name in hashed if (row := rows[name]) is not None)
            splits.append(by_key.setdefault(key, split))
        else:
            splits.append(next(iter(values.values())))
    rule = ", ".join(dict.fromkeys(rules[name] for name in real if rules[name]))
    shares = None
    if hashed and num_made == len(splits):
        rule, shares = rules[hashed[0]], sources[hashed[0]].provenance.split_shares
    elif num_made:
        how = rules[hashed[0]].split(";")[0]
        rule = f"{rule or 'fixed'}; {num_made:,} samples without one {how}"
    return pa.array(splits, pa.string()), (rule, shares)


def _positions(source: Samples, modality: str, rows: Sequence[int | None]) -> list[int | None]:
    """Return `rows`, None where the source's row lacks the modality."""
    present = source.present[:, list(source.modalities).index(modality)].tolist()
    return [row if row is not None and present[row] else None for row in rows]


def _without_empty(
    sources: Sources, joined: JoinedRows, origins: Mapping[str, tuple[str, str]], drop_empty: bool
) -> JoinedRows:
    """Drop the samples that lack every modality, or raise if the user does not allow that."""
    has_any = np.zeros(len(joined.ids), dtype=bool)
    for name, original in origins.values():
        cells = _positions(sources[name], original, joined.rows[name])
        has_any |= np.array([cell is not None for cell in cells])
    if has_any.all() or (is_collecting() and not drop_empty):
        return joined
    all_of_them = " and ".join(source.source for source in sources.values())
    if not has_any.any():
        raise FusionZooError(f"{all_of_them}: every modality is empty in all joined samples")
    if not drop_empty:
        raise FusionZooError(
            f"sample {joined.ids[int(has_any.argmin())]!r} of {all_of_them}: every modality is"
            f" empty, as in {(~has_any).sum():,} of {len(has_any):,} joined samples:"
            " --data.drop_empty true leaves them out"
        )
    return joined.keep(has_any.tolist())


def _shared_columns(
    sources: Sources, joined: JoinedRows, keys: Mapping[str, str], reserved: Iterable[str]
) -> dict[str, Any]:
    """Return id, target and group, on which the sources must agree, and their other columns."""
    columns: dict[str, Any] = {"id": pa.array(joined.ids, pa.string())}
    labels = {label for source in sources.values() for label in _label_names(source)}
    grouped = any("group" in source.table.column_names for source in sources.values())
    for column in ("target", *(["group"] if grouped else [])):
        columns[column] = pa.array(_agreed(column, sources, joined), pa.string())
    if grouped or joined.repeated:
        alone = joined.keys if joined.repeated else joined.ids
        groups = columns["group"].to_pylist() if grouped else [None] * len(alone)
        cells = [key if group is None else group for group, key in zip(groups, alone, strict=True)]
        columns["group"] = pa.array(cells, pa.string())
    others = _other_columns(sources, {*columns, *ROLES, *labels, *reserved, *keys.values()})
    for column, (name, original) in others.items():
        cells = sources[name].column(original)
        columns[column] = pa.array([None if x is None else cells[x] for x in joined.rows[name]])
    for column in dict.fromkeys(keys.values()):
        if column not in {*columns, *labels, *reserved}:
            columns[column] = pa.array(joined.keys, pa.string())
    return columns


def _other_columns(sources: Sources, taken: set[str]) -> dict[str, tuple[str, str]]:
    """Return the sources' other columns by their joined name: two of one name get a prefix."""
    sources_by_column: dict[str, list[str]] = {}
    for name, source in sources.items():
        for column in source.table.column_names:
            if column not in source.modalities and column not in ROLES:
                sources_by_column.setdefault(column, []).append(name)
    joined = {
        column if len(names) == 1 else f"{name}_{column}": (name, column)
        for column, names in sources_by_column.items()
        if column not in taken
        for name in names
    }
    return {column: origin for column, origin in joined.items() if column not in taken}


def _agreed(column: str, sources: Sources, joined: JoinedRows) -> list[str | None]:
    """Return the only value that the sources of each sample have in a column."""
    cells = {
        name: source.column(column)
        for name, source in sources.items()
        if column in source.table.column_names
    }
    agreed = []
    for position, sample_id in enumerate(joined.ids):
        values = {}
        for name in cells:
            row = joined.rows[name][position]
            if row is not None and cells[name][row] is not None:
                values[name] = cells[name][row]
        if len(set(values.values())) > 1:
            raise FusionZooError(f"id {sample_id!r}: sources disagree on its {column}: {values}")
        agreed.append(next(iter(values.values()), None))
    return agreed


def _label_names(source: Samples) -> list[str]:
    """Return the columns that a source reads as labels, besides `target`."""
    return [target.name for target in source.scheme or () if target.name != "target"]


def _target_kinds(sources: Sources) -> dict[str, str] | None:
    """Return what the sources' columns of labels hold, on which they must agree."""
    if all(source.scheme is None for source in sources.values()):
        return None
    kinds: dict[str, str] = {}
    for name, source in sources.items():
        for target in source.scheme or ():
            if kinds.setdefault(target.name, target.kind) != target.kind:
                raise FusionZooError(f"source {name!r} takes {target.name!r} for {target.kind}")
    return kinds


def _provenance(
    sources: Sources,
    origins: Mapping[str, tuple[str, str]],
    split_rule: SplitRule,
    joined: JoinedRows,
    keys: Mapping[str, str],
    num_empty: int,
) -> Provenance:
    """Gather where the sources' samples come from, and what of them is not used."""
    unused, inferred = [], []
    for name, source in sources.items():
        used = [original for source_name, original in origins.values() if source_name == name]
        others = [modality for modality in source.modalities if modality not in used]
        columns = [x for x in source.provenance.unused if x.strip() not in keys.values()]
        unused += [f"{name}: {column}" for column in (*columns, *others)]
        inferred += [f"{name}: {note}" for note in source.provenance.inferred]
    first = joined.repeated or next(iter(sources))
    with_ids, keys_are_ids = sources[first].provenance, _keys_are_ids(sources, joined.repeated)
    of_sources = dict.fromkeys(source.provenance.group_rule for source in sources.values())
    group_rules = [x for x in of_sources if x]
    rule, shares = split_rule
    if joined.repeated:
        group_rules.append(f"samples of one {keys[joined.repeated]!r} belong together")
    return Provenance(
        reading=tuple(f"{name}: {x}" for name, s in sources.items() for x in s.provenance.reading),
        missing="; ".join(
            f"{name}: {s.provenance.missing}" for name, s in sources.items() if s.provenance.missing
        ),
        joined=joined.overlap,
        numbered=with_ids.numbered and not keys_are_ids,
        id_column=keys[first] if keys_are_ids else with_ids.id_column,
        empty_rows=num_empty + sum(source.provenance.empty_rows for source in sources.values()),
        split_rule=rule,
        split_shares=shares,
        row_numbers=None,
        group_rule=", ".join(group_rules),
        unused=tuple(unused),
        inferred=tuple(inferred),
    )


class SourceValues:
    """The undecoded values of a source's modality, by position in the source."""

    def __init__(self, source: Samples, modality: str) -> None:
        self.source, self.modality = source, modality

    def __getitem__(self, index: int) -> Any:
        return self.source.reference(self.modality, int(self.source.rows[index]))

    def __len__(self) -> int:
        return len(self.source)


def join_arguments(
    sources: Mapping[str, Any],
    how: How = "inner",
    on: str | Mapping[str, str] = "id",
    names: Names | None = None,
    labels: Iterable[str] = (),
    drop_empty: bool = False,
) -> dict[str, Any]:
    """Return the arguments of the `PairedDataset` that pairs `sources`, which agree on `labels`.

    See `PairedDataset.join`; `names` are new names of modalities.
    """
    if not sources:
        raise FusionZooError("there are no sources to join")
    for source in sources.values():
        check_unedited(source, "joined")
    policies = {name: source.on_error for name, source in sources.items()}
    if len(set(policies.values())) > 1:
        raise FusionZooError(f"sources to join need the same on_error, found {policies}")
    weight = _weight_column(sources)
    labels = [*labels, *(() if weight is None else (weight,))]
    columns = key_columns(sources, on)
    joined = match_rows(sources, columns, how)
    names = names or modality_names(sources)
    origins = {x: (name, names[name][x]) for name in sources for x in names[name]}
    num_rows = len(joined.ids)
    joined = _without_empty(sources, joined, origins, drop_empty)
    table = _joined_columns(sources, joined, columns, origins, labels)
    targets = _target_kinds(sources)
    table["split"], rule = join_splits(sources, joined, table, targets)
    encoders = {name: source.default_encoders for name, source in sources.items()}
    ranges = {x: range_of(sources[name].image_range, y) for x, (name, y) in origins.items()}
    return {
        "table": pa.table({**{role: table[role] for role in ROLES if role in table}, **table}),
        "modalities": {x: sources[name].modalities[y] for x, (name, y) in origins.items()},
        "memory": {x: SourceValues(sources[name], y) for x, (name, y) in origins.items()},
        "source": " + ".join(source.source for source in sources.values()),
        "on_error": next(iter(policies.values())),
        "max_errors": min(source.max_errors for source in sources.values()),
        "image_range": {x: chosen for x, chosen in ranges.items() if chosen is not None},
        "encoders": {x: encoders[name][y] for x, (name, y) in origins.items()},
        "targets": targets,
        "provenance": _provenance(
            sources, origins, rule, joined, columns, num_rows - len(joined.ids)
        ),
        "weight_column": weight,
        "positive": next((x.positive for x in sources.values() if x.positive is not None), None),
    }


def _joined_columns(
    sources: Sources,
    joined: JoinedRows,
    keys: Mapping[str, str],
    origins: Mapping[str, tuple[str, str]],
    labels: Sequence[str],
) -> dict[str, Any]:
    """Return the shared columns, the labels, and the positions of values in their sources."""
    table = _shared_columns(sources, joined, keys, [*origins, *labels])
    readers = {name: [*_label_names(source), *labels] for name, source in sources.items()}
    for label in dict.fromkeys(label for names in readers.values() for label in names):
        having = {name: source for name, source in sources.items() if label in readers[name]}
        table[label] = pa.array(_agreed(label, having, joined), pa.string())
    for modality, (name, original) in origins.items():
        rows = _positions(sources[name], original, joined.rows[name])
        table[modality] = pa.array(rows, pa.int64())
    return table


def _weight_column(sources: Sources) -> str | None:
    """Return the column by which the joined samples are weighted, that of the sources that name
    one; they must agree on its cells."""
    names = {x.weight_column: name for name, x in sources.items() if x.weight_column is not None}
    if len(names) > 1:
        listed = ", ".join(f"{column!r} of {name}" for column, name in names.items())
        raise FusionZooError(f"the sources have different weights: {listed}; name one")
    return next(iter(names), None)
