"""Which jobs there are, which are done already, tuning, and running the rest."""

from __future__ import annotations

import json
import math
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fusionzoo.benchmark import job
from fusionzoo.config import split_name
from fusionzoo.errors import FusionZooError, __version__
from fusionzoo.evaluation.robustness import CORRUPTIONS
from fusionzoo.features import key_of
from fusionzoo.files import whole_lines
from fusionzoo.fusion import FUSIONS, fusion_info
from fusionzoo.plugins import code_digest, file_digest, load_plugins
from fusionzoo.structures import seed_of
from fusionzoo.targets import kind_of
from fusionzoo.training import run_folder
from fusionzoo.training.balance import BALANCE
from fusionzoo.training.multitask import targets_of
from fusionzoo.training.tasks import OBJECTIVES

from .bench import Bench, Settings, Unit, conditions
from .clock import Clock
from .executors import map_unordered
from .job import TrialResult
from .strategies import LINEAR, features_read, fusion_of, parse, reads_tokens, settings_of
from .train import FitResult

if TYPE_CHECKING:
    import optuna


DRAWN = 4  # proposals before the estimator sets in
WARM_UP = 3  # epochs before a proposal may be stopped
LEAST_DECAY = 1e-3  # the least weight decay that is drawn


def require_optuna() -> None:
    """Raise an error if Optuna is missing, before anything is computed."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise FusionZooError(
            "tuning needs Optuna: pip install 'fusionzoo[benchmark]', or --tune 0"
        ) from None


def tune(bench: Bench, unit: Unit) -> dict[str, Settings]:
    """Return the best `settings` and `training` of `cfg.tune` proposals; the first is the default.

    Both are empty where the default is best: that unit is the same as without tuning.
    The first proposals are drawn at random, the same ones for every strategy, the later ones by the
    tree-structured Parzen estimator (Bergstra et al. 2011). A proposal whose validation loss is
    above the median of the earlier ones at the same epoch is stopped. Each is written to a file and
    has its own seed, so an interrupted search continues with the proposals that it would have made
    anyway. The models of the first and of the best one are stored for the tests.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = _path(bench, unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = _read(path)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=WARM_UP)
    study = optuna.create_study(pruner=pruner)
    study.enqueue_trial(_defaults(bench, unit))
    models: dict[int, job.Trained] = {}  # by number
    for number in range(bench.cfg.tune or 0):
        seed = seed_of(bench.cfg.seed, number) % 2**32
        study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=DRAWN)
        proposal = study.ask()
        settings, training = _propose(proposal, bench, unit)
        if number == len(done):
            proposed = unit._replace(settings=settings, training=training)
            losses, model = _train(bench, proposed, proposal)
            if model is not None:
                models[number] = model
            line = {"losses": losses, "settings": settings, "training": training}
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            done.append(line)
        else:
            for epoch, loss in done[number]["losses"]:
                proposal.report(loss, epoch)
        study.tell(proposal, _least(done[number]["losses"]))
    numbers = range(min(len(done), bench.cfg.tune or 0))
    best = min(numbers, key=lambda number: _least(done[number]["losses"]))
    if 0 in models and bench.cfg.optim.weight_decay >= LEAST_DECAY:
        _store(models[0], bench, unit)
    if best == 0:
        return {"settings": {}, "training": {}}
    chosen = {key: done[best][key] for key in ("settings", "training")}
    if best in models:
        _store(models[best], bench, unit._replace(**chosen))
    return chosen


