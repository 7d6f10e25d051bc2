"""DrFuse: shared and distinct parts of each modality, and an attention over them for each class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, check_choice
from fusionzoo.structures import Features, FusionOutput, StepContext

from ..base import FUSIONS, Draws, Fusion, masked_softmax, present_mean


@FUSIONS.register(family="hybrid", paper="Yao et al. 2024, arXiv:2403.06197", reads="pooled")
class DrFuse(Fusion):
    """Split each modality into a shared and a distinct part; each class attends to them.

    u_m = V_m x_m is the distinct part, s_m = G(V'_m x_m) the shared one, with one MLP G for all.
    The shared parts are pooled to s = logit(mean_m sigmoid(s_m)). Tokens [u_1; ...; u_M; s] give
    queries, values and a key for each class c: A_c = softmax(mean query . k_c / sqrt D), f_c = A_c
    V, logit_c = W_c f_c + b_c; embedding = mean_c f_c. Loss: task losses of the logits, of each u_m
    and of s by heads of their own + sum_m |cos(s_m, u_m)| + the Jensen-Shannon divergence of the
    shared parts + a ranking that draws each class's attention to the tokens with the smaller loss
    on it. Differs from the authors' code, for two modalities of which one is always present: here
    any are missing, only present ones enter a term, and the ranking is a mean over pairs; V_m and
    V'_m are the ends of encoders of their own in it, and its G has no dropout.

    Missing: left out of the pool, the mean query and the loss; its attention is 0. In training,
    a share `aug_missing` of the rows loses some modalities. Each row has a loss of its own; the
    authors' code averages the terms of what may be missing over a batch's complete rows, and ranks
    on those alone (4.01 against 3.47 on the same incomplete rows).
    Pitfall: without such rows attention extrapolates badly to what is missing (measured: 0.46
    instead of 0.82). The ranking needs classes or labels of 0 and 1; other targets have none.
    Where no part alone says anything, the ranking keeps all at chance: set `rank` to 0.
    Use when: several labels per sample, of which different ones show in different modalities.

    Settings:
        aug_missing: share of the training rows that lose a random part of their modalities, 0 to 1
            (authors: 0)
        per_class: "key" for a key per class (paper), or "query" for one key and a learned query per
            class, with C dim instead of C dim^2 parameters: for many classes
        dropout: dropout rate in G, 0 to below 1 (paper: 0.3)
        disentangle: weight of the cosine and the divergence, at least 0
        rank: weight of the ranking, at least 0

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)}, weights (B, M):
            attention to u_m, mean over classes, normalised to sum 1; extra attention (B, K, M + 1)
    """

    symmetric = True
    last_layers = ("head", "heads")
    joins_linear = True

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        aug_missing: float = 0.3,
        per_class: Literal["key", "query"] = "key",
        dropout: float = 0.3,
        disentangle: float = 1.0,
        rank: float = 1.0,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        check_choice("per_class", per_class, ("key", "query"))
        if not 0 <= aug_missing <= 1 or disentangle < 0 or rank < 0:
            raise FusionZooError(
                f"aug_missing={aug_missing}, disentangle={disentangle}, rank={rank}; the first is a"
                " share, the others are at least 0"
            )
        self.aug_missing, self.disentangle, self.rank = aug_missing, disentangle, rank
        self.project, self.project_shared = self.align(), self.align()
        self.shared = nn.Sequential(
            *(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Dropout(dropout)),
            *(nn.Linear(2 * dim, dim), nn.ReLU(), nn.Dropout(dropout)),
            nn.Linear(dim, dim),
        )
        keys = num_outputs if per_class == "key" else 1
        self.attention = nn.Linear(dim, (2 + keys) * dim)
        self.class_query = (
            nn.Parameter(torch.randn(num_outputs, dim) * 0.02) if per_class == "query" else None
        )
        self.heads = nn.ModuleDict({name: nn.Linear(dim, num_outputs) for name in dims})
        self.shared_head = nn.Linear(dim, num_outputs)
        self.head = nn.Linear(dim, num_outputs)
        self.draws = Draws()

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        distinct, present = self.aligned(features)
        maps, vectors = self.project_shared, self.pooled(features)
        aligned = torch.stack([maps[name](x) for name, x in vectors.items()], dim=1)
        if self.training:
            present = random_part(present, self.aug_missing, self.draws)
            distinct = distinct.masked_fill(~present[..., None], 0)
        shared = self.shared(aligned).masked_fill(~present[..., None], 0)
        pooled = pooled_logit(shared, present)
        tokens = torch.cat([distinct, pooled[:, None]], dim=1)
        has_any = present.any(1, keepdim=True)
        weights, by_class = self._attend(tokens, torch.cat([present, has_any], dim=1))
        by_class = torch.where(has_any[..., None], by_class, self.null.to(by_class.dtype))
        logits = (by_class * self.head.weight).sum(-1) + self.head.bias
        pairs = zip(self.heads.values(), distinct.unbind(1), strict=True)
        votes = torch.stack([head(u) for head, u in pairs], dim=1)
        votes = votes.masked_fill(~present[..., None], 0)
        linear = self.linear_logits(features)
        if linear is not None:
            linear = linear.masked_fill(~present[..., None], 0)
            logits, votes = logits + linear.sum(1), votes + linear
        extra = {"present": present, "shared": shared, "distinct": distinct}
        extra |= {"attention": weights, "shared_logits": self.shared_head(pooled)}
        attention = weights.mean(1)[:, :-1]
        floor = torch.finfo(attention.dtype).tiny
        attention = attention / attention.sum(1, keepdim=True).clamp(min=floor)
        unimodal = dict(zip(self.dims, votes.unbind(1), strict=True))
        embedding = self.or_null(by_class.mean(1), present)
        return FusionOutput(embedding, logits, unimodal, attention, extra)

    def _attend(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention (B, K, M + 1) and the result (B, K, D) of each class."""
        query, value, *keys = self.attention(tokens).chunk(self._chunks, dim=-1)
        mean = present_mean(query, mask)[:, None]
        if self.class_query is not None:
            mean = mean + self.class_query
        stacked = torch.stack(keys, dim=1)  # (B, K or 1, M + 1, D)
        scores = (mean[:, :, None] * stacked).sum(-1) / math.sqrt(self.dim)
        weights = masked_softmax(scores, mask[:, None].expand_as(scores), dim=-1)
        return weights, weights @ value

    @property
    def _chunks(self) -> int:
        return self.attention.out_features // self.dim

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        extra, criterion = output.extra, context.criterion
        present, shared = extra["present"], extra["shared"].float()
        losses = [criterion(logits, target) for logits in output.unimodal.values()]
        similarity = F.cosine_similarity(shared, extra["distinct"].float(), dim=-1).abs()
        terms = torch.stack(losses, dim=1) + self.disentangle * similarity
        parts = terms.masked_fill(~present, 0).sum(1) + criterion(extra["shared_logits"], target)
        parts = parts + self.disentangle * divergence(shared, present)
        votes = torch.stack([*output.unimodal.values(), extra["shared_logits"]], dim=1)
        order = ranking(extra["attention"].float(), votes.detach().float(), target, present)
        order = context.weighted(order)
        total = criterion(output.logits, target)
        return total + (parts + self.rank * order).masked_fill(~present.any(1), 0)


