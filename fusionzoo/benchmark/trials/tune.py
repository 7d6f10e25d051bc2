"""An equal budget for every strategy: Optuna's trials, judged on the validation split alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionzoo.errors import FusionZooError
from fusionzoo.files import whole_lines
from fusionzoo.fusion import fusion_info

from ..bench import Bench, Settings, Unit
from ..features.encode import key_of
from ..strategies import fusion_of
from . import trial as trials

if TYPE_CHECKING:
    import optuna


def check() -> None:
    """Say what is missing before anything is computed."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise FusionZooError("--tune needs Optuna: pip install 'fusionzoo[benchmark]'") from None


def tune(bench: Bench, unit: Unit) -> dict[str, Settings]:
    """Return the best `settings` and `optim` of `cfg.tune` trials; the first is the default.

    Trials are kept one by one, so an interrupted search goes on where it stopped, with the trials
    that it would have made anyway: each proposal has a seed of its own.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = _path(bench, unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    known = _trials(path)
    study = optuna.create_study()
    study.enqueue_trial(_defaults(bench, unit))
    for number in range(bench.cfg.tune):
        study.sampler = optuna.samplers.TPESampler(seed=1000 * bench.cfg.seed + number)
        trial = study.ask()
        settings, optim = _propose(trial, unit)
        if number < len(known):
            loss = known[number]["loss"]
        else:
            loss = _loss(bench, unit._replace(settings=settings, optim=optim))
            line = {"loss": loss, "settings": settings, "optim": optim}
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            known.append(line)
        study.tell(trial, loss)
    best = min(known[: bench.cfg.tune], key=lambda one: one["loss"])
    return {"settings": best["settings"], "optim": best["optim"]}


def _trials(path: Path) -> list[dict[str, Any]]:
    """Read the trials made so far; half a line, from a kill, is cut off."""
    whole = whole_lines(path)
    path.write_text("".join(whole))
    return [json.loads(line) for line in whole]


def _defaults(bench: Bench, unit: Unit) -> Settings:
    optim = bench.cfg.optim
    start: Settings = {"lr": optim.lr, "weight_decay": max(optim.weight_decay, 1e-3)}
    known = fusion_info(fusion_of(unit.strategy)).parameters
    if "dropout" in known:
        start["dropout"] = unit.settings.get("dropout", known["dropout"].default)
    return start


def _propose(trial: optuna.Trial, unit: Unit) -> tuple[Settings, Settings]:
    """Ask for learning rate and decay, and for dropout where the fusion has it."""
    optim: Settings = {
        "lr": trial.suggest_float("lr", 1e-4, 1e-2, log=True),
        "weight_decay": trial.suggest_float("weight_decay", 1e-3, 1.0, log=True),
    }
    settings = dict(unit.settings)
    if "dropout" in fusion_info(fusion_of(unit.strategy)).parameters:
        settings["dropout"] = trial.suggest_float("dropout", 0.0, 0.6)
    return settings, optim


def _loss(bench: Bench, unit: Unit) -> float:
    try:
        (found,) = trials.train(bench, unit, *trials.build(bench, unit))
    except FusionZooError:
        return float("inf")  # a rate too high for it
    return found.loss


def _path(bench: Bench, unit: Unit) -> Path:
    cfg: Any = bench.cfg
    known = bench.features[unit.fold] if bench.features else cfg.encoders
    about = [cfg.data, known, unit._asdict(), cfg.optim, cfg.epochs, cfg.patience, cfg.batch_size]
    name = unit.strategy.replace(":", "-")
    return Path(cfg.out) / "cells" / f"tune-{name}-f{unit.fold}-{key_of(about)[:12]}.jsonl"
