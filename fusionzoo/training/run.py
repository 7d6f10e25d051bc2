"""One training: data, model and trainer, then epochs, test and results; or several of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fusionzoo.config import RunConfig
from fusionzoo.config.schema import drop_deselected
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.errors import is_out_of_memory
from fusionzoo.evaluation.measure import Answers
from fusionzoo.inputs.command import complete_run
from fusionzoo.inputs.cut import notes_of_cuts
from fusionzoo.inputs.data import with_image_range, with_validation
from fusionzoo.inputs.identity import data_identity
from fusionzoo.machine.devices import seed_everything
from fusionzoo.machine.distributed import World, from_main, wrap

from . import build, checkpoint, presets, report
from .average import ToAverage, add_linear, is_worse
from .fit import (
    Loaders,
    RunInProgress,
    check_last,
    check_refit,
    check_unvalidated,
    collect_answers,
    metrics_of,
)
from .floors import Floors, floors
from .frozen import frozen_features, standardise_frozen
from .loaders import build_loader
from .multitask import build_tasks, targets_of
from .optim import AMP_DTYPES, build_optimizer, param_groups
from .recompute import save_memory_and_compile
from .report import Run
from .run_folder import claim_folder
from .seeds import Seeds, check_seeds
from .tracker import Tracker
from .trainer import Trainer
from .trials import Trials


def train(cfg: RunConfig, world: World, data: DataSpec | None = None) -> Run:
    """Train, test, save; a signal ends the run after a whole step (`Run.exit_code` says so)."""
    tracker = Tracker(world)
    tracker.is_late(cfg.train.time_limit)  # raises an error if that is no time
    cfg, dataset = open_data(cfg, data, tracker)
    cfg, choices = presets.resolve(cfg, dataset, world)
    cfg, notes = build.with_linear_skip(cfg)
    tracker.say(*choices, *notes)
    check_seeds(cfg)
    check_last(cfg)
    if cfg.train.trials > 1 or cfg.train.seeds > 1:
        return train_several(cfg, world, dataset, tracker, choices)
    return train_once(cfg, world, dataset, tracker, choices)


def train_several(
    cfg: RunConfig, world: World, dataset: PairedDataset, tracker: Tracker, choices: Sequence[str]
) -> Run:
    """Train several times; keep the best by validation, or join the models of all seeds."""
    tasks = build_tasks(cfg, dataset.split("train"))
    with claim_folder(cfg, world) as (folder, resume):
        tracker.folder = folder
        tracker.say(*presets.recipe(folder, choices))
        identity = data_identity(dataset) if world.main else {}  # which alone reads it
        kind = Seeds if cfg.train.seeds > 1 else Trials
        repeats = kind(folder, cfg, identity, world, resume=resume)
        while repeats.number <= repeats.count:
            if obstacle := repeats.obstacle(tracker.seconds_left(cfg.train.time_limit)):
                tracker.say(obstacle)
                break
            tracker.say(repeats.title)
            begun = tracker.elapsed
            own = Tracker(world, tracker, quiet=repeats.number > 1)
            run = train_once(repeats.settings(), world, dataset, own)
            if run.exit_code:
                return Run(folder, run.exit_code)
            repeats.add(tasks, tracker.elapsed - begun)
        results = repeats.finish(dataset, tasks, tracker)
        report.show_results(folder, cfg, tasks, results, tracker)
    return Run(folder)


def train_once(
    cfg: RunConfig,
    world: World,
    dataset: PairedDataset,
    tracker: Tracker,
    choices: Sequence[str] = (),
) -> Run:
    """Train one run from the start or from its last checkpoint, then test and save it."""
    is_trial = tracker.folder is not None
    trainer, splits, unused = build_trainer(cfg, world, dataset, tracker)

    # ---- epochs from the start or from the last checkpoint; then the test split, once
    with claim_folder(trainer.cfg, world) as (folder, resume):
        state, notes = checkpoint.start_or_resume(folder, resume, trainer, dataset)
        if not (resume or tracker.quiet):  # a further trial's model is the first one's
            report.check_saving(folder, trainer)
        tracker.say(*presets.recipe(folder, choices))
        report.show_groups(folder, trainer, tracker)
        tracker.start(folder, state, cfg.log)
        tracker.say(*(f"no loss reads {name}: frozen" for name in unused), *notes)
        try:
            loaders = build_loaders(trainer, dataset, splits, tracker, resume=resume)
            if exit_code := RunInProgress(trainer, loaders, state, folder, tracker).fit():
                return Run(folder, exit_code)
            tracker.say(*checkpoint.restore_best(folder, trainer, state))
            val_answers = validate(trainer, loaders, state)
            fitted = floors(trainer, loaders)
            if cfg.train.floors:
                tracker.lap("floors")
            val_answers, added = average(trainer, state, val_answers, fitted, tracker)
            final = trainer
            if cfg.train.refit and has_time_for_refit(trainer, tracker):
                final, loaders, splits, exit_code = refit(trainer, dataset, state, folder, tracker)
                if exit_code:
                    return Run(folder, exit_code)
                if added is not None:
                    add_linear(final.module.model, added.of_all, added.modalities)
            with final.ema_weights():
                test, calibration, figures = report.test_model(
                    final, loaders["test"], val_answers, fitted
                )
                report.save_model(folder, final, splits, calibration, state, test)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise report.out_of_memory(trainer) from error
            raise
        finally:
            tracker.close()
        results = report.write_results(folder, trainer, state, test, figures, tracker)
        if not is_trial:
            report.show_results(folder, trainer.cfg, trainer.module.tasks, results, tracker)
        report.report_failures(dataset, tracker)
        if not is_trial:
            warn_if_hardly_trained(state, tracker)
    return Run(folder)


def warn_if_hardly_trained(state: checkpoint.State, tracker: Tracker) -> None:
    """Say where a limit ended the run within its first epoch."""
    if state.step < state.epoch_steps:
        tracker.say(
            f"warning: hardly trained, {state.step} of the {state.epoch_steps} steps of the"
            f" first epoch: {tracker.how_to_go_on}"
        )


def open_data(
    cfg: RunConfig, data: DataSpec | None, tracker: Tracker
) -> tuple[RunConfig, PairedDataset]:
    """Open the data set and show what its columns hold; return it with explicit settings of it."""
    cfg, data = complete_run(cfg, data)
    if tracker.world.main:
        data.show()
    dataset = data.open(targets_of(cfg))
    if cfg.train.select != "last":
        cfg, dataset = with_validation(cfg, dataset)
    return with_image_range(cfg, dataset)


def build_trainer(
    cfg: RunConfig, world: World, dataset: PairedDataset, tracker: Tracker
) -> tuple[Trainer, dict[str, PairedDataset], list[str]]:
    """Build model and optimiser; return them with the data's splits and the names of the
    parameters that no loss reads."""
    # ---- data: one table, its splits
    cfg, dropped = drop_deselected(cfg, dataset.provenance.deselected)
    report.show_data(dataset, dropped, tracker)
    encoders, notes = build.encoders_at_hand(dataset, cfg.encoders)
    cfg = replace(cfg, encoders=build.choose_encoders(dataset, encoders))
    tracker.say(*notes)
    splits = build.splits_of(cfg, dataset)
    trainer, unused = build_model(cfg, world, splits, tracker)
    if world.main and not tracker.quiet:
        tracker.say(*notes_of_cuts(trainer.module.model.named_encoders(), splits["train"]))
    check_refit(trainer)
    if "val" not in splits:
        check_unvalidated(trainer)
    return trainer, splits, unused


def build_model(
    cfg: RunConfig, world: World, splits: dict[str, PairedDataset], tracker: Tracker
) -> tuple[Trainer, list[str]]:
    """Build model and optimiser for these splits: the same weights on every process, then each its
    own dropout. Also return the names of the parameters that no loss reads."""
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
    return trainer, unused


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


def validate(trainer: Trainer, loaders: Loaders, state: checkpoint.State) -> Answers | None:
    """Return the answers to the validation samples, if there are some, of the model that has not
    learnt from them; complete the best epoch's figures with the slow ones."""
    if "val" not in loaders:
        return None
    with trainer.ema_weights():
        answers = collect_answers(trainer, loaders["val"])
    state.best = metrics_of(trainer.module.tasks, answers, slow=True) | state.best
    return answers


