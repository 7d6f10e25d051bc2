"""Stacking: a classifier over the modalities' out-of-fold probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from einops import einsum, rearrange
from torch import Tensor, nn

from ...errors import FusionZooError
from ...structures import Features, FusionOutput, Moment, Phase
from ..base import FUSIONS, Fusion, present_mean


@FUSIONS.register(
    family="late", paper="Wolpert 1992, Neural Networks 5(2)", reads="pooled", synergy=False
)
class LateStacking(Fusion):
    """Train K classifiers per modality on K folds; learn how to join what they say out of fold.

    Training sample i belongs to fold i mod K. Phase "base": the K versions of each modality's
    classifier (projection and head) learn, version f from all folds but f. Phase "stack": they and
    the encoders rest, and logits = W [softmax(z_1); ...; softmax(z_M); p] + c learns from version
    f(i) of sample i, which never saw it; W starts as the sum of the probabilities. Afterwards the
    versions' mean probability takes its place; no classifier is refitted, which would shift what W
    was trained on.

    Missing: probabilities 0, and its presence bit 0.
    Pitfall: an encoder trained end to end has seen every sample; out-of-fold holds for all that is
    learnt here, so freeze the encoders if the estimate must be clean.
    Use when: modalities differ in quality by class, and there is data to learn that from.

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)} log-probabilities
    """

    classes_only = True

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        folds: int = 5,
        base_share: float = 0.7,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        if folds < 2 or not 0 < base_share < 1:
            raise FusionZooError(
                f"folds={folds}, base_share={base_share}; at least 2 folds, a share within 0 to 1"
            )
        self.folds = folds
        self.phases = (
            Phase("base", base_share, trains=("project", "heads", "head_bias", "null")),
            Phase("stack", 1 - base_share, trains=("joiner",), encoders=False),
        )
        self.project = nn.ModuleDict({m: nn.Linear(w, folds * dim) for m, w in dims.items()})
        self.heads = nn.ParameterDict(
            {m: torch.randn(folds, dim, num_outputs) * dim**-0.5 for m in dims}
        )
        self.head_bias = nn.ParameterDict({m: torch.zeros(folds, num_outputs) for m in dims})
        self.joiner = nn.Linear(len(dims) * (num_outputs + 1), num_outputs)
        with torch.no_grad():  # the sum of the probabilities, until it knows better
            same = torch.eye(num_outputs).repeat(1, len(dims))
            self.joiner.weight.copy_(torch.cat([same, torch.zeros(num_outputs, len(dims))], dim=1))
            self.joiner.bias.zero_()

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present, pooled = self.present(features), self.pooled(features)
        aligned = {
            m: rearrange(self.project[m](x), "b (f d) -> b f d", f=self.folds)
            for m, x in pooled.items()
        }
        votes = torch.stack(
            [
                einsum(a, self.heads[m], "b f d, f d k -> b f k") + self.head_bias[m]
                for m, a in aligned.items()
            ],
            dim=1,
        )  # (B, M, F, K)
        means = torch.stack([a.mean(1) for a in aligned.values()], dim=1)
        shares = votes.softmax(-1).mean(2)
        own = votes.log_softmax(-1).logsumexp(2) - math.log(self.folds)  # log of `shares`
        own = own.masked_fill(~present[..., None], 0)
        return FusionOutput(
            self.or_null(present_mean(means, present), present),
            self.stack(shares, present),
            dict(zip(self.dims, own.unbind(1), strict=True)),
            None,
            {"present": present, "votes": votes},
        )

    def stack(self, shares: Tensor, present: Tensor) -> Tensor:
        """Join the modalities' probabilities: (B, M, K), (B, M) -> (B, K)."""
        given = shares.masked_fill(~present[..., None], 0)
        bits = present.to(given.dtype)
        return self.joiner(torch.cat([rearrange(given, "b m k -> b (m k)"), bits], dim=-1))

    def loss(self, output: FusionOutput, target: Tensor, moment: Moment) -> Tensor:
        present, votes = output.extra["present"], output.extra["votes"]
        fold = moment.rows % self.folds
        if moment.phase == 0:
            return self._base_loss(votes, present, target, fold, moment)
        index = fold[:, None, None, None].expand(-1, len(self.dims), 1, self.num_outputs)
        unseen = rearrange(votes.detach().gather(2, index), "b m 1 k -> b m k")
        return moment.criterion(self.stack(unseen.softmax(-1), present), target)

    def _base_loss(
        self, votes: Tensor, present: Tensor, target: Tensor, fold: Tensor, moment: Moment
    ) -> Tensor:
        """Train each version on the samples of the other folds."""
        rows = rearrange(votes, "b m f k -> (b m f) k")
        repeated = target[:, None, None].expand(votes.shape[:3]).flatten()
        each = rearrange(
            moment.criterion(rows, repeated), "(b m f) -> b m f", m=len(self.dims), f=self.folds
        )
        versions = torch.arange(self.folds, device=fold.device)
        learns = present[:, :, None] & (versions != fold[:, None])[:, None]
        return each.masked_fill(~learns, 0).sum((1, 2)) / (self.folds - 1)
