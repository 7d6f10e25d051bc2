"""Quality-aware fusion: votes weighted by an energy that is trained to follow past losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, distributed, nn

from fusionzoo.structures import Features, FusionOutput, StepContext

from ..base import FUSIONS
from ._base import VotersAlone


@FUSIONS.register(
    family="late", paper="Zhang et al. 2023, arXiv:2306.02050", reads="pooled", synergy=False
)
class QMF(VotersAlone):
    """Weigh each vote by its energy u_m = logsumexp(z_m) / 10; rank energies by past losses.

    logits = sum_m u_m z_m over what is present, not normalised. Loss: CE(logits) + sum_m CE(z_m) +
    `rank_weight` sum_m R_m; R compares each sample i with the next one j of the batch: max(0,
    sign(k_i - k_j) (u_i - u_j) + |k_i - k_j|), k the sample's cross-entropy summed over training
    and scaled to 0..1 over the data set: whoever was harder should have less energy. The
    gradient of CE(logits) reaches u_m unless `detach`, which some of the public code has; that code
    also negates the difference but not the margin, which turns it into slack.

    Missing: adds nothing, and takes no part in history or pairs.
    Pitfall: u may be negative, which turns a vote around; and adding a constant to z_m changes u_m.
    Use when: the quality of the modalities varies strongly over samples (noise, blur, blanks).

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
        rank_weight: float = 1.0,
        detach: bool = False,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.rank_weight, self.detach = rank_weight, detach

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedding, votes, present = self.votes(features)
        energy = (votes.logsumexp(-1) / 10).masked_fill(~present, 0)
        trust = energy.detach() if self.detach else energy
        logits = (trust[..., None] * votes).sum(1)
        return self.output(embedding, logits, votes, present, None, energy=energy)

    def prepare(self, targets: Tensor, groups: Sequence[str] = (), seed: int = 0) -> nn.Module:
        return History(len(targets), len(self.dims))

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        assert isinstance(context.memory, History)
        present, energy = output.extra["present"], output.extra["energy"].float()
        hardness = context.memory.hardness(context.rows)
        rank = ranking_loss(energy, hardness, present)
        if self.training:
            each = [context.criterion(vote, target) for vote in output.unimodal.values()]
            context.memory.add(context.rows, torch.stack(each, dim=1).detach(), present)
        joint = torch.where(present.any(1), context.criterion(output.logits, target), 0)
        return joint + super().loss(output, target, context) + self.rank_weight * rank


def ranking_loss(energy: Tensor, hardness: Tensor, present: Tensor) -> Tensor:
    """Compare each row with the next one, modality by modality: (B, M) x 3 -> (B,)."""
    gap = hardness - hardness.roll(-1, 0)
    both = present & present.roll(-1, 0)
    short = gap.sign() * (energy - energy.roll(-1, 0)) + gap.abs()
    return short.clamp(min=0).masked_fill(~both, 0).sum(1)


class History(nn.Module):
    """The cross-entropy of each training sample and modality, summed over training: (N, M)."""

    total: Tensor

    def __init__(self, samples: int, modalities: int) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(samples, modalities))

    def hardness(self, rows: Tensor) -> Tensor:
        """Return the rows' sums scaled to 0..1 over the data set; unknown rows count as 0."""
        if not len(self.total):
            return self.total.new_zeros(len(rows), self.total.shape[1])
        low, high = self.total.min(0).values, self.total.max(0).values
        scaled = (self.total[rows.clamp(min=0)] - low) / (high - low).clamp(min=1e-12)
        return scaled.masked_fill((rows < 0)[:, None], 0)

    def add(self, rows: Tensor, losses: Tensor, present: Tensor) -> None:
        """Add losses (B, M) to the rows they belong to, on every process."""
        known = rows >= 0
        own = (rows[known].cpu(), losses[known].masked_fill(~present[known], 0).float().cpu())
        shards = [own]
        if distributed.is_available() and distributed.is_initialized():
            shards = [own] * distributed.get_world_size()
            distributed.all_gather_object(shards, own)
        for index, values in shards:
            self.total.index_add_(0, index.to(self.total.device), values.to(self.total.device))
