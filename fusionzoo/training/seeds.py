"""Seeds: one model trained from several seeds, joined into one model; `train.seeds`.

Deep ensembles (Lakshminarayanan et al. 2017, arXiv:1612.01474). Each seed is an ordinary run, in
`seeds/<number>` of the run folder, whose model stays there.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import nn

from fusionzoo.config import OptimConfig, RunConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.encoders import Encoder
from fusionzoo.encoders.ensemble import EnsembleEncoder
from fusionzoo.errors import FusionZooError
from fusionzoo.fusion.late.ensemble import Ensemble
from fusionzoo.machine.distributed import World, from_main
from fusionzoo.model.fusion_model import FusionModel, JoinedHeads, UnimodalHeads, create_model
from fusionzoo.model.loading import load
from fusionzoo.model.standardise import Standardise
from fusionzoo.targets import OneOf

from . import report
from .balance import BALANCE, listed_strategies
from .balance.matryoshka import prefix_sizes
from .build import splits_of
from .checkpoint import State
from .fit import collect_answers, metrics_of
from .floors import FLOORS
from .loaders import build_loader
from .multitask import Tasks
from .objective import Objective
from .tasks import NO_TARGET
from .tracker import Tracker
from .trainer import Trainer
from .trials import Repeats, TrainingResult


class Seeds(Repeats[TrainingResult]):
    """The trainings of a run folder that differ in their seed, which are joined."""

    setting = "seeds"
    entry = TrainingResult

    def chosen(self) -> dict[str, Any]:
        return {"seed": self.cfg.seed + len(self.finished)}

    def drop(self) -> None:
        """Remove the checkpoints of the seeds that are finished; their models are joined."""
        for number in range(1, self.number):
            shutil.rmtree(self.folder_of(number) / "checkpoints", ignore_errors=True)

    def finish(self, dataset: PairedDataset, tasks: Tasks, tracker: Tracker) -> dict[str, Any]:
        """Join the models; calibrate, test and save the joined one as `train.py` does a single one.
        Return its results."""
        numbers = range(1, self.number)
        model = join([load(self.folder_of(number)) for number in numbers])
        alone = from_main(
            [self.results_of(n) for n in numbers] if self.world.main else [], self.world
        )
        splits = splits_of(self.cfg, dataset)
        trainer = evaluating_trainer(model, splits["train"], tasks, self.cfg, self.world)
        loaders = {
            name: build_loader(splits[name], model.collate(), trainer.cfg, self.world, name)
            for name in splits
            if name != "train"
        }
        val = collect_answers(trainer, loaders["val"]) if "val" in loaders else None
        best = {
            **({} if val is None else metrics_of(tasks, val, slow=True)),
            "epoch": max(x.best_epoch for x in self.finished),
            "train_loss": fmean(x["train"]["loss"] for x in alone),
            "seeds": [
                {"seed": x.seed, "val": results["val"], "test": results["test"]}
                for x, results in zip(self.finished, alone, strict=True)
            ],
        }
        state = State(data=self.data, best=best)
        test, calibration, figures = report.test_model(trainer, loaders["test"], val)
        test[FLOORS] = alone[0].get(FLOORS, {}) if alone else {}
        report.save_model(self.folder, trainer, splits, calibration, state, test)
        tracker.lap("join seeds")
        return report.write_results(self.folder, trainer, state, test, figures, tracker)


def check_seeds(cfg: RunConfig) -> None:
    """Raise an error for settings that `train.seeds` cannot keep, before anything is trained."""
    if cfg.train.seeds == 1:
        return
    if cfg.train.trials > 1:
        raise FusionZooError(
            "--train.trials keeps the best of several trainings, and --train.seeds joins several:"
            " leave one out (config.yaml of the best trial has its learning rates)"
        )
    if cfg.train.refit:
        raise FusionZooError(
            "--train.refit learns from the validation split, on which --train.seeds calibrates the"
            " joined model: leave one out"
        )
    if cfg.objective.get("name") == NO_TARGET:
        raise FusionZooError("--train.seeds averages answers, and --objective.name none has none")
    aligning = [x for x in listed_strategies(cfg.balance) if BALANCE[x].cls.aligns]  # type: ignore[attr-defined]
    if aligning:
        raise FusionZooError(
            f"--balance {aligning[0]} learns a common space, another one with each seed, which"
            " --train.seeds cannot join: leave one out"
        )
    if prefix_sizes(cfg.matryoshka) or "matryoshka" in listed_strategies(cfg.balance):
        raise FusionZooError(
            "--matryoshka trains the first entries of a vector, and --train.seeds puts the vectors"
            " of all seeds side by side: leave one out"
        )


def join(models: Sequence[FusionModel]) -> FusionModel:
    """Return one model that averages the answers of models that differ in their weights only.

    Encoders that are equal in all of them are one encoder; of others the features stand side by
    side, and each model's fusion reads its part. The models' modules are used, not copied; their
    calibrations are left out.
    """
    first = models[0]
    encoders: dict[str, Encoder] = {}
    standardisers: dict[str, Standardise] = {}
    apart = []
    for name, encoder in first.named_encoders():
        parts: list[Any] = [model.encoders[name] for model in models]
        scales: list[Any] = [
            model.standardise[name] for model in models if name in model.standardise
        ]
        if _equal(parts) and _equal(scales):
            encoders[name], scales = encoder, scales[:1]
        else:
            encoders[name] = EnsembleEncoder(members=parts)
            apart.append(name)
        if scales:
            standardisers[name] = _side_by_side(scales)
    members = [model.spec["fusion"] for model in models]
    settings = {
        "name": "ensemble",
        "dim": sum(member["dim"] for member in members),
        "members": members,
        "apart": apart,
        "one_of": _classes(first),
    }
    outputs = first.spec["num_outputs"]
    joined = create_model(settings, encoders, outputs, classes=first.classes, targets=first.targets)
    fusion = joined.fusion
    assert isinstance(fusion, Ensemble)
    for member, model in zip(fusion.fusions(), models, strict=True):
        member.load_state_dict(model.fusion.state_dict())
    heads = [model.heads for model in models if model.heads is not None]
    prior = first.spec.get("prior")
    return joined.complete(
        prior=None if prior is None else torch.tensor(prior),
        standardise=standardisers,
        heads=JoinedHeads(heads, fusion) if heads else None,
        first_weights=first.spec["first_weights"],
    ).eval()


def _equal(modules: Sequence[nn.Module]) -> bool:
    """Return whether modules of one class have the same parameters and buffers."""
    first, *others = (module.state_dict() for module in modules) if modules else ({},)
    return all(
        torch.equal(tensor, other[name]) for other in others for name, tensor in first.items()
    )


def _side_by_side(parts: Sequence[Standardise]) -> Standardise:
    """Return the module that standardises the parts' features side by side."""
    buffers = {
        name: torch.cat([part.get_buffer(name) for part in parts])
        for name, _ in parts[0].named_buffers()
    }
    wide = Standardise(len(buffers["pooled_mean"]))
    wide.load_state_dict(buffers)
    return wide


def _classes(model: FusionModel) -> list[list[int]]:
    """Return the logits of each target of one class: the first, and the one after the last."""
    ranges, end = [], 0
    for target in model.answer_targets:
        first, end = end, end + target.width
        if isinstance(target, OneOf):
            ranges.append([first, end])
    return ranges


def evaluating_trainer(
    model: FusionModel, train_set: PairedDataset, tasks: Tasks, cfg: RunConfig, world: World
) -> Trainer:
    """Return what evaluates and saves a finished model as that of a run; it makes no step."""
    heads = model.heads
    if heads is None:
        heads = UnimodalHeads(
            {}, model.fusion.dim, tasks.prior(train_set.targets, train_set.weights)
        )
    objective = Objective(model, heads, tasks).to(world.device)
    evaluated = replace(
        cfg,
        fusion=model.spec["fusion"],
        optim=OptimConfig(),
        train=replace(cfg.train, ema=None),
    )
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.0)
    return Trainer(objective, optimizer, evaluated, world)
