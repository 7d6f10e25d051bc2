"""The module that DDP wraps: model, unimodal heads and per-sample losses.

Shapes: `B` batch, `K` outputs, `D` width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fusionzoo.machine.devices import same_randomness
from fusionzoo.model.fusion_model import FusionModel, UnimodalHeads
from fusionzoo.structures import (
    Batch,
    Features,
    FusionOutput,
    Sample,
    StepContext,
    evaluating,
    keep_only,
    seed_of,
)

from .balance import Balance, LossTerm
from .multitask import Tasks, plain_tasks


class ObjectiveOutput(NamedTuple):
    """Logits and per-sample losses of a batch; `trainer.reduce_losses` averages them."""

    logits: Tensor  # (B, K) of the fusion
    loss: Tensor  # (B,) of the fusion
    unimodal_logits: dict[str, Tensor]  # modality -> (B, K) of its own head
    unimodal_loss: dict[str, Tensor]  # modality -> (B,), 0 where the sample lacks it
    main_loss: LossTerm | None = None  # `loss` as the strategies changed it; None: no strategy
    extra_losses: Mapping[str, LossTerm] = {}  # of strategies, added to the main loss
    separate_losses: Mapping[str, LossTerm] = {}  # of a strategy with a backward pass of their own
    aligned: Mapping[str, Tensor] = {}  # modality -> (B, D) in the space that a strategy aligns
    given_only: Mapping[str, Tensor] = {}  # modality -> (B, K) of the fusion given nothing else


class Objective(nn.Module):
    """Model, each modality's own head, the tasks' loss, and the training strategies.

    `ids`, `targets` and `groups` are those of the training split, for fusions with a memory.
    `mean_weight` is the mean of its rows' weights, if the data have weights: each row's losses are
    multiplied by its weight over this mean, so that the learning rate keeps its meaning.
    """

    def __init__(
        self,
        model: FusionModel,
        heads: UnimodalHeads,
        tasks: Tasks | None = None,
        ids: Sequence[str] = (),
        targets: Tensor | None = None,
        groups: Sequence[str] = (),
        seed: int = 0,
        mean_weight: float | None = None,
    ) -> None:
        super().__init__()
        self.model, self.heads, self.tasks = model, heads, tasks or plain_tasks()
        self.seed, self.mean_weight = seed, mean_weight
        self.row_of_id = {sample_id: row for row, sample_id in enumerate(ids)}
        no_targets = torch.zeros(0, dtype=torch.int64)
        targets = no_targets if targets is None else targets
        self.memory = model.fusion.prepare(targets, groups, seed)
        self.balance = nn.ModuleDict()
        self.notes: list[str] = []  # what a run says of it at start

    def strategies(self, context: StepContext) -> list[Balance]:
        """Return the training strategies that are active in a step."""
        return [s for s in self.balance.values() if s.active(context)]  # type: ignore[misc, operator]

    @property
    def makes_views(self) -> bool:
        """Whether a strategy learns from two augmentations of a batch."""
        return any(strategy.makes_views for strategy in self.balance.values())

    def rows(self, batch: Batch) -> Tensor:
        """Return the samples' rows in the training split, -1 where it has no such id: (B,)."""
        rows = [self.row_of_id.get(sample_id, -1) for sample_id in batch.ids]
        return torch.tensor(rows, dtype=torch.int64)

    def sample_weight(self, batch: Batch) -> Tensor | None:
        """Return the rows' weights over the mean of the training split, (B,); None: all count 1."""
        if self.mean_weight is None or batch.weight is None:
            return None
        return batch.weight / self.mean_weight

    def forward(
        self, batch: Batch, context: StepContext | None = None, *, each_alone: bool = False
    ) -> ObjectiveOutput:
        """Return logits and losses; without a `context`, in evaluation, the plain loss.

        With `each_alone` also the fusion's logits given each modality only.
        """
        assert batch.target is not None
        features = self.model.encode(batch)
        fused: Mapping[str, Features] = features
        if context is not None:
            context = self._in_batch(context, batch, features)
            fused = context.features
        # A training step learns from the fusion's own answer, also where nothing is present.
        fuse = self.model.fuse if context is None else self.model.fusion
        output: FusionOutput = fuse(fused)
        unimodal_logits = self.heads(features)
        unimodal_loss = {
            name: self.criterion(logits, batch.target) * features[name].mask.any(1)
            for name, logits in unimodal_logits.items()
        }
        if context is None:
            loss = self.criterion(output.logits, batch.target)
            evaluated = ObjectiveOutput(output.logits, loss, unimodal_logits, unimodal_loss)
            evaluated = evaluated._replace(aligned=self._align(features))
            if each_alone:  # nothing is encoded again
                alone = {n: self.model.fuse(keep_only(features, n)).logits for n in features}
                evaluated = evaluated._replace(given_only=alone)
            return evaluated
        context = context._replace(output=output, views=self._encode_views(context))
        strategies = self.strategies(context)
        for strategy in strategies:
            context = context._replace(output=strategy.edit_output(context))
        loss = self.model.fusion.loss(context.output, batch.target, context)
        trained = ObjectiveOutput(output.logits, loss, unimodal_logits, unimodal_loss)
        trained = _add_strategies(trained, strategies, context) if strategies else trained
        weight = context.sample_weight
        return trained if weight is None else _weigh_rows(trained, strategies, weight)

    def _in_batch(
        self, context: StepContext, batch: Batch, features: Mapping[str, Features]
    ) -> StepContext:
        """Return the context of a batch, its features as the strategies changed them."""
        assert batch.target is not None
        context = context._replace(
            batch=batch,
            features=features,
            criterion=self.criterion,
            row_weight=self.tasks.row_weight(batch.target),
            row_weight_of=self.tasks.row_weight,
            sample_weight=self.sample_weight(batch),
            memory=self.memory,
        )
        for strategy in self.strategies(context):
            context = context._replace(features=strategy.edit_features(context))
        return context

    def _align(self, features: Mapping[str, Features]) -> Mapping[str, Tensor]:
        """Return each modality's vectors in the common space, if a strategy learns one."""
        aligned = (s.embed(features) for s in self.balance.values() if s.aligns)  # type: ignore[operator]
        return next(aligned, {})

    def _encode_views(self, context: StepContext) -> tuple[dict[str, Features], ...]:
        """Encode the views of a strategy, drawing from generators of their own."""
        if context.augmented is None:
            return ()
        with same_randomness(context.rows.device):
            torch.manual_seed(seed_of(self.seed, "views", context.step, *context.rows[:1].tolist()))
            return tuple(self.model.encode(view) for view in context.augmented)

    def criterion(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the tasks' loss in single precision, say cross-entropy: (B, K), target -> (B,)."""
        return self.tasks.criterion(logits, target)


def _add_strategies(
    output: ObjectiveOutput, strategies: Sequence[Balance], context: StepContext
) -> ObjectiveOutput:
    """Let the strategies change the fusion's loss and add their own."""
    main_loss = LossTerm(output.loss, torch.ones_like(context.rows, dtype=torch.bool))
    extra_losses: dict[str, LossTerm] = {}
    separate_losses: dict[str, LossTerm] = {}
    for strategy in strategies:
        main_loss = strategy.main_loss(context, main_loss)
        losses = separate_losses if strategy.two_pass else extra_losses
        losses.update(strategy.extra_losses(context))
    return output._replace(
        main_loss=main_loss, extra_losses=extra_losses, separate_losses=separate_losses
    )


def _weigh_rows(
    output: ObjectiveOutput, strategies: Sequence[Balance], weight: Tensor
) -> ObjectiveOutput:
    """Multiply every row's losses by its weight, (B,); a strategy that mixes rows has done so with
    the main loss."""

    def weigh(term: LossTerm) -> LossTerm:
        return term._replace(values=term.values * weight) if term.by_row else term

    main_loss, is_mixed = output.main_loss, any(x.mixes_rows for x in strategies)
    return output._replace(
        loss=output.loss * weight,
        unimodal_loss={name: loss * weight for name, loss in output.unimodal_loss.items()},
        main_loss=main_loss if main_loss is None or is_mixed else weigh(main_loss),
        extra_losses={name: weigh(term) for name, term in output.extra_losses.items()},
        separate_losses={name: weigh(term) for name, term in output.separate_losses.items()},
    )


def freeze_unused(objective: Objective) -> list[str]:
    """Freeze the parameters that no loss of any phase reads, and return their names.

    A fusion that reads tokens leaves, say, an encoder's pooling head without a gradient: DDP would
    hang and weight decay would shrink it. Found by a backward pass per phase over a dummy batch of
    two samples with all modalities present.
    """
    batch = dummy_batch(objective.model)
    with evaluating(objective):
        for phase in range(len(objective.model.fusion.phases)):
            context = StepContext(phase=phase, rows=torch.zeros(2, dtype=torch.int64))
            output = objective(batch, context)
            unimodal = sum(loss.sum() for loss in output.unimodal_loss.values())
            (output.loss.sum() + unimodal).backward()
    unused = []
    for name, parameter in objective.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.requires_grad_(False)
            unused.append(name.removeprefix("model."))
        parameter.grad = None
    return unused


def dummy_batch(model: FusionModel) -> Batch:
    """Return a batch of two blank samples with all modalities marked as present."""
    target = 0 if model.targets is None else (0.0,) * sum(t.columns for t in model.targets)
    sample = Sample("", "", target, dict.fromkeys(model.encoders))
    batch: Batch = model.collate()([sample, sample])
    return batch._replace(present=torch.ones_like(batch.present))