def pooled_logit(x: Tensor, present: Tensor) -> Tensor:
    """Return logit(mean of sigmoid(x_m) over present m): (B, M, D), (B, M) -> (B, D).

    Computed from logarithms, so that it stays finite; 0 for a row without any modality.
    """
    has_any = present.any(1, keepdim=True)
    absent = ~(present | ~has_any)[..., None]
    pieces = [
        F.logsigmoid(sign * x).masked_fill(absent, -torch.inf).logsumexp(1) for sign in (1, -1)
    ]
    return (pieces[0] - pieces[1]).masked_fill(~has_any, 0)


def divergence(shared: Tensor, present: Tensor) -> Tensor:
    """Return mean_m sum_d p_m log(p_m / mean p), p = sigmoid: (B, M, D), (B, M) -> (B,)."""
    logs = F.logsigmoid(shared)
    count = present.sum(1).clamp(min=1)[:, None]
    has_any = present.any(1, keepdim=True)
    absent = ~(present | ~has_any)[..., None]
    mean = logs.masked_fill(absent, -torch.inf).logsumexp(1) - count.to(logs.dtype).log()
    excess = (logs.exp() * (logs - mean[:, None])).sum(-1)
    return present_mean(excess, present)


def ranking(attention: Tensor, votes: Tensor, target: Tensor, present: Tensor) -> Tensor:
    """Return how far attention prefers the token with the larger loss on a class, a mean: (B,).

    attention (B, K, M + 1) and votes (B, M + 1, K) of the modalities and, last, the shared part;
    present (B, M). Targets are classes (B,) or labels (B, K) of 0 and 1, of which missing ones
    (NaN) are left out; rows with other targets, such as numbers, have no ranking.
    """
    if target.ndim == 1:
        labels = F.one_hot(target.long(), votes.shape[-1]).to(votes.dtype)
    elif target.shape == votes[:, 0].shape:
        labels = target.to(votes.dtype)
    else:
        return attention.new_zeros(len(attention))
    known = ~labels.isnan()
    binary = ((labels == 0) | (labels == 1) | ~known).all(1, keepdim=True)
    labels = labels.nan_to_num().clamp(0, 1)[:, None].expand_as(votes)
    losses = F.binary_cross_entropy_with_logits(votes, labels, reduction="none")
    mask = torch.cat([present, present.any(1, keepdim=True)], dim=1)
    total, pairs = (
        attention.new_zeros(len(attention)),
        torch.zeros_like(mask[:, 0], dtype=torch.long),
    )
    for i, j in combinations(range(mask.shape[1]), 2):
        sign = torch.where(losses[:, i] < losses[:, j], 1.0, -1.0)
        hinge = (-sign * (attention[..., i] - attention[..., j])).clamp(min=0)
        mean = hinge.masked_fill(~known, 0).sum(1) / known.sum(1).clamp(min=1)
        both = mask[:, i] & mask[:, j] & binary[:, 0]
        total, pairs = total + mean.masked_fill(~both, 0), pairs + both
    return total / pairs.clamp(min=1)


def random_part(present: Tensor, share: float, draws: Draws) -> Tensor:
    """Take a random part of the modalities of a share of the rows, at least one: (B, M) -> (B, M).

    The number that is kept, 1 to P - 1 of P present modalities, is drawn first.
    """
    rows, modalities = present.shape
    numbers = draws.uniform(rows, modalities + 2).to(present.device)
    count = present.sum(1)
    size = (1 + (numbers[:, 1] * (count - 1)).floor()).clamp(min=1)
    size = torch.where((numbers[:, 0] < share) & (count > 1), size, count)
    rank = numbers[:, 2:].masked_fill(~present, 2).argsort(dim=1).argsort(dim=1)
    return (rank < size[:, None]) & present
