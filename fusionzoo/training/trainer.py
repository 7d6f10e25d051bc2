"""The training step: forward, loss over all processes, backward, clip, update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from fusionzoo.config import RunConfig
from fusionzoo.machine.distributed import World, broadcast_from_main, gather, total, wrap
from fusionzoo.machine.fsdp import sharded
from fusionzoo.machine.memory import Heap
from fusionzoo.structures import (
    FIRST_STEP,
    Batch,
    Features,
    StepContext,
    evaluating,
    in_float64,
    to_device,
)

from .balance import Balance, LossTerm, MeanLoss
from .balance.base import RestartsSchedule
from .balance.two_pass import TwoPassBackward
from .freezing import FreezePlan
from .objective import Objective, ObjectiveOutput
from .optim import EMA, autocast, clip_gradients, grad_norm


class BatchCounts(NamedTuple):
    """Row counts of a batch over all processes, and whether any of them was asked to stop."""

    rows: int  # on all processes together
    mean_rows: list[float]  # per process: all rows, then those with each modality; above zero
    stop: bool


class Losses(NamedTuple):
    """The scalar losses of a batch on this process."""

    main: Tensor
    # Of strategies: counted with `main`, or with a backward pass of their own.
    extra: Tensor | float
    unimodal: Tensor | float  # of the modalities' own heads, summed
    named: dict[str, Tensor]  # for the log, detached


def count_rows(present: np.ndarray, stop: bool, world: World) -> BatchCounts:
    """Sum the rows of a batch, (B, M) of presence, over the processes."""
    local = torch.tensor([int(stop), len(present), *present.sum(0).tolist()], dtype=torch.float64)
    stopped, *counts = total(local, world).tolist()
    return BatchCounts(
        int(counts[0]), [max(count, 1) / world.size for count in counts], bool(stopped)
    )


def reduce_losses(
    output: ObjectiveOutput,
    counts: BatchCounts,
    turn: str | None,
    world: World,
    strategies: Sequence[Balance] = (),
) -> Losses:
    """Average the losses of a batch; the strategies may then weigh them.

    Losses of a strategy with a backward pass of its own are `extra` by themselves; all others are
    added to the main loss or stand beside it.
    """
    rows, *rows_with = counts.mean_rows
    unimodal = [
        loss.sum() / count
        for loss, count in zip(output.unimodal_loss.values(), rows_with, strict=False)
    ]
    named = {
        f"{name} alone": loss.detach()
        for name, loss in zip(output.unimodal_loss, unimodal, strict=True)
        if turn in (None, name)
    }
    if output.main_loss is None:
        return Losses(output.loss.sum() / rows, 0.0, sum(unimodal), named)
    terms = {"": output.main_loss, **output.extra_losses, **output.separate_losses}
    by_name = dict(zip(terms, mean_over_rows(list(terms.values()), world), strict=True))
    named |= {name: mean.value.detach() for name, mean in by_name.items() if name}
    for strategy in strategies:
        by_name = {**by_name, **strategy.weigh(by_name)}
    means = [mean.value for mean in by_name.values()]
    num_extra = len(output.extra_losses)
    extra, separate = sum(means[1 : 1 + num_extra]), sum(means[1 + num_extra :])
    if output.separate_losses:
        return Losses(means[0] + extra, separate, sum(unimodal), named)
    return Losses(means[0], extra, sum(unimodal), named)


def mean_over_rows(terms: Sequence[LossTerm], world: World) -> list[MeanLoss]:
    """Average each term over the rows where it holds, on all processes.

    Returned is this process's weighted share, so that the mean over processes is the mean over all
    rows.
    """
    counts = in_float64(torch.stack([term.mask.sum() for term in terms]))
    all_rows = total(counts, world)
    counts = all_rows.clamp(min=1) / world.size
    return [
        MeanLoss(
            term.weight
            * torch.where(term.mask, term.values, 0).sum()
            / count.to(term.values.dtype),
            rows,
        )
        for term, count, rows in zip(terms, counts, all_rows, strict=True)
    ]


class SavedBuffers:
    """A copy of all floating-point buffers (running statistics), to restore after a bad step."""

    def __init__(self, module: nn.Module) -> None:
        self.buffers = [b for b in module.buffers() if b.is_floating_point()]
        self.copies = [b.clone() for b in self.buffers]

    def save(self) -> None:
        """Copy the buffers as they are now."""
        if self.buffers:
            torch._foreach_copy_(self.copies, self.buffers)

    def restore(self) -> None:
        """Put the buffers back to what `save` copied."""
        torch._foreach_copy_(self.buffers, self.copies)


def why_not_finite(objective: Objective, batches: Sequence[Batch], world: World) -> str:
    """Explain loss or gradients that are not finite; the same text on every process."""
    moved = [batch.to(world.device) for batch in batches]
    causes = gather(first_cause(objective, moved), world)
    named_causes = [
        f"process {i}: {x}" if len(causes) > 1 else x for i, x in enumerate(causes) if x
    ]
    return "; ".join(named_causes) or "the gradients overflow, and no sample or layer by itself"


@torch.no_grad()
def first_cause(objective: Objective, batches: Sequence[Batch]) -> str | None:
    """Name what is not finite in these batches; None where the cause is on another process.

    Looks at the inputs, then at every layer's output in evaluation mode, in the order in which they
    run, then at the gradients that are still there.
    """
    gradients = [name for name, p in objective.named_parameters() if _not_finite(p.grad)]
    # Every batch is run, since processes that share weights must run the same.
    with evaluating(objective):
        causes = [(_bad_input(batch), _bad_layer(objective, batch)) for batch in batches]
    for input_cause, layer_cause in causes:
        if input_cause or layer_cause:
            return input_cause or layer_cause
    ids = ", ".join(repr(name) for batch in batches for name in batch.ids[:4])
    if not gradients:
        return None
    parameter = _readable(gradients[-1])
    return f"samples {ids}, ...: the loss is finite, the gradient of {parameter} is not"


def _bad_input(batch: Batch) -> str | None:
    for column, (modality, tensors) in enumerate(batch.inputs.items()):
        for values in tree_leaves(tensors):
            if values.is_floating_point():
                finite = values.flatten(1).isfinite().all(1) | ~batch.present[:, column]
                rows = (~finite).nonzero()[:, 0].tolist()
                if rows:
                    cached = isinstance(tensors, Features)
                    kind = "cached feature" if cached else "input"
                    return f"{_sample_ids(batch, rows)}: the {kind} of {modality} is not finite"
    return None


def _bad_layer(objective: Objective, batch: Batch) -> str | None:
    """Run the batch; name the first layer whose output is not finite, and the samples."""
    bad_layers: list[str] = []
    names = {module: name for name, module in objective.named_modules() if name}

    def check(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if not bad_layers and any(_not_finite(leaf) for leaf in tree_leaves(outputs)):
            bad_layers.append(names[module])

    hooks = [m.register_forward_hook(check) for m in names if not list(m.children())]
    try:
        output = objective(batch)
    finally:
        for hook in hooks:
            hook.remove()
    rows = (~output.loss.isfinite()).nonzero()[:, 0].tolist()
    if not rows and not bad_layers:
        return None
    location = f"first in {_readable(bad_layers[0])}" if bad_layers else "in the loss"
    return f"{_sample_ids(batch, rows or range(len(batch.ids)))}: not finite, {location}"


def _not_finite(value: Any) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return not bool(value.isfinite().all())


def _sample_ids(batch: Batch, rows: Sequence[int]) -> str:
    ids = ", ".join(repr(batch.ids[row]) for row in rows[:5])
    return f"samples {ids}{', ...' if len(rows) > 5 else ''}"


def _readable(layer: str) -> str:
    """Turn `model.encoders.image.net.conv1` into `image: net.conv1`."""
    name = layer.removeprefix("model.")
    if name.startswith("encoders."):
        _, modality, inside = name.split(".", 2)
        return f"{modality}: {inside}"
    return name


class StepResult(NamedTuple):
    """The outcome of a step."""

    loss: Tensor  # this process's share of the mean loss, detached; 0 where it was not finite
    stop: bool  # whether any process was asked to stop
    skipped: str | None  # why the weights stayed as they were; None: they were updated
    losses: dict[str, Tensor]  # of strategies and of the modalities' own heads, by name
    grad_norms: dict[str, Tensor]  # of fusion and encoders before clipping; {} unless asked for


@dataclass
class Trainer:
    """Run optimiser steps on a wrapped objective."""

    wrapped: nn.Module  # an Objective, inside DDP or DataParallel or bare
    optimizer: torch.optim.Optimizer
    cfg: RunConfig
    world: World
    rows: int = 0  # learned from so far, on all processes
    heap: Heap = field(default_factory=Heap)

    def __post_init__(self) -> None:
        inner = getattr(self.wrapped, "module", self.wrapped)
        assert isinstance(inner, Objective)
        self.module = inner
        model = inner.model
        self.scaler = GradScaler(self.world.device.type, enabled=self.cfg.train.amp == "fp16")
        self.ema = EMA(self.module, self.cfg.train.ema) if self.cfg.train.ema else None
        self.encoders = {name: list(e.parameters()) for name, e in model.named_encoders()}
        # Clipped separately, so that heads and strategies do not scale the model's gradient.
        parts = (model, self.module.heads, self.module.balance)
        self.clip_groups = [list(part.parameters()) for part in parts]
        self.freeze_plan = FreezePlan(self.module, model, self.cfg)
        self.saved_buffers = SavedBuffers(self.module)

    def step(
        self,
        batches: Sequence[Batch],
        context: StepContext = FIRST_STEP,
        *,
        stop: bool = False,
        measure: bool = False,
    ) -> StepResult:
        """Learn from `batches` (gradients accumulated): one update, or one for each turn.

        `stop` tells all processes that this one was asked to stop; `measure` asks for gradient
        norms.
        """
        strategies = self.module.strategies(context)
        turns = next((t for s in strategies if (t := s.turns(context)) != (None,)), (None,))
        rows_before = self.rows
        result = StepResult(torch.zeros((), device=self.world.device), stop, None, {}, {})
        for turn in turns:
            update = self._update_once(batches, context._replace(turn=turn), result.stop, measure)
            result = StepResult(
                result.loss + update.loss / len(turns),
                update.stop,
                update.skipped or result.skipped,
                result.losses | update.losses,
                result.grad_norms | update.grad_norms,
            )
        self.rows = rows_before + (self.rows - rows_before) // len(turns)
        self.heap.after_batch()
        return result

    def _update_once(
        self, batches: Sequence[Batch], context: StepContext, stop: bool, measure: bool
    ) -> StepResult:
        """Forward and backward over the batches, then one update."""
        device = self.world.device
        if self.freeze_plan.set_modes(self.wrapped, context):
            self.share_statistics()  # modules now in evaluation mode read them
        self.saved_buffers.save()
        strategies = self.module.strategies(context)
        two_pass = next(
            (TwoPassBackward(s, self.encoders, self.scaler) for s in strategies if s.two_pass), None
        )
        loss, losses = torch.zeros((), device=device), {}
        for number, batch in enumerate(batches):
            rows = self.module.rows(batch)
            for strategy in strategies:
                batch = strategy.edit_batch(batch, rows, context)
            moved = batch.to(device)
            counts = count_rows(moved.presence(), stop, self.world)
            self.rows, stop = self.rows + counts.rows, counts.stop
            in_step = context._replace(rows=to_device(rows, device), augmented=None)
            for strategy in (x for x in strategies if x.makes_views):
                first, other = strategy.views(batch, rows, context)
                in_step = in_step._replace(augmented=(first.to(device), other.to(device)))
            with self._no_sync(until_last=number < len(batches) - 1 or two_pass is not None):
                with autocast(self.cfg.train, device):
                    output: ObjectiveOutput = self.wrapped(moved, in_step)
                reduced = reduce_losses(output, counts, context.turn, self.world, strategies)
                main = reduced.main + self._zero_loss(context)
                if two_pass:
                    two_pass.backward(
                        (main + reduced.unimodal) / len(batches), reduced.extra / len(batches)
                    )
                else:
                    total_loss = main + reduced.extra + reduced.unimodal
                    self.scaler.scale(total_loss / len(batches)).backward()
            loss += (main + reduced.extra).detach() / len(batches)
            losses = reduced.named
        if two_pass:
            two_pass.combine([p for group in self.clip_groups for p in group], self.world)
        skipped, norms = self._update_weights(context, batches, loss, measure)
        loss = loss.nan_to_num(0.0, 0.0, 0.0) if skipped else loss
        return StepResult(loss, stop, skipped, losses, norms)

    def _update_weights(
        self, context: StepContext, batches: Sequence[Batch], loss: Tensor, measure: bool
    ) -> tuple[str | None, dict[str, Tensor]]:
        """Clip and step; return why not, if loss or gradients are not finite, and the norms."""
        for parameter in self.freeze_plan.frozen(context):
            parameter.grad = None  # neither momentum nor decay moves it
        strategies = self.module.strategies(context)
        self.scaler.unscale_(self.optimizer)
        for strategy in strategies:
            strategy.edit_gradients(self.encoders, context)
        norms = self._grad_norms(context.turn) if measure else {}
        clipped = clip_gradients(self.clip_groups, self.cfg.optim.clip, self.world.device)
        # In fp16 the scaler handles overflowing gradients: it skips the step and lowers its scale.
        finite = total(in_float64(loss), self.world) if self.scaler.is_enabled() else clipped
        skipped = None
        if finite.isfinite().all():
            self.scaler.step(self.optimizer)
            for strategy in strategies:
                strategy.after_step()
            if self.ema:
                self.ema.update()
        else:
            skipped = why_not_finite(self.module, batches, self.world)
            self.saved_buffers.restore()
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return skipped, norms

    def _grad_norms(self, turn: str | None) -> dict[str, Tensor]:
        """Return the gradient norms of the fusion and of the encoders that learn in this turn."""
        parts = {"fusion": self.module.model.fusion.parameters(), **self.encoders}
        learning = ("fusion", turn) if turn else tuple(parts)
        return {name: grad_norm(list(p)) for name, p in parts.items() if name in learning}

    def _zero_loss(self, context: StepContext) -> Tensor | float:
        """Return a zero-valued loss term over frozen parameters, so that DDP's reducer sees every
        gradient."""
        if sharded(self.module):
            return 0.0
        unused = [*self.freeze_plan.frozen(context), *self.module.balance.parameters()]
        firsts = [p.flatten()[0] for p in unused if p.requires_grad]
        return 0.0 * torch.stack(firsts).sum() if firsts else 0.0

    def _no_sync(self, *, until_last: bool) -> AbstractContextManager[None]:
        """Keep DDP from summing gradients over processes before the update's last batch."""
        if until_last and isinstance(self.wrapped, DistributedDataParallel):
            return self.wrapped.no_sync()
        return nullcontext()

    def share_statistics(self) -> None:
        """Broadcast the encoders' running statistics from the main process: needed before
        evaluation mode reads them, not in every step."""
        if isinstance(self.wrapped, DistributedDataParallel):
            broadcast_from_main(list(self.module.model.encoders.buffers()))

    def begin_epoch(self, loaders: Mapping[str, Any], context: StepContext) -> None:
        """Let the training strategies prepare an epoch."""
        for strategy in self.module.strategies(context):
            strategy.begin_epoch(self, loaders, context)

    def restarts(self) -> dict[str, int]:
        """Return the modalities whose schedule a strategy has restarted, and at which epoch."""
        strategies = self.module.balance.values()
        epochs = [s.restarts() for s in strategies if isinstance(s, RestartsSchedule)]
        return {name: epoch for by_name in epochs for name, epoch in by_name.items()}

    def copy(self, edit: Callable[[Objective], None]) -> Trainer:
        """Return a trainer of copies of module and optimiser, the module changed by `edit`."""
        # Together, so that the optimiser's copy holds the parameters of the module's copy.
        module, optimizer = deepcopy((self.module, self.optimizer))
        edit(module)
        return Trainer(wrap(module, self.cfg.dist, self.world), optimizer, self.cfg, self.world)

    def ema_weights(self) -> AbstractContextManager[None]:
        """Temporarily swap in the EMA weights, if enabled."""
        return self.ema.swapped_in() if self.ema else nullcontext()

    def mean_loss(self, loss: Tensor) -> float:
        """Average a loss that `step` returned, or a sum of them, over the processes."""
        return total(in_float64(loss)[None], self.world).item() / self.world.size
