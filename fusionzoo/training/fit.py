"""The epochs of a run: steps, evaluation, checkpoints, and stopping early."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch.utils.data import DataLoader

from fusionzoo.config import TrainConfig
from fusionzoo.distributed.process_group import from_main, gather
from fusionzoo.distributed.signals import catch_signals, exit_code
from fusionzoo.structures import Batch, StepContext

from .data import chunks
from .evaluate import Metrics, evaluate
from .optim.optimizers import rates, set_rates
from .optim.schedules import Plan, phased
from .runs import checkpoint, soup
from .runs.checkpoint import State
from .runs.tracker import Tracker
from .trainer import Trainer

Loaders = dict[str, DataLoader[Batch]]
OUT_OF_TIME = -1  # in place of an exit code: evaluate, save and report as after the last epoch


def fit(trainer: Trainer, loaders: Loaders, state: State, folder: Path, tracker: Tracker) -> int:
    """Train the epochs that remain; return 0, or the exit code after a signal."""
    cfg = trainer.cfg.train
    last, best = folder / "checkpoints" / "last.pt", folder / "checkpoints" / "best.pt"
    epoch_steps = -(-len(loaders["train"]) // cfg.accumulate)
    for note in state.refit(epoch_steps):
        tracker.say(note)
    phases, steps = trainer.freeze_plan.phases, num_steps(cfg, epoch_steps)
    plan = phased(trainer.cfg.optim, phases, steps, epoch_steps)
    tracker.progress(steps, state.step)
    late = False

    with catch_signals() as signals:
        if not state.step:
            checkpoint.save(last, trainer, state)
        while state.evaluated * epoch_steps < steps and not out_of_patience(state, cfg):
            stopped = OUT_OF_TIME
            if not (state.step and from_main(tracker.is_late(cfg.time_limit), trainer.world)):
                stopped = train_epoch(trainer, loaders, state, plan, last, tracker, signals)
            if stopped not in (0, OUT_OF_TIME):
                tracker.say(f"stopped at step {state.step}: --resume --out {folder} goes on")
                return stopped
            late = stopped == OUT_OF_TIME and state.step < steps
            if late:
                break
            is_best = evaluate_epoch(trainer, loaders, state, plan, best, tracker)
            same_as = best if is_best else None
            checkpoint.save(last, trainer, state, keep=cfg.last_k, same_as=same_as)
            soup.remove_rejected(trainer, state, best.parent)
            tracker.lap("evaluate and save")
    if late:
        stop_in_time(trainer, loaders, state, plan, last, best, tracker)
        said = f"time limit of {cfg.time_limit} reached at step {state.step} of {steps}"
        tracker.say(f"{said}: --resume --out {folder} goes on")
    elif state.evaluated * epoch_steps < steps:
        tracker.say(f"no better epoch for {cfg.patience}: stopped after epoch {state.evaluated}")
    mix_soup(trainer, loaders, state, best, tracker)
    return 0


def num_steps(cfg: TrainConfig, epoch_steps: int) -> int:
    """Return the optimiser steps of a run, of which `epoch_steps` make an epoch."""
    steps = cfg.epochs * epoch_steps
    return steps if cfg.max_steps is None else min(steps, cfg.max_steps)


def out_of_patience(state: State, cfg: TrainConfig) -> bool:
    """Whether the last `cfg.patience` epochs brought no better one."""
    if cfg.patience is None or not state.best:
        return False
    waited: int = state.evaluated - state.best["epoch"]
    return waited >= cfg.patience


def train_epoch(
    trainer: Trainer,
    loaders: Loaders,
    state: State,
    plan: Plan,
    last: Path,
    tracker: Tracker,
    signals: list[int],
) -> int:
    """Run the remaining steps of an epoch; return 0, `OUT_OF_TIME`, or a signal's exit code."""
    cfg = trainer.cfg.train
    steps_done = state.step - state.evaluated * state.epoch_steps
    if not steps_done:
        context = StepContext(state.step, state.evaluated, plan(state.step)[0])
        trainer.begin_epoch(loaders, context)
        tracker.lap("strategies")
    steps_left = num_steps(cfg, state.epoch_steps) - state.step
    for batches in chunks(
        loaders["train"], cfg.accumulate, state.evaluated, skip=steps_done, max_chunks=steps_left
    ):
        tracker.lap("data")
        phase, factors = plan(state.step, state.val_losses, trainer.restarts())
        set_rates(trainer.optimizer, factors)
        tracker.phase(trainer.freeze_plan.phases[phase].name)
        log = (state.step + 1) % cfg.log_every == 0
        context = StepContext(state.step, state.step / state.epoch_steps, phase)
        stop = bool(signals) or tracker.is_late(cfg.time_limit)
        result = trainer.step(batches, context, stop=stop, measure=log)
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
            interrupted = any(gather(bool(signals), trainer.world))
            return exit_code(signals) if interrupted else OUT_OF_TIME
    return 0


