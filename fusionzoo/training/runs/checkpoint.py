"""Checkpoints: everything that a bit-exact continuation of a run needs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from fusionzoo.distributed.fsdp import load_optimizer, load_whole, whole_optimizer, whole_state
from fusionzoo.distributed.process_group import World, from_main, gather
from fusionzoo.errors import FusionZooError, one_line

from ..tasks.multitask import Tasks
from ..trainer import Trainer
from .checkpoint_file import Contents, read_newest, write
from .run_folder import store_config


@dataclass
class State:
    """The progress of a run; field names are those of checkpoint files."""

    step: int = 0  # optimiser steps made
    evaluated: int = 0  # epochs evaluated
    loss: torch.Tensor = field(default_factory=lambda: torch.zeros(()))  # summed over the epoch
    best: Contents = field(
        default_factory=dict
    )  # metrics of the best epoch so far, on the validation split
    made: int = 0  # steps of the epoch that were not skipped
    bad: int = 0  # steps skipped in a row, for a loss or gradient that was not finite
    epoch_steps: int = 0  # steps of an epoch, with the processes of the time
    val_losses: list[float] = field(default_factory=list)  # of each epoch: what plateau reads

    def is_best(self, metrics: Contents, tasks: Tasks) -> bool:
        """Whether `metrics` of the validation split beat the best, as the tasks rank them."""
        return not self.best or tasks.rank(metrics) > tasks.rank(self.best)

    def count_skipped(self, cause: str | None, most: int, say: Callable[[str], None]) -> None:
        """Count steps in a row that had to be skipped; beyond `most` the run ends."""
        if cause is None:
            self.bad, self.made = 0, self.made + 1
            return
        self.bad += 1
        say(f"warning: step {self.step} skipped, its loss or gradient is not finite: {cause}")
        if self.bad > most:
            raise FusionZooError(
                f"{self.bad} steps in a row were not finite (--train.max_bad_steps {most}). The"
                f" last: {cause}. A lower --optim.lr, or mending those samples, may help"
            )

    def refit(self, epoch_steps: int) -> list[str]:
        """Count steps as `epoch_steps` of them make an epoch; say so where that changes anything.

        With other processes an epoch has another number of steps. What a run has seen is kept: the
        epochs done, and the share of the current one, rounded down to whole steps.
        """
        before, self.epoch_steps = self.epoch_steps, epoch_steps
        if before in (0, epoch_steps):
            return []
        done = self.step - self.evaluated * before
        self.step = self.evaluated * epoch_steps + done * epoch_steps // before
        return [f"an epoch had {before} steps and now has {epoch_steps}: going on at {self.step}"]


def save(path: Path, trainer: Trainer, state: State, keep: int = 1) -> None:
    """Write everything a bit-exact continuation needs; called by all processes.

    The `keep - 1` files before it stay, as `last-1.pt`, `last-2.pt`, ...
    """
    world = trainer.world
    contents = {
        "state": asdict(state),
        "objective": whole_state(trainer.module),
        "optimizer": whole_optimizer(trainer.optimizer),
        "average": trainer.ema.state_dict() if trainer.ema else None,
        "scaler": trainer.scaler.state_dict(),
        "random": random_states(world),
        "losses": gather(state.loss.cpu(), world),
    }
    problem = None
    if world.main:
        try:
            write(contents, path, keep)
        except FusionZooError as error:
            problem = str(error)
    problem = from_main(problem, world)
    if problem:
        raise FusionZooError(problem)


def restore(path: Path, trainer: Trainer) -> tuple[State, list[str]]:
    """Continue from `path`, or from the newest whole one before it; also return warnings."""
    contents, notes = read_newest(path)
    try:
        load_whole(trainer.module, contents["objective"])
        load_optimizer(trainer.optimizer, contents["optimizer"])
        if trainer.ema:
            trainer.ema.load_state_dict(contents["average"])
        if contents["scaler"]:  # empty without fp16, which may begin here
            trainer.scaler.load_state_dict(contents["scaler"])
    except (LookupError, RuntimeError, ValueError, TypeError) as error:
        raise FusionZooError(f"{path} belongs to another model: {one_line(error)}") from error
    state = State(**contents["state"])
    steps = gather(state.step, trainer.world)
    if len({*steps}) > 1:
        raise FusionZooError(f"{path} is another file on another node: of the steps {steps}")
    state.loss = contents["losses"][trainer.world.rank % len(contents["losses"])]
    state.loss = state.loss.to(trainer.world.device)
    if not restore_random(contents["random"], trainer.world):
        random.seed(f"{state.step}/{trainer.world.rank}")
        torch.manual_seed(random.getrandbits(60))
        before, now = len(contents["random"]), trainer.world.size
        notes.append(f"made by {before} processes, going on with {now}: not bit for bit")
    return state, notes


def start_or_resume(folder: Path, resume: bool, trainer: Trainer) -> tuple[State, list[str]]:
    """Return a new run's state, or that of the run in `folder`, restored; also return warnings."""
    if not resume:
        return State(), []
    state, notes = restore(folder / "checkpoints" / "last.pt", trainer)
    if trainer.world.main:
        store_config(trainer.cfg, folder)
    return state, notes


def restore_best(folder: Path, trainer: Trainer, state: State) -> list[str]:
    """Load weights and metrics of the run's best epoch, or of the best before it if that file is
    damaged; return warnings."""
    contents, notes = read_newest(folder / "checkpoints" / "best.pt")
    load_whole(trainer.module, contents["objective"])
    if trainer.ema:
        trainer.ema.load_state_dict(contents["average"])
    state.best = contents["state"]["best"]
    return notes


def random_states(world: World) -> list[Contents]:
    """Collect the state of every process's random generators."""
    version, internal, gauss = random.getstate()
    states: Contents = {"torch": torch.get_rng_state(), "python": [version, list(internal), gauss]}
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device)
    return gather(states, world)


def restore_random(states: list[Contents], world: World) -> bool:
    """Restore this process's generators; return False where the number of processes changed."""
    if len(states) != world.size:
        return False
    state = states[world.rank]
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and world.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], world.device)
    return True
