"""Which trials there are, which are done already, and running the rest.

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

from fusionzoo.config import BenchmarkConfig
from fusionzoo.errors import FusionZooError
from fusionzoo.fusion import FUSIONS
from fusionzoo.plugins import load_plugins
from fusionzoo.sources import code_digest, file_digest
from fusionzoo.version import __version__

from ..bench import Bench, Settings, Unit
from ..executors import work
from ..features.encode import key_of
from ..strategies import fusion_of, reads_tokens, settings_of
from . import store, trial
from .store import Cell
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


def units(bench: Bench, strategies: Sequence[str]) -> list[Unit]:
    """Return all units: every strategy on every fold with every seed, and its control."""
    cfg, found = bench.cfg, []
    seeds = tuple(range(cfg.seed, cfg.seed + cfg.seeds))
    for strategy in strategies:
        settings = settings_of(cfg, strategy)
        together = trial.can_stack(bench, strategy, settings)
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
    names = [fusion_of(unit.strategy), *unit.settings.values()]  # `base` names a fusion too
    digests = [code_digest(FUSIONS[x].cls) for x in names if isinstance(x, str) and x in FUSIONS]
    if cfg.mode == "finetune":  # of cached features the description has the encoder's
        digests += map(file_digest, load_plugins(cfg.plugins))
    return [digest for digest in digests if digest is not None]


def run_all(bench: Bench, strategies: Sequence[str]) -> list[Result]:
    """Work off what is not done yet; a unit that fails is reported and stops no other."""
    todo = units(bench, strategies)
    if bench.cfg.tune:
        todo = _tuned(bench, todo)
    results, missing = [], []
    for unit in todo:
        found = store.load(path_of(bench, unit))
        if found is None:
            missing.append(unit)
        else:
            results.append(Result(unit, found, None))
    # The costly ones first, so that no process waits long at the end.
    missing.sort(key=lambda unit: -_effort(unit))
    for unit, error in work(bench.cfg, bench, missing, _run_unit, "train"):
        found = store.load(path_of(bench, unit)) if error is None else None
        results.append(Result(unit, found or [], error))
    order = {unit: number for number, unit in enumerate(map(_name, todo))}
    return sorted(results, key=lambda result: order[_name(result.unit)])


def _run_unit(bench: Bench, unit: Unit) -> str | None:
    """Run and store a unit; return what went wrong, or None."""
    try:
        store.save(path_of(bench, unit), unit, trial.run(bench, unit))
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
    return (10.0 if reads_tokens(unit.strategy) else 1.0) * len(unit.seeds)
