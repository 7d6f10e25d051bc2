"""Checkpoints: everything needed to continue a run bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from fusionzoo.datasets import Collate, PairedDataset
from fusionzoo.devices import gpu_random_state, seed_everything, set_gpu_random_state
from fusionzoo.distributed import World, from_main, gather
from fusionzoo.encoders import Encoder
from fusionzoo.errors import FusionZooError, one_line
from fusionzoo.features_frozen import StoredModality
from fusionzoo.fsdp import (
    full_optimizer_state,
    full_state_dict,
    load_full_state_dict,
    load_optimizer_state,
    sharded,
)
from fusionzoo.fusion import fusion_info
from fusionzoo.identity import changes, data_identity
from fusionzoo.model import RAW_KINDS, FusionModel, Moments, Standardise, encode_rows
from fusionzoo.progress import progress_bar
from fusionzoo.structures import evaluating, seed_of
from fusionzoo.worker_memory import make_loader

from .loaders import num_workers
from .multitask import Tasks
from .objective import dummy_batch
from .optim import autocast
from .run_folder import Contents, read_newest, store_config, write
from .trainer import Trainer

MAX_SAMPLES = 10_000  # of a larger split, at random: a mean is then off by 1 % of the std


def frozen_encoders(model: FusionModel) -> dict[str, Encoder]:
    """Return the encoders whose features stay the same for the whole run."""
    return {
        name: encoder
        for name, encoder in model.named_encoders()
        if encoder.frozen or not any(True for _ in encoder.parameters())
    }


@torch.no_grad()
def standardise_frozen(
    trainer: Trainer, train_set: PairedDataset, stored: Mapping[str, StoredModality]
) -> list[str]:
    """Measure frozen encoders' features, and standardise them from now on; return what to say.

    `stored` are the modalities whose features `train_set` reads from the cache. Called by all
    processes, each of which encodes its share.
    """
    module, cfg = trainer.module, trainer.cfg
    encoders = frozen_encoders(module.model)
    if cfg.train.standardise == "off" or not encoders:
        return []
    with evaluating(module), autocast(cfg.train, trainer.world.device):
        if sharded(module):
            # FSDP's first forward pass must be that of the outermost module.
            module(dummy_batch(module.model).to(trainer.world.device))
        modules = {
            name: _measure(trainer, encoder, train_set.only(name), stored.get(name))
            for name, encoder in encoders.items()
        }
    module.model.complete(standardise=modules)
    names = ", ".join(modules)
    return [f"{names}: features standardised by the training split (--train.standardise auto)"]


def restore_standardise(model: FusionModel, weights: Mapping[str, Tensor]) -> None:
    """Standardise the features of the modalities for which a checkpoint holds statistics."""
    means = {
        name: weights.get(f"model.standardise.{name}.pooled_mean")
        for name, _ in model.named_encoders()
    }
    modules = {name: Standardise(len(mean)) for name, mean in means.items() if mean is not None}
    model.complete(standardise=modules)


def _measure(
    trainer: Trainer, encoder: Encoder, samples: PairedDataset, stored: StoredModality | None
) -> Standardise:
    """Measure one modality's features on the training samples that have it."""
    cfg, world, name = trainer.cfg, trainer.world, encoder.modality
    loader = make_loader(
        samples,
        _share(trainer, samples, by_length=stored is None),
        Collate({name: stored or encoder.processor(False)}),
        num_workers=num_workers(cfg.train.num_workers, world),
    )
    pooled = tokens = Moments.of(torch.zeros(0, encoder.dim))
    label, silent = f"standardise {name}", not world.main
    for batch in progress_bar(loader, desc=label, unit="batch", disable=silent):
        batch = batch.to(world.device)
        features = encode_rows(encoder, batch.inputs[name], batch.present[:, 0])
        pooled = pooled.merge(_moments(features.pooled[features.mask.any(1)]))
        tokens = tokens.merge(_moments(features.tokens[features.mask]))
        trainer.heap.after_batch()
    shares = gather((pooled, tokens), world)
    pooled, tokens = (reduce(Moments.merge, parts) for parts in zip(*shares, strict=True))
    reads_tokens = fusion_info(cfg.fusion["name"]).reads == "tokens"
    return Standardise.from_moments(
        pooled, tokens if reads_tokens else None, encoder.kind in RAW_KINDS
    )


def _moments(rows: Tensor) -> Moments:
    """Measure rows (N, D); those that are not finite are left out, and training reports them."""
    return Moments.of(rows[rows.isfinite().all(1)])


