"""Which trials there are, which are done already, and running the rest.

A finished unit is a file under `<out>/cells`. Its name holds a hash of everything that determines
its results: a changed setting is another file, and a finished unit is never run again.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusionzoo.config import BenchmarkConfig
from fusionzoo.errors import FusionZooError
from fusionzoo.features.encode import key_of
from fusionzoo.fusion import FUSIONS
from fusionzoo.plugins import load_plugins
from fusionzoo.sources import code_digest, file_digest
from fusionzoo.training.balance import BALANCE
from fusionzoo.version import __version__

from ..bench import Bench, Settings, Unit
from ..clock import Clock
from ..executors import map_unordered
from ..strategies import LINEAR, features_read, fusion_of, parse, reads_tokens, settings_of
from . import store, trial
from .store import TrialResult
from .tune import remove_models, trained_model, tune

# Settings that do not change a trial: how and where it is run, and which other trials are run.
IRRELEVANT = {"fusions", "settings", "fusion", "balance", "balance_settings", "missing_train"}
IRRELEVANT |= {"damaged_train", "seeds", "controls", "tune", "analyses"}
IRRELEVANT |= {"jobs", "engine", "num_workers", "out", "combine", "plugins", "speed"}

# Raised when a metric of a trial is redefined: trials of earlier versions are then run again.
DEFINITIONS = 5


class UnitResult(NamedTuple):
    """A unit and the results of its trials, or the error that stopped it."""

    unit: Unit
    trials: list[TrialResult]
    error: str | None


class Results(NamedTuple):
    """The results that are reported and, where they were tuned, those of the default settings.

    With default settings each strategy is trained with the first seed only.
    """

    reported: list[UnitResult]
    untuned: list[UnitResult]


def units(bench: Bench, strategies: Sequence[str]) -> list[Unit]:
    """Return all units: every strategy on every fold with every seed, and its control."""
    cfg, listed = bench.cfg, []
    seeds = tuple(range(cfg.seed, cfg.seed + cfg.seeds))
    for strategy in strategies:
        settings = settings_of(cfg, strategy)
        stacked = trial.can_stack(bench, strategy, settings)
        for fold in range(len(bench.folds)):
            all_seeds = Unit(strategy, fold, seeds, False, settings, {})
            if stacked:
                listed.append(all_seeds)
            else:
                listed += [all_seeds._replace(seeds=(seed,)) for seed in seeds]
            if cfg.controls and has_control(strategy):
                listed.append(all_seeds._replace(seeds=seeds[:1], shuffled=True))
    return listed


def has_control(strategy: str) -> bool:
    """Whether a strategy is trained on shuffled labels too: fusions and modalities as such are."""
    named = parse(strategy)
    return not (named.balance or named.incomplete or named.base in LINEAR)


def path_of(bench: Bench, unit: Unit) -> Path:
    """Return the file of a unit's results."""
    settings = {k: v for k, v in asdict(bench.cfg).items() if k not in IRRELEVANT}
    key: list[Any] = [settings, unit._asdict(), features_read(bench, unit), __version__]
    key += [str(torch.__version__), DEFINITIONS, dict(bench.identity)]
    if not unit.shuffled and bench.corrupted:
        key += [str(condition) for condition in bench.corrupted[unit.fold]]
    key += [(name, bench.cfg.balance_settings.get(name)) for name in parse(unit.strategy).balance]
    code = _plugin_code(bench.cfg, unit)
    if code:
        key.append(code)
    name = re.sub(r"[^\w.-]", "-", unit.strategy) + ("-shuffled" if unit.shuffled else "")
    file_name = f"{name}-f{unit.fold}-s{unit.seeds[0]}-{key_of(key)[:12]}.npz"
    return store.folder_of(bench.cfg.out) / file_name


def _plugin_code(cfg: BenchmarkConfig, unit: Unit) -> list[str]:
    """Return digests of the code that a unit runs and that is not fusionzoo's own."""
    names = [fusion_of(unit.strategy), *unit.settings.values()]  # `base` names a fusion too
    digests = [code_digest(FUSIONS[x].cls) for x in names if isinstance(x, str) and x in FUSIONS]
    digests += [code_digest(BALANCE[name].cls) for name in parse(unit.strategy).balance]
    if cfg.mode == "finetune":  # of cached features the description has the encoder's
        digests += map(file_digest, load_plugins(cfg.plugins))
    return [digest for digest in digests if digest is not None]


