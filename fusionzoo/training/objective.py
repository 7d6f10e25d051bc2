"""What DDP wraps: the model, each modality's own head beside it, and their losses per row.

Shapes: `B` rows, `K` outputs, `D` width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fusionzoo.model import FusionModel, quiet
from fusionzoo.structures import Batch, Features, FusionOutput, Moment, Phase, Sample
from fusionzoo.unimodal import UnimodalHeads

from .balance import START, Balance, Now, Seen, Term
from .tasks.multitask import Tasks, plain_tasks


class Step(NamedTuple):
    """A forward pass, row by row, so that any strategy can average it as it must."""

    logits: Tensor  # (B, K) of the fusion
    loss: Tensor  # (B,)
    unimodal: dict[str, Tensor]  # modality -> (B, K) of its own head
    unimodal_loss: dict[str, Tensor]  # modality -> (B,), 0 where the row lacks it
    main: Term | None = None  # the fusion's loss as a training strategy left it; None: `loss`
    terms: Mapping[str, Term] = {}  # losses of training strategies
    apart: Mapping[str, Term] = {}  # those whose gradients a strategy wants by themselves
    common: Mapping[str, Tensor] = {}  # modality -> (B, D) in the space that a strategy aligns
    given_only: Mapping[str, Tensor] = {}  # modality -> (B, K) of the fusion without the others


class Objective(nn.Module):
    """The fusion's own loss and the tasks' loss of each modality's own head.

    `ids`, `targets` and `groups` are of the training split: a fusion may remember its samples.
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
    ) -> None:
        super().__init__()
        self.model, self.heads, self.tasks = model, heads, tasks or plain_tasks()
        self.numbers = {name: number for number, name in enumerate(ids)}
        no_targets = torch.zeros(0, dtype=torch.int64)
        targets = no_targets if targets is None else targets
        self.memory = model.fusion.prepare(targets, groups, seed)
        self.balance = nn.ModuleDict()

    def strategies(self, now: Now) -> list[Balance]:
        """Return the training strategies that are active."""
        return [one for one in self.balance.values() if one.active(now)]  # type: ignore[misc, operator]

    def rows(self, batch: Batch) -> Tensor:
        """Return the samples' numbers in the training split, -1 where it has no such id: (B,)."""
        return torch.tensor([self.numbers.get(name, -1) for name in batch.ids], dtype=torch.int64)

    def forward(
        self,
        batch: Batch,
        rows: Tensor | None = None,
        now: Now = START,
        *,
        each_alone: bool = False,
    ) -> Step:
        """Return logits and losses; without `rows`, in evaluation, the plain loss.

        With `each_alone` also what the fusion says given each modality only.
        """
        assert batch.target is not None
        features = self.model.encode(batch)
        output: FusionOutput = self.model.fusion(features)
        unimodal = self.heads(features)
        alone = {
            name: self.criterion(own, batch.target) * features[name].mask.any(1)
            for name, own in unimodal.items()
        }
        if rows is None:
            loss = self.criterion(output.logits, batch.target)
            aligned = (one.embed(features) for one in self.balance.values() if one.aligns)  # type: ignore[operator]
            step = Step(output.logits, loss, unimodal, alone, common=next(aligned, {}))
            return step._replace(given_only=self._given_only(features)) if each_alone else step
        weight = self.tasks.row_weight(batch.target)
        moment = Moment(rows, now.epoch, now.phase, self.criterion, self.memory, weight)
        strategies = self.strategies(now)
        seen = Seen(batch, rows, features, output, self.criterion, now)
        for one in strategies:
            seen = seen._replace(output=one.respond(seen))
        loss = self.model.fusion.loss(seen.output, batch.target, moment)
        step = Step(output.logits, loss, unimodal, alone)
        return self._strategic(step, strategies, seen) if strategies else step

    def _given_only(self, features: Mapping[str, Features]) -> dict[str, Tensor]:
        """Return the fusion's logits given each modality only; nothing is encoded again."""
        absent = {n: x._replace(mask=torch.zeros_like(x.mask)) for n, x in features.items()}
        return {n: self.model.fusion({**absent, n: x}).logits for n, x in features.items()}

    def _strategic(self, step: Step, strategies: Sequence[Balance], seen: Seen) -> Step:
        """Let the training strategies change the fusion's loss and lay theirs beside it."""
        main = Term(step.loss, torch.ones_like(seen.rows, dtype=torch.bool))
        terms: dict[str, Term] = {}
        apart: dict[str, Term] = {}
        for one in strategies:
            main = one.main(seen, main)
            into = apart if one.apart else terms
            into.update(one.terms(seen))
        return step._replace(main=main, terms=terms, apart=apart)

    def criterion(self, logits: Tensor, target: Tensor) -> Tensor:
        """The tasks' loss in single precision, say cross-entropy: (B, K), target -> (B,)."""
        return self.tasks.criterion(logits, target)


def resting(model: FusionModel, phase: Phase) -> list[nn.Parameter]:
    """Return the parameters that do not learn in a phase of the fusion."""
    named = model.fusion.named_parameters()
    rest = [p for name, p in named if not name.startswith(phase.trains)]
    return rest if phase.encoders else [*rest, *model.encoders.parameters()]


def freeze_unused(objective: Objective) -> list[str]:
    """Freeze the parameters that no loss of any phase reads, and return their names.

    A fusion that reads tokens leaves, say, an encoder's pooling head without a gradient. DDP would
    wait for it for ever; weight decay would shrink it. Found by a backward pass of each phase over
    two blank rows that claim to have every modality.
    """
    batch = blank_batch(objective.model)
    with quiet(objective):
        for phase in range(len(objective.model.fusion.phases)):
            step = objective(batch, torch.zeros(2, dtype=torch.int64), Now(phase=phase))
            (step.loss.sum() + sum(own.sum() for own in step.unimodal_loss.values())).backward()
    unused = []
    for name, parameter in objective.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.requires_grad_(False)
            unused.append(name.removeprefix("model."))
        parameter.grad = None
    return unused


def blank_batch(model: FusionModel) -> Batch:
    """Return two blank rows that claim to have every modality."""
    target = 0 if model.targets is None else (0.0,) * sum(one.columns for one in model.targets)
    blank = Sample("", "", target, dict.fromkeys(model.encoders))
    batch: Batch = model.collate()([blank, blank])
    return batch._replace(present=torch.ones_like(batch.present))