def evaluate_epoch(
    trainer: Trainer,
    loaders: Loaders,
    state: State,
    plan: Plan,
    best: Path,
    tracker: Tracker,
    *,
    any_phase: bool = False,
) -> bool:
    """Evaluate on the validation split; keep a checkpoint of the best epoch of the last phase, or
    of any. Return whether this epoch is the best."""
    in_last_phase = plan(state.step - 1)[0] == len(trainer.freeze_plan.phases) - 1
    with trainer.ema_weights():
        val = evaluate(trainer, loaders["val"])
        state.evaluated += 1
        if in_last_phase:
            soup.add_candidate(trainer, state, val, best.parent)
    state.val_losses.append(val["loss"])
    train_loss = trainer.mean_loss(state.loss) / state.made if state.made else float("nan")
    tracker.log_epoch(state, train_loss, val, trainer.module.tasks, trainer.rows)
    state.loss.zero_()
    state.made = 0
    is_best = (in_last_phase or any_phase) and state.is_best(val, trainer.module.tasks)
    if is_best:
        state.best = {**val, "epoch": state.evaluated, "train_loss": train_loss}
        checkpoint.save(best, trainer, state, keep=2)
    return is_best


def stop_in_time(
    trainer: Trainer,
    loaders: Loaders,
    state: State,
    plan: Plan,
    last: Path,
    best: Path,
    tracker: Tracker,
) -> None:
    """Evaluate what was trained since the last evaluation; resumed, the run goes on from here."""
    within_epoch = state.step > state.evaluated * state.epoch_steps
    if not within_epoch and state.best:
        return
    before = replace(state, loss=state.loss.clone(), val_losses=[*state.val_losses])
    evaluate_epoch(trainer, loaders, state, plan, best, tracker, any_phase=not state.best)
    in_last_phase = plan(state.step - 1)[0] == len(trainer.freeze_plan.phases) - 1
    state.evaluated, state.made = before.evaluated, before.made
    state.loss, state.val_losses = before.loss, before.val_losses
    best_so_far = state.best if in_last_phase else before.best
    checkpoint.save(last, trainer, replace(state, best=best_so_far), keep=trainer.cfg.train.last_k)
    tracker.lap("evaluate and save")


def mix_soup(
    trainer: Trainer, loaders: Loaders, state: State, best: Path, tracker: Tracker
) -> None:
    """Replace the best epoch's weights by the greedy soup, if `--train.soup` finds one."""

    def evaluate_soup() -> Metrics:
        with trainer.ema_weights():
            return evaluate(trainer, loaders["val"])

    metrics = soup.mix(trainer, state, best.parent, evaluate_soup)
    if metrics is None:
        return
    tasks, epochs = trainer.module.tasks, ", ".join(map(str, metrics["soup"]))
    name = tasks.leading
    tracker.say(
        f"soup of epochs {epochs}: val {name} {metrics[name]:.3f}, of the best epoch alone"
        f" {state.best[name]:.3f}"
    )
    state.best = {**state.best, **metrics, "epoch": state.best["epoch"]}
    checkpoint.save(best, trainer, state, keep=2)
