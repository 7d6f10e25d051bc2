"""Stacking: a classifier trained on the modalities' out-of-fold probabilities."""

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
    """Combine the modalities' class probabilities by a classifier trained on out-of-fold ones.

    Training samples are assigned to folds by the run's seed, stratified by class, with the samples
    of a group in the same fold. Phase "base" trains one version of each modality's classifier
    (projection and head) per fold: version f learns from all folds except f. Phase "stack" freezes
    these and the encoders and trains logits = W [softmax(z_1); ...; softmax(z_M); p] + c, where
    sample i uses the version that was not trained on it; W is initialised to sum the
    probabilities, and p are presence bits. In evaluation the probabilities are averaged over the
    versions; refitting a classifier on all folds would shift the inputs that W was trained on.

    Missing: its probabilities and its presence bit are 0.
    Pitfall: an encoder trained end to end has seen every sample; only the parameters of this
    module are out of fold, so freeze the encoders if the estimate must be clean.
    Use when: modalities differ in quality by class and there is enough data to learn that.

    Settings:
        folds: number of folds and of versions per classifier, at least 2
        base_share: share of the training steps spent in phase "base", between 0 and 1 (exclusive)

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)} log-probabilities
    """

    classes_only = True
    last_layers = ("heads", "head_bias")
    joins_linear = True

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
        with torch.no_grad():  # initially the sum of the probabilities
            summing = torch.eye(num_outputs).repeat(1, len(dims))
            bit_weights = torch.zeros(num_outputs, len(dims))
            self.joiner.weight.copy_(torch.cat([summing, bit_weights], dim=1))
            self.joiner.bias.zero_()

    @property
    def linear_outputs(self) -> int:
        """One linear layer per version, so that each is out of fold too."""
        return self.folds * self.num_outputs

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present, pooled = self.present(features), self.pooled(features)
        aligned = {
            m: rearrange(self.project[m](x), "b (f d) -> b f d", f=self.folds)
            for m, x in pooled.items()
        }
        fold_logits = torch.stack(
            [
                einsum(a, self.heads[m], "b f d, f d k -> b f k") + self.head_bias[m]
                for m, a in aligned.items()
            ],
            dim=1,
        )  # (B, M, F, K)
        linear = self.linear_logits(features)
        if linear is not None:
            fold_logits = fold_logits + linear.unflatten(-1, (self.folds, self.num_outputs))
        means = torch.stack([a.mean(1) for a in aligned.values()], dim=1)
        probabilities = fold_logits.softmax(-1).mean(2)
        log_probabilities = fold_logits.log_softmax(-1).logsumexp(2) - math.log(self.folds)
        log_probabilities = log_probabilities.masked_fill(~present[..., None], 0)
        return FusionOutput(
            self.or_null(present_mean(means, present), present),
            self.stack(probabilities, present),
            dict(zip(self.dims, log_probabilities.unbind(1), strict=True)),
            None,
            {"present": present, "fold_logits": fold_logits},
        )

    def stack(self, probabilities: Tensor, present: Tensor) -> Tensor:
        """Combine the modalities' probabilities into logits: (B, M, K), (B, M) -> (B, K)."""
        masked = probabilities.masked_fill(~present[..., None], 0)
        bits = present.to(masked.dtype)
        return self.joiner(torch.cat([rearrange(masked, "b m k -> b (m k)"), bits], dim=-1))

    def prepare(self, targets: Tensor, groups: Sequence[str] = (), seed: int = 0) -> nn.Module:
        return Folds(assign_folds(targets, groups, self.folds, seed))

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        assert isinstance(context.memory, Folds)
        present, fold_logits = output.extra["present"], output.extra["fold_logits"]
        fold = context.memory.of(context.rows)
        if context.phase == 0:
            return self._base_loss(fold_logits, present, target, fold, context)
        index = fold[:, None, None, None].expand(-1, len(self.dims), 1, self.num_outputs)
        out_of_fold = rearrange(fold_logits.detach().gather(2, index), "b m 1 k -> b m k")
        return context.criterion(self.stack(out_of_fold.softmax(-1), present), target)

    def _base_loss(
        self,
        fold_logits: Tensor,
        present: Tensor,
        target: Tensor,
        fold: Tensor,
        context: StepContext,
    ) -> Tensor:
        """Return the loss of each version on the samples of all other folds, summed: (B,)."""
        rows = rearrange(fold_logits, "b m f k -> (b m f) k")
        row_targets = target[:, None, None].expand(fold_logits.shape[:3]).flatten()
        losses = rearrange(
            context.criterion(rows, row_targets), "(b m f) -> b m f", m=len(self.dims), f=self.folds
        )
        versions = torch.arange(self.folds, device=fold.device)
        in_training = present[:, :, None] & (versions != fold[:, None])[:, None]
        return losses.masked_fill(~in_training, 0).sum((1, 2)) / (self.folds - 1)


class Folds(nn.Module):
    """The fold of each training sample: (N,)."""

    fold: Tensor

    def __init__(self, fold: Tensor) -> None:
        super().__init__()
        self.register_buffer("fold", fold)

    def of(self, rows: Tensor) -> Tensor:
        """Return the folds of rows (B,); fold 0 for rows outside the training split."""
        if not len(self.fold):
            return torch.zeros_like(rows)
        return self.fold[rows.clamp(min=0)]


def assign_folds(targets: Tensor, groups: Sequence[str], count: int, seed: int) -> Tensor:
    """Assign each sample to a fold, stratified by class, without splitting groups: (N,) int64."""
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
        return _stratified_folds(targets, count, seed)
    from sklearn.model_selection import StratifiedGroupKFold

    splitter = StratifiedGroupKFold(count, shuffle=True, random_state=seed)
    with warnings.catch_warnings():  # about classes with fewer samples than folds: harmless here
        warnings.simplefilter("ignore", UserWarning)
        for fold, (_, rows) in enumerate(splitter.split(names, targets.cpu(), names)):
            folds[torch.from_numpy(rows)] = fold
    return folds


def _stratified_folds(targets: Tensor, count: int, seed: int) -> Tensor:
    """Assign shuffled samples round-robin, class by class; scikit-learn needs 0.1 ms per group."""
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    by_class = order[targets.cpu()[order].argsort(stable=True)]
    folds = torch.empty(len(targets), dtype=torch.int64)
    folds[by_class] = torch.arange(len(targets)) % count
    return folds
