"""Quality-aware fusion: logits weighted by an energy that is trained to reflect past losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, distributed, nn

from fusionzoo.structures import Features, FusionOutput, StepContext

from ..base import FUSIONS
from ._base import IndependentHeads


@FUSIONS.register(
    family="late", paper="Zhang et al. 2023, arXiv:2306.02050", reads="pooled", synergy=False
)
class QMF(IndependentHeads):
    """Weight each modality's logits by their energy u_m; rank energies by past training losses.

    logits = sum_m u_m z_m over present m, not normalised, with u_m = logsumexp(z_m) / 10; z_m is
    one linear map of x_m, as in the authors' code (`project` puts V_m before it). Loss: CE(logits)
    + sum_m CE(z_m) + rank_weight sum_m R_m. R_m compares each sample i with the next sample j of
    the batch: max(0, sign(k_i - k_j) (u_i - u_j) + |k_i - k_j|), where k is the sample's
    cross-entropy accumulated over training, scaled to 0..1 over the data set: samples with larger
    losses should have less energy. Differs from the authors' public code, which negates the
    difference but not the margin and so turns the margin into slack.

    Missing: adds nothing; left out of the accumulated losses and of the pairs.
    Pitfall: u_m may be negative, which inverts the modality's prediction; adding a constant to z_m
    changes u_m.
    Use when: the quality of the modalities varies strongly over samples (noise, blur, blanks).

    Settings:
        rank_weight: weight of the ranking loss, at least 0
        detach: whether u_m gets no gradient from CE(logits), as in parts of the public code

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)}
    """

    classes_only = True
    symmetric = True

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        project: bool = False,
        rank_weight: float = 1.0,
        detach: bool = False,
    ) -> None:
        super().__init__(dims, dim, num_outputs, project=project)
        self.rank_weight, self.detach = rank_weight, detach

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedding, unimodal, present = self.unimodal_logits(features)
        energy = (unimodal.logsumexp(-1) / 10).masked_fill(~present, 0)
        weights = energy.detach() if self.detach else energy
        logits = (weights[..., None] * unimodal).sum(1)
        return self.output(embedding, logits, unimodal, present, None, energy=energy)

    def prepare(self, targets: Tensor, groups: Sequence[str] = (), seed: int = 0) -> nn.Module:
        return History(len(targets), len(self.dims))

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        assert isinstance(context.memory, History)
        present, energy = output.extra["present"], output.extra["energy"].float()
        hardness = context.memory.hardness(context.rows)
        ranking = ranking_loss(energy, hardness, present)
        if self.training:
            losses = [context.criterion(logits, target) for logits in output.unimodal.values()]
            context.memory.add(context.rows, torch.stack(losses, dim=1).detach(), present)
        joint = torch.where(present.any(1), context.criterion(output.logits, target), 0)
        return joint + super().loss(output, target, context) + self.rank_weight * ranking


def ranking_loss(energy: Tensor, hardness: Tensor, present: Tensor) -> Tensor:
    """Return each row's ranking loss against the next row, over modalities: (B, M) x 3 -> (B,)."""
    gap = hardness - hardness.roll(-1, 0)
    both_present = present & present.roll(-1, 0)
    violation = gap.sign() * (energy - energy.roll(-1, 0)) + gap.abs()
    return violation.clamp(min=0).masked_fill(~both_present, 0).sum(1)


class History(nn.Module):
    """Cross-entropy of each training sample and modality, accumulated over training: (N, M)."""

    total: Tensor

    def __init__(self, samples: int, modalities: int) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(samples, modalities))

    def hardness(self, rows: Tensor) -> Tensor:
        """Return the rows' sums, scaled to 0..1 over the data set; 0 for rows outside of it."""
        if not len(self.total):
            return self.total.new_zeros(rows.shape[0], self.total.shape[1])
        low, high = self.total.min(0).values, self.total.max(0).values
        scaled = (self.total[rows.clamp(min=0)] - low) / (high - low).clamp(min=1e-12)
        return scaled.masked_fill((rows < 0)[:, None], 0)

    def add(self, rows: Tensor, losses: Tensor, present: Tensor) -> None:
        """Add losses (B, M) of all processes to their rows; equal on every process afterwards."""
        known = rows >= 0
        local = (rows[known].cpu(), losses[known].masked_fill(~present[known], 0).float().cpu())
        shards = [local]
        if distributed.is_available() and distributed.is_initialized():
            shards = [local] * distributed.get_world_size()
            distributed.all_gather_object(shards, local)
        for index, values in shards:
            self.total.index_add_(0, index.to(self.total.device), values.to(self.total.device))
