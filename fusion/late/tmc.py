"""Trusted multi-view classification: evidence of each modality, combined by Dempster's rule."""

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
    """Predict Dirichlet evidence per modality and combine it by the reduced Dempster rule.

    z_m is one linear map of x_m, as in the authors' code (`project` puts V_m before it). e_m =
    softplus(z_m), alpha_m = e_m + 1, uncertainty u_m = K / sum alpha_m. For all views together the
    rule is alpha = 1 + K (prod_m (1 + e_m / K) - 1), computed in logarithms because the pairwise
    form becomes 0 / 0 for large evidence. logits = log alpha, so that their softmax is the expected
    class distribution. Loss, for every view and for the combination: digamma(S) - digamma(alpha_y)
    + lambda KL(Dir(alpha without evidence for y) || Dir(1)), S = sum alpha, times the class weight.
    Focal `gamma` and label smoothing do not apply to this loss and raise an error.

    Missing: no evidence, which leaves the combination unchanged exactly.
    Pitfall: with few epochs lambda stays small, and evidence for wrong classes remains.
    Use when: you want an uncertainty for each modality and each prediction.

    Settings:
        annealing_epochs: epochs over which lambda rises linearly from 0 to 1, at least 1
        pseudo_view: whether to add a view of the concatenated features (the second paper's ETMC)

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)},
            weights (B, M): 1 - u_m, normalised to sum 1
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
        project: bool = False,
        annealing_epochs: int = 50,
        pseudo_view: bool = False,
    ) -> None:
        super().__init__(dims, dim, num_outputs, project=project)
        self.annealing_epochs = annealing_epochs
        width = sum(self.read_widths.values()) + len(dims)
        self.joint = nn.Linear(width, num_outputs) if pseudo_view else None
        self.last_layers = ("heads", "joint")

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedding, unimodal, present = self.unimodal_logits(features)
        evidence = F.softplus(unimodal).masked_fill(~present[..., None], 0)
        views = [*evidence.unbind(1)]
        if self.joint is not None:
            read = self.head_inputs(features, self.aligned(features)[0])
            bits = present.to(unimodal.dtype)
            joint_logits = self.joint(torch.cat([*read, bits], dim=1))
            any_present = present.any(1)[:, None]
            views.append(F.softplus(joint_logits).masked_fill(~any_present, 0))
        stacked = torch.stack(views, dim=1)
        joined = combine(stacked)
        certainty = 1 - self.num_outputs / (self.num_outputs + evidence.sum(-1))
        floor = torch.finfo(certainty.dtype).tiny
        weights = certainty / certainty.sum(1, keepdim=True).clamp(min=floor)
        extra = {"views": stacked, "joined": joined}
        unimodal, logits = evidence.log1p(), joined.log1p()
        return self.output(embedding, logits, unimodal, present, weights, **extra)

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        strength = min(1.0, context.epoch / self.annealing_epochs)
        present, views = output.extra["present"], output.extra["views"].float()
        if self.joint is not None:
            present = torch.cat([present, present.any(1, keepdim=True)], dim=1)
        view_losses = evidential_loss(views, target[:, None].expand(-1, views.shape[1]), strength)
        joined_loss = evidential_loss(output.extra["joined"].float(), target, strength)
        total = context.weighted(joined_loss + view_losses.masked_fill(~present, 0).sum(1))
        return torch.where(present.any(1), total, context.criterion(output.logits, target))


def combine(evidence: Tensor) -> Tensor:
    """Combine the evidence of all views by the reduced Dempster rule: (B, M, K) -> (B, K)."""
    classes = evidence.shape[-1]
    return classes * (evidence / classes).log1p().sum(1).expm1()


def evidential_loss(evidence: Tensor, target: Tensor, strength: float) -> Tensor:
    """Return the expected cross-entropy under Dir(evidence + 1) plus the evidence regulariser.

    The regulariser, weighted by `strength` (lambda), is the KL divergence that draws the evidence
    for wrong classes towards 0. Shapes: evidence (..., K), target (...) -> (...).
    """
    alpha = evidence + 1
    is_target = F.one_hot(target, evidence.shape[-1]).bool()
    fit = alpha.sum(-1).digamma() - alpha.masked_fill(~is_target, 0).sum(-1).digamma()
    return fit + strength * divergence(alpha.masked_fill(is_target, 1))


def divergence(alpha: Tensor) -> Tensor:
    """Return KL(Dir(alpha) || Dir(1)): (..., K) -> (...)."""
    total, classes = alpha.sum(-1), alpha.new_full((), alpha.shape[-1])
    normaliser = total.lgamma() - alpha.lgamma().sum(-1) - classes.lgamma()
    return normaliser + ((alpha - 1) * (alpha.digamma() - total.digamma()[..., None])).sum(-1)
