"""Checkpoints: written atomically, read without executing anything."""

from __future__ import annotations

import os
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import FusionZooError
from .distributed import World, barrier, gather

if TYPE_CHECKING:
    from .loop import Stepper

Contents = dict[str, Any]


@dataclass
class State:
    """Where a run is; with the weights and the generators, all that its future depends on."""

    step: int = 0  # optimiser steps made
    evaluated: int = 0  # epochs evaluated
    loss: torch.Tensor = field(default_factory=lambda: torch.zeros(()))  # summed over the epoch
    best: Contents = field(default_factory=dict)  # figures of the best epoch so far
    val_losses: list[float] = field(default_factory=list)  # of each epoch: what plateau reads

    def better(self, figures: Contents) -> bool:
        """Whether `figures` of the validation split beat the best: accuracy first, then loss."""
        if not self.best:
            return True
        return (figures["accuracy"], -figures["loss"]) > (self.best["accuracy"], -self.best["loss"])


def save(path: Path, stepper: Stepper, state: State) -> None:
    """Write everything a bit-exact continuation needs; called by all processes."""
    world = stepper.world
    states = random_states(world)
    if world.main:
        contents = {
            "state": asdict(state),
            "objective": stepper.plain.state_dict(),
            "optimizer": stepper.optimizer.state_dict(),
            "scaler": stepper.scaler.state_dict(),
            "random": states,
        }
        write(contents, path)
    barrier(world)


def restore(path: Path, stepper: Stepper) -> State:
    """Continue from `path`."""
    contents = read(path)
    try:
        stepper.plain.load_state_dict(contents["objective"])
        stepper.optimizer.load_state_dict(contents["optimizer"])
    except (KeyError, RuntimeError, ValueError) as error:
        raise FusionZooError(f"{path} belongs to another model: {error}") from error
    stepper.scaler.load_state_dict(contents["scaler"])
    restore_random(contents["random"], stepper.world)
    state = State(**contents["state"])
    state.loss = state.loss.to(stepper.world.device)
    return state


def restore_weights(path: Path, stepper: Stepper) -> None:
    """Take the weights of `path`, and nothing else."""
    stepper.plain.load_state_dict(read(path)["objective"])


def write(contents: Contents, path: Path) -> None:
    """Write so that a kill at any moment leaves the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            torch.save(contents, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        raise FusionZooError(f"cannot write {path} (the one before is kept): {error}") from error


def read(path: Path) -> Contents:
    """Read a checkpoint: tensors and plain values only."""
    if not path.is_file():
        raise FusionZooError(f"no checkpoint {path} to resume from")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FusionZooError(f"{path} cannot be read: {error}") from error


def random_states(world: World) -> list[Contents]:
    """Collect the generators' states of every process."""
    version, internal, gauss = random.getstate()
    own: Contents = {"torch": torch.get_rng_state(), "python": [version, list(internal), gauss]}
    if world.device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(world.device)
    return gather(own, world)


def restore_random(states: list[Contents], world: World) -> None:
    """Put this process's generators back to where they were."""
    if len(states) != world.size:
        raise FusionZooError(
            f"the run was made by {len(states)} processes and cannot go on with {world.size}"
        )
    own = states[world.rank]
    version, internal, gauss = own["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(own["torch"])
    if "cuda" in own and world.device.type == "cuda":
        torch.cuda.set_rng_state(own["cuda"], world.device)