def _share(trainer: Trainer, samples: PairedDataset, *, by_length: bool) -> list[list[int]]:
    """Return the batches of this process: as many as every other's, the last one maybe empty."""
    world, size = trainer.world, trainer.cfg.train.batch_size
    rows = samples.present[:, 0].nonzero()[:, 0]
    if len(rows) > MAX_SAMPLES:
        draws = torch.Generator().manual_seed(seed_of("standardise", trainer.cfg.seed))
        rows = rows[torch.randperm(len(rows), generator=draws)[:MAX_SAMPLES].sort().values]
    if by_length:
        order = torch.tensor(samples.by_length())
        rows = order[torch.isin(order, rows)]
    return [batch[world.rank :: world.size].tolist() for batch in rows.split(size * world.size)]


@dataclass
class State:
    """The progress of a run; field names are those of checkpoint files."""

    step: int = 0  # optimiser steps made
    evaluated: int = 0  # epochs evaluated
    loss: torch.Tensor = field(default_factory=lambda: torch.zeros(()))  # summed over the epoch
    best: Contents = field(
        default_factory=dict
    )  # metrics of the best epoch so far, on the validation split
    made: int = 0  # updates in the epoch: its steps that were not skipped
    bad: int = 0  # steps skipped in a row, for a loss or gradient that was not finite
    epoch_steps: int = 0  # steps of an epoch, with the number of processes of this run
    val_losses: list[float] = field(default_factory=list)  # of each epoch, for plateau
    soup: list[Contents] = field(default_factory=list)  # metrics of the epochs that soup may use
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


def save(
    path: Path, trainer: Trainer, state: State, keep: int = 1, same_as: Path | None = None
) -> None:
    """Write everything needed to continue bit for bit; called by all processes.

    The `keep - 1` previous files are kept, as `last-1.pt`, `last-2.pt`, ... A checkpoint of the
    same state that was just written, `same_as`, is copied: cheaper than writing it anew.
    """
    world = trainer.world
    if same_as is not None:
        return write_from_main(same_as, path, world, keep)
    contents = {
        "state": asdict(state),
        "objective": full_state_dict(trainer.module),
        "optimizer": full_optimizer_state(trainer.optimizer),
        "average": trainer.ema.state_dict() if trainer.ema else None,
        "scaler": trainer.scaler.state_dict(),
        "random": random_states(world),
        "losses": gather(state.loss.cpu(), world),
    }
    write_from_main(contents, path, world, keep)


def write_from_main(contents: Contents | Path, path: Path, world: World, keep: int = 1) -> None:
    """Write a file on the main process; every process raises where that fails."""
    problem = None
    if world.main:
        try:
            write(contents, path, keep)
        except FusionZooError as error:
            problem = str(error)
    problem = from_main(problem, world)
    if problem:
        raise FusionZooError(problem)


def restore(
    path: Path, trainer: Trainer, data: dict[str, str] | None = None
) -> tuple[State, list[str]]:
    """Restore from `path`, or from the newest undamaged older file; also return warnings.

    `data` identifies the data to go on with; None: whether they are the same is not checked.
    """
    contents, notes = read_newest(path)
    if data is not None:
        notes += check_data(path, contents["state"], data, trainer.cfg.resume_anyway)
    restore_standardise(trainer.module.model, contents["objective"])
    try:
        load_full_state_dict(trainer.module, contents["objective"])
        load_optimizer_state(trainer.optimizer, contents["optimizer"])
        if trainer.ema:
            trainer.ema.load_state_dict(contents["average"])
        if contents["scaler"]:  # empty if the run was not fp16 before
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
        seed_everything(seed_of(state.step, trainer.world.rank))
        before, now = len(contents["random"]), trainer.world.size
        notes.append(f"made by {before} processes, going on with {now}: not bit for bit")
    return state, notes


def check_data(path: Path, state: Contents, data: dict[str, str], anyway: bool) -> list[str]:
    """Compare the data that a checkpoint was trained on with `data`, and store those in its state;
    raise an error if they differ, unless `anyway`; return warnings."""
    before, state["data"] = state.get("data"), data
    if not before:
        return [f"warning: {path} is of an earlier version: whether its data changed is not known"]
    differ = changes(before, data)
    if differ and not anyway:
        raise FusionZooError(
            f"{path} was trained on data with other {differ}: bring those back, take another --out"
            " to train anew, or go on with these data by --resume_anyway"
        )
    return [f"warning: going on with data with other {differ}: --resume_anyway"] if differ else []


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
