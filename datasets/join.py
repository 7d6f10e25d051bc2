"""Pair the samples of separate sources by id or by another column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fusionzoo.errors import FusionZooError

from .join_names import key_columns, modality_names
from .join_rows import How, JoinedRows, match_rows
from .joined_splits import SplitRule, join_splits
from .provenance import Provenance
from .refusals import is_collecting
from .table import ROLES, SampleTable

Sources = Mapping[str, SampleTable]
Names = Mapping[str, Mapping[str, str]]  # source -> modality -> its name in the source


class JoinedTable(NamedTuple):
    """What a data set needs to read samples from several sources."""

    table: pa.Table
    kinds: dict[str, str]  # by modality
    values: dict[str, Any]  # modality -> undecoded values, read through the source they come from
    origins: dict[str, tuple[str, str]]  # modality -> its source, and its name there
    targets: dict[str, str] | None
    provenance: Provenance


def join_tables(
    sources: Sources,
    how: How = "inner",
    on: str | Mapping[str, str] = "id",
    names: Names | None = None,
    labels: Iterable[str] = (),
    drop_empty: bool = False,
) -> JoinedTable:
    """Pair `sources`, see `PairedDataset.join`.

    `names` renames modalities; `labels` are columns that sources must agree on, besides those that
    they read as labels. A sample without any modality is an error, unless `drop_empty`.
    """
    if not sources:
        raise FusionZooError("there are no sources to join")
    columns = key_columns(sources, on)
    joined = match_rows(sources, columns, how)
    names = names or modality_names(sources)
    origins = {x: (name, names[name][x]) for name in sources for x in names[name]}
    num_rows = len(joined.ids)
    joined = _without_empty(sources, joined, origins, drop_empty)
    table = _shared_columns(sources, joined, columns, [*origins, *labels])
    readers = {name: [*_label_names(source), *labels] for name, source in sources.items()}
    for label in dict.fromkeys(label for names in readers.values() for label in names):
        having = {name: source for name, source in sources.items() if label in readers[name]}
        table[label] = pa.array(_agreed(label, having, joined), pa.string())
    kinds, values = {}, {}
    for modality, (name, original) in origins.items():
        source = sources[name]
        table[modality] = pa.array(_positions(source, original, joined.rows[name]), pa.int64())
        kinds[modality] = source.modalities[original]
        values[modality] = SourceValues(source, original)
    targets = _target_kinds(sources)
    table["split"], rule = join_splits(sources, joined, table, targets)
    return JoinedTable(
        pa.table({**{role: table[role] for role in ROLES if role in table}, **table}),
        kinds=kinds,
        values=values,
        origins=origins,
        targets=targets,
        provenance=_provenance(sources, origins, rule, joined, columns, num_rows - len(joined.ids)),
    )


def _positions(source: SampleTable, modality: str, rows: Sequence[int | None]) -> list[int | None]:
    """Return `rows`, None where the source's row lacks the modality."""
    present = source.present[:, list(source.modalities).index(modality)].tolist()
    return [row if row is not None and present[row] else None for row in rows]


def _without_empty(
    sources: Sources,
    joined: JoinedRows,
    origins: Mapping[str, tuple[str, str]],
    drop_empty: bool,
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
    sources: Sources,
    joined: JoinedRows,
    keys: Mapping[str, str],
    reserved: Iterable[str],
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
    found: dict[str, list[str]] = {}
    for name, source in sources.items():
        for column in source.table.column_names:
            if column not in source.modalities and column not in ROLES:
                found.setdefault(column, []).append(name)
    joined = {
        column if len(names) == 1 else f"{name}_{column}": (name, column)
        for column, names in found.items()
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
            raise FusionZooError(
                f"id {sample_id!r}: the sources disagree on its {column}: {values}"
            )
        agreed.append(next(iter(values.values()), None))
    return agreed


def _label_names(source: SampleTable) -> list[str]:
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
    rules = dict.fromkeys(source.provenance.group_rule for source in sources.values())
    group_rules = [rule for rule in rules if rule]
    if joined.repeated:
        group_rules.append(f"samples of one {keys[joined.repeated]!r} belong together")
    return Provenance(
        reading=tuple(f"{name}: {x}" for name, s in sources.items() for x in s.provenance.reading),
        missing="; ".join(
            f"{name}: {s.provenance.missing}" for name, s in sources.items() if s.provenance.missing
        ),
        joined=joined.overlap,
        empty_rows=num_empty + sum(source.provenance.empty_rows for source in sources.values()),
        split_rule=split_rule.text,
        split_shares=split_rule.shares,
        row_numbers=None,
        group_rule=", ".join(group_rules),
        unused=tuple(unused),
        inferred=tuple(inferred),
    )


class SourceValues:
    """The undecoded values of a source's modality, by position in the source."""

    def __init__(self, source: SampleTable, modality: str) -> None:
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
    """Return the arguments of the `PairedDataset` that joins other ones."""
    if not isinstance(sources, Mapping) or not all(
        isinstance(source, SampleTable) for source in sources.values()
    ):
        raise FusionZooError('join takes data sets by name: {"photos": photos, "clips": clips}')
    policies = {name: source.on_error for name, source in sources.items()}
    if len(set(policies.values())) > 1:
        raise FusionZooError(f"sources to join need the same on_error, found {policies}")
    joined = join_tables(sources, how, on, names, labels, drop_empty)
    encoders = {name: source.default_encoders for name, source in sources.items()}
    return {
        "table": joined.table,
        "modalities": joined.kinds,
        "memory": joined.values,
        "source": " + ".join(source.source for source in sources.values()),
        "on_error": next(iter(policies.values())),
        "max_errors": min(source.max_errors for source in sources.values()),
        "encoders": {x: encoders[name][original] for x, (name, original) in joined.origins.items()},
        "targets": joined.targets,
        "provenance": joined.provenance,
    }
