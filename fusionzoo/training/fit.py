"""The epochs of a run: steps, evaluation, checkpoints, and stopping early."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from fusionzoo.config import TrainConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.distributed import World, from_main, gather
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.measure import Answers, measure
from fusionzoo.evaluation.retrieval import relevance_labels, retrieval_figures
from fusionzoo.fsdp import sharded
from fusionzoo.processes import catch_signals, exit_code
from fusionzoo.structures import Batch, StepContext
from fusionzoo.training import checkpoint, soup

from .checkpoint import State
from .loaders import chunks
from .multitask import Tasks
from .objective import Objective, ObjectiveOutput, dummy_batch
from .optim import autocast, rates, set_rates
from .schedules import Plan, phased
from .tracker import Tracker
from .trainer import Trainer

Metrics = dict[str, Any]
Loaders = dict[str, DataLoader[Batch]]
OUT_OF_TIME = -1  # in place of an exit code: evaluate, save and report as after the last epoch


def evaluate(trainer: Trainer, loader: DataLoader[Batch], each_alone: bool = False) -> Metrics:
    """Return the metrics of the fusion, and under `unimodal` those of each modality's own head,
    unless no sample has it.

    With `each_alone` also, under `given_only`, those of the fusion given each modality only, among
    the samples that have it; of the same samples, under `where_present`, those of its own head.
    Each process evaluates its own share, and no sample counts twice.
    """
    return metrics_of(trainer.module.tasks, collect_answers(trainer, loader, each_alone))


@torch.no_grad()
def collect_answers(
    trainer: Trainer, loader: DataLoader[Batch], each_alone: bool = False
) -> Answers:
    """Return the answers to the samples of all processes. Leaves the module in eval mode."""
    trainer.share_statistics()
    trainer.heap.trim()
    module, cfg, world = trainer.module, trainer.cfg.train, trainer.world
    module.eval()
    parts: list[Answers] = []
    for batch, counts in _equally_many(loader, module, world):
        batch = batch.to(world.device)
        with autocast(cfg, world.device):
            output: ObjectiveOutput = module(batch, each_alone=each_alone)
        if not counts:
            continue
        part = _answers(module, batch, output)
        if output.aligned and isinstance(loader.dataset, PairedDataset):
            part = replace(part, relevance=relevance_labels(loader.dataset).of(batch.ids))
        parts.append(part)
        trainer.heap.after_batch()
    shards = gather(Answers.join(parts).cpu() if parts else None, world)
    return Answers.join([shard for shard in shards if shard is not None])


def _answers(module: Objective, batch: Batch, output: ObjectiveOutput) -> Answers:
    assert batch.target is not None
    return Answers(
        target=batch.target,
        present=dict(zip(module.model.encoders, batch.present.unbind(1), strict=True)),
        fused=output.logits.float(),
        alone={name: x.float() for name, x in output.unimodal_logits.items()},
        given={frozenset([name]): x.float() for name, x in output.given_only.items()},
        aligned={name: x.float() for name, x in output.aligned.items()},
    )


def metrics_of(tasks: Tasks, answers: Answers) -> Metrics:
    """Compute the metrics of a whole split, see `evaluate`."""
    figures = measure(tasks, answers)
    metrics: Metrics = {**figures.fused, **(answers.retrieval(retrieval_figures) or {})}
    metrics["unimodal"] = figures.alone
    where_present: Metrics = {}
    for names in figures.given:
        (name,), rows = names, answers.has_any(names)
        head = {}
        if name in figures.alone:
            head = tasks.metrics(answers.alone[name][rows], answers.target[rows])
        where_present[name] = {"samples": int(rows.sum()), "of": len(rows), "unimodal": head}
    if where_present:
        given_only = {name: x for (name,), x in figures.given.items()}
        metrics |= {"given_only": given_only, "where_present": where_present}
    return metrics


def _equally_many(
    loader: DataLoader[Batch], module: Objective, world: World
) -> Iterator[tuple[Batch, bool]]:
    """Yield the batches and whether they count.

    With sharded weights every process must run the same number, so dummy batches that do not count
    are appended.
    """
    yield from ((batch, True) for batch in loader)
    if sharded(module):
        num_batches = len(loader)
        dummy = dummy_batch(module.model)
        yield from ((dummy, False) for _ in range(max(gather(num_batches, world)) - num_batches))


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
                tracker.say(f"stopped at step {state.step}: {tracker.how_to_go_on}")
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
        tracker.say(f"{said}: {tracker.how_to_go_on}")
    elif state.evaluated * epoch_steps < steps:
        tracker.say(f"no better epoch for {cfg.patience}: stopped after epoch {state.evaluated}")
    mix_soup(trainer, loaders, state, best, tracker)
    return 0


def check_refit(trainer: Trainer) -> None:
    """Raise an error for settings that `--train.refit` cannot keep, before anything is trained."""
    cfg, why = trainer.cfg, "--train.refit trains without validation"
    if not cfg.train.refit:
        return
    if "plateau" in (cfg.optim.schedule, *cfg.optim.modality_schedule.values()):
        raise FusionZooError(f"--optim.schedule plateau follows a validation loss; {why}")
    if cfg.train.soup:
        raise FusionZooError(f"--train.soup mixes epochs by their validation; {why}")
    if cfg.train.time_limit is not None:
        raise FusionZooError("--train.refit trains twice, and has no --train.time_limit")
    for name, strategy in trainer.module.balance.items():
        if strategy.validates:
            raise FusionZooError(f"--balance {name} needs samples to validate on; {why}")


def refit(
    trainer: Trainer, loaders: Loaders, state: State, epochs: int, path: Path, tracker: Tracker
) -> int:
    """Train for so many epochs without validation; return 0, or the exit code after a signal.

    The schedule of the learning rate is that of `fit`, cut off after these epochs. The state after
    each epoch, and that of a stopped run, is in `path`.
    """
    cfg = trainer.cfg.train
    epoch_steps = -(-len(loaders["train"]) // cfg.accumulate)
    for note in state.refit(epoch_steps):
        tracker.say(note)
    steps = num_steps(cfg, epoch_steps)
    plan = phased(trainer.cfg.optim, trainer.freeze_plan.phases, steps, epoch_steps)
    tracker.progress(min(steps, epochs * epoch_steps), state.step)
    with catch_signals() as signals:
        while state.evaluated < epochs and state.evaluated * epoch_steps < steps:
            stopped = train_epoch(trainer, loaders, state, plan, path, tracker, signals)
            if stopped:
                tracker.say(f"stopped at step {state.step} of the refit: --resume goes on")
                return stopped
            state.evaluated += 1
            loss = trainer.mean_loss(state.loss) / state.made if state.made else float("nan")
            tracker.say(f"refit, epoch {state.evaluated:3d} of {epochs}  train loss {loss:.3f}")
            state.loss.zero_()
            state.made = 0
            checkpoint.save(path, trainer, state, keep=cfg.last_k)
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
