"""Stacking: a classifier over the modalities' out-of-fold probabilities."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence

import torch
from einops import einsum, rearrange
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features, FusionOutput, Phase, StepContext

from ..base import FUSIONS, Fusion, present_mean


@FUSIONS.register(
    family="late", paper="Wolpert 1992, Neural Networks 5(2)", reads="pooled", synergy=False
)
class LateStacking(Fusion):
    """Train K classifiers per modality on K folds; learn how to join what they say out of fold.

    Training samples are dealt to folds by the run's seed, each class evenly, samples of one group
    to one fold. Phase "base": the K versions of each modality's
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

    def prepare(self, targets: Tensor, groups: Sequence[str] = (), seed: int = 0) -> nn.Module:
        return Folds(deal(targets, groups, self.folds, seed))

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        assert isinstance(context.memory, Folds)
        present, votes = output.extra["present"], output.extra["votes"]
        fold = context.memory.of(context.rows)
        if context.phase == 0:
            return self._base_loss(votes, present, target, fold, context)
        index = fold[:, None, None, None].expand(-1, len(self.dims), 1, self.num_outputs)
        unseen = rearrange(votes.detach().gather(2, index), "b m 1 k -> b m k")
        return context.criterion(self.stack(unseen.softmax(-1), present), target)

    def _base_loss(
        self, votes: Tensor, present: Tensor, target: Tensor, fold: Tensor, context: StepContext
    ) -> Tensor:
        """Train each version on the samples of the other folds."""
        rows = rearrange(votes, "b m f k -> (b m f) k")
        repeated = target[:, None, None].expand(votes.shape[:3]).flatten()
        each = rearrange(
            context.criterion(rows, repeated), "(b m f) -> b m f", m=len(self.dims), f=self.folds
        )
        versions = torch.arange(self.folds, device=fold.device)
        learns = present[:, :, None] & (versions != fold[:, None])[:, None]
        return each.masked_fill(~learns, 0).sum((1, 2)) / (self.folds - 1)


class Folds(nn.Module):
    """The fold of each training sample: (N,)."""

    fold: Tensor

    def __init__(self, fold: Tensor) -> None:
        super().__init__()
        self.register_buffer("fold", fold)

    def of(self, rows: Tensor) -> Tensor:
        """Return the folds of rows (B,); a row that is not of the training split has the first."""
        if not len(self.fold):
            return torch.zeros_like(rows)
        return self.fold[rows.clamp(min=0)]


def deal(targets: Tensor, groups: Sequence[str], count: int, seed: int) -> Tensor:
    """Return a fold for each sample: groups stay whole, classes are spread evenly; (N,) int64."""
    folds = torch.zeros(len(targets), dtype=torch.int64)
    if not len(targets):
        return folds
    names = list(groups) or [str(row) for row in range(len(targets))]
    if len({*names}) < count:
        raise FusionZooError(
            f"late_stacking: folds={count}, and the training split has {len({*names})} independent"
            " groups of samples; it needs one for each fold"
        )
    if len({*names}) == len(names):
        return _deal_samples(targets, count, seed)
    from sklearn.model_selection import StratifiedGroupKFold

    dealer = StratifiedGroupKFold(count, shuffle=True, random_state=seed)
    with warnings.catch_warnings():  # of classes with fewer samples than folds, which is fine here
        warnings.simplefilter("ignore", UserWarning)
        for fold, (_, rows) in enumerate(dealer.split(names, targets.cpu(), names)):
            folds[torch.from_numpy(rows)] = fold
    return folds


def _deal_samples(targets: Tensor, count: int, seed: int) -> Tensor:
    """Deal shuffled samples out class by class, like cards; scikit-learn takes 0.1 ms a group."""
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    by_class = order[targets.cpu()[order].argsort(stable=True)]
    folds = torch.empty(len(targets), dtype=torch.int64)
    folds[by_class] = torch.arange(len(targets)) % count
    return folds
