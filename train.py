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
from fusionzoo.errors import FusionZooError

if TYPE_CHECKING:
    from pathlib import Path

    from torch.utils.data import DataLoader

    from fusionzoo.structures import Batch
    from fusionzoo.training.checkpoint import State
    from fusionzoo.training.distributed import World
    from fusionzoo.training.loop import Stepper
    from fusionzoo.training.tracking import Tracker

    Loaders = dict[str, DataLoader[Batch]]


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; an error that the user can mend is one line and exit code 2."""
    args = sys.argv[1:] if args is None else args
    if {"-h", "--help"} & set(args):
        print(f"{(__doc__ or '').strip()}\n\nSettings and defaults:\n{help_text(RunConfig)}")
        return 0
    try:
        cfg = from_args(RunConfig, args)
        from fusionzoo.training.distributed import launch, launched, process_group
        from fusionzoo.training.memory import keep_freed_memory

        if cfg.dist.nproc > 1 and not launched():
            return launch(cfg.dist, __file__, args)
        keep_freed_memory()
        with process_group(cfg.dist, cfg.device) as world:
            return train(cfg, world)
    except FusionZooError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def train(cfg: RunConfig, world: World) -> int:
    """Train, test, save; return 0, or 128 + the signal that ended the run early."""
    from fusionzoo.training import checkpoint, run
    from fusionzoo.training.distributed import seed_everything, wrap
    from fusionzoo.training.groups import param_groups
    from fusionzoo.training.loop import Stepper, build_loader, evaluate
    from fusionzoo.training.optim import build_optimizer
    from fusionzoo.training.tracking import Tracker

    # ---- data: one table, three splits
    tracker = Tracker(world)
    dataset = run.open_dataset(cfg.data)
    splits = {name: dataset.split(name) for name in ("train", "val", "test")}
    cfg = replace(cfg, encoders=run.choose_encoders(dataset, cfg.encoders))

    # ---- model: the same weights on every process, then each its own dropout
    seed_everything(cfg.seed)
    objective, unused = run.build_objective(cfg, splits["train"])
    objective.to(world.device)
    groups = param_groups(objective.model, objective.heads, cfg.optim)
    optimizer = build_optimizer(groups, cfg.optim)
    learn = Stepper(wrap(objective, cfg.dist, world), optimizer, cfg, world)
    seed_everything(cfg.seed + world.rank)
    loaders = {
        name: build_loader(part, objective.model.collate(name == "train"), cfg, world, name)
        for name, part in splits.items()
    }

    # ---- where we are: at the start, or where the last checkpoint left off
    cfg, folder = run.claim_folder(cfg, world)
    last, best = folder / "checkpoints" / "last.pt", folder / "checkpoints" / "best.pt"
    state = checkpoint.restore(last, learn) if cfg.resume else checkpoint.State()
    run.show_groups(folder, groups, learn, tracker)
    for name in unused:
        tracker.say(f"no loss reads {name}: frozen")

    # ---- the loop, then the test split: looked at once, with the best epoch's weights
    tracker.start(folder, state.step, cfg.train.tensorboard)
    try:
        signal = fit(learn, loaders, state, folder, tracker)
        if signal:
            return 128 + signal
        checkpoint.restore_weights(best, learn)
        test = evaluate(learn, loaders["test"])
    finally:
        tracker.close()
    run.report(folder, learn, state, test, tracker)
    run.report_failures(dataset, tracker)
    return 0


def fit(learn: Stepper, loaders: Loaders, state: State, folder: Path, tracker: Tracker) -> int:
    """Train the epochs that remain; return the signal that stopped it after a step, or 0."""
    from fusionzoo.training import checkpoint
    from fusionzoo.training.loop import catch_signals, chunks, evaluate
    from fusionzoo.training.optim import rates, set_rates
    from fusionzoo.training.schedules import phased

    cfg = learn.cfg.train
    last, best = folder / "checkpoints" / "last.pt", folder / "checkpoints" / "best.pt"
    epoch_steps = -(-len(loaders["train"]) // cfg.accumulate)
    plan = phased(learn.cfg.optim, learn.phases, cfg.epochs * epoch_steps, epoch_steps)
    progress = tracker.progress(cfg.epochs * epoch_steps, state.step)

    with catch_signals() as signals:
        if not state.step:
            checkpoint.save(last, learn, state)
        while state.evaluated < cfg.epochs:
            done = state.step - state.evaluated * epoch_steps
            for batches in chunks(loaders["train"], cfg.accumulate, state.evaluated, skip=done):
                tracker.lap("data")
                phase, factors = plan(state.step, state.val_losses)
                set_rates(learn.optimizer, factors)
                tracker.phase(learn.phases[phase].name)
                loss, stop = learn(batches, bool(signals), state.step / epoch_steps, phase)
                state.step, state.loss = state.step + 1, state.loss + loss
                tracker.lap("train")
                progress.update()
                if state.step % cfg.log_every == 0:
                    figures = {"loss": learn.mean(loss), "lr": rates(learn.optimizer)}
                    tracker.log(state.step, "step", figures)
                if stop or (cfg.save_every and state.step % cfg.save_every == 0):
                    checkpoint.save(last, learn, state)
                if stop:
                    tracker.say(f"stopped at step {state.step}: --resume --out {folder} goes on")
                    return (signals or [15])[0]

            val = evaluate(learn, loaders["val"])
            state.evaluated += 1
            state.val_losses.append(val["loss"])
            train_loss = learn.mean(state.loss) / epoch_steps
            tracker.log_epoch(state, train_loss, val)
            last_phase = plan(state.step - 1)[0] == len(learn.phases) - 1
            if last_phase and state.better(val):
                state.best = {**val, "epoch": state.evaluated, "train_loss": train_loss}
                checkpoint.save(best, learn, state)
            state.loss.zero_()
            checkpoint.save(last, learn, state)
            tracker.lap("evaluate and save")
    return 0


if __name__ == "__main__":
    sys.exit(main())
