"""Shared by the late fusions: one classifier per modality, and an embedding."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fusionzoo.structures import Features, FusionOutput, StepContext

from ..base import Fusion, present_mean


class LateFusion(Fusion):
    """Classify each modality, z_m = head_m(a_m) with a_m = V_m x_m; subclasses combine the z_m.

    The embedding is the mean of the present a_m. The logits of a sample without any modality are
    the learned `prior_logits`. With `linear_skip`, z_m = head_m(a_m) + W_m x_m, and what the rule
    joins, and losses of single modalities, hold it.
    """

    last_layers: tuple[str, ...] = ("heads",)
    joins_linear = True

    def __init__(self, dims: Mapping[str, int], dim: int, num_outputs: int) -> None:
        super().__init__(dims, dim, num_outputs)
        self.project = self.align()
        self.heads = nn.ModuleDict({name: nn.Linear(dim, num_outputs) for name in dims})
        self.prior_logits = nn.Parameter(torch.zeros(num_outputs))

    def unimodal_logits(self, features: Mapping[str, Features]) -> tuple[Tensor, Tensor, Tensor]:
        """Return embedding (B, dim), logits of each modality (B, M, K), presence (B, M).

        The logits of absent modalities are zeros.
        """
        aligned, present = self.aligned(features)
        unimodal = self.classify(aligned, present, self.linear_logits(features))
        return self.or_null(present_mean(aligned, present), present), unimodal, present

    def classify(self, aligned: Tensor, present: Tensor, linear: Tensor | None) -> Tensor:
        """Return the logits of each modality, zeros where absent: (B, M, dim) -> (B, M, K).

        `linear` is the result of `linear_logits`.
        """
        pairs = zip(self.heads.values(), aligned.unbind(1), strict=True)
        unimodal = torch.stack([head(a) for head, a in pairs], dim=1)
        unimodal = unimodal if linear is None else unimodal + linear
        return unimodal.masked_fill(~present[..., None], 0)

    def output(
        self,
        embedding: Tensor,
        logits: Tensor,
        unimodal: Tensor,
        present: Tensor,
        weights: Tensor | None,
        **extra: Tensor,
    ) -> FusionOutput:
        """Build the output, with `prior_logits` for samples without any modality."""
        prior = self.prior_logits.to(logits.dtype)
        logits = torch.where(present.any(1)[:, None], logits, prior)
        logits_by_modality = dict(zip(self.dims, unimodal.unbind(1), strict=True))
        extra = {"present": present, **extra}
        return FusionOutput(embedding, logits, logits_by_modality, weights, extra)


class IndependentHeads(LateFusion):
    """Late fusion whose classifiers are each trained on their own loss, not on the fused logits."""

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        """Sum the losses of the present modalities; that of the prior if none is present: (B,)."""
        present = output.extra["present"]
        losses = [context.criterion(logits, target) for logits in output.unimodal.values()]
        unimodal_loss = torch.stack(losses, dim=1).masked_fill(~present, 0).sum(1)
        return torch.where(present.any(1), unimodal_loss, context.criterion(output.logits, target))
