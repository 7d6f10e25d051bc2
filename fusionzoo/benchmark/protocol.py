"""Which cells there are, who works them off, and what is done already.

A finished unit is a file under `<out>/cells`; its name holds a hash of all that determines it, so a
changed setting is another file, and what is there is never run again.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from fusionzoo import __version__
from fusionzoo.cards import FAMILIES
from fusionzoo.config import BenchmarkConfig
from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.fusion import FUSIONS, fusion_info, list_fusions
from fusionzoo.plugins import load_plugins
from fusionzoo.sources import code_digest, file_digest

from . import cells
from .cells import ALONE, Cell, Settings, Unit
from .engines import work
from .features import key_of
from .prepare import Bench
from .tune import tune

# What does not change a cell: where and how it is run, and what else is run.
ELSEWHERE = {"fusions", "settings", "fusion", "seeds", "controls", "tune"}
ELSEWHERE |= {"jobs", "engine", "num_workers", "out", "combine", "plugins"}

# Raise it when a figure in a cell is defined anew: cells of before are then run again.
DEFINITIONS = 2


class Result(NamedTuple):
    """A unit and its cells, or why there are none."""

    unit: Unit
    cells: list[Cell]
    error: str | None


def choose(wanted: str | Sequence[str], modalities: int) -> list[str]:
    """Resolve names and families; an unknown one is named before anything is computed."""
    words = wanted.split(",") if isinstance(wanted, str) else list(wanted)
    found: list[str] = []
    for word in (word.strip() for word in words):
        if word == "all" or word in FAMILIES:
            family = list_fusions(None if word == "all" else word)
            found += [name for name in family if fusion_info(name).at_least <= modalities]
        elif word not in FUSIONS:
            near = did_you_mean(word, [*list_fusions(), *FAMILIES, "all"])
            raise FusionZooError(f"unknown fusion {word!r}.{near} `fusionzoo zoo` lists all.")
        else:
            found.append(word)
    for name in found:
        if fusion_info(name).at_least > modalities:
            raise FusionZooError(
                f"{name} needs {fusion_info(name).at_least} modalities; the data has {modalities}"
            )
    return list(dict.fromkeys(found))


def settings_of(cfg: BenchmarkConfig, strategy: str) -> Settings:
    """Return a strategy's settings: those of every fusion that it has, then its own."""
    name = cells.fusion_of(strategy)
    known = {"dim", *fusion_info(name).parameters}
    common = {key: value for key, value in cfg.fusion.items() if key in known}
    if strategy.startswith(ALONE):
        common["hidden"] = ()  # a linear head: the strongest probe of one encoder that we measured
    own = dict(cfg.settings.get(strategy, {}))
    for key in own:
        if key not in known:
            raise FusionZooError(
                f"--settings.{strategy}.{key}: {name} has no such setting."
                f"{did_you_mean(key, known)} It has: {', '.join(sorted(known))}."
            )
    return common | own


def check(cfg: BenchmarkConfig, strategies: Sequence[str]) -> None:
    """Refuse settings that no strategy has, before anything is computed."""
    for name in cfg.settings:
        if name not in FUSIONS and not name.startswith(ALONE):
            raise FusionZooError(
                f"--settings.{name}: unknown fusion{did_you_mean(name, strategies)}"
            )
    for key in cfg.fusion:
        names = [*list_fusions(), *map(cells.fusion_of, strategies)]
        if not any(key in {"dim", *fusion_info(n).parameters} for n in names):
            raise FusionZooError(f"--fusion.{key}: no fusion has this setting")
    for name in strategies:
        settings_of(cfg, name)
    optim = cfg.optim
    if "plateau" in (optim.schedule, *optim.modality_schedule.values()):
        raise FusionZooError("--optim.schedule plateau: here seeds share a rate; choose another")
    for key in ("unfreeze_at_epoch", "gradual_unfreeze"):
        if getattr(optim, key):
            raise FusionZooError(f"--optim.{key} is a setting of train.py; benchmark.py has none")


