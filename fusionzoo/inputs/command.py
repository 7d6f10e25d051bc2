"""The data of a command: explicit settings of them, and what its targets hold.

Imports no torch: a mistake in a command or a table is answered before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fusionzoo.config import BenchmarkConfig, RunConfig
from fusionzoo.datasets.opening.complete import complete
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.datasets.sources.table_files import can_read
from fusionzoo.datasets.tables.splits import makers_of_splits
from fusionzoo.datasets.tables.table import word_list
from fusionzoo.errors import FusionZooError
from fusionzoo.ground.plugins import load_plugins

R = TypeVar("R", RunConfig, BenchmarkConfig)
CLASSIFICATION = {"name": "classification"}


def complete_run(cfg: R, data: DataSpec | None = None) -> tuple[R, DataSpec]:
    """Return `cfg` with explicit settings of the data and of what `cfg.target` holds, and the data;
    `data` replace those that `cfg` names. Its plug-ins are loaded: one may hold the data set."""
    load_plugins(cfg.plugins)
    data = data or DataSpec(settings=cfg.data)
    if data.is_complete:
        return cfg, data
    if data.dataset is not None:
        if cfg.target:
            raise FusionZooError(
                "target names a column of a table; a PairedDataset has its targets: targets="
            )
        return cfg, data
    settings, splits = data.settings, list[str]()
    if isinstance(cfg, BenchmarkConfig):
        settings = check_splits(cfg, settings)
        splits = [word for word in split_words(cfg) if not is_split_file(word)]
    known, infer_kinds = tuple(cfg.targets), cfg.objective == CLASSIFICATION
    spec = complete(
        settings, cfg.target, known=known, infer_kinds=infer_kinds, to_train=True, splits=splits
    )
    spec = replace(spec, is_complete=True)
    cfg = with_targets(cfg, spec)
    return (cfg if spec.is_in_memory else replace(cfg, data=spec.settings)), spec


def check_splits(cfg: BenchmarkConfig, data: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a benchmark's data; of random splits those of the first seed.

    Raise an error for settings that make the splits in two ways.
    """
    folds = "" if cfg.folds is None else cfg.folds
    named = {"--folds": folds, "--splits": cfg.splits, "--repeats": cfg.repeats or ""}
    chosen = [f"{flag} {value}" for flag, value in named.items() if value not in ("", [])]
    if len(chosen) > 1:
        raise FusionZooError(f"{' and '.join(chosen)} both say how to split the data: name one")
    makers = makers_of_splits(data) + ["val_share"] * bool(data.get("val_share"))
    if cfg.repeats is not None:
        if data.get("random_splits") == cfg.seed:
            makers.remove("random_splits")
        data = {**data, "random_splits": cfg.seed}
    if makers and (cfg.repeats or cfg.splits):
        name = makers[0]
        raise FusionZooError(
            f"--data.{name} {data[name]} and {chosen[0]} both say how to split the data: name one"
        )
    return data


def split_words(cfg: BenchmarkConfig) -> list[str]:
    """Return the files and columns that `--splits` names."""
    return word_list(cfg.splits) if cfg.splits else []


def is_split_file(word: str) -> bool:
    """Whether a word of `--splits` names a file, by its ending or because it is there."""
    return can_read(Path(word)) or Path(word).expanduser().is_file()


def required(data: DataSpec) -> DataSpec:
    """Return the data of a command, which must be named."""
    if data.dataset is None and not data.settings:
        raise FusionZooError(
            "--data is missing: a data set's name, a file, a folder or a URL of shards comes first"
        )
    return data


def complete_data(data: DataSpec, target: str | Sequence[str] = ()) -> DataSpec:
    """Return the data of a command that does not train, with explicit settings."""
    if required(data).dataset is not None:
        return data
    spec = complete(data.settings, target)
    kinds = spec.target_kinds
    if spec.has_one_target:
        kinds = {"target": next(iter(kinds.values()))}
    if not kinds or kinds == {"target": "classification"}:
        return spec
    return replace(spec, settings={**spec.settings, "targets": kinds})


def with_targets(cfg: R, spec: DataSpec) -> R:
    """Return `cfg` with the objective of each target that was found out."""
    kinds = spec.target_kinds
    cfg = replace(cfg, target="")
    if spec.has_one_target and not cfg.targets:
        return replace(cfg, objective={"name": next(iter(kinds.values()))})
    if not kinds:
        return cfg
    return replace(cfg, targets={**{x: {"name": kind} for x, kind in kinds.items()}, **cfg.targets})
