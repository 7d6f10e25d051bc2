"""Checkpoints: everything that a bit-exact continuation of a run needs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fusionzoo.distributed.fsdp import load_optimizer, load_whole, whole_optimizer, whole_state
from fusionzoo.distributed.process_group import World, from_main, gather
from fusionzoo.errors import FusionZooError, one_line

if TYPE_CHECKING:
    from ..tasks.multitask import Tasks
    from ..trainer import Stepper
from .checkpoint_file import Contents, read_newest, write


@dataclass
class State:
    """Where a run is; with the weights and the generators, all that its future depends on."""

    step: int = 0  # optimiser steps made
    evaluated: int = 0  # epochs evaluated
    loss: torch.Tensor = field(default_factory=lambda: torch.zeros(()))  # summed over the epoch
    best: Contents = field(default_factory=dict)  # figures of the best epoch so far
    made: int = 0  # steps of the epoch that were not skipped
    bad: int = 0  # steps skipped in a row, for a loss or gradient that was not finite
    epoch_steps: int = 0  # steps of an epoch, with the processes of the time
    val_losses: list[float] = field(default_factory=list)  # of each epoch: what plateau reads

    def better(self, figures: Contents, tasks: Tasks) -> bool:
        """Whether `figures` of the validation split beat the best, as the tasks rank them."""
        return not self.best or tasks.rank(figures) > tasks.rank(self.best)

    def count_bad(self, cause: str | None, most: int, say: Callable[[str], None]) -> None:
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


def save(path: Path, stepper: Stepper, state: State, keep: int = 1) -> None:
    """Write everything a bit-exact continuation needs; called by all processes.

    The `keep - 1` files before it stay, as `last-1.pt`, `last-2.pt`, ...
    """
    world = stepper.world
    contents = {
        "state": asdict(state),
        "objective": whole_state(stepper.plain),
        "optimizer": whole_optimizer(stepper.optimizer),
        "average": stepper.average.state_dict() if stepper.average else None,
        "scaler": stepper.scaler.state_dict(),
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


def restore(path: Path, stepper: Stepper) -> tuple[State, list[str]]:
    """Continue from `path`, or the newest before it that is whole; also say what was odd."""
    contents, notes = read_newest(path)
    try:
        load_whole(stepper.plain, contents["objective"])
        load_optimizer(stepper.optimizer, contents["optimizer"])
        if stepper.average:
            stepper.average.load_state_dict(contents["average"])
        if contents["scaler"]:  # empty without fp16, which may begin here
            stepper.scaler.load_state_dict(contents["scaler"])
    except (LookupError, RuntimeError, ValueError, TypeError) as error:
        raise FusionZooError(f"{path} belongs to another model: {one_line(error)}") from error
    state = State(**contents["state"])
    steps = gather(state.step, stepper.world)
    if len({*steps}) > 1:
        raise FusionZooError(f"{path} is another file on another node: of the steps {steps}")
    state.loss = contents["losses"][stepper.world.rank % len(contents["losses"])]
    state.loss = state.loss.to(stepper.world.device)
    if not restore_random(contents["random"], stepper.world):
        random.seed(f"{state.step}/{stepper.world.rank}")
        torch.manual_seed(random.getrandbits(60))
        count, now = len(contents["random"]), stepper.world.size
        notes.append(f"made by {count} processes, going on with {now}: not bit for bit")
    return state, notes


def restore_best(path: Path, stepper: Stepper, state: State) -> list[str]:
    """Take the weights of `path` (or of the best before it, if it is damaged), and its figures."""
    contents, notes = read_newest(path)
    load_whole(stepper.plain, contents["objective"])
    if stepper.average:
        stepper.average.load_state_dict(contents["average"])
    state.best = contents["state"]["best"]
    return notes


def random_states(world: World) -> list[Contents]:
    """Collect the generators' states of every process."""
    version, internal, gauss = random.getstate()
    own: Contents = {"torch": torch.get_rng_state(), "python": [version, list(internal), gauss]}
    if world.device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(world.device)
    return gather(own, world)


def restore_random(states: list[Contents], world: World) -> bool:
    """Put this process's generators back to where they were; False where there were others."""
    if len(states) != world.size:
        return False
    own = states[world.rank]
    version, internal, gauss = own["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(own["torch"])
    if "cuda" in own and world.device.type == "cuda":
        torch.cuda.set_rng_state(own["cuda"], world.device)
    return True