def average(
    trainer: Trainer,
    state: checkpoint.State,
    answers: Answers | None,
    fitted: Floors,
    tracker: Tracker,
) -> tuple[Answers | None, ToAverage | None]:
    """Let the model answer with the mean of itself and a linear model, unless validation speaks
    against it; return its answers there, and what a refitted model is averaged with."""
    linear, model, tasks = fitted.to_average, trainer.module.model, trainer.module.tasks
    if answers is None or linear is None:
        return answers, None
    averaged = linear.mean(answers)
    if is_worse(tasks, averaged, answers):
        return answers, None
    add_linear(model, linear.of_train, linear.modalities)
    state.best |= {**metrics_of(tasks, averaged, slow=True), "average_linear": True}
    name = "tabular/tabm" if len(model.encoders) == 1 else trainer.cfg.fusion["name"]
    tracker.say(f"average: the model answers with the mean of {name} and a linear model")
    return averaged, linear


def has_time_for_refit(trainer: Trainer, tracker: Tracker) -> bool:
    """Whether the time limit leaves as long as the run has taken; say so if it does not."""
    left = tracker.seconds_left(trainer.cfg.train.time_limit)
    has_time = from_main(left >= tracker.elapsed, trainer.world)
    if not has_time:
        tracker.say("no time for the refit: the model has learnt from train alone")
    return has_time


