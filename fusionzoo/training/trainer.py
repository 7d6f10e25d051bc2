"""One step of training: forward, backward, clip, update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_

from fusionzoo.config import RunConfig, TrainConfig
from fusionzoo.distributed.fsdp import sharded, whole
from fusionzoo.distributed.malloc import Heap
from fusionzoo.distributed.process_group import World, gather, share, total
from fusionzoo.structures import Batch

from .balance import START, Now, Term
from .balance.two_pass import Apart
from .nonfinite import first_cause
from .objective import Objective, Step, resting
from .optim.ema import Average
from .optim.unfreezing import Unfreezing

AMP = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


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
    heap: Heap = field(default_factory=Heap)

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
        self.cause, self.norms, self.terms = None, {}, {}
        strategies = self.plain.strategies(now)
        turns = next((t for one in strategies if (t := one.turns(now)) != (None,)), (None,))
        loss, before = torch.zeros((), device=self.world.device), self.rows
        for turn in turns:
            own, stop = self._turn(batches, now._replace(turn=turn), stop)
            loss += own / len(turns)
        self.rows = before + (self.rows - before) // len(turns)
        self.heap.after_batch()
        return loss, stop

    def _turn(self, batches: list[Batch], now: Now, stop: bool) -> tuple[Tensor, bool]:
        """Forward and backward over the batches, then one update."""
        self._modes(now)
        if self.bare:
            torch._foreach_copy_(self.kept, self.bare)
        strategies = self.plain.strategies(now)
        apart = next((Apart(x, self.encoders, self.scaler) for x in strategies if x.apart), None)
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
                fused, extra, alone = self._losses(step, counts, now)
                if apart:
                    apart.backward((fused + alone) / len(batches), extra / len(batches))
                else:
                    self.scaler.scale((fused + extra + alone) / len(batches)).backward()
            loss += (fused + extra).detach() / len(batches)
        if apart:
            apart.join([p for own in self.owners for p in own], self.world)
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
        self.share_statistics()  # what is in evaluation mode from now on reads them

    def share_statistics(self) -> None:
        """Give all processes the running statistics that the main process has of its batches;
        needed before they are read, in evaluation mode, and not at every step."""
        if isinstance(self.objective, DistributedDataParallel):
            share(list(self.plain.model.encoders.buffers()))

    def _losses(self, step: Step, counts: list[float], now: Now) -> tuple[Tensor, Any, Any]:
        """Return the fused loss, those of strategies, and those of each modality's own head.

        Of the strategies' losses one that is wanted apart stands alone; others count as fused.
        """
        each = [
            own.sum() / count
            for own, count in zip(step.unimodal_loss.values(), counts[1:], strict=False)
        ]
        if self.watch:
            own = zip(step.unimodal_loss, each, strict=True)
            turn = now.turn
            self.terms |= {f"{n} alone": x.detach() for n, x in own if turn in (None, n)}
        alone = sum(each)
        if step.main is None:
            return step.loss.sum() / counts[0] + self._touch(now), 0.0, alone
        terms = {"": step.main, **step.terms, **step.apart}
        means = self._means(list(terms.values()))
        if self.watch:
            self.terms |= {n: x.detach() for n, x in zip(terms, means, strict=True) if n}
        beside = sum(means[1 : 1 + len(step.terms)])
        if step.apart:
            return means[0] + beside + self._touch(now), sum(means[1 + len(step.terms) :]), alone
        return means[0] + self._touch(now), beside, alone

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

    def _update(self, now: Now, batches: list[Batch], loss: Tensor) -> None:
        """Clip and step; the heads are clipped on their own, to leave the fusion as it would be."""
        for parameter in self._rests(now):
            parameter.grad = None  # neither momentum nor decay moves it
        strategies = self.plain.strategies(now)
        self.scaler.unscale_(self.optimizer)
        for one in strategies:
            one.gradients(self.encoders, now)
        if self.watch:
            every = {"fusion": self.plain.model.fusion.parameters(), **self.encoders}
            learnt = ("fusion", now.turn) if now.turn else tuple(every)
            self.norms |= {name: _norm(own) for name, own in every.items() if name in learnt}
        cause = self._cause(self._clip(), batches, loss)
        if cause is None:
            self.scaler.step(self.optimizer)
            for one in strategies:
                one.after_step()
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


def autocast(cfg: TrainConfig, device: torch.device) -> torch.autocast:
    """Return the mixed precision that the run asks for."""
    dtype = AMP[cfg.amp]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def unwrap(module: nn.Module) -> Objective:
    """Return the Objective inside DDP or DataParallel."""
    inner = getattr(module, "module", module)
    assert isinstance(inner, Objective)
    return inner
