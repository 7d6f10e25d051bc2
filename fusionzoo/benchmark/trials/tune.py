"""Tuning: every strategy gets the same number of Optuna trials, compared on validation data.

An Optuna trial is called a proposal here: a trial is a model whose results are reported.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionzoo.errors import FusionZooError
from fusionzoo.features.encode import key_of
from fusionzoo.files import whole_lines
from fusionzoo.fusion import fusion_info
from fusionzoo.rng import seed_of
from fusionzoo.training.runs import checkpoint_file

from ..bench import Bench, Settings, Unit
from ..fit import FitResult
from ..strategies import features_read, fusion_of, parse
from . import store, trial

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
    models: dict[int, trial.Trained] = {}  # by number
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
) -> tuple[list[tuple[int, float]], trial.Trained | None]:
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
        models, feed = trial.build(bench, unit)
        fits = trial.train(bench, unit, models, feed, stop_early)
    except FusionZooError:
        return [], None  # the learning rate is too high
    return losses, None if stopped else trial.Trained(fits, time.perf_counter() - start)


def trained_model(bench: Bench, unit: Unit) -> trial.Trained | None:
    """Return the model of a unit that tuning has trained already; None if there is none."""
    path = _path(bench, unit, ".pt")
    if not path.is_file():
        return None
    contents = checkpoint_file.read(path)
    return trial.Trained([FitResult(**contents["fit"])], contents["seconds"])


def remove_models(bench: Bench) -> None:
    """Remove the models that tuning has stored."""
    for path in store.folder_of(bench.cfg.out).glob("tune-*.pt"):
        path.unlink()


def _store(model: trial.Trained, bench: Bench, unit: Unit) -> None:
    if bench.cfg.mode == "finetune":
        return  # with their encoders the models of all strategies may fill the disk
    contents = {"fit": model.fits[0]._asdict(), "seconds": model.seconds}
    checkpoint_file.write(contents, _path(bench, unit, ".pt"))


def _path(bench: Bench, unit: Unit, suffix: str = ".jsonl") -> Path:
    """Return the file of the proposals for a unit, or of its trained model."""
    cfg: Any = bench.cfg
    unit = unit._replace(whole=True)  # how a model is tested does not change its training
    features = features_read(bench, unit) or cfg.encoders
    key = [cfg.data, features, unit._asdict(), cfg.optim, cfg.epochs, cfg.patience, cfg.batch_size]
    key += [cfg.objective, cfg.targets, cfg.standardise, dict(bench.identity)]
    key += [cfg.balance_settings.get(name) for name in parse(unit.strategy).balance]
    name = re.sub(r"[^\w.-]+", "-", unit.strategy)
    return store.folder_of(cfg.out) / f"tune-{name}-f{unit.fold}-{key_of(key)[:12]}{suffix}"
