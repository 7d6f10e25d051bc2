"""The epochs of a run: steps, evaluation, checkpoints, and stopping early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from fusionzoo.config import RunConfig, TrainConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.measure import Answers, measure
from fusionzoo.evaluation.retrieval import Relevance, relevance_labels, retrieval_figures
from fusionzoo.machine.distributed import World, from_main, gather
from fusionzoo.machine.fsdp import sharded
from fusionzoo.machine.processes import catch_signals, exit_code
from fusionzoo.structures import Batch, StepContext
from fusionzoo.training import checkpoint

from .checkpoint import State
from .loaders import chunks
from .multitask import Tasks
from .objective import Objective, ObjectiveOutput, dummy_batch
from .optim import autocast, rates, set_rates
from .schedules import phased
from .tracker import Tracker
from .trainer import Trainer

Metrics = dict[str, Any]
Loaders = dict[str, DataLoader[Batch]]
FEW_EPOCHS = 30  # of more, the better ones and every tenth have a line
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
        parts.append(_answers(module, batch, output, loader.dataset))
        trainer.heap.after_batch()
    shards = gather(Answers.join(parts).cpu() if parts else None, world)
    return Answers.join([shard for shard in shards if shard is not None])


def _answers(module: Objective, batch: Batch, output: ObjectiveOutput, dataset: Any) -> Answers:
    assert batch.target is not None
    is_compared = bool(output.aligned) and isinstance(dataset, PairedDataset)
    return Answers(
        target=batch.target,
        present=dict(zip(module.model.encoders, batch.present.unbind(1), strict=True)),
        fused=output.logits.float(),
        alone={name: x.float() for name, x in output.unimodal_logits.items()},
        by_subset={frozenset([name]): x.float() for name, x in output.given_only.items()},
        aligned={name: x.float() for name, x in output.aligned.items()},
        relevance=relevance_labels(dataset).of(batch.ids) if is_compared else Relevance(),
        ids=list(batch.ids),
        weights=batch.weight,
    )


def metrics_of(tasks: Tasks, answers: Answers, *, slow: bool = False) -> Metrics:
    """Compute the metrics of a whole split, see `evaluate`; with `slow` also the slow ones."""
    figures = measure(tasks, answers, slow=slow)
    metrics: Metrics = {**figures.fused, **(answers.retrieval(retrieval_figures) or {})}
    metrics["unimodal"] = figures.alone
    where_present: Metrics = {}
    for names in figures.by_subset:
        (name,), rows = names, answers.has_any(names)
        head = {}
        if name in figures.alone:
            chosen = None if answers.weights is None else answers.weights[rows]
            part = answers.alone[name][rows], answers.target[rows], chosen
            head = tasks.metrics(*part, slow=slow)
        where_present[name] = {"samples": int(rows.sum()), "of": len(rows), "unimodal": head}
    if where_present:
        given_only = {name: x for (name,), x in figures.by_subset.items()}
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


class RunInProgress:
    """A run in progress: what trains, on which batches, how far it is, where its checkpoints are.

    `last` is the name of the checkpoint from which the run goes on.
    """

    def __init__(
        self,
        trainer: Trainer,
        loaders: Loaders,
        state: State,
        folder: Path,
        tracker: Tracker,
        last: str = "last.pt",
    ) -> None:
        self.trainer, self.loaders, self.state, self.tracker = trainer, loaders, state, tracker
        self.files = checkpoint.Files(trainer, folder / "checkpoints", last)
        cfg = trainer.cfg.train
        self.epoch_steps = -(-len(loaders["train"]) // cfg.accumulate)
        self.steps = cfg.epochs * self.epoch_steps
        if cfg.max_steps is not None:
            self.steps = min(self.steps, cfg.max_steps)
        phases = trainer.freeze_plan.phases
        self.plan = phased(trainer.cfg.optim, phases, self.steps, self.epoch_steps)

    def fit(self) -> int:
        """Train the epochs that remain; return 0, or the exit code after a signal."""
        state, tracker, cfg = self.state, self.tracker, self.trainer.cfg.train
        late = False
        with self._progress(self.steps), catch_signals() as signals:
            if not state.step:
                self.files.write(state)
            while self._goes_on():
                late = state.step > 0 and from_main(
                    self.tracker.is_late(cfg.time_limit), self.trainer.world
                )
                stopped = OUT_OF_TIME if late else self.train_epoch(signals)
                if stopped not in (0, OUT_OF_TIME):
                    tracker.say(f"stopped at step {state.step}: {tracker.how_to_go_on}")
                    return stopped
                late = stopped == OUT_OF_TIME and state.step < self.steps
                if late:
                    break
                self.evaluate_epoch()
                self.files.write(state, if_due=self._goes_on())
                tracker.lap("evaluate and save")
        if late:
            self._stop_in_time()
            said = f"time limit of {cfg.time_limit} reached at step {state.step} of {self.steps}"
            tracker.say(f"{said}: {tracker.how_to_go_on}")
        elif self._has_steps():
            tracker.say(
                f"no better epoch for {cfg.patience}: stopped after epoch {state.evaluated}"
            )
        return 0

    def refit(self, epochs: int) -> int:
        """Train for so many epochs without validation; return 0, or the exit code after a signal.

        The schedule of the learning rate is that of `fit`, cut off after these epochs. The state
        after each epoch, and that of a stopped run, is in `last`.
        """
        state, tracker = self.state, self.tracker
        steps = min(self.steps, epochs * self.epoch_steps)
        with self._progress(steps), catch_signals() as signals:
            while state.evaluated < epochs and self._has_steps():
                stopped = self.train_epoch(signals)
                if stopped:
                    tracker.say(f"stopped at step {state.step} of the refit: --resume goes on")
                    return stopped
                state.evaluated += 1
                self._forget_losses()
                self.files.write(state, if_due=state.evaluated < epochs and self._has_steps())
        return 0

    def _progress(self, steps: int) -> AbstractContextManager[None]:
        for note in self.state.refit(self.epoch_steps):
            self.tracker.say(note)
        return self.tracker.progress(steps, self.state.step)

    def _has_steps(self) -> bool:
        return self.state.evaluated * self.epoch_steps < self.steps

    def _goes_on(self) -> bool:
        return self._has_steps() and not out_of_patience(self.state, self.trainer.cfg.train)

    def _mean_loss(self) -> float:
        """Return the mean loss of an epoch's steps."""
        made = self.state.made
        return self.trainer.mean_loss(self.state.loss) / made if made else float("nan")

    def _forget_losses(self) -> None:
        self.state.loss.zero_()
        self.state.made = 0

    def train_epoch(self, signals: list[int]) -> int:
        """Run the remaining steps of an epoch; return 0, `OUT_OF_TIME`, or a signal's exit code."""
        trainer, state, tracker = self.trainer, self.state, self.tracker
        cfg = trainer.cfg.train
        steps_done = state.step - state.evaluated * state.epoch_steps
        if not steps_done:
            context = StepContext(state.step, state.evaluated, self.plan(state.step)[0])
            trainer.begin_epoch(self.loaders, context)
            tracker.lap("strategies")
        left, loader = self.steps - state.step, self.loaders["train"]
        for batches in chunks(
            loader, cfg.accumulate, state.evaluated, skip=steps_done, max_chunks=left
        ):
            tracker.lap("data")
            phase, factors = self.plan(state.step, state.val_losses, trainer.restarts())
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
                self.files.write(state)
            if result.stop:
                interrupted = any(gather(bool(signals), trainer.world))
                return exit_code(signals) if interrupted else OUT_OF_TIME
        return 0

    def evaluate_epoch(self, *, any_phase: bool = False) -> None:
        """Evaluate on the validation split, if there is one; keep the weights of the best epoch of
        the last phase, or of any; with `--train.select last` those of the last so far."""
        trainer, state = self.trainer, self.state
        val: Metrics = {}
        with trainer.ema_weights():
            if "val" in self.loaders:
                val = evaluate(trainer, self.loaders["val"])
            state.evaluated += 1
        if val:
            state.val_losses.append(val["loss"])
            if trainer.cfg.train.metric and not state.best:
                trainer.module.tasks.check_leading(val)
        train_loss, tasks = self._mean_loss(), trainer.module.tasks
        is_last = trainer.cfg.train.select == "last"
        is_best = (self._in_last_phase() or any_phase) and (is_last or state.is_best(val, tasks))
        many = self.steps > FEW_EPOCHS * self.epoch_steps
        shown = not many or state.evaluated % 10 == 0 or (is_best and not is_last)
        self.tracker.log_epoch(state, train_loss, val, tasks, shown=shown)
        self._forget_losses()
        if is_best:
            state.best = {**val, "epoch": state.evaluated, "train_loss": train_loss}
            self.files.keep_best(state)

    def _in_last_phase(self) -> bool:
        return self.plan(self.state.step - 1)[0] == len(self.trainer.freeze_plan.phases) - 1

    def _stop_in_time(self) -> None:
        """Evaluate what was trained since the last evaluation; resumed, the run goes on here."""
        state = self.state
        within_epoch = state.step > state.evaluated * state.epoch_steps
        if not within_epoch and state.best:
            return self.files.write(state)
        before = replace(state, loss=state.loss.clone(), val_losses=[*state.val_losses])
        self.evaluate_epoch(any_phase=not state.best)
        state.evaluated, state.made = before.evaluated, before.made
        state.loss, state.val_losses = before.loss, before.val_losses
        best_so_far = state.best if self._in_last_phase() else before.best
        self.files.write(replace(state, best=best_so_far))
        self.tracker.lap("evaluate and save")


