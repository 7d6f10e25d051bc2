"""Join a manifest with further sources: `--data.join.audio other.csv --data.on id`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fusionzoo.errors import FusionZooError

from ..join import join_arguments
from ..join_rows import How
from ..paired import PairedDataset
from ..refusals import part_of_join

MAIN = "root"  # the name of the manifest itself among the sources


def join_sources(
    open_root: Callable[[], PairedDataset],
    join: Mapping[str, Any],
    open_source: Callable[..., PairedDataset],
    *,
    on: str | Mapping[str, str],
    how: How,
    targets: Mapping[str, str] | None,
    drop_empty: bool,
) -> PairedDataset:
    """Join the root with the sources in `join`: paths, settings of a manifest, tables or data sets.

    The modalities of the root keep their names; a source's only modality gets the source's name.
    """
    with part_of_join(targets):
        main = open_root()
        sources = {MAIN: main}
        for name, source in join.items():
            if name == MAIN or name in main.modalities:
                raise FusionZooError(
                    f"--data.join.{name}: the manifest itself has {name!r}: give the source another"
                    " name, or leave that column out with --data.modalities of its own"
                )
            sources[name] = _open(name, source, open_source)
    names: dict[str, Mapping[str, str]] = {MAIN: {x: x for x in main.modalities}}
    for name in join:
        names[name] = _names(name, sources[name], {x for by in names.values() for x in by})
    labels = [name for name in targets or () if name != "target"]
    joined = join_arguments(sources, how, on, names, labels, drop_empty)
    return PairedDataset(**{**joined, "targets": targets})


def _names(name: str, source: PairedDataset, taken: set[str]) -> Mapping[str, str]:
    if name in source.modalities:
        return {name: name}
    if len(source.modalities) == 1:
        return {name: next(iter(source.modalities))}
    return {f"{name}_{x}" if x in taken else x: x for x in source.modalities}


def _open(name: str, source: Any, open_source: Callable[..., PairedDataset]) -> PairedDataset:
    if isinstance(source, PairedDataset):
        return source
    if not isinstance(source, Mapping):
        source = {"root": source}
    if not isinstance(source.get("root", ""), str) or source.get("root"):
        return open_source(**source)
    raise FusionZooError(f"--data.join.{name} names no file: --data.join.{name}.root names it")
