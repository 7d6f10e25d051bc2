"""Checkpoints: written atomically, checked when read, read without executing anything.

A file is what `torch.save` writes, a zip archive; the digest of its bytes stands in the archive's
comment. So `torch.load` reads it as ever, and a bit that turned is found.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from fusionzoo.errors import FusionZooError, one_line

from .distributed import World, from_main, gather
from .sharding import load_optimizer, load_whole, whole_optimizer, whole_state

if TYPE_CHECKING:
    from .joint import Tasks
    from .step import Stepper

Contents = dict[str, Any]
MARK = b"sha256:"  # of the archive's comment, before 64 hexadecimal digits
COMMENT = len(MARK) + 64
BLOCK = 1 << 22  # bytes hashed at once


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


def write(contents: Contents, path: Path, keep: int = 1) -> None:
    """Write so that a kill at any moment leaves the old file or the new one, never half of one."""
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb+") as file:
            torch.save(contents, file)
            _seal(file)
            file.flush()
            os.fsync(file.fileno())
        _rotate(path, keep)
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            partial.unlink()
        kept = "the one before is kept" if path.is_file() else "there was none before"
        there = next(folder for folder in path.parents if folder.is_dir())
        free = shutil.disk_usage(there).free / 1e6  # torch does not say when a disk is full
        raise FusionZooError(
            f"cannot write {path} ({kept}; {free:,.1f} MB are free there): {error};"
            f" {_remedy(there)}, then --resume"
        ) from error


def _remedy(folder: Path) -> str:
    if os.access(folder, os.W_OK):
        return "make room"
    return f"{folder} may not be written: ask for permission, or name another --out"


def read_newest(path: Path) -> tuple[Contents, list[str]]:
    """Read `path`, or the newest before it that is whole; also say what was wrong with the rest."""
    problems: list[str] = []
    for one in (path, *_before(path)):
        if one == path or one.is_file():
            try:
                contents = read(one)
                if problems:
                    step = contents["state"]["step"]
                    problems = [f"warning: {problems[0]}; {one.name} is whole: step {step}"]
                return contents, problems
            except FusionZooError as error:
                problems.append(str(error))
    raise FusionZooError(problems[0])


def read(path: Path) -> Contents:
    """Read a checkpoint whose digest is right: tensors and plain values only."""
    if not path.is_file():
        raise FusionZooError(f"no checkpoint {path} to resume from")
    try:
        with path.open("rb") as file:
            _verify(file)
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


def _seal(file: BinaryIO) -> None:
    """Write the digest of what `file` holds into the comment of the archive's last record."""
    digest = _digest(file, file.tell())
    file.seek(-2, os.SEEK_END)  # the comment's length: 0 so far
    file.write(COMMENT.to_bytes(2, "little") + MARK + digest)


def _verify(file: BinaryIO) -> None:
    size = file.seek(0, os.SEEK_END) - COMMENT
    if size < 0:
        raise ValueError("it is cut off")
    file.seek(size)
    comment = file.read()
    if not comment.startswith(MARK):
        raise ValueError("it is cut off, or was not written by fusionzoo")
    if _digest(file, size) != comment.removeprefix(MARK):
        raise ValueError("its bytes have changed since it was written")


def _digest(file: BinaryIO, size: int) -> bytes:
    """Hash the first `size` bytes, the comment's length counted as 0."""
    file.seek(0)
    found, left = hashlib.sha256(), size - 2
    while block := file.read(min(BLOCK, left)):
        found.update(block)
        left -= len(block)
    return found.hexdigest().encode()


def _before(path: Path, number: int = 0) -> Iterator[Path]:
    """Yield last-1.pt, last-2.pt, ... as far as there are any; one may be missing."""
    numbered = [one.stem.rpartition("-")[2] for one in path.parent.glob(f"{path.stem}-*.pt")]
    for number in sorted(int(text) for text in numbered if text.isdigit()):
        yield path.with_stem(f"{path.stem}-{number}")


def _rotate(path: Path, keep: int) -> None:
    """Number the files before; a link, so that `path` itself is never missing."""
    for number in range(keep - 1, 0, -1):
        newer = path.with_stem(f"{path.stem}-{number - 1}") if number > 1 else path
        older = path.with_stem(f"{path.stem}-{number}")
        if newer.is_file():
            spare = older.with_suffix(".spare")
            spare.unlink(missing_ok=True)
            os.link(newer, spare)
            spare.replace(older)
