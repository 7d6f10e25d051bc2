"""MVAE: one Gaussian per modality, combined as a product of experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from einops import reduce
from torch import Tensor, nn

from fusionzoo.structures import Features, FusionOutput, StepContext

from ..base import FUSIONS, Fusion, linear_of


@FUSIONS.register(family="hybrid", paper="Wu and Goodman 2018, arXiv:1802.05335", reads="pooled")
class MVAEPoE(Fusion):
    """Predict a Gaussian per modality; multiply those of present ones with the prior N(0, I).

    (mu_m, log var_m) = V_m x_m with log var_m clipped to -10..10, t_m = 1 / var_m, t = 1 +
    sum_m p_m t_m, mu = sum_m p_m t_m mu_m / t, p_m = 1 if m is present, else 0; embedding = mu, in
    training a sample from N(mu, 1/t). Loss: cross-entropy of the sample + beta KL to the prior,
    summed over all present modalities together, each one alone and `random_subsets` further
    subsets; with `decoders`, + the mean squared error of decoding each x_m of the subset from its
    sample. Differs from the authors' code, which decodes images and words and has no classifier,
    clips no log var_m and adds 2e-8 to each variance.

    Missing: precision 0; if all modalities are missing, the prior, with mean 0.
    Pitfall: an overconfident modality dominates: check the weights. Where the answer is only in the
    combination, the terms of subsets pull to the prior: an exclusive or of three modalities takes
    200 epochs, or 60 with `beta` 1e-4.
    Use when: any subset may be missing and you want an embedding with an uncertainty.

    Settings:
        beta: weight of the KL divergence to the prior, at least 0
        random_subsets: random subsets of modalities per step, at least 0
        decoders: whether to decode each modality's features and add the error to the loss

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K),
            weights (B, M): t_m / sum_m t_m, averaged over dim
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
        gaussians = torch.stack([self.experts[name](x) for name, x in pooled.items()], dim=1)
        means, log_variances = gaussians.chunk(2, dim=-1)
        precision = (-log_variances.clamp(-10, 10)).exp()
        mean, variance = multiply(means, precision, present)
        embedding = self._sample(mean, variance)
        masked = precision.masked_fill(~present[..., None], 0)
        floor = torch.finfo(masked.dtype).tiny
        shares = masked / masked.sum(1, keepdim=True).clamp(min=floor)
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
        posterior = (extra["mean"], extra["variance"], extra["sample"])
        loss = loss + self._regularise(*posterior, present, extra)
        single = torch.eye(len(self.dims), dtype=torch.bool, device=present.device)
        drawn = torch.rand(self.random_subsets, *present.shape, device=present.device) < 0.5
        for subset in (*(row & present for row in single), *(present & mask for mask in drawn)):
            mean, variance = multiply(means, precision, subset)
            sample = self._sample(mean, variance)
            logits = self.head(sample) + linear_of(output, subset)
            subset_loss = context.criterion(logits, target)
            subset_loss = subset_loss + self._regularise(mean, variance, sample, subset, extra)
            loss = loss + torch.where(subset.any(1), subset_loss, 0)
        return loss

    def _sample(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Sample from the Gaussian in training; return its mean in evaluation."""
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
    """Multiply the present Gaussians with N(0, I): (B, M, D) x 2, (B, M) -> (B, D) x 2.

    Returns mean and variance of the product.
    """
    masked = precision.masked_fill(~present[..., None], 0)
    total = 1 + masked.sum(1)
    return (masked * means).sum(1) / total, 1 / total
