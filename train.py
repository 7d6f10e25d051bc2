"""Train a fusion model: `python train.py --config configs/stamps.yaml --fusion.name mbt`.

Reads downward: the command line; then data, model, where we are, the loop, what came of it.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this folder: its `datasets` would hide Hugging Face's

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fusionzoo.config import RunConfig, from_args, help_text
from fusionzoo.console import quiet_pipe
from fusionzoo.errors import FusionZooError

if TYPE_CHECKING:
    from pathlib import Path

    from torch.utils.data import DataLoader

    from fusionzoo.distributed.process_group import World
    from fusionzoo.structures import Batch
    from fusionzoo.training.optim.schedules import Plan
    from fusionzoo.training.runs.checkpoint import State
    from fusionzoo.training.runs.tracker import Tracker
    from fusionzoo.training.trainer import Stepper

    Loaders = dict[str, DataLoader[Batch]]


@quiet_pipe
def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; an error that the user can mend is one line and exit code 2."""
    args = sys.argv[1:] if args is None else args
    if {"-h", "--help"} & set(args):
        print(f"{(__doc__ or '').strip()}\n\nSettings and defaults:\n{help_text(RunConfig)}")
        return 0
    try:
        cfg = from_args(RunConfig, args)
        from fusionzoo.distributed.malloc import keep_freed_memory
        from fusionzoo.distributed.process_group import launch, launched, process_group

        if cfg.dist.nproc > 1 and not launched():
            return launch(cfg.dist, __file__, args)
        keep_freed_memory()
        with process_group(cfg.dist, cfg.device) as world:
            return train(cfg, world)
    except (FusionZooError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def train(cfg: RunConfig, world: World) -> int:
    """Train, test, save; return 0, or 75 (130 after Ctrl-C) if a signal ended the run early."""
    import torch

    from fusionzoo.config.deselected import drop_deselected
    from fusionzoo.distributed.process_group import seed_everything, wrap
    from fusionzoo.plugins import load_plugins
    from fusionzoo.training import build
    from fusionzoo.training.data import build_loader
    from fusionzoo.training.evaluate import evaluate
    from fusionzoo.training.optim import memory_and_compile
    from fusionzoo.training.optim.optimizers import build_optimizer
    from fusionzoo.training.optim.param_groups import param_groups
    from fusionzoo.training.runs import checkpoint, report
    from fusionzoo.training.runs.run_folder import claim_folder, store_config
    from fusionzoo.training.runs.tracker import Tracker
    from fusionzoo.training.tasks.multitask import targets_of
    from fusionzoo.training.trainer import AMP, Stepper

    load_plugins(cfg.plugins)

    # ---- data: one table, three splits
    tracker = Tracker(world)
    dataset = build.open_dataset(cfg.data, targets_of(cfg))
    report.show_data(dataset, tracker)
    cfg, dropped = drop_deselected(cfg, dataset.provenance.deselected)
    if dropped:
        tracker.say(f"unused settings, left out by --data.modalities: {', '.join(dropped)}")
    splits = {name: dataset.split(name) for name in ("train", "val", "test")}
    cfg = replace(cfg, encoders=build.choose_encoders(dataset, cfg.encoders))

    # ---- model: the same weights on every process, then each its own dropout
    seed_everything(cfg.seed)
    objective, unused = build.build_objective(cfg, splits["train"], world)
    build.check_splits(objective.tasks, splits)
    memory_and_compile.prepare(
        objective.model, cfg.train, apart=any(x.apart for x in objective.balance.values())
    )
    wrapped = wrap(objective.to(world.device), cfg.dist, world, AMP[cfg.train.amp])
    groups = param_groups(objective.model, objective.heads, cfg.optim, objective.balance)
    learn = Stepper(wrapped, build_optimizer(groups, cfg.optim), cfg, world)
    seed_everything(cfg.seed + world.rank)
    loaders = {
        name: build_loader(part, objective.model.collate(name == "train"), cfg, world, name)
        for name, part in splits.items()
    }

    # ---- where we are: at the start, or where the last checkpoint left off
    with claim_folder(cfg, world) as (folder, resume):
        state, notes = checkpoint.State(), [f"no loss reads {name}: frozen" for name in unused]
        if resume:
            state, odd = checkpoint.restore(folder / "checkpoints" / "last.pt", learn)
            notes += odd
            if world.main:
                store_config(cfg, folder)
        report.show_groups(folder, groups, learn, tracker)
        tracker.start(folder, state, cfg.log)
        for note in notes:
            tracker.say(note)

        # ---- the loop, then the test split: looked at once, with the best epoch's weights
        try:
            stopped = fit(learn, loaders, state, folder, tracker)
            if stopped:
                return stopped
            for note in checkpoint.restore_best(folder / "checkpoints" / "best.pt", learn, state):
                tracker.say(note)
            with learn.judged():
                test = evaluate(learn, loaders["test"], each_alone=report.shows_each_alone(learn))
                report.save_model(folder, learn)
        except torch.OutOfMemoryError as error:
            raise report.out_of_memory(learn) from error
        finally:
            tracker.close()
        report.report(folder, learn, state, test, tracker)
        report.report_failures(dataset, tracker)
    return 0


def fit(learn: Stepper, loaders: Loaders, state: State, folder: Path, tracker: Tracker) -> int:
    """Train the epochs that remain; return 0, or the exit code after a signal."""
    from fusionzoo.distributed.signals import catch_signals
    from fusionzoo.training.evaluate import evaluate
    from fusionzoo.training.optim.schedules import phased
    from fusionzoo.training.runs import checkpoint

    cfg = learn.cfg.train
    last, best = folder / "checkpoints" / "last.pt", folder / "checkpoints" / "best.pt"
    epoch_steps = -(-len(loaders["train"]) // cfg.accumulate)
    for note in state.refit(epoch_steps):
        tracker.say(note)
    plan = phased(learn.cfg.optim, learn.phases, cfg.epochs * epoch_steps, epoch_steps)
    tracker.progress(cfg.epochs * epoch_steps, state.step)

    with catch_signals() as signals:
        if not state.step:
            checkpoint.save(last, learn, state)
        while state.evaluated < cfg.epochs:
            stopped = train_epoch(learn, loaders, state, plan, last, tracker, signals)
            if stopped:
                tracker.say(f"stopped at step {state.step}: --resume --out {folder} goes on")
                return stopped
            with learn.judged():
                val = evaluate(learn, loaders["val"])
            state.evaluated += 1
            state.val_losses.append(val["loss"])
            train_loss = learn.mean(state.loss) / state.made if state.made else float("nan")
            tracker.log_epoch(state, train_loss, val, learn.plain.tasks, learn.rows)
            last_phase = plan(state.step - 1)[0] == len(learn.phases) - 1
            if last_phase and state.better(val, learn.plain.tasks):
                state.best = {**val, "epoch": state.evaluated, "train_loss": train_loss}
                checkpoint.save(best, learn, state, keep=2)
            state.loss.zero_()
            state.made = 0
            checkpoint.save(last, learn, state, keep=cfg.last_k)
            tracker.lap("evaluate and save")
    return 0


def train_epoch(
    learn: Stepper,
    loaders: Loaders,
    state: State,
    plan: Plan,
    last: Path,
    tracker: Tracker,
    signals: list[int],
) -> int:
    """Make the steps that remain of an epoch; return 0, or the exit code after a signal."""
    from fusionzoo.distributed.signals import exit_code
    from fusionzoo.training.balance import Now
    from fusionzoo.training.data import chunks
    from fusionzoo.training.optim.optimizers import rates, set_rates
    from fusionzoo.training.runs import checkpoint

    cfg = learn.cfg.train
    done = state.step - state.evaluated * state.epoch_steps
    if not done:
        learn.begin_epoch(loaders, Now(state.step, state.evaluated, plan(state.step)[0]))
        tracker.lap("strategies")
    for batches in chunks(loaders["train"], cfg.accumulate, state.evaluated, skip=done):
        tracker.lap("data")
        phase, factors = plan(state.step, state.val_losses)
        set_rates(learn.optimizer, factors)
        tracker.phase(learn.phases[phase].name)
        learn.watch = (state.step + 1) % cfg.log_every == 0
        now = Now(state.step, state.step / state.epoch_steps, phase)
        loss, stop = learn(batches, now, bool(signals))
        state.step, state.loss = state.step + 1, state.loss + loss
        state.count_bad(learn.cause, cfg.max_bad_steps, tracker.say)
        tracker.lap("train")
        tracker.advance()
        if learn.watch:
            figures = {"loss": learn.mean(loss), "lr": rates(learn.optimizer), **learn.figures()}
            tracker.log(state.step, "step", figures)
        if stop or (cfg.save_every and state.step % cfg.save_every == 0):
            checkpoint.save(last, learn, state, keep=cfg.last_k)
        if stop:
            return exit_code(signals)
    return 0


if __name__ == "__main__":
    from fusionzoo.distributed.exit import leave

    leave(main())
