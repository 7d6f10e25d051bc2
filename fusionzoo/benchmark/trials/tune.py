"""Tuning: every strategy gets the same number of Optuna trials, compared on validation data.

An Optuna trial is called a proposal here: a trial is a model whose results are reported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionzoo.errors import FusionZooError
from fusionzoo.features.encode import key_of
from fusionzoo.files import whole_lines
from fusionzoo.fusion import fusion_info
from fusionzoo.rng import seed_of

from ..bench import Bench, Settings, Unit
from ..strategies import fusion_of
from . import store, trial

if TYPE_CHECKING:
    import optuna


def require_optuna() -> None:
    """Raise an error if Optuna is missing, before anything is computed."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise FusionZooError("--tune needs Optuna: pip install 'fusionzoo[benchmark]'") from None


def tune(bench: Bench, unit: Unit) -> dict[str, Settings]:
    """Return the best `settings` and `optim` of `cfg.tune` proposals; the first is the default.

    Each proposal is written to a file and has its own seed, so an interrupted search continues with
    the proposals that it would have made anyway.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = _path(bench, unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = _read(path)
    study = optuna.create_study()
    study.enqueue_trial(_defaults(bench, unit))
    for number in range(bench.cfg.tune):
        study.sampler = optuna.samplers.TPESampler(seed=seed_of(bench.cfg.seed, number) % 2**32)
        proposal = study.ask()
        settings, optim = _propose(proposal, unit)
        if number < len(done):
            loss = done[number]["loss"]
        else:
            loss = _loss(bench, unit._replace(settings=settings, optim=optim))
            line = {"loss": loss, "settings": settings, "optim": optim}
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            done.append(line)
        study.tell(proposal, loss)
    best = min(done[: bench.cfg.tune], key=lambda line: line["loss"])
    return {"settings": best["settings"], "optim": best["optim"]}


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the proposals evaluated so far; an incomplete last line, from a kill, is removed."""
    lines = whole_lines(path)
    path.write_text("".join(lines))
    return [json.loads(line) for line in lines]


def _defaults(bench: Bench, unit: Unit) -> Settings:
    optim = bench.cfg.optim
    start: Settings = {"lr": optim.lr, "weight_decay": max(optim.weight_decay, 1e-3)}
    parameters = fusion_info(fusion_of(unit.strategy)).parameters
    if "dropout" in parameters:
        start["dropout"] = unit.settings.get("dropout", parameters["dropout"].default)
    return start


def _propose(proposal: optuna.Trial, unit: Unit) -> tuple[Settings, Settings]:
    """Draw learning rate and weight decay, and dropout where the fusion has it."""
    optim: Settings = {
        "lr": proposal.suggest_float("lr", 1e-4, 1e-2, log=True),
        "weight_decay": proposal.suggest_float("weight_decay", 1e-3, 1.0, log=True),
    }
    settings = dict(unit.settings)
    if "dropout" in fusion_info(fusion_of(unit.strategy)).parameters:
        settings["dropout"] = proposal.suggest_float("dropout", 0.0, 0.6)
    return settings, optim


def _loss(bench: Bench, unit: Unit) -> float:
    try:
        (result,) = trial.train(bench, unit, *trial.build(bench, unit))
    except FusionZooError:
        return float("inf")  # training diverged: the learning rate is too high
    return result.loss


def _path(bench: Bench, unit: Unit) -> Path:
    cfg: Any = bench.cfg
    features = bench.features[unit.fold] if bench.features else cfg.encoders
    key = [cfg.data, features, unit._asdict(), cfg.optim, cfg.epochs, cfg.patience, cfg.batch_size]
    name = unit.strategy.replace(":", "-")
    return store.folder_of(cfg.out) / f"tune-{name}-f{unit.fold}-{key_of(key)[:12]}.jsonl"
