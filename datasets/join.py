"""Pair the tables of separate sources by id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError

from .join_splits import SplitRule, remake_splits, sources_with_split
from .provenance import Provenance
from .table import SampleTable

RowsById = Mapping[str, Mapping[str, int]]  # source -> id -> position of the sample


class JoinedTable(NamedTuple):
    """What a data set needs to read samples from several sources."""

    table: pa.Table
    kinds: dict[str, str]  # by modality
    values: dict[str, Any]  # modality -> undecoded values, read through the source they come from
    modalities: dict[str, str]  # modality -> its name in the source
    targets: dict[str, str] | None
    provenance: Provenance


def join_tables(
    sources: Mapping[str, SampleTable], how: Literal["inner", "outer"] = "inner"
) -> JoinedTable:
    """Pair `sources` by id, see `PairedDataset.join`."""
    if how not in ("inner", "outer"):
        raise FusionZooError(f"how={how!r} is neither 'inner' nor 'outer'")
    rows = {
        name: dict(zip(source.ids, range(len(source)), strict=True))
        for name, source in sources.items()
    }
    ids = _join_ids(rows, how)
    modalities = {name: _modality_of(name, source) for name, source in sources.items()}
    columns, targets = _shared_columns(sources, ids, rows), _target_kinds(sources)
    columns["split"], split_rule = remake_splits(sources, columns, targets)
    for name, source in sources.items():
        present = source.present[:, list(source.modalities).index(modalities[name])].tolist()
        positions = [rows[name].get(key) for key in ids]
        references = [x if x is not None and present[x] else None for x in positions]
        columns[name] = pa.array(references, pa.int64())
    return JoinedTable(
        pa.table(columns),
        kinds={name: source.modalities[modalities[name]] for name, source in sources.items()},
        values={name: _SourceValues(source, modalities[name]) for name, source in sources.items()},
        modalities=modalities,
        targets=targets,
        provenance=_provenance(sources, modalities, split_rule),
    )


def _join_ids(rows: RowsById, how: str) -> list[str]:
    """Return the ids of the joined samples, in the order in which the sources list them."""
    sets = [set(by_id) for by_id in rows.values()]
    common = set.intersection(*sets) if how == "inner" else set.union(*sets)
    if not common:
        examples = {name: next(iter(by_id)) for name, by_id in rows.items()}
        raise FusionZooError(f"no id is in all sources; they have, for instance, {examples}")
    return [
        key for key in dict.fromkeys(k for by_id in rows.values() for k in by_id) if key in common
    ]


def _modality_of(name: str, source: SampleTable) -> str:
    """Return the source's modality of that name, or its only one."""
    if name not in source.modalities and len(source.modalities) > 1:
        raise FusionZooError(f"source {name!r} has several modalities, none of that name")
    return name if name in source.modalities else next(iter(source.modalities))


def _shared_columns(
    sources: Mapping[str, SampleTable], ids: list[str], rows: RowsById
) -> dict[str, Any]:
    """Return the columns on which the sources must agree: split, target, group, labels."""
    columns: dict[str, Any] = {"id": pa.array(ids)}
    labels = [target.name for source in sources.values() for target in source.scheme or ()]
    grouped = any("group" in source.table.column_names for source in sources.values())
    names = ("split", "target", *(["group"] if grouped else []), *labels)
    for column in dict.fromkeys(names):
        cells = [_agreed(column, key, sources, rows) for key in ids]
        columns[column] = pa.array(cells, pa.string())
    if grouped:
        columns["group"] = pc.coalesce(columns["group"], columns["id"])
    return columns


def _agreed(
    column: str, key: str, sources: Mapping[str, SampleTable], rows: RowsById
) -> str | None:
    """Return the one value that the sources with this id have in a column."""
    values = {}
    named = sources_with_split(sources, key, rows) if column == "split" else sources
    for name, source in named.items():
        if key in rows[name] and column in source.table.column_names:
            value = source.table[column][int(source.rows[rows[name][key]])].as_py()
            if value is not None:
                values[name] = value
    if len(set(values.values())) > 1:
        raise FusionZooError(f"id {key!r}: the sources disagree on its {column}: {values}")
    return next(iter(values.values()), None)


def _target_kinds(sources: Mapping[str, SampleTable]) -> dict[str, str] | None:
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
    sources: Mapping[str, SampleTable], modalities: Mapping[str, str], split_rule: SplitRule
) -> Provenance:
    """Gather where the sources' samples come from, and what of them is not used."""
    origins = {name: source.provenance for name, source in sources.items()}
    unused = [f"{name}: {column}" for name, origin in origins.items() for column in origin.unused]
    for name, source in sources.items():
        others = [other for other in source.modalities if other != modalities[name]]
        unused += [f"{name}: {other}" for other in others]
    group_rules = dict.fromkeys(o.group_rule for o in origins.values() if o.group_rule)
    return Provenance(
        reading=tuple(f"{name}: {x}" for name, origin in origins.items() for x in origin.reading),
        missing="; ".join(f"{name}: {x.missing}" for name, x in origins.items() if x.missing),
        empty_rows=sum(origin.empty_rows for origin in origins.values()),
        split_rule=split_rule.text,
        split_shares=split_rule.shares,
        group_rule=", ".join(group_rules),
        unused=tuple(unused),
        row_numbers=None,
    )


class _SourceValues:
    """The undecoded values of a source's modality, by position in the source."""

    def __init__(self, source: SampleTable, modality: str) -> None:
        self.source, self.modality = source, modality

    def __getitem__(self, index: int) -> Any:
        return self.source.reference(self.modality, int(self.source.rows[index]))

    def __len__(self) -> int:
        return len(self.source)
