"""MVAE: each modality is a Gaussian expert, and experts multiply."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from einops import reduce
from torch import Tensor, nn

from fusionzoo.structures import Features, FusionOutput, StepContext

from ..base import FUSIONS, Fusion


@FUSIONS.register(family="hybrid", paper="Wu and Goodman 2018, arXiv:1802.05335", reads="pooled")
class MVAEPoE(Fusion):
    """Let each modality name a Gaussian; multiply those that are there with the prior N(0, I).

    (mu_m, log var_m) = V_m x_m, t_m = 1 / var_m, t = 1 + sum_m p_m t_m, mu = sum_m p_m t_m mu_m /
    t; embedding = mu, in training a sample from N(mu, 1/t). Loss: cross-entropy of the sample +
    `beta` KL to the prior, for the whole, for each modality alone and for `random_subsets` further
    subsets; with `decoders`, + mean squared error of each x_m of that subset decoded from its draw.
    log var is kept within -10 to 10.

    Missing: no precision. Nothing at all: the prior itself, mean 0.
    Pitfall: an overconfident expert takes over: watch the weights.
    Use when: any subset may be missing and an embedding with an uncertainty is wanted.

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K),
            weights (B, M): share of the precision, averaged over dim
    """

    symmetric = True

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        beta: float = 1e-3,
        random_subsets: int = 1,
        decoders: bool = False,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        del self.null  # the prior's mean takes its place
        self.beta, self.random_subsets = beta, random_subsets
        self.experts = nn.ModuleDict({name: nn.Linear(w, 2 * dim) for name, w in dims.items()})
        self.decoders = (
            nn.ModuleDict({name: nn.Linear(dim, w) for name, w in dims.items()})
            if decoders
            else None
        )
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present, pooled = self.present(features), self.pooled(features)
        both = torch.stack([self.experts[name](x) for name, x in pooled.items()], dim=1)
        means, logs = both.chunk(2, dim=-1)
        precision = (-logs.clamp(-10, 10)).exp()
        mean, variance = multiply(means, precision, present)
        embedding = self._draw(mean, variance)
        given = precision.masked_fill(~present[..., None], 0)
        floor = torch.finfo(given.dtype).tiny
        shares = given / given.sum(1, keepdim=True).clamp(min=floor)
        extra = {"means": means, "precision": precision, "present": present}
        extra |= {"mean": mean, "variance": variance, "sample": embedding}
        if self.decoders is not None:
            extra |= {f"pooled/{name}": x for name, x in pooled.items()}
        weights = reduce(shares, "b m d -> b m", "mean")
        return FusionOutput(embedding, self.head(embedding), {}, weights, extra)

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        extra = output.extra
        present, means, precision = extra["present"], extra["means"], extra["precision"]
        loss = context.criterion(output.logits, target)
        whole = (extra["mean"], extra["variance"], extra["sample"])
        loss = loss + self._regularise(*whole, present, extra)
        alone = torch.eye(len(self.dims), dtype=torch.bool, device=present.device)
        drawn = torch.rand(self.random_subsets, *present.shape, device=present.device) < 0.5
        for subset in (*(row & present for row in alone), *(present & kept for kept in drawn)):
            mean, variance = multiply(means, precision, subset)
            sample = self._draw(mean, variance)
            own = context.criterion(self.head(sample), target)
            own = own + self._regularise(mean, variance, sample, subset, extra)
            loss = loss + torch.where(subset.any(1), own, 0)
        return loss

    def _draw(self, mean: Tensor, variance: Tensor) -> Tensor:
        return mean + variance.sqrt() * torch.randn_like(mean) if self.training else mean

    def _regularise(
        self,
        mean: Tensor,
        variance: Tensor,
        sample: Tensor,
        subset: Tensor,
        extra: Mapping[str, Tensor],
    ) -> Tensor:
        """Return beta KL(N(mean, variance) || N(0, I)) and the error of decoding `subset`: (B,)."""
        loss = self.beta * 0.5 * (variance + mean.square() - 1 - variance.log()).sum(-1)
        if self.decoders is not None:
            for column, (name, decode) in enumerate(self.decoders.items()):
                error = (decode(sample) - extra[f"pooled/{name}"]).square().mean(-1)
                loss = loss + error.masked_fill(~subset[:, column], 0)
        return loss


def multiply(means: Tensor, precision: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply Gaussians with N(0, I): (B, M, D) x 2, (B, M) -> mean and variance (B, D)."""
    counted = precision.masked_fill(~present[..., None], 0)
    total = 1 + counted.sum(1)
    return (counted * means).sum(1) / total, 1 / total
