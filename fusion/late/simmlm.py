"""SimMLM: a mixture of modality experts that must not do worse with more modalities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, check_choice
from fusionzoo.structures import Features, FusionOutput, Phase, StepContext

from ..base import FUSIONS, Draws, masked_softmax
from ._base import LateFusion


@FUSIONS.register(
    family="late", paper="Li et al. 2025, arXiv:2507.19264", reads="pooled", synergy=False
)
class SimMLM(LateFusion):
    """Mix the modalities' logits by a router; nested subsets train that more is never worse.

    w = softmax over present m of R [a_1; ...; a_M; p], an MLP with a weight for each class, p
    presence bits; logits = sum_m w_m * z_m. Phase "experts" trains each z_m on its own loss, phase
    "all" everything: of each sample's present modalities two nested subsets are drawn, their sizes
    first, S- within S+, and the loss is (l(S+) + l(S-)) / 2 + alpha max(0, l(S+) - l(S-)). In
    training the logits are those of S+. Differs from the paper, whose router reads raw volumes and
    whose subsets are drawn by rejection, which favours some sizes.

    Missing: weight 0; R reads 0 and a presence bit. Training shows every subset.
    Pitfall: with a weight per class, a constant added to a modality's logits changes the answer, so
    they are normalised first (`mix="log_prob"`). An exclusive or is then not learned; with "logit"
    it is.
    Use when: modalities are missing in training and test, and one more must never hurt.

    Settings:
        mix: what is mixed: "log_prob" (log-probabilities), "logit" (raw logits, for several labels
            per sample or numbers), "prob" (probabilities) or "feature" (the a_m, with one weight
            per modality and one classifier)
        alpha: weight of the hinge, 0 to 0.5; above that a loss of fewer modalities would be
            rewarded, unless `detach_fewer`
        detach_fewer: whether the hinge has no gradient through l(S-)
        expert_share: share of the training steps spent in phase "experts", 0 to below 1
        router_width: width of R's hidden layer, at least 1

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)}, weights (B, M):
            mean over the classes
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        mix: Literal["log_prob", "logit", "prob", "feature"] = "log_prob",
        alpha: float = 0.1,
        detach_fewer: bool = False,
        expert_share: float = 0.3,
        router_width: int = 256,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        check_choice("mix", mix, ("log_prob", "logit", "prob", "feature"))
        if alpha < 0 or (alpha > 0.5 and not detach_fewer) or not 0 <= expert_share < 1:
            raise FusionZooError(
                f"alpha={alpha}, expert_share={expert_share}; alpha is 0 to 0.5, or more with"
                " detach_fewer=true, and the share 0 to below 1"
            )
        self.mix, self.alpha, self.detach_fewer = mix, alpha, detach_fewer
        self.classes_only = mix in ("log_prob", "prob")
        self.per_class = 1 if mix == "feature" else num_outputs
        experts = ("project", "heads", "prior_logits", "null")
        if mix == "feature":
            del self.heads
            self.head, self.last_layers = nn.Linear(dim, num_outputs), ("head",)
            experts = ("project", "head", "prior_logits", "null")
        if expert_share:
            last = Phase("all", 1 - expert_share)
            self.phases = (Phase("experts", expert_share, trains=experts), last)
        self.router = nn.Sequential(
            nn.Linear(len(dims) * (dim + 1), router_width),
            nn.ReLU(),
            nn.Linear(router_width, len(dims) * self.per_class),
        )
        self.draws = Draws()

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        aligned, present = self.aligned(features)
        linear = self.linear_logits(features)
        if self.mix == "feature":
            unimodal = self.head(aligned) if linear is None else self.head(aligned) + linear
            unimodal = unimodal.masked_fill(~present[..., None], 0)
        else:
            unimodal = self.classify(aligned.unbind(1), present, linear)
        subset, extra = present, {}
        if self.training:
            subset, fewer = nested_subsets(present, self.draws)
            extra["fewer"] = self._mixture(aligned, unimodal, fewer, linear)[0]
        logits, weights = self._mixture(aligned, unimodal, subset, linear)
        embedding = (weights[..., None] * aligned).sum(1)
        return self.output(
            self.or_null(embedding, present), logits, unimodal, present, weights, **extra
        )

    def _mixture(
        self,
        aligned: Tensor,
        unimodal: Tensor,
        subset: Tensor,
        linear: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return logits (B, K) and weights (B, M) of a subset of modalities (B, M)."""
        seen = aligned.masked_fill(~subset[..., None], 0)
        scores = self.router(torch.cat([seen.flatten(1), subset.to(seen.dtype)], dim=1))
        scores = scores.unflatten(1, (len(self.dims), self.per_class))
        weights = masked_softmax(scores, subset[..., None].expand_as(scores))
        if self.mix == "feature":
            logits = self.head((weights * seen).sum(1))
            if linear is not None:
                logits = logits + linear.masked_fill(~subset[..., None], 0).sum(1)
        elif self.mix == "prob":
            logits = (weights * unimodal.softmax(-1)).sum(1).clamp(min=1e-30).log()
        else:
            votes = unimodal.log_softmax(-1) if self.mix == "log_prob" else unimodal
            logits = (weights * votes).sum(1)
        return logits, weights.mean(-1)

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        present = output.extra["present"]
        if len(self.phases) > 1 and context.phase == 0:
            losses = [context.criterion(logits, target) for logits in output.unimodal.values()]
            unimodal = torch.stack(losses, dim=1).masked_fill(~present, 0).sum(1)
            return torch.where(present.any(1), unimodal, context.criterion(output.logits, target))
        more = context.criterion(output.logits, target)
        if "fewer" not in output.extra:
            return more
        fewer = context.criterion(output.extra["fewer"], target)
        total = more_beats_fewer(more, fewer, self.alpha, detach_fewer=self.detach_fewer)
        return torch.where(present.any(1), total, more)


def more_beats_fewer(
    more: Tensor, fewer: Tensor, alpha: float, *, detach_fewer: bool = False
) -> Tensor:
    """Return (more + fewer) / 2 + alpha max(0, more - fewer), of losses (B,)."""
    bound = fewer.detach() if detach_fewer else fewer
    return (more + fewer) / 2 + alpha * (more - bound).clamp(min=0)


def nested_subsets(present: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Draw a subset of the present modalities and a smaller one within it: (B, M) -> (B, M) x 2.

    The larger has 2 to P of the P present modalities, the smaller at least 1, each size equally
    likely; a single present modality is both.
    """
    rows, modalities = present.shape
    numbers = draws.uniform(rows, modalities + 2).to(present.device)
    count = present.sum(1)
    larger = (2 + (numbers[:, 0] * (count - 1)).floor()).clamp(max=count)
    smaller = (1 + (numbers[:, 1] * (larger - 1)).floor()).clamp(max=count)
    order = numbers[:, 2:].masked_fill(~present, 2).argsort(dim=1)
    rank = order.argsort(dim=1)
    return (rank < larger[:, None]) & present, (rank < smaller[:, None]) & present
