"""Which jobs there are, which are done already, tuning, and running the rest."""

from __future__ import annotations

import json
import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fusionzoo.benchmark import examine, jobs, store
from fusionzoo.config import split_name
from fusionzoo.errors import FusionZooError, explained
from fusionzoo.evaluation.metrics import metrics_of
from fusionzoo.evaluation.robustness import CORRUPTIONS
from fusionzoo.evaluation.statistics import by_group
from fusionzoo.features.encode import key_of
from fusionzoo.files import whole_lines
from fusionzoo.fusion import FUSIONS, fusion_info
from fusionzoo.ground.plugins import code_digest, file_digest, load_plugins
from fusionzoo.ground.version import __version__
from fusionzoo.structures import seed_of
from fusionzoo.targets import kind_of
from fusionzoo.training.balance import BALANCE
from fusionzoo.training.multitask import targets_of
from fusionzoo.training.tasks import OBJECTIVES

from .bench import CTRL_C, Bench, Job, Settings, conditions
from .candidates import (
    features_read,
    fusion_of,
    is_costly,
    is_fitted,
    is_single,
    parse,
    settings_of,
)
from .executors import OutOfTimeError, map_unordered
from .prepare import encode_all_damaged
from .store import SeedResult

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

P = TypeVar("P")  # a piece of work


DRAWN = 5  # tuning trials before the estimator sets in, the default settings among them
SPACE = 2  # raised when the search space changes: trials of earlier versions are then made again
DECAYS = (1e-3, 10.0)  # range of the weight decay
RATES = (0.1, 10.0)  # range of the learning rate, as multiples of that of the settings
# Settings that do not change a job: how and where it is run, and which other jobs are run.
IRRELEVANT = {"fusions", "settings", "fusion", "balance", "balance_settings", "seeds", "controls"}
IRRELEVANT |= {"tune", "baselines", "external", "figures", "shard"}
IRRELEVANT |= {"splits", "repeats"}  # the rows of the split count
IRRELEVANT |= {"time_limit", "jobs", "num_workers", "out", "combine", "plugins"}
# Raised when a metric of a job is redefined: jobs of earlier versions are then run again.
DEFINITIONS = 6
STAGES = ("first seed", "other seeds", "tuning", "damaged samples")
FIRST_SEED, OTHER_SEEDS, TUNING, DAMAGED = STAGES
FAR = 3.0  # standard errors below the best candidate from which one is tuned last


def require_optuna() -> None:
    """Raise an error if Optuna is missing, before anything is computed."""
    words = "tuning needs Optuna, pip install 'fusionzoo[benchmark]', or --tune 0"
    with explained(words, ImportError):
        import optuna  # noqa: F401


class TunedSettings(NamedTuple):
    """The settings that tuning chose; both are empty where the default settings stay."""

    settings: Settings
    training: Settings


