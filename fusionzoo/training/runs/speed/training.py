"""`--speed auto` of training: memory format, bf16 and loader processes, on copies of the model."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from fusionzoo.config import TrainConfig
from fusionzoo.datasets import PairedBatchSampler
from fusionzoo.distributed.process_group import from_main
from fusionzoo.errors import FusionZooError
from fusionzoo.files import write_json
from fusionzoo.structures import Batch

from ...data import build_loader, num_workers
from ...objective import Objective
from ...optim.precision import autocast
from ...trainer import Trainer
from .choose import Choice, Option, Settings, Timing, choose, describe
from .measure import (
    DISTINCT,
    format_options,
    measure_loading,
    same_randomness,
    set_memory_format,
    worker_options,
)

Loaders = dict[str, DataLoader[Batch]]
FILE = "speed.json"


def choose_for_training(
    trainer: Trainer, loaders: Loaders, folder: Path, *, resume: bool
) -> tuple[Loaders, list[str]]:
    """Set what a measurement finds faster, and return the loaders and what to say.

    The main process measures and decides for all; speed.json keeps the choice, and a resumed run
    takes the one it began with. Batch size, order and random draws stay as they are: bf16 alone
    changes numbers.
    """
    cfg, world = trainer.cfg, trainer.world
    if cfg.speed == "off":
        return loaders, []
    if cfg.dist.strategy == "fsdp":
        raise FusionZooError(
            "--speed auto measures on a copy of the model, whose weights fsdp shards: --speed off"
        )
    path, defaults = folder / FILE, _defaults(trainer)
    stored = from_main(_read(path) if world.main and resume else None, world)
    record = stored
    if record is None:
        made = _measure(trainer, loaders["train"], defaults).record if world.main else None
        record = from_main(made, world)
    choice = Choice.from_record(record)
    if stored is None and world.main:
        write_json(path, record)
    loaders = _apply(trainer, loaders, choice.settings)
    notes = [describe(choice, defaults, FILE) if stored is None else f"--speed auto: as in {FILE}"]
    if choice.settings["amp"] != defaults["amp"]:
        notes.append(
            "bf16: matrix products and convolutions are computed in bfloat16 (about 3 digits),"
            " weights and losses in float32; --speed off trains in full precision"
        )
    return loaders, notes


def _defaults(trainer: Trainer) -> Settings:
    train = trainer.cfg.train
    return {
        "channels_last": train.channels_last,
        "amp": train.amp,
        "num_workers": num_workers(train.num_workers, trainer.world),
    }


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def _measure(trainer: Trainer, loader: DataLoader[Batch], defaults: Settings) -> Choice:
    """Time forward and backward passes on a copy of the module, without strategies."""
    train, world = trainer.cfg.train, trainer.world
    sampler = loader.batch_sampler
    assert isinstance(sampler, PairedBatchSampler)
    sampler.set_iters(0, sampler.epoch_length())
    keys = list(islice(iter(sampler), DISTINCT))
    keys = [batch for batch in keys if len(batch) == len(keys[0])]  # no short one at the end
    dataset: Any = loader.dataset
    options: list[Option] = [
        *format_options(
            trainer.module.model, channels_last=train.channels_last, bf16=train.amp != "none"
        ),
        *worker_options(train.num_workers, defaults["num_workers"], world),
    ]
    with same_randomness(world.device):
        module = copy.deepcopy(trainer.module)

        def measured(settings: Settings) -> Timing:
            set_memory_format(module.model, channels_last=settings["channels_last"])
            precision = replace(train, amp=settings["amp"])

            def work(batch: Batch) -> None:
                train_once(module, batch, precision, world.device)

            workers = settings["num_workers"]
            return measure_loading(dataset, loader.collate_fn, keys, workers, work, world.device)

        return choose(defaults, options, measured, samples=_samples(trainer, loader))


def train_once(module: Objective, batch: Batch, cfg: TrainConfig, device: torch.device) -> None:
    """Run a forward and a backward pass; the weights stay."""
    module.train()
    with autocast(cfg, device):
        output = module(batch)
    losses = [output.loss, *output.unimodal_loss.values()]
    torch.stack([loss.float().mean() for loss in losses]).sum().backward()
    module.zero_grad(set_to_none=True)


def _samples(trainer: Trainer, loader: DataLoader[Batch]) -> int:
    """Return the samples that this process trains on in the whole run."""
    train = trainer.cfg.train
    steps = train.epochs * len(loader)
    if train.max_steps is not None:
        steps = min(steps, train.max_steps * train.accumulate)
    return steps * train.batch_size


def _apply(trainer: Trainer, loaders: Loaders, settings: Settings) -> Loaders:
    """Set the chosen values for the trainer and new loaders."""
    cfg = trainer.cfg
    train = replace(cfg.train, **settings)
    trainer.cfg = replace(cfg, train=train)
    if train.channels_last != cfg.train.channels_last:
        set_memory_format(trainer.module.model, channels_last=train.channels_last)
    if train.num_workers == num_workers(cfg.train.num_workers, trainer.world):
        return loaders
    return {
        name: build_loader(loader.dataset, loader.collate_fn, trainer.cfg, trainer.world, name)  # type: ignore[arg-type]
        for name, loader in loaders.items()
    }