def run_all(bench: Bench, strategies: Sequence[str], clock: Clock | None = None) -> Results:
    """Run all units that are not done yet; one that fails is reported and stops no other."""
    if bench.cfg.mode == "probe":
        bench = replace(bench, dataset=None)  # trials read cached features: send workers no more
    clock = clock or Clock()
    plain = units(bench, strategies)
    if not bench.cfg.tune:
        results = Results(_run(bench, plain), [])
        clock.lap("training and tests")
        return results
    chosen = _tune_all(bench, plain)
    clock.lap("tuning")
    errors = {pair: x for pair, x in chosen.items() if isinstance(x, str)}
    failed = [
        UnitResult(unit, [], errors[unit.strategy, unit.fold])
        for unit in plain
        if (unit.strategy, unit.fold) in errors
    ]
    plain = [unit for unit in plain if (unit.strategy, unit.fold) not in errors]
    reported = [tuned for unit in plain for tuned in _tuned(bench, unit, chosen)]
    untuned = [  # the test score of the first seed is enough
        unit if unit in reported else unit._replace(seeds=unit.seeds[:1], whole=False)
        for unit in plain
        if unit.seeds[0] == bench.cfg.seed and not unit.shuffled and unit.strategy not in LINEAR
    ]
    every = _run(bench, [*reported, *(unit for unit in untuned if unit not in reported)])
    remove_models(bench)
    clock.lap("training and tests")
    result_of = {_identity(result.unit): result for result in every}
    return Results(
        [*(result_of[_identity(unit)] for unit in reported), *failed],
        [result_of[_identity(unit)] for unit in untuned],
    )


def _run(bench: Bench, ordered: Sequence[Unit]) -> list[UnitResult]:
    """Run the units that are not done yet; return all results in the order of the units."""
    results, missing = [], []
    for unit in ordered:
        trials = store.load(path_of(bench, unit))
        if trials is None:
            missing.append(unit)
        else:
            results.append(UnitResult(unit, trials, None))
    # The slowest ones first, so that no process is left waiting for one at the end.
    missing.sort(key=lambda unit: -_relative_cost(unit))
    for unit, error in map_unordered(bench.cfg, bench, missing, _run_unit, "train"):
        trials = store.load(path_of(bench, unit)) if error is None else None
        results.append(UnitResult(unit, trials or [], error))
    position = {_identity(unit): number for number, unit in enumerate(ordered)}
    return sorted(results, key=lambda result: position[_identity(result.unit)])


def _run_unit(bench: Bench, unit: Unit) -> str | None:
    """Run a unit and store its results; return the error message, or None."""
    try:
        store.save(path_of(bench, unit), unit, trial.run(bench, unit, trained_model(bench, unit)))
    except Exception as error:  # shown in the report; the other strategies are run
        return _message(error)
    return None


def _message(error: Exception) -> str:
    """Return an error with its place, unless it is the user's."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if isinstance(error, FusionZooError) else f" ({frame.filename}:{frame.lineno})"
    return f"{type(error).__name__}: {error}{where}"


def _tune_all(bench: Bench, plain: Sequence[Unit]) -> dict[tuple[str, int], Settings | str]:
    """Tune every strategy on every fold: the chosen settings, or the error that stopped it."""
    pairs = list(dict.fromkeys((u.strategy, u.fold) for u in plain if u.strategy not in LINEAR))
    pairs.sort(key=lambda pair: -_relative_cost(_first_unit(bench, *pair)))
    return dict(map_unordered(bench.cfg, bench, pairs, _tune, "tune"))


def _tune(bench: Bench, pair: tuple[str, int]) -> Settings | str:
    unit = _first_unit(bench, *pair)
    try:
        return tune(bench, unit)
    except Exception as error:  # shown in the report; the other strategies are run
        return _message(error)


def _tuned(
    bench: Bench, unit: Unit, chosen: Mapping[tuple[str, int], Settings | str]
) -> list[Unit]:
    """Return the unit with the chosen settings; seeds that no longer stack are units apart."""
    best = chosen.get((unit.strategy, unit.fold))
    if best is None or isinstance(best, str):
        return [unit]
    settings = {**unit.settings, **best["settings"]}
    unit = unit._replace(settings=settings, training=best["training"])
    if len(unit.seeds) == 1 or trial.can_stack(bench, unit.strategy, settings):
        return [unit]
    return [unit._replace(seeds=(seed,)) for seed in unit.seeds]


def _first_unit(bench: Bench, strategy: str, fold: int) -> Unit:
    settings = settings_of(bench.cfg, strategy)
    return Unit(strategy, fold, (bench.cfg.seed,), False, settings, {})


def _identity(unit: Unit) -> str:
    return key_of([unit._asdict()])


def _relative_cost(unit: Unit) -> float:
    return (10.0 if reads_tokens(unit.strategy) else 1.0) * len(unit.seeds)