def units(bench: Bench, strategies: Sequence[str]) -> list[Unit]:
    """Return all units: every strategy on every fold with every seed, and its control."""
    cfg, found = bench.cfg, []
    seeds = tuple(range(cfg.seed, cfg.seed + cfg.seeds))
    for strategy in strategies:
        settings = settings_of(cfg, strategy)
        together = cells.can_stack(bench, strategy, settings)
        for fold in range(len(bench.folds)):
            whole = Unit(strategy, fold, seeds, False, settings, {})
            if together:
                found.append(whole)
            else:
                found += [whole._replace(seeds=(seed,)) for seed in seeds]
            if cfg.controls:
                found.append(whole._replace(seeds=seeds[:1], shuffled=True))
    return found


def path_of(bench: Bench, unit: Unit) -> Path:
    """Return where a unit's cells are kept."""
    stable = {k: v for k, v in asdict(bench.cfg).items() if k not in ELSEWHERE}
    known = bench.features[unit.fold] if bench.features else {}
    about = [stable, unit._asdict(), known, __version__, str(torch.__version__), DEFINITIONS]
    if not unit.shuffled and bench.corrupted:
        about.append([str(key) for key in bench.corrupted[unit.fold]])
    code = _plugin_code(bench.cfg, unit)
    if code:
        about.append(code)
    name = re.sub(r"[^\w.-]", "-", unit.strategy) + ("-shuffled" if unit.shuffled else "")
    return (
        Path(bench.cfg.out)
        / "cells"
        / f"{name}-f{unit.fold}-s{unit.seeds[0]}-{key_of(about)[:12]}.npz"
    )


def _plugin_code(cfg: BenchmarkConfig, unit: Unit) -> list[str]:
    """Return digests of the code that a unit runs and that is not fusionzoo's own."""
    names = [cells.fusion_of(unit.strategy), *unit.settings.values()]  # `base` names a fusion too
    found = [code_digest(FUSIONS[x].cls) for x in names if isinstance(x, str) and x in FUSIONS]
    if cfg.mode == "finetune":  # of cached features the description has the encoder's
        found += map(file_digest, load_plugins(cfg.plugins))
    return [code for code in found if code is not None]


def run_all(bench: Bench, strategies: Sequence[str]) -> list[Result]:
    """Work off what is not done yet; a unit that fails is reported and stops no other."""
    todo = units(bench, strategies)
    if bench.cfg.tune:
        todo = _tuned(bench, todo)
    results, missing = [], []
    for unit in todo:
        found = cells.load(path_of(bench, unit))
        if found is None:
            missing.append(unit)
        else:
            results.append(Result(unit, found, None))
    # The costly ones first, so that no process waits long at the end.
    missing.sort(key=lambda unit: -_effort(unit))
    for unit, error in work(bench.cfg, bench, missing, _run_unit, "train"):
        found = cells.load(path_of(bench, unit)) if error is None else None
        results.append(Result(unit, found or [], error))
    order = {unit: number for number, unit in enumerate(map(_name, todo))}
    return sorted(results, key=lambda result: order[_name(result.unit)])


def _run_unit(bench: Bench, unit: Unit) -> str | None:
    """Run and store a unit; return what went wrong, or None."""
    try:
        cells.save(path_of(bench, unit), unit, cells.run(bench, unit))
    except Exception as error:  # reported in the table; the other strategies go on
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, FusionZooError) else f" ({last.filename}:{last.lineno})"
        return f"{type(error).__name__}: {error}{where}"
    return None


def _tuned(bench: Bench, todo: Sequence[Unit]) -> list[Unit]:
    """Give every strategy the same number of trials on validation data, and keep its best."""
    names = list(dict.fromkeys((unit.strategy, unit.fold) for unit in todo))
    best = dict(work(bench.cfg, bench, names, _tune, "tune"))
    return [
        unit._replace(
            settings={**unit.settings, **best[unit.strategy, unit.fold]["settings"]},
            optim=best[unit.strategy, unit.fold]["optim"],
        )
        for unit in todo
    ]


def _tune(bench: Bench, name: tuple[str, int]) -> dict[str, Settings]:
    strategy, fold = name
    seeds = (bench.cfg.seed,)
    return tune(bench, Unit(strategy, fold, seeds, False, settings_of(bench.cfg, strategy), {}))


def _name(unit: Unit) -> tuple[str, int, tuple[int, ...], bool]:
    return unit.strategy, unit.fold, unit.seeds, unit.shuffled


def _effort(unit: Unit) -> float:
    return (10.0 if cells.reads_tokens(unit.strategy) else 1.0) * len(unit.seeds)