def _least(losses: Sequence[tuple[int, float]]) -> float:
    """Return the least validation loss; infinity where training diverged."""
    return min((loss for _, loss in losses), default=math.inf)


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the proposals evaluated so far; an incomplete last line, from a kill, is removed."""
    lines = whole_lines(path)
    path.write_text("".join(lines))
    return [json.loads(line) for line in lines]


def _defaults(bench: Bench, unit: Unit) -> Settings:
    cfg = bench.cfg
    start: Settings = {
        "lr": cfg.optim.lr,
        "weight_decay": max(cfg.optim.weight_decay, LEAST_DECAY),
        "epochs": cfg.epochs,
    }
    if has_dropout(unit):
        default = fusion_info(fusion_of(unit.strategy)).parameters["dropout"].default
        start["dropout"] = unit.settings.get("dropout", default)
    return start


def has_dropout(unit: Unit) -> bool:
    """Whether dropout changes anything: a fusion without hidden layers drops nothing."""
    parameters = fusion_info(fusion_of(unit.strategy)).parameters
    return "dropout" in parameters and len(unit.settings.get("hidden", (1,))) > 0


def _propose(proposal: optuna.Trial, bench: Bench, unit: Unit) -> tuple[Settings, Settings]:
    """Draw learning rate, weight decay and epochs, and dropout where the fusion has it.

    The rate lies between a third and ten times that of the settings, the epochs between a quarter
    and all of theirs.
    """
    lr, decay, epochs = bench.cfg.optim.lr, bench.cfg.optim.weight_decay, bench.cfg.epochs
    optim: Settings = {
        "lr": proposal.suggest_float("lr", lr / 3, lr * 10, log=True),
        "weight_decay": proposal.suggest_float(
            "weight_decay", LEAST_DECAY, max(3.0, decay), log=True
        ),
    }
    epochs = proposal.suggest_int("epochs", max(1, epochs // 4), epochs, log=True)
    settings = dict(unit.settings)
    if has_dropout(unit):
        settings["dropout"] = proposal.suggest_float("dropout", 0.0, 0.6)
    return settings, {"epochs": epochs, "optim": optim}


def _train(
    bench: Bench, unit: Unit, proposal: optuna.Trial
) -> tuple[list[tuple[int, float]], job.Trained | None]:
    """Train; return (epoch, validation loss) of each epoch, and the model if none stopped it.

    No losses: training diverged.
    """
    losses: list[tuple[int, float]] = []
    stopped = False

    def stop_early(epoch: int, loss: float) -> bool:
        nonlocal stopped
        if math.isfinite(loss):
            losses.append((epoch, loss))
            proposal.report(loss, epoch)
            stopped = proposal.should_prune()
        else:
            stopped = True
        return stopped

    start = time.perf_counter()
    try:
        models, feed = job.build(bench, unit)
        fits = job.train(bench, unit, models, feed, stop_early)
    except FusionZooError:
        return [], None  # the learning rate is too high
    return losses, None if stopped else job.Trained(fits, time.perf_counter() - start)


def trained_model(bench: Bench, unit: Unit) -> job.Trained | None:
    """Return the model of a unit that tuning has trained already; None if there is none."""
    path = _path(bench, unit, ".pt")
    if not path.is_file():
        return None
    contents = run_folder.read(path)
    return job.Trained([FitResult(**contents["fit"])], contents["seconds"])


def remove_models(bench: Bench) -> None:
    """Remove the models that tuning has stored."""
    for path in job.folder_of(bench.cfg.out).glob("tune-*.pt"):
        path.unlink()


def _store(model: job.Trained, bench: Bench, unit: Unit) -> None:
    if bench.cfg.mode == "finetune":
        return  # with their encoders the models of all strategies may fill the disk
    contents = {"fit": model.fits[0]._asdict(), "seconds": model.seconds}
    run_folder.write(contents, _path(bench, unit, ".pt"))


def _path(bench: Bench, unit: Unit, suffix: str = ".jsonl") -> Path:
    """Return the file of the proposals for a unit, or of its trained model."""
    cfg: Any = bench.cfg
    unit = unit._replace(whole=True)  # how a model is tested does not change its training
    features = features_read(bench, unit) or cfg.encoders
    key = [cfg.data, features, unit._asdict(), cfg.optim, cfg.epochs, cfg.patience, cfg.batch_size]
    key += [cfg.objective, cfg.targets, cfg.standardise, dict(bench.identity)]
    key += [cfg.balance_settings.get(name) for name in parse(unit.strategy).balance]
    name = re.sub(r"[^\w.-]+", "-", unit.strategy)
    return job.folder_of(cfg.out) / f"tune-{name}-f{unit.fold}-{key_of(key)[:12]}{suffix}"


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
        stacked = job.can_stack(bench, strategy, settings)
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
    code = _plugin_code(bench, unit)
    if code:
        key.append(code)
    name = re.sub(r"[^\w.-]", "-", unit.strategy) + ("-shuffled" if unit.shuffled else "")
    file_name = f"{name}-f{unit.fold}-s{unit.seeds[0]}-{key_of(key)[:12]}.npz"
    return job.folder_of(bench.cfg.out) / file_name


def _plugin_code(bench: Bench, unit: Unit) -> list[str]:
    """Return digests of the code that a unit runs and that is not fusionzoo's own."""
    cfg = bench.cfg
    names = [fusion_of(unit.strategy), *unit.settings.values()]  # `base` names a fusion too
    digests = [code_digest(FUSIONS[x].cls) for x in names if isinstance(x, str) and x in FUSIONS]
    digests += [code_digest(BALANCE[name].cls) for name in parse(unit.strategy).balance]
    for settings in (cfg.objective, *cfg.targets.values()):
        digests.append(code_digest(OBJECTIVES[split_name(settings, "objective")[0]].cls))
    digests += [code_digest(kind_of(kind)) for kind in (targets_of(cfg) or {}).values()]
    tried = dict.fromkeys((modality, name) for modality, name, _ in conditions(bench))
    digests += [code_digest(CORRUPTIONS[bench.modalities[m]][name]) for m, name in tried]
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
        trials = job.load(path_of(bench, unit))
        if trials is None:
            missing.append(unit)
        else:
            results.append(UnitResult(unit, trials, None))
    # The slowest ones first, so that no process is left waiting for one at the end.
    missing.sort(key=lambda unit: -_relative_cost(unit))
    for unit, error in map_unordered(bench.cfg, bench, missing, _run_unit, "train"):
        trials = job.load(path_of(bench, unit)) if error is None else None
        results.append(UnitResult(unit, trials or [], error))
    position = {_identity(unit): number for number, unit in enumerate(ordered)}
    return sorted(results, key=lambda result: position[_identity(result.unit)])


def _run_unit(bench: Bench, unit: Unit) -> str | None:
    """Run a unit and store its results; return the error message, or None."""
    try:
        job.save(path_of(bench, unit), unit, job.run_job(bench, unit, trained_model(bench, unit)))
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
    if len(unit.seeds) == 1 or job.can_stack(bench, unit.strategy, settings):
        return [unit]
    return [unit._replace(seeds=(seed,)) for seed in unit.seeds]


def _first_unit(bench: Bench, strategy: str, fold: int) -> Unit:
    settings = settings_of(bench.cfg, strategy)
    return Unit(strategy, fold, (bench.cfg.seed,), False, settings, {})


def _identity(unit: Unit) -> str:
    return key_of([unit._asdict()])


def _relative_cost(unit: Unit) -> float:
    return (10.0 if reads_tokens(unit.strategy) else 1.0) * len(unit.seeds)