def tune(bench: Bench, job: Job) -> tuple[TunedSettings, jobs.TrainedModels | None]:
    """Try `cfg.tune` settings of a job; return the chosen ones and their model, if it is at hand.

    The default settings are the first, with the losses of the job that is done already. The next
    ones change the structure only (`linear_skip`, hidden layers); then some are drawn at random,
    the same for every candidate, the later ones by the tree-structured Parzen estimator (Bergstra
    et al. 2011). None is stopped early: a low learning rate has a high loss for many epochs. Each
    is written to a file and has its own seed, so an interrupted search continues with the trials
    that it would have made anyway.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = _path(bench, job)
    path.parent.mkdir(parents=True, exist_ok=True)
    done, space = _read(path), _space(bench, job)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in done))  # without half a line
    default = _default_losses(bench, job)
    study = optuna.create_study()
    study.add_trial(
        optuna.trial.create_trial(
            params=_default_values(bench, job, space),
            distributions=space,
            value=_mean_loss(bench, job, default),
        )
    )
    for values in _other_structures(bench, job, space):
        study.enqueue_trial(values)
    models: dict[int, jobs.TrainedModels] = {}  # by line
    for line in range((bench.cfg.tune or 1) - 1):
        seed = seed_of(bench.cfg.seed, line) % 2**32
        study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=DRAWN)
        trial = study.ask(space)
        if line == len(done):
            settings, training = _settings_of(trial.params, job)
            trained = _train(bench, job._replace(settings=settings, training=training))
            if trained is not None:
                models[line] = trained
            losses = [] if trained is None else trained.fits[0].losses.tolist()
            entry = {"settings": settings, "training": training, "losses": losses}
            with path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            done.append(entry)
        losses = done[line]["losses"]
        study.tell(trial, _mean_loss(bench, job, np.array(losses)) if losses else math.inf)
    best = _best(bench, job, default, done)
    return _tuned_by(done, best), models.get(-1 if best is None else best)


def chosen_settings(bench: Bench, job: Job) -> TunedSettings | None:
    """Return what tuning chose for a job; None if it is not done."""
    done, trials = _read(_path(bench, job)), (bench.cfg.tune or 1) - 1
    if len(done) < trials or store.load(path_of(bench, job)) is None:
        return None
    done = done[:trials]
    return _tuned_by(done, _best(bench, job, _default_losses(bench, job), done))


def _tuned_by(done: Sequence[dict[str, Any]], best: int | None) -> TunedSettings:
    return (
        TunedSettings({}, {})
        if best is None
        else TunedSettings(done[best]["settings"], done[best]["training"])
    )


def _best(
    bench: Bench, job: Job, default: NDArray[np.float64], done: Sequence[dict[str, Any]]
) -> int | None:
    """Return the line of the best settings; None if they are not better than the default ones.

    The mean loss of the validation samples must fall by more than its standard error, paired by
    sample, or by group where the data has groups. The least of several noisy means is too low.
    """
    losses = [np.array(entry["losses"] or [math.inf] * len(default)) for entry in done]
    if not losses:
        return None
    best = min(range(len(losses)), key=lambda line: _mean_loss(bench, job, losses[line]))
    if not math.isfinite(losses[best].mean()):
        return None
    val = bench.folds[job.fold].val.tolist()
    groups = [bench.groups[row] for row in val] if bench.groups else None
    gain = by_group((default - losses[best])[None], groups, _val_weights(bench, job))[0]
    error = gain.std(ddof=1) / math.sqrt(len(gain)) if len(gain) > 1 else math.inf
    return best if gain.mean() > error else None


def _val_weights(bench: Bench, job: Job) -> NDArray[np.float64] | None:
    """Return how much the validation samples of a job's fold count, (N,); None: all alike."""
    weights = bench.weights_of(bench.folds[job.fold].val)
    return None if weights is None else weights.double().numpy()


def _mean_loss(bench: Bench, job: Job, losses: NDArray[np.float64]) -> float:
    """Return the mean of the validation samples' losses, each counting by its weight."""
    weights = _val_weights(bench, job)
    if weights is not None and not np.isfinite(losses).all():
        return math.inf  # also where the weight of an infinite loss is 0
    return float(np.average(losses, weights=weights))


