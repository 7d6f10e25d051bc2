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

from fusionzoo.benchmark import jobs
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

from .bench import Bench, Job, Settings, conditions
from .candidates import LINEAR, features_read, fusion_of, parse, reads_tokens, settings_of
from .clock import Clock
from .executors import map_unordered
from .jobs import SeedResult
from .train import FitResult

if TYPE_CHECKING:
    import optuna


DRAWN = 4  # tuning trials before the estimator sets in
WARM_UP = 3  # epochs before a tuning trial may be stopped
LEAST_DECAY = 1e-3  # the least weight decay that is drawn


def require_optuna() -> None:
    """Raise an error if Optuna is missing, before anything is computed."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise FusionZooError(
            "tuning needs Optuna: pip install 'fusionzoo[benchmark]', or --tune 0"
        ) from None


def tune(bench: Bench, job: Job) -> dict[str, Settings]:
    """Return the best `settings` and `training` of `cfg.tune` tuning trials; the default is first.

    Both are empty where the default is best: that job is the same as without tuning.
    The first trials are drawn at random, the same ones for every candidate, the later ones by the
    tree-structured Parzen estimator (Bergstra et al. 2011). A trial whose validation loss is
    above the median of the earlier ones at the same epoch is stopped. Each is written to a file and
    has its own seed, so an interrupted search continues with the trials that it would have made
    anyway. The models of the first and of the best one are stored for the tests.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = _path(bench, job)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = _read(path)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=WARM_UP)
    study = optuna.create_study(pruner=pruner)
    study.enqueue_trial(_defaults(bench, job))
    models: dict[int, jobs.Trained] = {}  # by number
    for number in range(bench.cfg.tune or 0):
        seed = seed_of(bench.cfg.seed, number) % 2**32
        study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=DRAWN)
        trial = study.ask()
        settings, training = _propose(trial, bench, job)
        if number == len(done):
            proposed = job._replace(settings=settings, training=training)
            losses, model = _train(bench, proposed, trial)
            if model is not None:
                models[number] = model
            line = {"losses": losses, "settings": settings, "training": training}
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            done.append(line)
        else:
            for epoch, loss in done[number]["losses"]:
                trial.report(loss, epoch)
        study.tell(trial, _least(done[number]["losses"]))
    numbers = range(min(len(done), bench.cfg.tune or 0))
    best = min(numbers, key=lambda number: _least(done[number]["losses"]))
    if 0 in models and bench.cfg.optim.weight_decay >= LEAST_DECAY:
        _store(models[0], bench, job)
    if best == 0:
        return {"settings": {}, "training": {}}
    chosen = {key: done[best][key] for key in ("settings", "training")}
    if best in models:
        _store(models[best], bench, job._replace(**chosen))
    return chosen


