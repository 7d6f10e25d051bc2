"""Columns and modalities of sources to join: on which they are matched, what they are called."""

from __future__ import annotations

from collections.abc import Mapping

from fusionzoo.errors import FusionZooError, did_you_mean

from .table import SampleTable


def key_columns(sources: Mapping[str, SampleTable], on: str | Mapping[str, str]) -> dict[str, str]:
    """Return the column of each source on which it is joined."""
    if not isinstance(on, str):
        for name in on:
            if name not in sources:
                hint = did_you_mean(name, sources)
                raise FusionZooError(f"on: there is no source {name!r} to join.{hint}")
    columns = {name: on if isinstance(on, str) else on.get(name, "id") for name in sources}
    for name, source in sources.items():
        known = [x for x in source.table.column_names if x not in source.modalities]
        if columns[name] not in known:
            raise FusionZooError(
                f"source {name!r} ({source.source}) has no column {columns[name]!r} to join on."
                f"{did_you_mean(columns[name], known)} It has: {', '.join(known)};"
                " on={'source': 'column'} names a column for each source"
            )
    return columns


def modality_names(sources: Mapping[str, SampleTable]) -> dict[str, dict[str, str]]:
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
