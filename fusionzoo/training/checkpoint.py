"""Checkpoints: everything needed to continue a run bit for bit."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.utils._pytree import tree_map_only

from fusionzoo.datasets import PairedDataset
from fusionzoo.errors import FusionZooError, explained
from fusionzoo.inputs.identity import changes, data_identity
from fusionzoo.machine.devices import gpu_random_state, seed_everything, set_gpu_random_state
from fusionzoo.machine.distributed import World, from_main, gather, on_main
from fusionzoo.machine.fsdp import (
    full_optimizer_state,
    full_state_dict,
    load_full_state_dict,
    load_optimizer_state,
)
from fusionzoo.structures import seed_of

from .frozen import restore_standardise
from .multitask import Tasks
from .run_folder import Contents, read_newest, store_config, write
from .trainer import Trainer

KEPT = 2  # files of a name; the older one replaces a damaged one
PAUSE = 20  # between two writings after an epoch, as a multiple of the time that one takes


@dataclass
class State:
    """The progress of a run; field names are those of checkpoint files."""

    step: int = 0  # optimiser steps made
    evaluated: int = 0  # epochs evaluated
    loss: torch.Tensor = field(default_factory=lambda: torch.zeros(()))  # summed over the epoch
    best: Contents = field(default_factory=dict)  # of the best epoch: its validation metrics
    made: int = 0  # updates in the epoch: its steps that were not skipped
    bad: int = 0  # steps skipped in a row, for a loss or gradient that was not finite
    epoch_steps: int = 0  # steps of an epoch, with the number of processes of this run
    val_losses: list[float] = field(default_factory=list)  # of each epoch, for plateau
    data: dict[str, str] = field(default_factory=dict)  # identity of the data trained on, by part

    def is_best(self, metrics: Contents, tasks: Tasks) -> bool:
        """Whether validation `metrics` are better than the best so far, as ranked by the tasks."""
        return not self.best or tasks.rank(metrics) > tasks.rank(self.best)

    def count_skipped(self, cause: str | None, most: int, say: Callable[[str], None]) -> None:
        """Count consecutive skipped steps; raise after more than `most`."""
        if cause is None:
            self.bad, self.made = 0, self.made + 1
            return
        self.bad += 1
        say(f"warning: step {self.step} skipped, its loss or gradient is not finite: {cause}")
        if self.bad > most:
            raise FusionZooError(
                f"{self.bad} steps in a row were not finite (--train.max_bad_steps {most}). The"
                f" last: {cause}. A lower --optim.lr, or fixing those samples, may help"
            )

    def refit(self, epoch_steps: int) -> list[str]:
        """Convert the step count to an epoch of `epoch_steps` steps; return messages on a change.

        The steps of an epoch depend on the number of processes. Finished epochs are kept, and the
        share of the current one, rounded down to whole steps.
        """
        old_epoch_steps, self.epoch_steps = self.epoch_steps, epoch_steps
        if old_epoch_steps in (0, epoch_steps):
            return []
        steps_in_epoch = self.step - self.evaluated * old_epoch_steps
        self.step = self.evaluated * epoch_steps + steps_in_epoch * epoch_steps // old_epoch_steps
        sizes = f"an epoch had {old_epoch_steps} steps and now has {epoch_steps}"
        return [f"{sizes}: going on at {self.step}"]


class Files:
    """The files that a run goes on from: `last`, and `best.pt` with the weights of its best epoch.

    They are written together. After an epoch they wait until `PAUSE` times as long has passed as
    writing took; until then the best weights are in memory.
    """

    def __init__(self, trainer: Trainer, folder: Path, last: str = "last.pt") -> None:
        self.trainer, self.last, self.best = trainer, folder / last, folder / "best.pt"
        self.waiting: Contents | None = None  # of best.pt; on other processes than the main, empty
        self.due = -math.inf  # by time.monotonic()

    def keep_best(self, state: State) -> None:
        """Remember the weights and figures of the best epoch so far; called by all processes."""
        contents = {"state": asdict(state), **_weights(self.trainer)}
        self.waiting = {}
        if self.trainer.world.main:
            self.waiting = tree_map_only(torch.Tensor, _copied, contents)

    def write(self, state: State, *, if_due: bool = False) -> None:
        """Write what is new; called by all processes."""
        world, begun = self.trainer.world, time.monotonic()
        if if_due and not from_main(begun >= self.due, world):
            return
        if (best := self.waiting) is not None:
            on_main(lambda: write(best, self.best, KEPT), world)
            self.waiting = None
        save(self.last, self.trainer, state, KEPT)
        now = time.monotonic()
        self.due = now + PAUSE * (now - begun)


def save(path: Path, trainer: Trainer, state: State, keep: int = 1) -> None:
    """Write everything needed to continue bit for bit; called by all processes.

    The `keep - 1` previous files are kept, as `last-1.pt`, `last-2.pt`, ...
    """
    world = trainer.world
    contents = {
        "state": asdict(state),
        **_weights(trainer),
        "optimizer": full_optimizer_state(trainer.optimizer),
        "scaler": trainer.scaler.state_dict(),
        "random": random_states(world),
        "losses": gather(state.loss.cpu(), world),
    }
    on_main(lambda: write(contents, path, keep), world)


def _weights(trainer: Trainer) -> Contents:
    average = trainer.ema.state_dict() if trainer.ema else None
    return {"objective": full_state_dict(trainer.module), "average": average}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def restore(
    path: Path, trainer: Trainer, data: dict[str, str] | None = None
) -> tuple[State, list[str]]:
    """Restore from `path`, or from the newest undamaged older file; also return warnings.

    `data` identifies the data to go on with; None: whether they are the same is not checked.
    """
    contents, notes = read_newest(path)
    if data is not None:
        notes += check_data(path, contents["state"], data, anyway=trainer.cfg.resume == "anyway")
    restore_standardise(trainer.module.model, contents["objective"])
    problem = f"{path} belongs to another model"
    with explained(problem, LookupError, RuntimeError, ValueError, TypeError):
        load_full_state_dict(trainer.module, contents["objective"])
        load_optimizer_state(trainer.optimizer, contents["optimizer"])
        if trainer.ema:
            trainer.ema.load_state_dict(contents["average"])
        if contents["scaler"]:  # empty if the run was not fp16 before
            trainer.scaler.load_state_dict(contents["scaler"])
    state = State(**contents["state"])
    steps = gather(state.step, trainer.world)
    if len({*steps}) > 1:
        raise FusionZooError(f"{path} is another file on another node: of the steps {steps}")
    state.loss = contents["losses"][trainer.world.rank % len(contents["losses"])]
    state.loss = state.loss.to(trainer.world.device)
    if not restore_random(contents["random"], trainer.world):
        seed_everything(seed_of(state.step, trainer.world.rank))
        before, now = len(contents["random"]), trainer.world.size
        notes.append(f"made by {before} processes, going on with {now}: not bit for bit")
    return state, notes


def check_data(path: Path, state: Contents, data: dict[str, str], *, anyway: bool) -> list[str]:
    """Compare the data that a checkpoint was trained on with `data`, and store those in its state;
    raise an error if they differ, unless `anyway`; return warnings."""
    before, state["data"] = state["data"], data
    differ = changes(before, data)
    if differ and not anyway:
        raise FusionZooError(
            f"{path} was trained on data with other {differ}: bring those back, take another --out"
            " to train anew, or go on with these data by --resume anyway"
        )
    return [f"warning: going on with data with other {differ}: --resume anyway"] if differ else []


def start_or_resume(
    folder: Path, resume: bool, trainer: Trainer, dataset: PairedDataset
) -> tuple[State, list[str]]:
    """Return a new run's state, or that of the run in `folder`, restored; also return warnings."""
    # One process: each node may have a copy of the files, with times of its own.
    data = from_main(data_identity(dataset) if trainer.world.main else {}, trainer.world)
    if not resume:
        return State(data=data), []
    state, notes = restore(folder / "checkpoints" / "last.pt", trainer, data)
    if trainer.world.main:
        store_config(trainer.cfg, folder)
    return state, notes


def restore_best(folder: Path, trainer: Trainer, state: State) -> list[str]:
    """Load weights and metrics of the run's best epoch, or of the best before it if that file is
    damaged; return warnings."""
    contents, notes = read_newest(folder / "checkpoints" / "best.pt")
    load_full_state_dict(trainer.module, contents["objective"])
    if trainer.ema:
        trainer.ema.load_state_dict(contents["average"])
    state.best = contents["state"]["best"]
    return notes


def random_states(world: World) -> list[Contents]:
    """Collect the state of every process's random generators."""
    version, internal, gauss = random.getstate()
    states: Contents = {"torch": torch.get_rng_state(), "python": [version, list(internal), gauss]}
    gpu = gpu_random_state(world.device)
    if gpu is not None:
        states[world.device.type] = gpu
    return gather(states, world)


def restore_random(states: list[Contents], world: World) -> bool:
    """Restore this process's generators; return False if the number of processes changed."""
    if len(states) != world.size:
        return False
    state = states[world.rank]
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    set_gpu_random_state(state.get(world.device.type), world.device)
    return True
