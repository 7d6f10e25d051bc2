"""MixUp: blend the features and labels of two samples, in all modalities together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.fusion import FUSIONS
from fusionzoo.machine.distributed import World, gather, gathered
from fusionzoo.structures import Features, StepContext

from .base import BALANCE, Balance, LossTerm, StrategyInputs, at_least_float32, presence


class Pairs(NamedTuple):
    """The partners of a batch's rows."""

    position: Tensor  # (B,) int64, among the rows of all processes
    row: Tensor  # (B,) int64, of the training split
    share: Tensor  # (B,) of the row itself, 0.5 to 1


@BALANCE.register(family="data", paper="Zhang et al. 2018, ICLR, arXiv:1710.09412")
class MixUp(Balance):
    """Mix the features and the loss of each sample with those of a partner, in all modalities.

    x_m' = lambda x_m + (1 - lambda) y_m for every modality m, and L' = lambda L(class of x) +
    (1 - lambda) L(class of y), which for cross-entropy is the loss of the mixed label; lambda =
    max(b, 1 - b) with b ~ Beta(alpha, alpha), one per pair. Each row of the batch has one partner
    for all modalities: sorted by a random number of each sample and epoch, the next one, over the
    rows of all processes. So pairs depend neither on the order of rows nor on the number of
    processes. Of tokens, those at the same place are mixed; where only one text has a token there,
    it stays whole.
    With weights of rows each of the two losses counts by its own sample's.
    Differs from the paper: lambda is 0.5 or more; after the encoders, so texts and token sequences
    mix too (as Verma et al. 2019, arXiv:1806.05236); the partner's features carry no gradient, so
    that nothing is exchanged in the backward pass; the modalities' own heads learn from unmixed
    features.

    Missing: a modality that the row lacks stays missing; one that only the partner lacks stays
    unmixed, and the label's share is the mean share of the row's modalities.
    Pitfall: does not apply to objectives other than classification, to fusions that remember
    samples (`qmf`, `late_stacking`), or with strategies that read labels: each is one clear error.
    Use when: the training split is small, and the loss on validation data rises early.

    Settings:
        alpha: of the Beta distribution, above 0: 0.2 mixes few pairs evenly, 1 all shares alike

    Shapes: features[m] of (B, T, D), (B, T), (B, D) -> the same, T of the longest partner
    """

    raw_inputs = False
    mixes_rows = True

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        alpha: float = 0.4,
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        self.require(alpha > 0, f"alpha={alpha:g}; it must be above 0")
        is_class = inputs.targets.ndim == 1 and not inputs.targets.is_floating_point()
        self.require(
            is_class,
            "it mixes the losses of two classes: leave it out, or use --objective classification",
        )
        self.alpha, self.targets = alpha, inputs.targets
        entries = (FUSIONS[name] for name in FUSIONS)
        reads = {entry.cls: entry.reads for entry in entries}.get(type(self.fusion), "tokens")
        self.with_tokens = reads == "tokens"
        self.draws: tuple[int, Tensor, Tensor] | None = None  # epoch, then (N,) keys and shares
        self.pairs: Pairs | None = None  # of the batch in progress
        self.label_share = torch.zeros(0)  # (B,)

    def edit_features(self, context: StepContext) -> dict[str, Features]:
        self.require(
            context.memory is None,
            f"{type(self.fusion).__name__} remembers the losses of single samples, and mixed"
            " samples have none: leave it out, or choose another --fusion.name",
        )
        features = context.features
        widths = {name: x.mask.shape[1] for name, x in features.items()}
        by_rank = gather((context.rows.tolist(), widths), self.world)
        pairs = self.pair([rows for rows, _ in by_rank], context)
        length = {name: max(sizes[name] for _, sizes in by_rank) for name in widths}
        present, mixed = presence(features), {}
        partners_present = []
        for name, x in features.items():
            longest = length[name] if self.with_tokens else 0
            partner = partner_features(x, longest, pairs.position, self.world)
            partners_present.append(partner.mask.any(1))
            mixed[name] = mix(x, partner, pairs.share, self.with_tokens)
        both = present & torch.stack(partners_present, dim=1)
        number = present.sum(1).clamp(min=1)
        self.label_share = 1 - (1 - pairs.share) * both.sum(1) / number
        self.pairs = pairs
        return mixed

    def main_loss(self, context: StepContext, loss: LossTerm) -> LossTerm:
        pairs, self.pairs = self.pairs, None
        if pairs is None:
            return loss
        target = self.targets.to(context.rows.device)[pairs.row]
        if context.row_weight is not None and context.row_weight_of is not None:
            context = context._replace(row_weight=context.row_weight_of(target))
        values, others = loss.values, self.fusion.loss(context.output, target, context)
        share = self.label_share.to(values.dtype)
        if (weight := context.sample_weight) is not None:
            values, others = weight * values, gathered(weight, self.world)[pairs.position] * others
        return loss._replace(values=share * values + (1 - share) * others)

    def pair(self, rows_by_rank: list[list[int]], context: StepContext) -> Pairs:
        """Return the partners of this process's rows, and how much of each row remains."""
        flat = [row for rows in rows_by_rank for row in rows]
        self.require(
            all(0 <= row < len(self.targets) for row in flat),
            "the batch holds samples that are not of the training split",
        )
        keys, shares = self._draws_of(int(context.epoch))
        rows = torch.tensor(flat, dtype=torch.int64)
        order = keys[rows].argsort(stable=True)
        partner = torch.empty_like(order)
        partner[order] = order.roll(-1)
        first = sum(len(x) for x in rows_by_rank[: self.world.rank])
        shard = slice(first, first + len(rows_by_rank[self.world.rank]))
        device = context.rows.device
        vectors = next(iter(context.features.values())).pooled
        share = shares[rows[shard]].to(at_least_float32(vectors[:0]).dtype)
        return Pairs(partner[shard].to(device), rows[partner[shard]].to(device), share.to(device))

    def _draws_of(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Return a number to sort by and a share for each sample of the split, (N,) each."""
        if self.draws is None or self.draws[0] != epoch:
            size, generator = len(self.targets), self.draw(epoch)
            keys = torch.rand(size, generator=generator, dtype=torch.float64)
            blend = np.random.default_rng(generator.initial_seed()).beta(
                self.alpha, self.alpha, size
            )
            self.draws = epoch, keys, torch.from_numpy(np.maximum(blend, 1 - blend))
        return self.draws[1], self.draws[2]


def partner_features(x: Features, length: int, position: Tensor, world: World) -> Features:
    """Gather features from all processes, padded to `length` tokens, and take some rows.

    With `length` 0 the pooled vector is the only token.
    """
    present = x.mask.any(1)
    pooled = torch.where(present[:, None], x.pooled, 0).detach()
    mask, tokens = present[:, None], pooled[:, None]
    if length:
        tokens = torch.where(x.mask[..., None], x.tokens, 0).detach()
        tokens = F.pad(tokens, (0, 0, 0, length - tokens.shape[1]))
        mask = F.pad(x.mask, (0, length - x.mask.shape[1]))
    parts = [pooled, mask.to(pooled), tokens.flatten(1).to(pooled)]
    rows = gathered(torch.cat(parts, dim=1), world)[position]
    widths = [part.shape[1] for part in parts]
    pooled, real, flat = rows.split(widths, dim=1)
    return Features(flat.unflatten(1, (-1, x.tokens.shape[-1])), real > 0.5, pooled)


def mix(x: Features, partner: Features, share: Tensor, with_tokens: bool) -> Features:
    """Mix rows with their partners where both have the modality; `share` (B,) is of the row."""
    both = x.mask.any(1) & partner.mask.any(1)
    share = torch.where(both, share, 1).to(x.pooled.dtype)[:, None]
    partner_vector = torch.where(both[:, None], partner.pooled, 0)
    pooled = torch.where(both[:, None], share * x.pooled + (1 - share) * partner_vector, x.pooled)
    if not with_tokens:
        return x._replace(pooled=pooled)
    padding = partner.mask.shape[1] - x.mask.shape[1]
    own_mask = F.pad(x.mask, (0, padding))
    tokens = torch.where(own_mask[..., None], F.pad(x.tokens, (0, 0, 0, padding)), 0)
    partner_mask = partner.mask & both[:, None]
    weight, other = share * own_mask, (1 - share) * partner_mask
    weight = weight / (weight + other).clamp(min=torch.finfo(weight.dtype).tiny)
    weight = weight.to(tokens.dtype)[..., None]
    tokens = weight * tokens + torch.where(
        partner_mask[..., None], (1 - weight) * partner.tokens, 0
    )
    return Features(tokens, own_mask | partner_mask, pooled)