def _least(losses: Sequence[tuple[int, float]]) -> float:
    """Return the least validation loss; infinity where training diverged."""
    return min((loss for _, loss in losses), default=math.inf)


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the tuning trials evaluated so far; an incomplete last line, from a kill, is removed."""
    lines = whole_lines(path)
    path.write_text("".join(lines))
    return [json.loads(line) for line in lines]


def _defaults(bench: Bench, job: Job) -> Settings:
    cfg = bench.cfg
    start: Settings = {
        "lr": cfg.optim.lr,
        "weight_decay": max(cfg.optim.weight_decay, LEAST_DECAY),
        "epochs": cfg.epochs,
    }
    if has_dropout(job):
        default = fusion_info(fusion_of(job.candidate)).parameters["dropout"].default
        start["dropout"] = job.settings.get("dropout", default)
    return start


def has_dropout(job: Job) -> bool:
    """Whether dropout changes anything: a fusion without hidden layers drops nothing."""
    parameters = fusion_info(fusion_of(job.candidate)).parameters
    return "dropout" in parameters and len(job.settings.get("hidden", (1,))) > 0


def _propose(trial: optuna.Trial, bench: Bench, job: Job) -> tuple[Settings, Settings]:
    """Draw learning rate, weight decay and epochs, and dropout where the fusion has it.

    The rate lies between a third and ten times that of the settings, the epochs between a quarter
    and all of theirs.
    """
    lr, decay, epochs = bench.cfg.optim.lr, bench.cfg.optim.weight_decay, bench.cfg.epochs
    optim: Settings = {
        "lr": trial.suggest_float("lr", lr / 3, lr * 10, log=True),
        "weight_decay": trial.suggest_float("weight_decay", LEAST_DECAY, max(3.0, decay), log=True),
    }
    epochs = trial.suggest_int("epochs", max(1, epochs // 4), epochs, log=True)
    settings = dict(job.settings)
    if has_dropout(job):
        settings["dropout"] = trial.suggest_float("dropout", 0.0, 0.6)
    return settings, {"epochs": epochs, "optim": optim}


def _train(
    bench: Bench, job: Job, trial: optuna.Trial
) -> tuple[list[tuple[int, float]], jobs.Trained | None]:
    """Train; return (epoch, validation loss) of each epoch, and the model if none stopped it.

    No losses: training diverged.
    """
    losses: list[tuple[int, float]] = []
    stopped = False

    def stop_early(epoch: int, loss: float) -> bool:
        nonlocal stopped
        if math.isfinite(loss):
            losses.append((epoch, loss))
            trial.report(loss, epoch)
            stopped = trial.should_prune()
        else:
            stopped = True
        return stopped

    start = time.perf_counter()
    try:
        models, feed = jobs.build(bench, job)
        fits = jobs.train(bench, job, models, feed, stop_early)
    except FusionZooError:
        return [], None  # the learning rate is too high
    return losses, None if stopped else jobs.Trained(fits, time.perf_counter() - start)


def trained_model(bench: Bench, job: Job) -> jobs.Trained | None:
    """Return the model of a job that tuning has trained already; None if there is none."""
    path = _path(bench, job, ".pt")
    if not path.is_file():
        return None
    contents = run_folder.read(path)
    return jobs.Trained([FitResult(**contents["fit"])], contents["seconds"])


def remove_models(bench: Bench) -> None:
    """Remove the models that tuning has stored."""
    for path in jobs.folder_of(bench.cfg.out).glob("tune-*.pt"):
        path.unlink()


def _store(model: jobs.Trained, bench: Bench, job: Job) -> None:
    if bench.cfg.mode == "finetune":
        return  # with their encoders the models of all candidates may fill the disk
    contents = {"fit": model.fits[0]._asdict(), "seconds": model.seconds}
    run_folder.write(contents, _path(bench, job, ".pt"))


def _path(bench: Bench, job: Job, suffix: str = ".jsonl") -> Path:
    """Return the file of the tuning trials of a job, or of its trained model."""
    cfg: Any = bench.cfg
    job = job._replace(whole=True)  # how a model is tested does not change its training
    features = features_read(bench, job) or cfg.encoders
    key = [cfg.data, features, job.stored(), cfg.optim, cfg.epochs, cfg.patience, cfg.batch_size]
    key += [cfg.objective, cfg.targets, cfg.standardise, dict(bench.identity)]
    key += [cfg.balance_settings.get(name) for name in parse(job.candidate).balance]
    name = re.sub(r"[^\w.-]+", "-", job.candidate)
    return jobs.folder_of(cfg.out) / f"tune-{name}-f{job.fold}-{key_of(key)[:12]}{suffix}"


# Settings that do not change a job: how and where it is run, and which other jobs are run.
IRRELEVANT = {"fusions", "settings", "fusion", "balance", "balance_settings", "missing_train"}
IRRELEVANT |= {"damaged_train", "seeds", "controls", "tune", "analyses"}
IRRELEVANT |= {"jobs", "engine", "num_workers", "out", "combine", "plugins", "speed"}

# Raised when a metric of a job is redefined: jobs of earlier versions are then run again.
DEFINITIONS = 5


class JobResult(NamedTuple):
    """A job and the results of its seeds, or the error that stopped it."""

    job: Job
    seed_results: list[SeedResult]
    error: str | None


class Results(NamedTuple):
    """The results that are reported and, where they were tuned, those of the default settings.

    With default settings each candidate is trained with the first seed only.
    """

    reported: list[JobResult]
    untuned: list[JobResult]


def list_jobs(bench: Bench, candidates: Sequence[str]) -> list[Job]:
    """Return all jobs: every candidate on every fold with every seed, and its control."""
    cfg, listed = bench.cfg, []
    seeds = tuple(range(cfg.seed, cfg.seed + cfg.seeds))
    for candidate in candidates:
        settings = settings_of(cfg, candidate)
        stacked = jobs.can_stack(bench, candidate, settings)
        for fold in range(len(bench.folds)):
            all_seeds = Job(candidate, fold, seeds, False, settings, {})
            if stacked:
                listed.append(all_seeds)
            else:
                listed += [all_seeds._replace(seeds=(seed,)) for seed in seeds]
            if cfg.controls and has_control(candidate):
                listed.append(all_seeds._replace(seeds=seeds[:1], shuffled=True))
    return listed


def has_control(candidate: str) -> bool:
    """Whether a candidate is trained on shuffled labels too: fusions and modalities as such are."""
    named = parse(candidate)
    return not (named.balance or named.incomplete or named.base in LINEAR)


def path_of(bench: Bench, job: Job) -> Path:
    """Return the file of a job's results."""
    settings = {k: v for k, v in asdict(bench.cfg).items() if k not in IRRELEVANT}
    key: list[Any] = [settings, job.stored(), features_read(bench, job), __version__]
    key += [str(torch.__version__), DEFINITIONS, dict(bench.identity)]
    if not job.shuffled and bench.corrupted:
        key += [str(condition) for condition in bench.corrupted[job.fold]]
    key += [(name, bench.cfg.balance_settings.get(name)) for name in parse(job.candidate).balance]
    code = _plugin_code(bench, job)
    if code:
        key.append(code)
    name = re.sub(r"[^\w.-]", "-", job.candidate) + ("-shuffled" if job.shuffled else "")
    file_name = f"{name}-f{job.fold}-s{job.seeds[0]}-{key_of(key)[:12]}.npz"
    return jobs.folder_of(bench.cfg.out) / file_name


