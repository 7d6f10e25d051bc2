"""Trusted multi-view classification: evidence from each modality, joined by Dempster's rule."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.structures import Features, FusionOutput, StepContext

from ..base import FUSIONS
from ._base import LateFusion


@FUSIONS.register(
    family="late",
    paper="Han et al. 2021, arXiv:2102.02051; 2022, arXiv:2204.11423",
    reads="pooled",
    synergy=False,
)
class TMC(LateFusion):
    """Turn votes into evidence for a Dirichlet distribution; combine by the reduced Dempster rule.

    e_m = softplus(z_m), alpha_m = e_m + 1, uncertainty u_m = K / sum alpha_m. The rule applied to
    all views is alpha = 1 + K (prod_m (1 + e_m / K) - 1), taken here through logarithms: the
    pairwise form divides 0 by 0 once evidence is large. logits = log alpha, so that their softmax
    is the expected class distribution. Loss: for every view and for the whole,
    digamma(S) - digamma(alpha_y) + lambda KL(Dir(alpha without evidence for y) || Dir(1)), lambda
    rising to 1 over `annealing_epochs`, times the class's weight; it has no place for focal `gamma`
    or label smoothing, which are refused. `pseudo_view` adds a view of the concatenated features
    (ETMC).

    Missing: no evidence, the vacuous opinion, which is exactly neutral.
    Pitfall: with few epochs lambda stays small and wrong classes keep evidence.
    Use when: an uncertainty for each modality and each decision is wanted.

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)},
            weights (B, M): 1 - u_m, shared out
    """

    classes_only = True
    ignores = ("gamma", "label_smoothing")
    symmetric = True

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        annealing_epochs: int = 50,
        pseudo_view: bool = False,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.annealing_epochs = annealing_epochs
        width = len(dims) * (dim + 1)
        self.joint = nn.Linear(width, num_outputs) if pseudo_view else None

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedding, votes, present = self.votes(features)
        evidence = F.softplus(votes).masked_fill(~present[..., None], 0)
        views = [*evidence.unbind(1)]
        if self.joint is not None:
            aligned, bits = self.aligned(features)[0], present.to(votes.dtype)
            everything = self.joint(torch.cat([aligned.flatten(1), bits], dim=1))
            seen = present.any(1)[:, None]
            views.append(F.softplus(everything).masked_fill(~seen, 0))
        each = torch.stack(views, dim=1)
        joined = combine(each)
        trust = 1 - self.num_outputs / (self.num_outputs + evidence.sum(-1))
        weights = trust / trust.sum(1, keepdim=True).clamp(min=torch.finfo(trust.dtype).tiny)
        opinions = evidence.log1p()
        logits = joined.log1p()
        return self.output(embedding, logits, opinions, present, weights, views=each, joined=joined)

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        strength = min(1.0, context.epoch / self.annealing_epochs)
        present, views = output.extra["present"], output.extra["views"].float()
        if self.joint is not None:
            present = torch.cat([present, present.any(1, keepdim=True)], dim=1)
        each = evidential_loss(views, target[:, None].expand(-1, views.shape[1]), strength)
        whole = evidential_loss(output.extra["joined"].float(), target, strength)
        total = whole + each.masked_fill(~present, 0).sum(1)
        if context.row_weight is not None:
            total = context.row_weight * total
        return torch.where(present.any(1), total, context.criterion(output.logits, target))


def combine(evidence: Tensor) -> Tensor:
    """Join the evidence of all views by Dempster's reduced rule: (B, M, K) -> (B, K)."""
    classes = evidence.shape[-1]
    return classes * (evidence / classes).log1p().sum(1).expm1()


def evidential_loss(evidence: Tensor, target: Tensor, strength: float) -> Tensor:
    """Expected cross-entropy under Dir(evidence + 1), and what pulls wrong evidence to nothing.

    evidence (..., K), target (...) -> (...)
    """
    alpha = evidence + 1
    right = F.one_hot(target, evidence.shape[-1]).bool()
    fit = alpha.sum(-1).digamma() - alpha.masked_fill(~right, 0).sum(-1).digamma()
    return fit + strength * divergence(alpha.masked_fill(right, 1))


def divergence(alpha: Tensor) -> Tensor:
    """Return KL(Dir(alpha) || Dir(1)): (..., K) -> (...)."""
    total, classes = alpha.sum(-1), alpha.new_tensor(float(alpha.shape[-1]))
    normaliser = total.lgamma() - alpha.lgamma().sum(-1) - classes.lgamma()
    return normaliser + ((alpha - 1) * (alpha.digamma() - total.digamma()[..., None])).sum(-1)
