"""Shared by `ecml` and `dbf`: evidence of each modality, averaged, and how far two disagree.

Shapes: `B` batch, `M` modalities, `K` classes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.errors import check_number
from fusionzoo.structures import Features, FusionOutput, StepContext

from ._base import LateFusion
from .tmc import evidential_loss


class AveragedEvidence(LateFusion):
    """Average the evidence of the present modalities and train against their conflict.

    Settings:
        annealing_epochs: epochs over which the weight of the KL term rises from 0 to 1, at least 1
        conflict: weight of the conflict between modalities in the loss, at least 0
        penalise_missing: whether to divide by the number of all modalities instead of the present
            ones, so that missing ones raise the uncertainty (the class stays the same)
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
        conflict: float = 1.0,
        penalise_missing: bool = False,
    ) -> None:
        super().__init__(dims, dim, num_outputs, project=project)
        check_number("annealing_epochs", annealing_epochs, 1)
        check_number("conflict", conflict, 0)
        self.annealing_epochs, self.conflict = annealing_epochs, conflict
        self.penalise_missing = penalise_missing

    @abstractmethod
    def trust(self, conflict: Tensor) -> Tensor:
        """Return how far to trust each modality, 0 to 1: (B, M, M) -> (B, M)."""

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedding, unimodal, present = self.unimodal_logits(features)
        evidence = F.softplus(unimodal).masked_fill(~present[..., None], 0)
        conflict = conflict_of(evidence)
        trust = self.trust(conflict)
        counted = discount(evidence, trust)
        count = present.sum(1, keepdim=True).clamp(min=1)
        joined = counted.sum(1) / (len(self.dims) if self.penalise_missing else count)
        certainty = trust * (1 - uncertainty(evidence))
        floor = torch.finfo(certainty.dtype).tiny
        weights = certainty / certainty.sum(1, keepdim=True).clamp(min=floor)
        extra = {"views": evidence, "joined": joined, "conflict": conflict}
        extra["uncertainty"] = uncertainty(joined)
        views, logits = evidence.log1p(), joined.log1p()
        return self.output(embedding, logits, views, present, weights, **extra)

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        strength = min(1.0, context.epoch / self.annealing_epochs)
        present, views = output.extra["present"], output.extra["views"].float()
        count = present.sum(1)
        losses = evidential_loss(views, target[:, None].expand(-1, views.shape[1]), strength)
        joined_loss = evidential_loss(output.extra["joined"].float(), target, strength)
        fit = (joined_loss + losses.masked_fill(~present, 0).sum(1)) / (count + 1)
        disagreement = conflict_of(views).sum((1, 2)) / (count - 1).clamp(min=1)
        total = context.weighted(fit + self.conflict * disagreement)
        return torch.where(count > 0, total, context.criterion(output.logits, target))


def uncertainty(evidence: Tensor) -> Tensor:
    """Return K / (K + sum of the evidence): (..., K) -> (...)."""
    classes = evidence.shape[-1]
    return classes / (classes + evidence.sum(-1))


def conflict_of(evidence: Tensor) -> Tensor:
    """Return the conflict of every two modalities, from 0 to 1: (B, M, K) -> (B, M, M).

    It is half the distance of their expected class distributions times the certainty of both, and
    so 0 for a modality without evidence.
    """
    classes = evidence.shape[-1]
    expected = (evidence + 1) / (classes + evidence.sum(-1, keepdim=True))
    distance = (expected[:, :, None] - expected[:, None]).abs().sum(-1) / 2
    certainty = 1 - uncertainty(evidence)
    return distance * certainty[:, :, None] * certainty[:, None]


def discount(evidence: Tensor, trust: Tensor) -> Tensor:
    """Discount the belief b of each modality to trust x b, as evidence: (B, M, K), (B, M).

    What belief loses is uncertainty; trust 1 changes nothing.
    """
    classes = evidence.shape[-1]
    trusted, lost = trust[..., None], (1 - trust)[..., None]
    return classes * trusted * evidence / (classes + lost * evidence.sum(-1, keepdim=True))
