"""DynMM: a gate that sends each sample through one of several branches, cheap or complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, distributed, nn

from fusionzoo.errors import FusionZooError, check_modality
from fusionzoo.structures import Features, FusionOutput, Phase, StepContext

from ..base import FUSIONS, masked_softmax, present_mean
from ..late._base import LateFusion


@FUSIONS.register(
    family="hybrid", paper="Xue and Marculescu 2023, arXiv:2204.00102", reads="pooled"
)
class DynMM(LateFusion):
    """Let a gate choose which branch answers for a sample: one modality, or several together.

    A branch reads the modalities of its subset: head_m(a_m) for one, else an MLP on [a_m; ...]. y =
    softmax(G [a_1; ...; a_M; p] / temperature) over the branches that lack no modality, G an MLP, p
    presence bits; the branch of the largest y answers, its hidden vector is the embedding. Phase
    "branches" trains every branch on its own loss, "soft" the gate by sum_k y_k z_k, "hard" by the
    chosen z_k with the gradient of the sum (straight-through); these two add `cost` max(0, mean
    sum_k y_k q_k - `budget`), q_k a branch's relative cost. `model.weights` returns the branch.
    Differs from the authors' code: a soft warm-up, costs and branches of any number, and the
    branches share the encoders, which stay fixed with them while the gate learns; its gate reads
    the raw inputs, on sequences by a transformer.

    Missing: branches that need it are not chosen; without any, the mean of present heads answers.
    With the default branches, one modality alone answers a sample that lacks one of three: no
    branch reads two (measured: 0.66, and 0.88 with a branch for every subset; docs/which.md).
    Pitfall: all encoders run, as the gate reads every modality; the branches saved were at most
    0.2 % of a prediction (docs/which.md).
    Use when: branches are costly beside encoders, and most samples are easy.

    Settings:
        branches: modalities of each branch, [[image], [image, text]]; null for every modality alone
            and all together
        costs: relative cost of each branch, above 0 to 1; null for its share of the modalities
        temperature: temperature of the gate's softmax, above 0
        hard: whether one branch answers; if not, the weighted sum of all
        cost: weight of the cost above the budget, at least 0
        budget: mean cost that is free, at least 0; 1 or more switches the penalty off
        gate_width: width of G's hidden layer, at least 1
        branch_share: share of the training steps in phase "branches", between 0 and 1 (exclusive)
        soft_share: share in phase "soft", above 0; all that remains if not `hard`
        freeze: whether encoders and branches stay fixed after phase "branches"

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), extra branch_weights (B, branches)
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        branches: Sequence[Sequence[str]] | None = None,
        costs: Sequence[float] | None = None,
        temperature: float = 1.0,
        hard: bool = True,
        cost: float = 0.1,
        budget: float = 0.5,
        gate_width: int = 128,
        branch_share: float = 0.5,
        soft_share: float = 0.2,
        freeze: bool = True,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.temperature, self.hard, self.cost, self.budget = temperature, hard, cost, budget
        if temperature <= 0 or cost < 0 or budget < 0 or gate_width < 1:
            raise FusionZooError(
                f"temperature={temperature}, cost={cost}, budget={budget}, gate_width={gate_width};"
                " they must be above 0, at least 0, at least 0 and at least 1"
            )
        self.subsets = self._subsets(branches)
        self.costs = self._costs(costs)
        several = [names for names in self.subsets if len(names) > 1]
        self.joint = nn.ModuleDict(
            {"+".join(names): nn.Linear(len(names) * dim, dim) for names in several}
        )
        self.joint_heads = nn.ModuleDict({key: nn.Linear(dim, num_outputs) for key in self.joint})
        self.last_layers = ("heads", "joint_heads")
        self.gate = nn.Sequential(
            nn.Linear(len(dims) * (dim + 1), gate_width),
            nn.ReLU(),
            nn.Linear(gate_width, len(self.subsets)),
        )
        self.phases = self._phases(branch_share, soft_share, freeze)

    def _subsets(self, branches: Sequence[Sequence[str]] | None) -> list[tuple[str, ...]]:
        """Return the modalities of each branch, in the order of `dims`."""
        if branches is None:
            everything = [(*self.dims,)] if len(self.dims) > 1 else []
            return [*((name,) for name in self.dims), *everything]
        for name in (name for branch in branches for name in branch):
            check_modality("branches", name, self.dims)
        subsets = [tuple(name for name in self.dims if name in branch) for branch in branches]
        if not subsets or not all(subsets) or len({*subsets}) < len(subsets):
            raise FusionZooError(
                f"branches={[list(x) for x in branches]}; it needs at least one branch, and each a"
                " different subset of at least one modality"
            )
        return subsets

    def _costs(self, costs: Sequence[float] | None) -> list[float]:
        if costs is None:
            return [len(names) / len(self.dims) for names in self.subsets]
        if len(costs) != len(self.subsets) or not all(0 < x <= 1 for x in costs):
            raise FusionZooError(
                f"costs={[*costs]}; it needs one above 0 to 1 for each of {len(self.subsets)}"
                " branches"
            )
        return [*costs]

    def _phases(self, branch_share: float, soft_share: float, freeze: bool) -> tuple[Phase, ...]:
        rest = 1 - branch_share - soft_share
        if not 0 < branch_share < 1 or soft_share <= 0 or rest <= 0:
            raise FusionZooError(
                f"branch_share={branch_share}, soft_share={soft_share}; both must be above 0, their"
                " sum below 1"
            )
        joint = ("joint", "joint_heads") if len(self.joint) else ()
        parts = ("project", "heads", *joint, "prior_logits", "null")
        first = Phase("branches", branch_share, parts)
        shares = {"soft": soft_share, "hard": rest} if self.hard else {"soft": soft_share + rest}
        trains = ("gate",) if freeze else ("",)
        return first, *(Phase(name, x, trains, not freeze) for name, x in shares.items())

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        aligned, present = self.aligned(features)
        scores = self.gate(torch.cat([aligned.flatten(1), present.to(aligned.dtype)], dim=1))
        usable, linear = self._usable(present), self.linear_logits(features)
        weights = masked_softmax(scores / self.temperature, usable)
        if self.hard and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return self._chosen_only(aligned, present, usable, weights, linear)
        heads = self.classify(aligned.unbind(1), present, linear)
        pairs = [self._branch(names, aligned, linear, heads) for names in self.subsets]
        hidden, answers = (torch.stack(x, dim=1) for x in zip(*pairs, strict=True))
        extra = {"branch_logits": answers, "heads": heads, "usable": usable}
        soft = (weights[..., None] * answers).sum(1)
        extra |= {"soft_weights": weights, "soft_logits": soft}
        logits, embedding = soft, (weights[..., None] * hidden).sum(1)
        if self.hard:
            choice, weights = weights.argmax(1), straight_through(weights)
            # In evaluation by index: exact, where the weighted sum is so to rounding.
            logits, embedding = (
                (weights[..., None] * x).sum(1) if self.training else _rows(x, choice)
                for x in (answers, hidden)
            )
        fits = usable.any(1)[:, None]
        logits = torch.where(fits, logits, present_mean(heads, present).to(logits.dtype))
        embedding = torch.where(fits, embedding, present_mean(aligned, present).to(embedding.dtype))
        return self._output(embedding, logits, present, branch_weights=weights, **extra)

    def _chosen_only(
        self,
        aligned: Tensor,
        present: Tensor,
        usable: Tensor,
        weights: Tensor,
        linear: Tensor | None,
    ) -> FusionOutput:
        """Answer without gradients: each row runs through its own branch only."""
        count = len(self.subsets)
        choice = torch.where(usable.any(1), weights.argmax(1), count)  # count: no branch is left
        *rows_by_branch, rest = [(choice == k).nonzero()[:, 0] for k in range(count + 1)]
        pairs = zip(self.subsets, rows_by_branch, strict=True)

        def some(rows: Tensor) -> Tensor | None:
            return None if linear is None else linear[rows]

        answers = [self._branch(names, aligned[rows], some(rows)) for names, rows in pairs]
        left, here = aligned[rest], present[rest]
        heads = self.classify(left.unbind(1), here, some(rest))
        answers.append((present_mean(left, here), present_mean(heads, here)))
        place = torch.cat([*rows_by_branch, rest]).argsort()
        embedding, logits = (torch.cat(x)[place] for x in zip(*answers, strict=True))
        chosen = nn.functional.one_hot(choice, count + 1)[:, :-1].to(weights.dtype)
        return self._output(embedding, logits, present, branch_weights=chosen)

    def _output(
        self, embedding: Tensor, logits: Tensor, present: Tensor, **extra: Tensor
    ) -> FusionOutput:
        logits = torch.where(present.any(1)[:, None], logits, self.prior_logits.to(logits.dtype))
        extra |= {"present": present}
        return FusionOutput(self.or_null(embedding, present), logits, {}, None, extra)

    def _branch(
        self,
        names: tuple[str, ...],
        aligned: Tensor,
        linear: Tensor | None,
        heads: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden vector (B, dim) and the logits (B, K) of one branch.

        `heads` are the logits of each modality alone, (B, M, K), if they are known.
        """
        columns = [[*self.dims].index(name) for name in names]
        if len(names) == 1 and heads is not None:
            return aligned[:, columns[0]], heads[:, columns[0]]
        if len(names) == 1:
            hidden = aligned[:, columns[0]]
            logits = self.heads[names[0]](hidden)
        else:
            key = "+".join(names)
            hidden = self.joint[key](aligned[:, columns].flatten(1)).relu()
            logits = self.joint_heads[key](hidden)
        return hidden, logits if linear is None else logits + linear[:, columns].sum(1)

    def _usable(self, present: Tensor) -> Tensor:
        """Return which branches lack no modality: (B, M) -> (B, branches)."""
        members = [[name in names for name in self.dims] for names in self.subsets]
        needs = torch.tensor(members, device=present.device)
        return (present[:, None] | ~needs).all(-1)

    def shares(self, output: FusionOutput) -> dict[str, Tensor]:
        names = ("+".join(names) for names in self.subsets)
        return dict(zip(names, output.extra["branch_weights"].unbind(1), strict=True))

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        extra, task = output.extra, context.criterion(output.logits, target)
        if "branch_logits" not in extra:
            return task
        if context.phase == 0:
            return self._branch_loss(output, target, context)
        weights = extra["branch_weights"]
        if context.phase == 1:
            usable = extra["usable"].any(1)
            soft = context.criterion(extra["soft_logits"], target)
            task, weights = torch.where(usable, soft, task), extra["soft_weights"]
        spent = weights.float() @ torch.tensor(self.costs, device=weights.device)
        return task + self.cost * self._above_budget(spent)

    def _above_budget(self, spent: Tensor) -> Tensor:
        """Return values (B,) whose mean, over all processes, is max(0, mean cost - budget)."""
        total = torch.stack([spent.detach().sum(), spent.new_tensor(len(spent))])
        if self.training and distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(total)
        return (spent - self.budget) * (total[0] > self.budget * total[1])

    def _branch_loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        """Return the mean loss of all heads and branches that lack no modality, (B,)."""
        extra, present = output.extra, output.extra["present"]
        several = [k for k, names in enumerate(self.subsets) if len(names) > 1]
        answers = [*extra["heads"].unbind(1), *(extra["branch_logits"][:, k] for k in several)]
        complete = torch.cat([present, extra["usable"][:, several]], dim=1)
        losses = torch.stack([context.criterion(z, target) for z in answers], dim=1)
        mean = losses.masked_fill(~complete, 0).sum(1) / complete.sum(1).clamp(min=1)
        return torch.where(present.any(1), mean, context.criterion(output.logits, target))


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Return x[i, index[i]] for each row i: (B, N, D), (B,) -> (B, D)."""
    return x.gather(1, index[:, None, None].expand(-1, 1, x.shape[-1]))[:, 0]


def straight_through(weights: Tensor) -> Tensor:
    """Return 1 for a row's largest weight, 0 elsewhere, with the gradient of the weights."""
    hard = nn.functional.one_hot(weights.argmax(1), weights.shape[1]).to(weights.dtype)
    return hard * weights.any(1, keepdim=True) - weights.detach() + weights
