"""The inside of training: loaders, one step, one evaluation."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_
from torch.utils.data import DataLoader

from ..config import RunConfig, TrainConfig
from ..datasets import PairedBatchSampler, PairedDataset, make_sampler
from ..structures import Batch
from .average import Average
from .balance import START, Balance, Now, Term
from .diagnose import first_cause
from .distributed import World, gather, total
from .objectives import Objective, Step, blank_batch, resting
from .sharding import sharded, whole
from .unfreeze import Unfreezing

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
    average: Average | None = field(init=False)
    rows: int = 0  # learned from, on all processes
    modes: tuple[int, str | None] = (-1, None)  # phase and turn of the last step
    terms: dict[str, Tensor] = field(default_factory=dict)  # the last losses of strategies
    watch: bool = False  # whether to keep the figures of the next step
    norms: dict[str, Tensor] = field(default_factory=dict)  # of gradients, before clipping
    cause: str | None = None  # why the last step was skipped; None: it was made

    def __post_init__(self) -> None:
        fp16 = self.cfg.train.amp == "fp16"
        self.scaler = GradScaler(self.world.device.type, enabled=fp16)
        self.plain = unwrap(self.objective)
        model = self.plain.model
        owners = (model, self.plain.heads, self.plain.balance)
        self.owners = [list(one.parameters()) for one in owners]
        self.encoders = {n: list(own.parameters()) for n, own in model.named_encoders()}
        self.belongs = {n: _belonging(self.plain, n) for n in self.encoders}
        self.average = Average(self.plain, self.cfg.train.ema) if self.cfg.train.ema else None
        self.bare = [b for b in self.plain.buffers() if b.is_floating_point()]
        self.kept = [b.clone() for b in self.bare]  # as they were before the step
        self.phases = model.fusion.phases
        self.resting = [resting(model, phase) for phase in self.phases]
        self.unfreezing = Unfreezing(model, self.cfg.optim, self.cfg.train.epochs)

    def __call__(
        self, batches: list[Batch], now: Now = START, stop: bool = False
    ) -> tuple[Tensor, bool]:
        """Learn from `batches` (accumulated); return the mean loss, and whether any rank must stop.

        The loss is the mean over all rows of all processes, so N processes with batch B have the
        gradients of one process with batch N x B, whatever rows or modalities each of them lacks.
        """
        self.cause = None
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
        if self.bare:
            torch._foreach_copy_(self.kept, self.bare)
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
        self._update(now, batches, loss)
        return loss.nan_to_num(0.0, 0.0, 0.0) if self.cause else loss, stop

    def _modes(self, now: Now) -> None:
        """Put every module in the mode of the phase and the turn; telling them takes a while."""
        modes = (now.phase, now.turn)
        changed = self.unfreezing.enter(int(now.epoch))
        if self.plain.training and modes == self.modes and not changed:
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
        if self.watch:
            own = zip(step.unimodal_loss, alone, strict=True)
            self.terms = {f"{name} alone": x.detach() for name, x in own}
        if step.main is None:
            return step.loss.sum() / counts[0] + self._touch(now), sum(alone)
        terms = {"": step.main, **step.terms, **step.apart}
        means = self._means(list(terms.values()))
        if self.watch:
            self.terms |= {n: x.detach() for n, x in zip(terms, means, strict=True) if n}
        fused = means[0] + self._touch(now)
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

    def begin_epoch(self, loaders: Mapping[str, Any], now: Now) -> None:
        """Let the training strategies get ready."""
        for one in self.plain.strategies(now):
            one.begin_epoch(self, loaders, now)

    def figures(self) -> dict[str, Any]:
        """Return losses and gradient norms of the last step, if it was watched."""
        found = {"grad_norm": self.norms, "losses": self.terms}
        return {what: {n: x.item() for n, x in own.items()} for what, own in found.items()}

    def judged(self) -> AbstractContextManager[None]:
        """Let the model wear what is evaluated and saved: the moving average, if there is one."""
        return self.average.worn() if self.average else nullcontext()

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

    def _rests(self, now: Now) -> list[nn.Parameter]:
        """Return what does not learn in this phase, epoch and turn."""
        rest = [*self.resting[now.phase], *self.unfreezing.resting]
        for name, own in self.belongs.items():
            rest += own if now.turn not in (None, name) else []
        return rest

    def _touch(self, now: Now) -> Tensor | float:
        """Give what rests a gradient of zero, for which DDP waits."""
        if sharded(self.plain):
            return 0.0
        rest = [p.flatten()[0] for p in self._rests(now) if p.requires_grad]
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

    def _update(self, now: Now, batches: list[Batch], loss: Tensor) -> None:
        """Clip and step; the heads are clipped on their own, to leave the fusion as it would be."""
        for parameter in self._rests(now):
            parameter.grad = None  # neither momentum nor decay moves it
        strategies = self.plain.strategies(now)
        self.scaler.unscale_(self.optimizer)
        for one in strategies:
            one.gradients(self.encoders, now)
        if self.watch:
            self.norms = {
                n: _norm(own)
                for n, own in {
                    "fusion": self.plain.model.fusion.parameters(),
                    **self.encoders,
                }.items()
            }
        cause = self._cause(self._clip(), batches, loss)
        if cause is None:
            self.scaler.step(self.optimizer)
            if self.average:
                self.average.update()
        else:
            torch._foreach_copy_(self.bare, self.kept)
            self.cause = cause
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _clip(self) -> Tensor:
        """Clip each owner's gradients; return their norms."""
        norms = []
        for parameters in self.owners:
            norms.append(_norm(parameters))
            if self.cfg.optim.clip is not None:
                clip_grads_with_norm_(parameters, self.cfg.optim.clip, norms[-1], foreach=True)
        return torch.stack([norm.to(self.world.device) for norm in norms])

    def _cause(self, norms: Tensor, batches: list[Batch], loss: Tensor) -> str | None:
        """Say why the step must not be made; None where it may. The same on every process.

        Gradients that overflow in fp16 are the scaler's business, which skips and shrinks.
        """
        asked = total(loss.double(), self.world) if self.scaler.is_enabled() else norms
        if asked.isfinite().all():
            return None
        device = self.world.device
        causes = gather(first_cause(self.plain, [b.to(device) for b in batches]), self.world)
        found = [f"process {i}: {x}" if len(causes) > 1 else x for i, x in enumerate(causes) if x]
        return "; ".join(found) or "the gradients overflow, and no sample or layer by itself"


