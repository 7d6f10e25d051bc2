"""Train a fusion model: `python train.py --config configs/stamps.yaml --fusion.name mbt`.

Reads downward: the command line; then data, model, trainer; then epochs, test, results.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this folder: its `datasets` would hide Hugging Face's

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fusionzoo.config import RunConfig
from fusionzoo.config.load import run_command

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from fusionzoo.datasets import PairedDataset
    from fusionzoo.distributed import World
    from fusionzoo.structures import Batch
    from fusionzoo.training.report import Run
    from fusionzoo.training.tracker import Tracker
    from fusionzoo.training.trainer import Trainer

    Loaders = dict[str, DataLoader[Batch]]


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 2 after a user's mistake, 75 or 130 if stopped early."""
    args = sys.argv[1:] if args is None else args

    def start(cfg: RunConfig) -> int:
        from fusionzoo.distributed import launch_or_join

        def work(world: World) -> int:
            return train(cfg, world).exit_code

        return launch_or_join(cfg.dist, cfg.device, work, script=__file__, args=args)

    return run_command(RunConfig, __doc__ or "", args, start)


def train(cfg: RunConfig, world: World, dataset: PairedDataset | None = None) -> Run:
    """Train, test, save; a signal ends the run after a whole step (`Run.exit_code` says so)."""
    import torch

    from fusionzoo.plugins import load_plugins
    from fusionzoo.training import checkpoint, report
    from fusionzoo.training.build import open_dataset
    from fusionzoo.training.fit import evaluate, fit
    from fusionzoo.training.multitask import targets_of
    from fusionzoo.training.report import Run
    from fusionzoo.training.run_folder import claim_folder
    from fusionzoo.training.speed import choose_for_training
    from fusionzoo.training.tracker import Tracker

    load_plugins(cfg.plugins)
    tracker = Tracker(world)
    tracker.is_late(cfg.train.time_limit)  # raises an error if that is no time
    dataset = open_dataset(cfg.data, targets_of(cfg), dataset)
    trainer, splits, unused = build_trainer(cfg, world, dataset, tracker)

    # ---- epochs from the start or from the last checkpoint; then the test split, once
    with claim_folder(trainer.cfg, world) as (folder, resume):
        state, notes = checkpoint.start_or_resume(folder, resume, trainer, dataset)
        report.show_groups(folder, trainer, tracker)
        tracker.start(folder, state, cfg.log)
        tracker.say(*(f"no loss reads {name}: frozen" for name in unused), *notes)
        try:
            loaders = build_loaders(trainer, dataset, splits, tracker, resume=resume)
            loaders, notes = choose_for_training(trainer, loaders, folder, resume=resume)
            if notes:
                tracker.say(*notes)
                tracker.lap("choose speed")
            if exit_code := fit(trainer, loaders, state, folder, tracker):
                return Run(folder, exit_code, trainer.module.model)
            tracker.say(*checkpoint.restore_best(folder, trainer, state))
            with trainer.ema_weights():
                test = evaluate(trainer, loaders["test"], report.reports_each_alone(trainer))
                report.save_model(folder, trainer, splits)
        except torch.OutOfMemoryError as error:
            raise report.out_of_memory(trainer) from error
        finally:
            tracker.close()
        report.report_results(folder, trainer, state, test, tracker)
        report.report_failures(dataset, tracker)
    return Run(folder)


def build_trainer(
    cfg: RunConfig, world: World, dataset: PairedDataset, tracker: Tracker
) -> tuple[Trainer, dict[str, PairedDataset], list[str]]:
    """Build model and optimiser; return them with the data's splits and the names of the
    parameters that no loss reads."""
    from fusionzoo.config.schema import drop_deselected
    from fusionzoo.distributed import seed_everything, wrap
    from fusionzoo.training import build
    from fusionzoo.training.freezing import save_memory_and_compile
    from fusionzoo.training.optim import AMP_DTYPES, build_optimizer, param_groups
    from fusionzoo.training.report import show_data
    from fusionzoo.training.trainer import Trainer

    # ---- data: one table, three splits
    cfg, dropped = drop_deselected(cfg, dataset.provenance.deselected)
    show_data(dataset, dropped, tracker)
    cfg = replace(cfg, encoders=build.choose_encoders(dataset, cfg.encoders))
    splits = {name: dataset.split(name) for name in ("train", "val", "test")}

    # ---- model: the same weights on every process, then each its own dropout
    seed_everything(cfg.seed)
    objective, unused = build.build_objective(cfg, splits["train"], world)
    build.check_splits(objective.tasks, splits)
    tracker.say(*objective.notes)
    two_pass = any(strategy.two_pass for strategy in objective.balance.values())
    save_memory_and_compile(objective.model, cfg.train, two_pass=two_pass)
    wrapped = wrap(objective.to(world.device), cfg.dist, world, AMP_DTYPES[cfg.train.amp])
    groups = param_groups(objective.model, objective.heads, cfg.optim, objective.balance)
    trainer = Trainer(wrapped, build_optimizer(groups, cfg.optim), cfg, world)
    seed_everything(cfg.seed + world.rank)
    return trainer, splits, unused


def build_loaders(
    trainer: Trainer,
    dataset: PairedDataset,
    splits: dict[str, PairedDataset],
    tracker: Tracker,
    *,
    resume: bool,
) -> Loaders:
    """Build the loader of each split, with cached features of encoders that stay frozen; measure
    how to standardise those of a new run."""
    from fusionzoo.training.build import frozen_features
    from fusionzoo.training.checkpoint import standardise_frozen
    from fusionzoo.training.loaders import build_loader

    cfg, world, model = trainer.cfg, trainer.world, trainer.module.model
    tracker.lap("set up")
    frozen = frozen_features(trainer.module, dataset, cfg, world)
    tracker.say(*frozen.notes)
    if not resume:
        tracker.say(*standardise_frozen(trainer, frozen.view(splits["train"]), frozen.modalities))
    tracker.lap("encode")
    collates = {name: frozen.collate(model.collate(train=name == "train")) for name in splits}
    collates["train"].second_view = trainer.module.makes_views
    return {
        name: build_loader(frozen.view(split), collates[name], cfg, world, name)
        for name, split in splits.items()
    }


if __name__ == "__main__":
    from fusionzoo.distributed import exit_process

    exit_process(main())
