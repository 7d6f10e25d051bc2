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
from .balance import START, Balance, Now, Term
from .distributed import World, gather, total
from .objectives import Objective, Step, resting

Metrics = dict[str, Any]
Gradients = dict[str, list[Tensor]]  # modality -> of its encoder's parameters
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
    modes: tuple[int, str | None] = (-1, None)  # phase and turn of the last step
    terms: dict[str, Tensor] = field(default_factory=dict)  # the last losses of strategies

    def __post_init__(self) -> None:
        fp16 = self.cfg.train.amp == "fp16"
        self.scaler = GradScaler(self.world.device.type, enabled=fp16)
        self.plain = unwrap(self.objective)
        model = self.plain.model
        owners = (model, self.plain.heads, self.plain.balance)
        self.owners = [list(one.parameters()) for one in owners]
        self.encoders = {n: list(own.parameters()) for n, own in model.named_encoders()}
        self.belongs = {n: _belonging(self.plain, n) for n in self.encoders}
        self.phases = model.fusion.phases
        self.resting = [resting(model, phase) for phase in self.phases]

    def __call__(
        self, batches: list[Batch], now: Now = START, stop: bool = False
    ) -> tuple[Tensor, bool]:
        """Learn from `batches` (accumulated); return the mean loss, and whether any rank must stop.

        The loss is the mean over all rows of all processes, so N processes with batch B have the
        gradients of one process with batch N x B, whatever rows or modalities each of them lacks.
        """
        strategies = self.plain.strategies(now)
        turns = next((t for one in strategies if (t := one.turns(now)) != (None,)), (None,))
        loss, before = torch.zeros((), device=self.world.device), self.rows
        for turn in turns:
            own, stop = self._turn(batches, now._replace(turn=turn), stop)
            loss += own / len(turns)
        self.rows = before + (self.rows - before) // len(turns)
        return loss, stop

    def _turn(self, batches: list[Batch], now: Now, stop: bool) -> tuple[Tensor, bool]:
        """Forward and backward over the batches, then one update."""
        self._modes(now)
        strategies = self.plain.strategies(now)
        apart = next((one for one in strategies if one.apart), None)
        held: list[Gradients] = []  # of the main loss and of the terms apart, encoder by encoder
        loss = torch.zeros((), device=self.world.device)
        for number, batch in enumerate(batches):
            rows = self.plain.rows(batch)
            for one in strategies:
                batch = one.edit(batch, rows, now)
            counts, stop = self._counts(batch.present, stop)
            batch, rows = batch.to(self.world.device), rows.to(self.world.device)
            with self._sync(last=number == len(batches) - 1 and not apart):
                with autocast(self.cfg.train, self.world.device):
                    step: Step = self.objective(batch, rows, now)
                fused, beside = self._losses(step, counts, now)
                if apart:
                    held = self._backward_apart(fused / len(batches), beside / len(batches), held)
                else:
                    self.scaler.scale((fused + beside) / len(batches)).backward()
            loss += fused.detach() / len(batches)
        if apart:
            self._join(apart, held)
        self._update(now)
        return loss, stop

    def _modes(self, now: Now) -> None:
        """Put every module in the mode of the phase and the turn; telling them takes a while."""
        modes = (now.phase, now.turn)
        if self.plain.training and modes == self.modes:
            return
        self.objective.train()
        encoders = self.plain.model.encoders
        encoders.train(self.phases[now.phase].encoders)
        for name, encoder in encoders.items():
            if now.turn not in (None, name):
                encoder.eval()
        self.modes = modes

    def _losses(self, step: Step, counts: list[float], now: Now) -> tuple[Tensor, Tensor | float]:
        """Return the fused loss, and the sum of the losses beside it."""
        alone = [
            own.sum() / count
            for own, count in zip(step.unimodal_loss.values(), counts[1:], strict=False)
        ]
        if step.main is None:
            return step.loss.sum() / counts[0] + self._touch(now.phase), sum(alone)
        terms = {"": step.main, **step.terms, **step.apart}
        means = self._means(list(terms.values()))
        self.terms = dict(zip(terms, (x.detach() for x in means), strict=True))
        fused = means[0] + self._touch(now.phase)
        extra = sum(means[1 : 1 + len(step.terms)])
        if step.apart:
            return fused + sum(alone) + extra, sum(means[1 + len(step.terms) :])
        return fused, sum(alone) + extra

    def _means(self, terms: list[Term]) -> list[Tensor]:
        """Average each term over the rows where it holds, of all processes: its weighted share of
        this one, so that the mean over processes is the mean over all rows."""
        counts = torch.stack([term.mask.sum() for term in terms]).double()
        counts = total(counts, self.world).clamp(min=1) / self.world.size
        return [
            term.weight * torch.where(term.mask, term.values, 0).sum() / count.to(term.values.dtype)
            for term, count in zip(terms, counts, strict=True)
        ]

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

    def _touch(self, phase: int) -> Tensor | float:
        """Give what rests in this phase a gradient of zero, for which DDP waits."""
        rest = [p.flatten()[0] for p in self.resting[phase] if p.requires_grad]
        rest += [p.flatten()[0] for p in self.owners[2] if p.requires_grad]  # maybe not active
        return 0.0 * torch.stack(rest).sum() if rest else 0.0

    def _backward_apart(
        self, main: Tensor, own: Tensor | float, held: list[Gradients]
    ) -> list[Gradients]:
        """Add the encoders' gradients of two losses to `held`, and leave none on the parameters."""
        found = []
        for loss, more in ((main, True), (own, False)):
            if isinstance(loss, Tensor) and loss.requires_grad:
                self.scaler.scale(loss).backward(retain_graph=more)
            found.append({name: _taken(own) for name, own in self.encoders.items()})
        if not held:
            return found
        for name in self.encoders:
            for before, new in zip(held, found, strict=True):
                before[name] = [x + y for x, y in zip(before[name], new[name], strict=True)]
        return held

    def _join(self, apart: Balance, held: list[Gradients]) -> None:
        """Sum over processes what DDP was kept from summing, and let the strategy join it."""
        every = [p.grad for own in self.owners for p in own if p.grad is not None]
        every += [x for gradients in held for own in gradients.values() for x in own]
        for gradient in every:
            gradient.copy_(total(gradient, self.world) / self.world.size)
        for name, parameters in self.encoders.items():
            learn = [p for p in parameters if p.requires_grad]
            joined = apart.combine(held[0][name], held[1][name]) if learn else []
            for parameter, gradient in zip(learn, joined, strict=True):
                parameter.grad = gradient

    def _update(self, now: Now) -> None:
        """Clip and step; the heads are clipped on their own, to leave the fusion as it would be."""
        rest = list(self.resting[now.phase])
        rest += [p for n, own in self.belongs.items() if now.turn not in (None, n) for p in own]
        for parameter in rest:
            parameter.grad = None  # neither momentum nor decay moves it
        strategies = self.plain.strategies(now)
        if self.cfg.optim.clip is not None or strategies:
            self.scaler.unscale_(self.optimizer)
        for one in strategies:
            one.gradients(self.encoders, now)
        if self.cfg.optim.clip is not None:
            for parameters in self.owners:
                nn.utils.clip_grad_norm_(parameters, self.cfg.optim.clip, foreach=True)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


def _belonging(plain: Objective, name: str) -> list[nn.Parameter]:
    """Return what is one modality's alone: its encoder, its head, its map to the fusion's width."""
    names = set(plain.model.encoders)
    maps = [x for x in plain.modules() if isinstance(x, nn.ModuleDict) and {*x.keys()} == names]
    return [p for one in maps for p in one[name].parameters()]


def _taken(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Take the gradients off parameters that learn."""
    found = []
    for parameter in parameters:
        if parameter.requires_grad:
            found.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = None
    return found


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