def refit(
    trainer: Trainer,
    dataset: PairedDataset,
    state: checkpoint.State,
    folder: Path,
    tracker: Tracker,
) -> tuple[Trainer, Loaders, dict[str, PairedDataset], int]:
    """Train a new model on train and validation together, for the epochs that were best.

    Return what trained it, its loaders and splits, and the exit code after a signal. Its
    checkpoints are `refit.pt` in the run folder; one for other epochs is not continued.
    """
    cfg, world, epochs = trainer.cfg, trainer.world, state.best["epoch"]
    learned = [row for row, x in enumerate(dataset.split_names) if x in ("train", "val")]
    splits = {"train": dataset.subset(learned)}
    splits |= {name: dataset.split(name) for name in ("val", "test")}
    state.best["refit"] = {"samples": len(learned), "epochs": epochs}
    trainer.optimizer.state.clear()  # room for that of the new model
    silent = Tracker(world)  # metrics.jsonl and the logger are those of the first training
    tracker.say(f"refit: {len(learned):,} samples of train and val, {epochs} epochs")
    again, _ = build_model(cfg, world, splits, silent)
    path = folder / "checkpoints" / "refit.pt"
    done = checkpoint.State(data=state.data, best={"epoch": epochs})
    resume = from_main(path.is_file(), world)
    if resume:
        done, notes = checkpoint.restore(path, again)
        tracker.say(*notes)
    if done.best["epoch"] != epochs:  # of an earlier end of the first training
        again, _ = build_model(cfg, world, splits, silent)
        done, resume = checkpoint.State(data=state.data, best={"epoch": epochs}), False
    try:
        loaders = build_loaders(again, dataset, splits, silent, resume=resume)
        run = RunInProgress(again, loaders, done, folder, silent, last=path.name)
        exit_code = run.refit(epochs)
    finally:
        silent.close()
    tracker.lap("refit")
    return again, loaders, splits, exit_code
