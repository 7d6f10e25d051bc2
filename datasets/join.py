"""Pair separate sources by id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError

from .paired import PairedDataset
from .provenance import Provenance


def join(
    sources: Mapping[str, PairedDataset], how: Literal["inner", "outer"] = "inner"
) -> PairedDataset:
    """Pair `sources` by id; see `PairedDataset.join`."""
    if how not in ("inner", "outer"):
        raise FusionZooError(f"how={how!r} is neither 'inner' nor 'outer'")
    if len({one.on_error for one in sources.values()}) != 1:
        said = {name: one.on_error for name, one in sources.items()}
        raise FusionZooError(f"sources to join need one on_error between them, found {said}")
    rows = {name: dict(zip(one.ids, range(len(one)), strict=True)) for name, one in sources.items()}
    sets = [set(own) for own in rows.values()]
    common = set.intersection(*sets) if how == "inner" else set.union(*sets)
    if not common:
        some = {name: next(iter(own)) for name, own in rows.items()}
        raise FusionZooError(f"no id is in all sources; they have, for instance, {some}")
    ids = [key for key in dict.fromkeys(k for own in rows.values() for k in own) if key in common]
    columns: dict[str, Any] = {"id": pa.array(ids)}
    labels = [target.name for one in sources.values() for target in one.scheme or ()]
    grouped = ["group"] if any("group" in x.table.column_names for x in sources.values()) else []
    for what in dict.fromkeys(("split", "target", *grouped, *labels)):
        columns[what] = pa.array([_agreed(what, key, sources, rows) for key in ids], pa.string())
    if grouped:
        columns["group"] = pc.coalesce(columns["group"], columns["id"])
    memory: dict[str, Any] = {}
    kinds, encoders = {}, {}
    for name, one in sources.items():
        inside = name if name in one.modalities else next(iter(one.modalities))
        if inside != name and len(one.modalities) > 1:
            raise FusionZooError(f"source {name!r} has several modalities, none of that name")
        kinds[name] = one.modalities[inside]
        encoders[name] = one.default_encoders[inside]
        # Values are read through their own source, whatever it is made of.
        memory[name] = _Through(one, inside)
        here = one.present[:, list(one.modalities).index(inside)].tolist()
        places = [rows[name].get(key) for key in ids]
        kept = [place if place is not None and here[place] else None for place in places]
        columns[name] = pa.array(kept, pa.int64())
    return PairedDataset(
        pa.table(columns),
        kinds,
        memory=memory,
        source=" + ".join(one.source for one in sources.values()),
        on_error=next(iter(sources.values())).on_error,
        max_errors=min(one.max_errors for one in sources.values()),
        encoders=encoders,
        targets=_kinds(sources),
        provenance=_provenance(sources),
    )


def _provenance(sources: Mapping[str, PairedDataset]) -> Provenance:
    """Gather where the sources' samples came from."""
    origins = {name: source.provenance for name, source in sources.items()}
    unused = [f"{name}: {column}" for name, origin in origins.items() for column in origin.unused]
    for name, source in sources.items():
        inside = name if name in source.modalities else next(iter(source.modalities))
        unused += [f"{name}: {other}" for other in source.modalities if other != inside]
    split_rules = dict.fromkeys(o.split_rule for o in origins.values() if o.split_rule)
    group_rules = dict.fromkeys(o.group_rule for o in origins.values() if o.group_rule)
    return Provenance(
        split_rule=", ".join(split_rules), group_rule=", ".join(group_rules), unused=tuple(unused)
    )


def _kinds(sources: Mapping[str, PairedDataset]) -> dict[str, str] | None:
    """Return what the sources' columns of labels hold, on which they must agree."""
    if all(one.scheme is None for one in sources.values()):
        return None
    kinds: dict[str, str] = {}
    for name, one in sources.items():
        for target in one.scheme or ():
            if kinds.setdefault(target.name, target.kind) != target.kind:
                raise FusionZooError(f"source {name!r} takes {target.name!r} for {target.kind}")
    return kinds


class _Through:
    """The undecoded values of one source's modality, by its own index."""

    def __init__(self, dataset: PairedDataset, modality: str) -> None:
        self.dataset, self.modality = dataset, modality

    def __getitem__(self, index: int) -> Any:
        one = self.dataset
        row = int(one.rows[index])
        return one.reference(self.modality, row)

    def __len__(self) -> int:
        return len(self.dataset)


def _agreed(
    what: str,
    key: str,
    sources: Mapping[str, PairedDataset],
    rows: Mapping[str, Mapping[str, int]],
) -> str | None:
    """Return what the sources that have the id say, which must be one thing."""
    said = {}
    for name, one in sources.items():
        if key in rows[name]:
            if what not in one.table.column_names:
                continue
            value = one.table[what][int(one.rows[rows[name][key]])].as_py()
            if value is not None:
                said[name] = value
    if len(set(said.values())) > 1:
        raise FusionZooError(f"id {key!r}: the sources disagree on its {what}: {said}")
    return next(iter(said.values()), None)