def _norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    grads = [p.grad for p in parameters if p.grad is not None]
    return whole(nn.utils.get_total_norm(grads, foreach=True))


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
    for batch, counts in evenly(loader, learn):
        batch = batch.to(world.device)
        with autocast(learn.cfg.train, world.device):
            step: Step = plain(batch)
        if not counts:
            continue
        assert batch.target is not None
        target.append(batch.target)
        fused.append(step.logits.float())
        for name, logits in step.unimodal.items():
            alone[name].append(logits.float())
    own = {name: _concat(rows) for name, rows in {"": fused, **alone}.items()}
    shards = gather((_concat(target), own), world)
    wanted = torch.cat([shard[0] for shard in shards if shard[0] is not None])
    figures = {
        name: plain.tasks.figures(
            torch.cat([s[1][name] for s in shards if s[0] is not None]), wanted
        )
        for name in own
    }
    return figures.pop("") | {"unimodal": figures}


def evenly(loader: DataLoader[Batch], learn: Stepper) -> Iterator[tuple[Batch, bool]]:
    """Yield the batches and whether they count; with shared weights every process must run as many
    as any other, so blank ones follow that do not."""
    yield from ((batch, True) for batch in loader)
    if sharded(learn.plain):
        own = len(loader)
        blank = blank_batch(learn.plain.model)
        yield from ((blank, False) for _ in range(max(gather(own, learn.world)) - own))


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


def exit_code(signals: list[int]) -> int:
    """Return 130 after Ctrl-C, as shells do, else 75, which sysexits.h reads as "try again"."""
    return 130 if signals[:1] == [signal.SIGINT] else 75


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collect what asks a run to stop, so that it ends after a whole step, with a checkpoint."""
    caught: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: caught.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    }
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _concat(rows: list[Tensor]) -> Tensor | None:
    """Join what one process saw, on the CPU; None where it saw nothing."""
    return torch.cat(rows).cpu() if rows else None
