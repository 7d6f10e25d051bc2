"""The epochs of a run: steps, evaluation, checkpoints, and stopping early."""

from __future__ import annotations

from pathlib import Path

from torch.utils.data import DataLoader

from fusionzoo.distributed.signals import catch_signals, exit_code
from fusionzoo.structures import Batch, StepContext

from .data import chunks
from .evaluate import evaluate
from .optim.optimizers import rates, set_rates
from .optim.schedules import Plan, phased
from .runs import checkpoint
from .runs.checkpoint import State
from .runs.tracker import Tracker
from .trainer import Trainer

Loaders = dict[str, DataLoader[Batch]]


def fit(trainer: Trainer, loaders: Loaders, state: State, folder: Path, tracker: Tracker) -> int:
    """Train the epochs that remain; return 0, or the exit code after a signal."""
    cfg = trainer.cfg.train
    last, best = folder / "checkpoints" / "last.pt", folder / "checkpoints" / "best.pt"
    epoch_steps = -(-len(loaders["train"]) // cfg.accumulate)
    for note in state.refit(epoch_steps):
        tracker.say(note)
    phases = trainer.freeze_plan.phases
    plan = phased(trainer.cfg.optim, phases, cfg.epochs * epoch_steps, epoch_steps)
    tracker.progress(cfg.epochs * epoch_steps, state.step)

    with catch_signals() as signals:
        if not state.step:
            checkpoint.save(last, trainer, state)
        while state.evaluated < cfg.epochs:
            stopped = train_epoch(trainer, loaders, state, plan, last, tracker, signals)
            if stopped:
                tracker.say(f"stopped at step {state.step}: --resume --out {folder} goes on")
                return stopped
            evaluate_epoch(trainer, loaders, state, plan, best, tracker)
            checkpoint.save(last, trainer, state, keep=cfg.last_k)
            tracker.lap("evaluate and save")
    return 0


def train_epoch(
    trainer: Trainer,
    loaders: Loaders,
    state: State,
    plan: Plan,
    last: Path,
    tracker: Tracker,
    signals: list[int],
) -> int:
    """Make the steps that remain of an epoch; return 0, or the exit code after a signal."""
    cfg = trainer.cfg.train
    done = state.step - state.evaluated * state.epoch_steps
    if not done:
        context = StepContext(state.step, state.evaluated, plan(state.step)[0])
        trainer.begin_epoch(loaders, context)
        tracker.lap("strategies")
    for batches in chunks(loaders["train"], cfg.accumulate, state.evaluated, skip=done):
        tracker.lap("data")
        phase, factors = plan(state.step, state.val_losses)
        set_rates(trainer.optimizer, factors)
        tracker.phase(trainer.freeze_plan.phases[phase].name)
        log = (state.step + 1) % cfg.log_every == 0
        context = StepContext(state.step, state.step / state.epoch_steps, phase)
        result = trainer.step(batches, context, stop=bool(signals), measure=log)
        state.step, state.loss = state.step + 1, state.loss + result.loss
        state.count_skipped(result.skipped, cfg.max_bad_steps, tracker.say)
        tracker.lap("train")
        tracker.advance()
        if log:
            loss = trainer.mean_loss(result.loss)
            tracker.log_step(state.step, loss, rates(trainer.optimizer), result)
        if result.stop or (cfg.save_every and state.step % cfg.save_every == 0):
            checkpoint.save(last, trainer, state, keep=cfg.last_k)
        if result.stop:
            return exit_code(signals)
    return 0


def evaluate_epoch(
    trainer: Trainer, loaders: Loaders, state: State, plan: Plan, best: Path, tracker: Tracker
) -> None:
    """Evaluate on the validation split; keep a checkpoint of the best epoch of the last phase."""
    with trainer.ema_weights():
        val = evaluate(trainer, loaders["val"])
    state.evaluated += 1
    state.val_losses.append(val["loss"])
    train_loss = trainer.mean_loss(state.loss) / state.made if state.made else float("nan")
    tracker.log_epoch(state, train_loss, val, trainer.module.tasks, trainer.rows)
    in_last_phase = plan(state.step - 1)[0] == len(trainer.freeze_plan.phases) - 1
    if in_last_phase and state.is_best(val, trainer.module.tasks):
        state.best = {**val, "epoch": state.evaluated, "train_loss": train_loss}
        checkpoint.save(best, trainer, state, keep=2)
    state.loss.zero_()
    state.made = 0