def _plugin_code(bench: Bench, job: Job) -> list[str]:
    """Return digests of the code that a job runs and that is not fusionzoo's own."""
    cfg = bench.cfg
    names = [fusion_of(job.candidate), *job.settings.values()]  # `base` names a fusion too
    digests = [code_digest(FUSIONS[x].cls) for x in names if isinstance(x, str) and x in FUSIONS]
    digests += [code_digest(BALANCE[name].cls) for name in parse(job.candidate).balance]
    for settings in (cfg.objective, *cfg.targets.values()):
        digests.append(code_digest(OBJECTIVES[split_name(settings, "objective")[0]].cls))
    digests += [code_digest(kind_of(kind)) for kind in (targets_of(cfg) or {}).values()]
    tried = dict.fromkeys((modality, name) for modality, name, _ in conditions(bench))
    digests += [code_digest(CORRUPTIONS[bench.modalities[m]][name]) for m, name in tried]
    if cfg.mode == "finetune":  # of cached features the description has the encoder's
        digests += map(file_digest, load_plugins(cfg.plugins))
    return [digest for digest in digests if digest is not None]


def run_all(bench: Bench, candidates: Sequence[str], clock: Clock | None = None) -> Results:
    """Run all jobs that are not done yet; one that fails is reported and stops no other."""
    if bench.cfg.mode == "probe":
        bench = replace(bench, dataset=None)  # jobs read cached features: send workers no more
    clock = clock or Clock()
    plain = list_jobs(bench, candidates)
    if not bench.cfg.tune:
        results = Results(_run(bench, plain), [])
        clock.lap("training and tests")
        return results
    chosen = _tune_all(bench, plain)
    clock.lap("tuning")
    errors = {pair: x for pair, x in chosen.items() if isinstance(x, str)}
    failed = [
        JobResult(job, [], errors[job.candidate, job.fold])
        for job in plain
        if (job.candidate, job.fold) in errors
    ]
    plain = [job for job in plain if (job.candidate, job.fold) not in errors]
    reported = [tuned for job in plain for tuned in _tuned(bench, job, chosen)]
    untuned = [  # the test score of the first seed is enough
        job if job in reported else job._replace(seeds=job.seeds[:1], whole=False)
        for job in plain
        if job.seeds[0] == bench.cfg.seed and not job.shuffled and job.candidate not in LINEAR
    ]
    every = _run(bench, [*reported, *(job for job in untuned if job not in reported)])
    remove_models(bench)
    clock.lap("training and tests")
    result_of = {_identity(result.job): result for result in every}
    return Results(
        [*(result_of[_identity(job)] for job in reported), *failed],
        [result_of[_identity(job)] for job in untuned],
    )


