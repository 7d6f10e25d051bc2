"""The inside of training: loaders, one step, one evaluation."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ..config import RunConfig, TrainConfig
from ..datasets import PairedBatchSampler, PairedDataset, make_sampler
from ..evaluation.metrics import classification
from ..structures import Batch
from .distributed import World, gather, total
from .objectives import Objective, Step, resting
from .unfreeze import Unfreezing

Metrics = dict[str, Any]
AMP = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def num_workers(wanted: int | None, world: World) -> int:
    """Choose how many processes load: none on a small machine, where each would cost a core."""
    if wanted is not None:
        return wanted
    cores = len(os.sched_getaffinity(0)) // world.size
    return 0 if cores <= 2 else min(8, cores - 1)


def build_loader(
    dataset: PairedDataset, collate: Any, cfg: RunConfig, world: World, split: str
) -> DataLoader[Batch]:
    """Build the loader of one split; the order is a function of the seed and the epoch alone."""
    train = split == "train"
    weights: Literal["class"] | None = (
        "class" if train and cfg.train.sampler == "class_weighted" else None
    )
    sampler = make_sampler(
        dataset,
        shuffle=train,
        distributed=(world.rank, world.size),
        weights=weights,
        seed=cfg.seed,
        pad=train,
    )
    size = cfg.train.batch_size if train else cfg.train.eval_batch_size or 2 * cfg.train.batch_size
    lengths = dataset.lengths() if cfg.train.group_by_length else None
    workers = num_workers(cfg.train.num_workers, world)
    return DataLoader(
        dataset,  # type: ignore[arg-type]
        batch_sampler=PairedBatchSampler(sampler, size, lengths=lengths),
        collate_fn=collate,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=world.device.type == "cuda",
        generator=torch.Generator(),  # its own, so that making an iterator draws nothing from ours
    )


@dataclass
class Stepper:
    """One optimiser step after another: forward, backward, clip, update."""

    objective: nn.Module  # an Objective, wrapped or not
    optimizer: torch.optim.Optimizer
    cfg: RunConfig
    world: World
    scaler: GradScaler = field(init=False)
    plain: Objective = field(init=False)
    rows: int = 0  # learned from, on all processes
    phase: int = -1  # of the last step

    def __post_init__(self) -> None:
        fp16 = self.cfg.train.amp == "fp16"
        self.scaler = GradScaler(self.world.device.type, enabled=fp16)
        self.plain = unwrap(self.objective)
        self.owners = [list(self.plain.model.parameters()), list(self.plain.heads.parameters())]
        self.phases = self.plain.model.fusion.phases
        self.resting = [resting(self.plain.model, phase) for phase in self.phases]
        self.unfreezing = Unfreezing(self.plain.model, self.cfg.optim, self.cfg.train.epochs)

    def __call__(
        self, batches: list[Batch], stop: bool = False, epoch: float = 0.0, phase: int = 0
    ) -> tuple[Tensor, bool]:
        """Learn from `batches` (accumulated); return the mean loss, and whether any rank must stop.

        The loss is the mean over all rows of all processes, so N processes with batch B have the
        gradients of one process with batch N x B, whatever rows or modalities each of them lacks.
        """
        changed = self.unfreezing.enter(int(epoch))
        # Telling every module takes a while.
        if changed or not self.plain.training or phase != self.phase:
            self.objective.train()
            self.plain.model.encoders.train(self.phases[phase].encoders)
            self.phase = phase
        loss = torch.zeros((), device=self.world.device)
        for number, batch in enumerate(batches):
            counts, stop = self._counts(batch.present, stop)
            rows = self.plain.rows(batch).to(self.world.device)
            batch = batch.to(self.world.device)
            with self._sync(last=number == len(batches) - 1):
                with autocast(self.cfg.train, self.world.device):
                    step: Step = self.objective(batch, rows, epoch, phase)
                fused = step.loss.sum() / counts[0] + self._touch(phase)
                alone = [
                    own.sum() / count
                    for own, count in zip(step.unimodal_loss.values(), counts[1:], strict=False)
                ]
                self.scaler.scale((fused + sum(alone)) / len(batches)).backward()
            loss += fused.detach() / len(batches)
        for parameter in self._rests(phase):
            parameter.grad = None  # neither momentum nor decay moves it
        self._update()
        return loss, stop

    def mean(self, loss: Tensor) -> float:
        """Average a loss that `__call__` returned, or a sum of them, over the processes."""
        return total(loss.double()[None], self.world).item() / self.world.size

    def _counts(self, present: Tensor, stop: bool) -> tuple[list[float], bool]:
        """Return rows, and rows with each modality, of an average process; at least a sliver."""
        own = torch.tensor([int(stop), len(present), *present.sum(0).tolist()], dtype=torch.float64)
        stopped, *counts = total(own, self.world).tolist()
        self.rows += int(counts[0])
        return [max(count, 1) / self.world.size for count in counts], bool(stopped)

    def _sync(self, last: bool) -> AbstractContextManager[None]:
        """Gradients cross processes once for each update, at its last batch."""
        if not last and isinstance(self.objective, DistributedDataParallel):
            return self.objective.no_sync()
        return nullcontext()

    def _rests(self, phase: int) -> list[nn.Parameter]:
        """Return what does not learn in this phase and epoch."""
        return [*self.resting[phase], *self.unfreezing.resting]

    def _touch(self, phase: int) -> Tensor | float:
        """Give what rests a gradient of zero, for which DDP waits."""
        rest = [p.flatten()[0] for p in self._rests(phase) if p.requires_grad]
        return 0.0 * torch.stack(rest).sum() if rest else 0.0

    def _update(self) -> None:
        """Clip and step; the heads are clipped on their own, to leave the fusion as it would be."""
        if self.cfg.optim.clip is not None:
            self.scaler.unscale_(self.optimizer)
            for parameters in self.owners:
                nn.utils.clip_grad_norm_(parameters, self.cfg.optim.clip, foreach=True)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def evaluate(learn: Stepper, loader: DataLoader[Batch]) -> Metrics:
    """Return the metrics of the fusion, and under `unimodal` those of each modality alone.

    Each process sees its own share, and no sample counts twice.
    """
    plain, world = learn.plain, learn.world
    plain.eval()
    target, fused, alone = [], [], {name: [] for name in plain.heads.heads}  # type: ignore[var-annotated]
    for batch in loader:
        batch = batch.to(world.device)
        with autocast(learn.cfg.train, world.device):
            step: Step = plain(batch)
        target.append(batch.target)
        fused.append(step.logits.float())
        for name, logits in step.unimodal.items():
            alone[name].append(logits.float())
    own = {name: _concat(rows) for name, rows in {"": fused, **alone}.items()}
    shards = gather((_concat(target), own), world)
    wanted = torch.cat([shard[0] for shard in shards if shard[0] is not None])
    figures = {
        name: classification(torch.cat([s[1][name] for s in shards if s[0] is not None]), wanted)
        for name in own
    }
    return figures.pop("") | {"unimodal": figures}


def autocast(cfg: TrainConfig, device: torch.device) -> torch.autocast:
    """Return the mixed precision that the run asks for."""
    dtype = AMP[cfg.amp]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def unwrap(module: nn.Module) -> Objective:
    """Return the Objective inside DDP or DataParallel."""
    inner = getattr(module, "module", module)
    assert isinstance(inner, Objective)
    return inner


def chunks(
    loader: DataLoader[Batch], size: int, epoch: int, skip: int = 0
) -> Iterator[list[Batch]]:
    """Yield an epoch's batches, `size` at a time, but for the first `skip` lists; the last may be
    shorter. What is skipped is not even loaded."""
    sampler = loader.batch_sampler
    assert isinstance(sampler, PairedBatchSampler)
    sampler.set_epoch(epoch)
    sampler.set_start(skip * size)
    batches = iter(loader)
    while held := list(islice(batches, size)):
        yield held


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM, so that a run ends after a whole step, with a checkpoint."""
    caught: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: caught.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _concat(rows: list[Tensor]) -> Tensor | None:
    """Join what one process saw, on the CPU; None where it saw nothing."""
    return torch.cat(rows).cpu() if rows else None