def check_refit(trainer: Trainer) -> None:
    """Raise an error for settings that `--train.refit` cannot keep, before anything is trained."""
    if trainer.cfg.train.refit:
        _check_without_validation(trainer, "; --train.refit trains without validation")


def _check_without_validation(trainer: Trainer, why: str) -> None:
    """Raise an error for a schedule and strategies that need a validation split."""
    optim = trainer.cfg.optim
    if "plateau" in (optim.schedule, *optim.modality_schedule.values()):
        raise FusionZooError(f"--optim.schedule plateau follows a validation loss{why}")
    for name, strategy in trainer.module.balance.items():
        if strategy.validates:
            raise FusionZooError(f"--balance {name} needs a validation split{why}")


def check_last(cfg: RunConfig) -> None:
    """Raise an error for settings that follow validation, beside `--train.select last`."""
    if cfg.train.select != "last":
        return
    train = cfg.train
    for name, is_set, what in (
        ("patience", train.patience is not None, "goes by validation"),
        ("metric", train.metric, "chooses an epoch by validation"),
        ("trials", train.trials > 1, "keeps the best by validation"),
        ("refit", train.refit, "trains anew for the epochs that validation chose"),
    ):
        if is_set:
            raise FusionZooError(
                f"--train.{name} {what}, and --train.select last keeps the last epoch whatever"
                " validation says: leave one out"
            )


def check_unvalidated(trainer: Trainer) -> None:
    """Raise an error for settings that need a validation split, where the data has none."""
    why = ", and the data has none: --data.val_share 0.1 makes one"
    if trainer.cfg.train.calibrate == "temperature":
        raise FusionZooError(f"--train.calibrate temperature needs a validation split{why}")
    _check_without_validation(trainer, why)


def out_of_patience(state: State, cfg: TrainConfig) -> bool:
    """Whether the last `cfg.patience` epochs brought no better one."""
    if cfg.patience is None or not state.best:
        return False
    waited: int = state.evaluated - state.best["epoch"]
    return waited >= cfg.patience