def _run(bench: Bench, ordered: Sequence[Job]) -> list[JobResult]:
    """Run the jobs that are not done yet; return all results in the order of the jobs."""
    results, missing = [], []
    for job in ordered:
        seed_results = jobs.load(path_of(bench, job))
        if seed_results is None:
            missing.append(job)
        else:
            results.append(JobResult(job, seed_results, None))
    # The slowest ones first, so that no process is left waiting for one at the end.
    missing.sort(key=lambda job: -_relative_cost(job))
    for job, error in map_unordered(bench.cfg, bench, missing, _run_job, "train"):
        seed_results = jobs.load(path_of(bench, job)) if error is None else None
        results.append(JobResult(job, seed_results or [], error))
    position = {_identity(job): number for number, job in enumerate(ordered)}
    return sorted(results, key=lambda result: position[_identity(result.job)])


def _run_job(bench: Bench, job: Job) -> str | None:
    """Run a job and store its results; return the error message, or None."""
    try:
        jobs.save(path_of(bench, job), job, jobs.run_job(bench, job, trained_model(bench, job)))
    except Exception as error:  # shown in the report; the other candidates are run
        return _message(error)
    return None


def _message(error: Exception) -> str:
    """Return an error with its place, unless it is the user's."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if isinstance(error, FusionZooError) else f" ({frame.filename}:{frame.lineno})"
    return f"{type(error).__name__}: {error}{where}"


def _tune_all(bench: Bench, plain: Sequence[Job]) -> dict[tuple[str, int], Settings | str]:
    """Tune every candidate on every fold: the chosen settings, or the error that stopped it."""
    pairs = list(dict.fromkeys((u.candidate, u.fold) for u in plain if u.candidate not in LINEAR))
    pairs.sort(key=lambda pair: -_relative_cost(_first_job(bench, *pair)))
    return dict(map_unordered(bench.cfg, bench, pairs, _tune, "tune"))


def _tune(bench: Bench, pair: tuple[str, int]) -> Settings | str:
    job = _first_job(bench, *pair)
    try:
        return tune(bench, job)
    except Exception as error:  # shown in the report; the other candidates are run
        return _message(error)


def _tuned(bench: Bench, job: Job, chosen: Mapping[tuple[str, int], Settings | str]) -> list[Job]:
    """Return the job with the chosen settings; seeds that no longer stack are jobs of their own."""
    best = chosen.get((job.candidate, job.fold))
    if best is None or isinstance(best, str):
        return [job]
    settings = {**job.settings, **best["settings"]}
    job = job._replace(settings=settings, training=best["training"])
    if len(job.seeds) == 1 or jobs.can_stack(bench, job.candidate, settings):
        return [job]
    return [job._replace(seeds=(seed,)) for seed in job.seeds]


def _first_job(bench: Bench, candidate: str, fold: int) -> Job:
    settings = settings_of(bench.cfg, candidate)
    return Job(candidate, fold, (bench.cfg.seed,), False, settings, {})


def _identity(job: Job) -> str:
    return key_of([job.stored()])


def _relative_cost(job: Job) -> float:
    return (10.0 if reads_tokens(job.candidate) else 1.0) * len(job.seeds)