def _default_losses(bench: Bench, job: Job) -> NDArray[np.float64]:
    """Return the validation samples' losses of a job that is done, (N,)."""
    for result in store.load(path_of(bench, job)) or ():
        if result.val_losses is not None:
            return result.val_losses.astype(np.float64)
    raise FusionZooError(f"{job.candidate} is not trained with its default settings")


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the tuning trials that are done; half a last line, from a kill, does not count."""
    return [json.loads(line) for line in whole_lines(path)]


def _space(bench: Bench, job: Job) -> dict[str, BaseDistribution]:
    """Return what is tuned: rate, decay and epochs; dropout, hidden layers and `linear_skip`.

    The epochs lie between a quarter and all of those of the settings. The last three are left out
    for a fusion that does not have them.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    lr, epochs = bench.cfg.optim.lr, bench.cfg.epochs
    space: dict[str, BaseDistribution] = {
        "lr": FloatDistribution(lr * RATES[0], lr * RATES[1], log=True),
        "weight_decay": FloatDistribution(*DECAYS, log=True),
        "epochs": IntDistribution(max(1, epochs // 4), epochs, log=True),
    }
    if has_dropout(job):
        space["dropout"] = FloatDistribution(0.0, 0.6)
    if len(choices := _hidden_choices(job)) > 1:
        space["hidden"] = CategoricalDistribution([json.dumps(widths) for widths in choices])
    if _has_linear_skip(bench, job):
        space["linear_skip"] = CategoricalDistribution((False, True))
    return space


def _default_values(
    bench: Bench, job: Job, space: Mapping[str, BaseDistribution]
) -> dict[str, Any]:
    """Return the default settings as a point of the space, at its edge where they lie outside."""
    cfg = bench.cfg
    values: dict[str, Any] = {
        "lr": cfg.optim.lr,
        "weight_decay": min(max(cfg.optim.weight_decay, DECAYS[0]), DECAYS[1]),
        "epochs": cfg.epochs,
        "linear_skip": job.settings.get("linear_skip", False),
    }
    if "dropout" in space:
        default = fusion_info(fusion_of(job.candidate)).parameters["dropout"].default
        values["dropout"] = min(job.settings.get("dropout", default), 0.6)
    if "hidden" in space:
        values["hidden"] = json.dumps(_hidden_choices(job)[0])
    return {name: values[name] for name in space}


def _other_structures(
    bench: Bench, job: Job, space: Mapping[str, BaseDistribution]
) -> list[dict[str, Any]]:
    """Return points that differ from the default settings in `linear_skip` or hidden layers."""
    default = _default_values(bench, job, space)
    points = [{**default, "hidden": json.dumps(x)} for x in _hidden_choices(job)[1:]]
    if "linear_skip" in space:
        points.insert(0, {**default, "linear_skip": not default["linear_skip"]})
    return points


def has_dropout(job: Job) -> bool:
    """Whether dropout changes anything: a fusion without hidden layers drops nothing."""
    parameters = fusion_info(fusion_of(job.candidate)).parameters
    return "dropout" in parameters and len(job.settings.get("hidden", (1,))) > 0


def _hidden_choices(job: Job) -> list[list[int]]:
    """Return lists of hidden widths to try, that of the job first; [] where there is no choice.

    Besides it these are no hidden layer and the fusion's own default. A single modality has a
    linear head.
    """
    parameter = fusion_info(fusion_of(job.candidate)).parameters.get("hidden")
    if parameter is None or not isinstance(parameter.default, tuple) or is_single(job.candidate):
        return []
    choices: list[list[int]] = []
    for widths in (job.settings.get("hidden", parameter.default), (), parameter.default):
        if list(widths) not in choices:
            choices.append(list(widths))
    return choices


def _has_linear_skip(bench: Bench, job: Job) -> bool:
    """Whether a linear path may be added: on frozen features, to a fusion that can have one."""
    if bench.cfg.mode != "probe" or is_single(job.candidate):  # a single modality's head is linear
        return False
    with torch.random.fork_rng(devices=[]):
        try:
            jobs.build_fusion(bench, job.candidate, {**job.settings, "linear_skip": True})
        except FusionZooError:  # one that has no layers which could start at zero
            return False
    return True


def _settings_of(values: Mapping[str, Any], job: Job) -> tuple[Settings, Settings]:
    """Return the settings of the fusion and of training at a point of the space.

    Default settings that stay are not listed, as stored results are found by the settings.
    """
    settings = dict(job.settings)
    if "dropout" in values:
        settings["dropout"] = values["dropout"]
    if "hidden" in values and (widths := json.loads(values["hidden"])) != _hidden_choices(job)[0]:
        settings["hidden"] = widths
    if values.get("linear_skip", False) != settings.get("linear_skip", False):
        settings["linear_skip"] = values["linear_skip"]
    optim = {key: values[key] for key in ("lr", "weight_decay")}
    return settings, {"epochs": values["epochs"], "optim": optim}


def _train(bench: Bench, job: Job) -> jobs.TrainedModels | None:
    """Train on the training split; None if training diverged."""
    try:
        return jobs.train(bench, job, *jobs.build(bench, job))
    except FusionZooError:
        return None  # the learning rate is too high


def _path(bench: Bench, job: Job) -> Path:
    """Return the file of the tuning trials of a job."""
    return path_of(bench, job).with_suffix(f".space{SPACE}.jsonl")


class JobResult(NamedTuple):
    """A job and the results of its seeds, or the error that stopped it."""

    job: Job
    seed_results: list[SeedResult]
    error: str | None


class Results(NamedTuple):
    """The results that are reported and, where they were tuned, those of the default settings."""

    reported: list[JobResult]
    untuned: list[JobResult]


class Stage(NamedTuple):
    """What a benchmark has found so far."""

    name: str  # of STAGES
    results: Results
    stopped: str  # what stopped it: "Ctrl-C", "the time limit of 20m"; empty: it is whole
    last: bool  # whether it is the last one
    part: bool  # whether it is not done for all candidates and folds
    tuned: tuple[str, ...]  # candidates that are tuned on every fold


def list_jobs(bench: Bench, candidates: Sequence[str]) -> list[Job]:
    """Return all jobs with the default settings: first seeds, other seeds and controls."""
    return [*_first_seeds(bench, candidates), *_other_seeds(bench, candidates)]


def _seeds(bench: Bench) -> tuple[int, ...]:
    return tuple(range(bench.cfg.seed, bench.cfg.seed + bench.cfg.seeds))


def _first_seeds(bench: Bench, candidates: Sequence[str]) -> list[Job]:
    """Return the jobs of the first seed; fitted models have none and are done for all."""
    return [
        first_job(bench, candidate, fold)._replace(
            seeds=_seeds(bench)[: None if is_fitted(candidate) else 1]
        )
        for candidate in candidates
        for fold in range(len(bench.folds))
    ]


def _other_seeds(bench: Bench, candidates: Sequence[str]) -> list[Job]:
    """Return the jobs of the other seeds, and the control of each candidate."""
    listed = []
    for candidate in candidates:
        for fold in range(len(bench.folds)):
            job = first_job(bench, candidate, fold)
            if not is_fitted(candidate):
                listed += _by_seeds(bench, job._replace(seeds=_seeds(bench)[1:]))
            # Fusions and modalities as such are trained on shuffled labels too.
            if bench.cfg.controls and not (parse(candidate).balance or is_fitted(candidate)):
                listed.append(job._replace(shuffled=True))
    return listed


def _by_seeds(bench: Bench, job: Job) -> list[Job]:
    """Return one job for all seeds where they can be trained together, else one for each."""
    if len(job.seeds) > 1 and jobs.can_stack(bench, job.candidate, job.settings):
        return [job]
    return [job._replace(seeds=(seed,)) for seed in job.seeds]


def path_of(bench: Bench, job: Job) -> Path:
    """Return the file of a job's results."""
    settings = {k: v for k, v in asdict(bench.cfg).items() if k not in IRRELEVANT}
    key: list[Any] = [settings, job._asdict(), features_read(bench, job), __version__]
    key += [str(torch.__version__), DEFINITIONS, dict(bench.identity)]
    if bench.from_splits:
        key.append([x.tolist() for x in vars(bench.folds[job.fold]).values()])
    if not job.shuffled and bench.corrupted:
        key += [str(condition) for condition in bench.corrupted[job.fold]]
    key += [(name, bench.cfg.balance_settings.get(name)) for name in parse(job.candidate).balance]
    code = _plugin_code(bench, job)
    if code:
        key.append(code)
    name = re.sub(r"[^\w.-]", "-", job.candidate) + ("-shuffled" if job.shuffled else "")
    file_name = f"{name}-f{job.fold}-s{job.seeds[0]}-{key_of(key)[:12]}.npz"
    return store.folder_of(bench.cfg.out) / file_name


def _plugin_code(bench: Bench, job: Job) -> list[str]:
    """Return digests of the code that a job runs and that is not fusionzoo's own."""
    cfg = bench.cfg
    names = [fusion_of(job.candidate), *job.settings.values()]  # `base` names a fusion too
    digests = [code_digest(FUSIONS[x].cls) for x in names if isinstance(x, str) and x in FUSIONS]
    digests += [code_digest(BALANCE[name].cls) for name in parse(job.candidate).balance]
    for settings in (cfg.objective, *cfg.targets.values()):
        digests.append(code_digest(OBJECTIVES[split_name(settings, "objective")[0]].cls))
    kinds = {target.standard_kind() for target in bench.scheme or ()} or {"classification"}
    digests += [code_digest(metric.cls) for kind in sorted(kinds) for metric in metrics_of(kind)]
    digests += [code_digest(kind_of(kind)) for kind in (targets_of(cfg) or {}).values()]
    tried = dict.fromkeys((modality, name) for modality, name, _ in conditions(bench))
    digests += [code_digest(CORRUPTIONS[bench.modalities[m]][name]) for m, name in tried]
    if cfg.mode == "finetune":  # of cached features the description has the encoder's
        digests += map(file_digest, load_plugins(cfg.plugins))
    return [digest for digest in digests if digest is not None]


def run_stages(bench: Bench, candidates: Sequence[str]) -> Iterator[Stage]:
    """Run all jobs that are not done yet, stage by stage; one that fails stops no other.

    First every candidate with its default settings and one seed, the cheap ones before the costly
    ones (`is_costly`); then the other seeds and the controls, then tuning. What changes no verdict
    comes last: the models are tested on damaged samples. After each stage, after the cheap part of
    the first one, and at the deadline or a Ctrl-C, what is done is yielded. With a bench of the
    first fold only, the first seed of the cheap ones alone is trained.
    """
    jobs_bench = bench
    if bench.cfg.mode == "probe":
        jobs_bench = replace(bench, dataset=None)  # jobs read cached features: send workers no more
    stages = _stage_names(bench, candidates)
    errors: dict[str, str] = {}  # by job
    for name, part in _parts(jobs_bench, candidates, stages):
        stopped = ""
        try:
            if name == DAMAGED:
                encode_all_damaged(bench)
            names = [x for x in candidates if not (part and is_costly(x))]
            for job, error in _run(jobs_bench, names, name, errors):
                if error is not None:
                    errors[_identity(job)] = error
        except OutOfTimeError:
            stopped = f"the time limit of {bench.cfg.time_limit}"
        except KeyboardInterrupt:
            stopped = CTRL_C
        results, tuned = _collect(jobs_bench, candidates, errors, name)
        part = part or bool(bench.of_folds)
        last = bool(stopped) or (name == stages[-1] and not part)
        yield Stage(name, results, stopped, last, part, tuned)
        if stopped:
            return


def _parts(
    bench: Bench, candidates: Sequence[str], stages: Sequence[str]
) -> Iterator[tuple[str, bool]]:
    """Yield each stage and whether its costly candidates are left out.

    The first stage comes in two parts, where a fusion is among the cheap candidates and there is
    something to do for both kinds. Of the first fold the cheap part is enough: all folds say more,
    sooner than the costly candidates on one. Where it is done, nothing is left of the first fold.
    """
    missing = {job.candidate for job in _missing(bench, candidates, FIRST_SEED)}
    cheap = {name for name in missing if not is_costly(name)}
    compared = [name for name in candidates if not (is_single(name) or is_fitted(name))]
    has_cheap_fusion = not all(map(is_costly, compared))
    if bench.of_folds:
        to_do = cheap if has_cheap_fusion else missing
        yield from [(FIRST_SEED, has_cheap_fusion)] * bool(to_do)
        return
    if has_cheap_fusion and cheap and cheap < missing:
        yield FIRST_SEED, True
    yield from ((name, False) for name in stages)


def _stage_names(bench: Bench, candidates: Sequence[str]) -> list[str]:
    wanted = {
        FIRST_SEED: True,
        OTHER_SEEDS: bool(_other_seeds(bench, candidates)),
        TUNING: (bench.cfg.tune or 0) > 1,
        DAMAGED: examine.tests_damage_later(bench),
    }
    return [name for name in STAGES if wanted[name]]


def read_shard(text: str) -> tuple[int, int]:
    """Read `--shard 3/8` as (3, 8).

    >>> read_shard("3/8")
    (3, 8)
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    part, parts = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= part <= parts:
        raise FusionZooError(f"--shard {text}: write the part and the number of parts, 1/8 to 8/8")
    return part, parts


def run_shard(bench: Bench, candidates: Sequence[str], part: int, parts: int) -> dict[str, str]:
    """Run one of `parts` shares of the jobs; return the error of each candidate that failed.

    A share has whole candidates on single folds, so that no two shares write the same file or wait
    for each other. A share tunes all its candidates; the report reads those that it needs. Damaged
    samples are tested by the run that reports, which knows what was chosen.
    """
    names = [name for name in _stage_names(bench, candidates) if name != DAMAGED]
    if bench.cfg.mode == "probe":
        bench = replace(bench, dataset=None)  # as in run_stages
    folds = range(len(bench.folds))
    share = [(name, fold) for name in candidates for fold in folds][part - 1 :: parts]
    errors: dict[str, str] = {}
    for stage in names:
        if stage == TUNING:
            first = [first_job(bench, *pair) for pair in share if not is_fitted(pair[0])]
            first = [job for job in first if store.load(path_of(bench, job)) is not None]
            listed = [job for job in first if _tuned_on(bench, job) is None]
            function = _tune_and_run
        else:
            missing = _missing(bench, candidates, stage)
            listed = [job for job in missing if (job.candidate, job.fold) in share]
            function = _run_job
        for job, error in map_unordered(bench.cfg, bench, listed, function, stage):
            if error is not None:
                errors[job.candidate] = error
    return errors


def _run(
    bench: Bench, candidates: Sequence[str], stage: str, errors: Mapping[str, str]
) -> Iterator[tuple[Job, str | None]]:
    """Run what a stage lacks; yield each job with its error, or None."""
    function = _run_job
    if stage == TUNING:
        listed, function = _jobs_to_tune(bench, candidates, errors), _tune_and_run
    elif stage == DAMAGED:
        listed, function = _not_damaged_yet(bench, candidates, errors), _run_damaged
    else:
        listed = _missing(bench, candidates, stage)
    return map_unordered(bench.cfg, bench, listed, function, stage)


def _not_damaged_yet(
    bench: Bench, candidates: Sequence[str], errors: Mapping[str, str]
) -> list[Job]:
    """Return the reported jobs whose models wait for damaged samples; forget the other models."""
    results, _ = _collect(bench, candidates, errors, DAMAGED)
    reported = {path_of(bench, x.job): x.job for x in results.reported if not x.error}
    for path in {path_of(bench, replaced.job) for replaced in results.untuned} - {*reported}:
        store.weights_path(path).unlink(missing_ok=True)
    waiting = [job for path, job in reported.items() if store.weights_path(path).is_file()]
    return sorted(waiting, key=lambda job: is_costly(job.candidate))


def _run_damaged(bench: Bench, job: Job) -> str | None:
    """Test a job's models on damaged samples; return the error message, or None."""
    return _guarded(lambda: jobs.run_damaged(bench, job, path_of(bench, job)))


def _missing(bench: Bench, candidates: Sequence[str], stage: str) -> list[Job]:
    """Return the jobs of the first seed or of the others that are not done, cheap ones first."""
    listed = _first_seeds if stage == FIRST_SEED else _other_seeds
    missing = [job for job in listed(bench, candidates) if store.load(path_of(bench, job)) is None]
    return sorted(missing, key=lambda job: is_costly(job.candidate))


def _run_job(bench: Bench, job: Job) -> str | None:
    """Run a job and store its results; return the error message, or None."""
    return _guarded(lambda: store.save(path_of(bench, job), job, jobs.run_job(bench, job)))


def _tune_and_run(bench: Bench, job: Job) -> str | None:
    """Tune a candidate on a fold and run its jobs with the chosen settings."""

    def work() -> None:
        tuned, trained = tune(bench, job)
        for chosen in _tuned_jobs(bench, job, tuned):
            path = path_of(bench, chosen)
            if store.load(path) is None:
                model = trained if chosen.seeds == job.seeds else None
                store.save(path, chosen, jobs.run_job(bench, chosen, model))

    return _guarded(work)


def _guarded(work: Callable[[], None]) -> str | None:
    """Do the work; return the message of an error, which the report shows: the others go on."""
    try:
        work()
    except OutOfTimeError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, FusionZooError) else f" ({frame.filename}:{frame.lineno})"
        return f"{type(error).__name__}: {error}{where}"
    return None


def _tuned_jobs(bench: Bench, job: Job, tuned: TunedSettings) -> list[Job]:
    """Return the jobs of all seeds with the chosen settings; none where the default ones stay."""
    if not tuned.training:
        return []
    changed = job._replace(settings=tuned.settings, training=tuned.training, seeds=_seeds(bench))
    return _by_seeds(bench, changed)


def _jobs_to_tune(bench: Bench, candidates: Sequence[str], errors: Mapping[str, str]) -> list[Job]:
    """Return the first seed's jobs to tune: candidates near the best one first, cheap ones first.

    One that is far below the best candidate is not likely to change the verdict.
    """
    trained: dict[str, list[SeedResult]] = {}
    failed = {job.candidate for job in list_jobs(bench, candidates) if _identity(job) in errors}
    for job in _first_seeds(bench, [x for x in candidates if x not in failed and not is_fitted(x)]):
        trained.setdefault(job.candidate, []).extend(store.load(path_of(bench, job)) or [])
    scores = {name: np.concatenate([r.scores[0] for r in x]) for name, x in trained.items()}
    if not scores:
        return []
    weights = bench.weights_of(torch.cat([fold.test for fold in bench.folds]))
    of_samples = None if weights is None else weights.double().numpy()
    best = max(scores.values(), key=lambda x: float(np.average(x, weights=of_samples)))

    def order(name: str) -> tuple[bool, float]:
        lag = by_group((best - scores[name])[None], weights=of_samples)[0]
        far = lag.mean() > FAR * lag.std() / math.sqrt(len(lag))
        return bool(far), float(np.mean([r.facts["seconds"] for r in trained[name]]))

    ordered = sorted(trained, key=order)
    listed = [first_job(bench, name, fold) for name in ordered for fold in range(len(bench.folds))]
    return [job for job in listed if _tuned_on(bench, job) is None]


def _tuned_on(bench: Bench, job: Job) -> list[JobResult] | None:
    """Return the results of a job's candidate and fold with the settings that tuning chose.

    An empty list: the default settings stay. None: it is not tuned, or not all seeds are done.
    """
    tuned = chosen_settings(bench, job)
    if tuned is None:
        return None
    chosen = _tuned_jobs(bench, job, tuned)
    results = _stored_results(bench, chosen, {})
    return results if len(results) == len(chosen) else None


def _collect(
    bench: Bench, candidates: Sequence[str], errors: Mapping[str, str], stage: str
) -> tuple[Results, tuple[str, ...]]:
    """Read the results that a stage and those before it have; return the tuned candidates too.

    A candidate is reported with tuned settings where all its folds are tuned.
    """
    listed = _first_seeds if stage == FIRST_SEED else list_jobs
    is_tuned = (bench.cfg.tune or 0) > 1 and stage in (TUNING, DAMAGED)
    reported: list[JobResult] = []
    untuned: list[JobResult] = []
    tuned_names = []
    for name in candidates:
        stored = _stored_results(bench, listed(bench, [name]), errors)
        if is_tuned and not is_fitted(name) and not any(x.error for x in stored):
            folds = range(len(bench.folds))
            by_fold = [_tuned_on(bench, first_job(bench, name, fold)) for fold in folds]
            if None not in by_fold:
                tuned_names.append(name)
                untuned += [result for result in stored if not result.job.shuffled]
                tuned = [result for results in by_fold for result in results or ()]
                changed = {result.job.fold for result in tuned}
                stored = [x for x in stored if x.job.shuffled or x.job.fold not in changed] + tuned
        reported += stored
    return Results(reported, untuned), tuple(tuned_names)


def _stored_results(
    bench: Bench, listed: Sequence[Job], errors: Mapping[str, str]
) -> list[JobResult]:
    """Return the results, or the error, of the jobs that are done."""
    results = []
    for job in listed:
        error = errors.get(_identity(job))
        seed_results = None if error else store.load(path_of(bench, job))
        if error or seed_results is not None:
            results.append(JobResult(job, seed_results or [], error))
    return results


def first_job(bench: Bench, candidate: str, fold: int) -> Job:
    """Return the job of a candidate on a fold with its default settings and the first seed."""
    settings = settings_of(bench.cfg, candidate)
    return Job(candidate, fold, (bench.cfg.seed,), False, settings, {})


def _identity(job: Job) -> str:
    return key_of([job._asdict()])
