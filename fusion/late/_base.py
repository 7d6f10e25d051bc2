"""Shared by the late fusions: one classifier per modality, and an embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.structures import Features, FusionOutput, StepContext

from ..base import Fusion, present_mean


class LateFusion(Fusion):
    """Classify each modality, z_m = head_m(a_m) with a_m = V_m x_m; subclasses combine the z_m.

    The embedding is the mean of the present a_m. With `project=False`, z_m = head_m(x_m), and the
    embedding is the mean of the present R_m x_m, R_m a `RandomMap`: nothing is learned between x_m
    and the logits, whose K numbers would be a poor embedding of few classes. The logits of a sample
    without any modality are the learned `prior_logits`. With `linear_skip`, z_m gains W_m x_m, and
    what the rule joins, and losses of single modalities, hold it; without `project` that is one
    more map of x_m, and training starts from equal classes.

    Settings:
        project: whether a linear map V_m to the width `dim` comes before each classifier; without
            it the classifiers read x_m, and the embedding is a fixed random map of x_m, which only
            training of the encoders changes
    """

    last_layers: tuple[str, ...] = ("heads",)
    joins_linear = True

    def __init__(
        self, dims: Mapping[str, int], dim: int, num_outputs: int, *, project: bool = True
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.projects = project
        self.read_widths = dict.fromkeys(dims, dim) if project else dict(dims)  # `head_inputs`
        self.project = (
            self.align()
            if project
            else nn.ModuleDict({name: RandomMap(width, dim) for name, width in dims.items()})
        )
        self.heads = nn.ModuleDict(
            {name: nn.Linear(width, num_outputs) for name, width in self.read_widths.items()}
        )
        self.prior_logits = nn.Parameter(torch.zeros(num_outputs))

    def unimodal_logits(self, features: Mapping[str, Features]) -> tuple[Tensor, Tensor, Tensor]:
        """Return embedding (B, dim), logits of each modality (B, M, K), presence (B, M).

        The logits of absent modalities are zeros.
        """
        aligned, present = self.aligned(features)
        read = self.head_inputs(features, aligned)
        unimodal = self.classify(read, present, self.linear_logits(features))
        return self.or_null(present_mean(aligned, present), present), unimodal, present

    def head_inputs(self, features: Mapping[str, Features], aligned: Tensor) -> Sequence[Tensor]:
        """Return what the classifiers read, zeros where absent: the a_m (B, dim), or the x_m."""
        return aligned.unbind(1) if self.projects else [*self.pooled(features).values()]

    def classify(self, read: Sequence[Tensor], present: Tensor, linear: Tensor | None) -> Tensor:
        """Return the logits of each modality, zeros where absent, (B, M, K).

        `read` is the result of `head_inputs`, `linear` that of `linear_logits`.
        """
        pairs = zip(self.heads.values(), read, strict=True)
        unimodal = torch.stack([head(x) for head, x in pairs], dim=1)
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


class RandomMap(nn.Module):
    """Map vectors by a random matrix that is kept and not trained: (B, width) -> (B, dim).

    Its entries have the variance 1 / dim, so that lengths and angles are kept on average, the more
    exactly the larger `dim` (Johnson and Lindenstrauss 1984), and the vectors of two modalities
    are nearly orthogonal.
    """

    weight: Tensor

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(dim, width) * dim**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)
