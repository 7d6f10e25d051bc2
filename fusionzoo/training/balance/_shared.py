"""Parts of several strategies: contrastive losses, passes with subsets of the modalities."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.machine.distributed import World, total
from fusionzoo.structures import Features, FusionOutput, StepContext, evaluating, seed_of

from .base import Balance, LossTerm, pooled_of


def check_contrast(
    strategy: Balance,
    *,
    weight: float,
    dim: int,
    temperature: float | None = None,
    between_modalities: bool = True,
) -> None:
    """Refuse settings of a contrastive loss that are out of range, and a model of one modality
    where the loss is between modalities."""
    strategy.require(weight >= 0, f"weight={weight:g}; it must be at least 0")
    strategy.require(dim >= 1, f"dim={dim}; it must be at least 1")
    if temperature is not None:
        strategy.require(temperature > 0, f"temperature={temperature:g}; it must be positive")
    if between_modalities:
        several = len(strategy.widths) > 1
        strategy.require(several, "it aligns modalities, and the model has only one")


def sums_of_rows(values: Tensor, present: Tensor, context: StepContext) -> Tensor:
    """Return the sums of values (B, M) where they are present and of their rows, each row counted
    by its weight in the data: (2, M); of values (B,), (2,)."""
    values, weight = values.where(present, 0), context.sample_weight
    if weight is None:
        return torch.stack([values.sum(0), present.sum(0)])
    weight = weight.reshape(-1, *[1] * (values.ndim - 1)).to(values)
    return torch.stack([(weight * values).sum(0), (weight * present).sum(0)])


def mean_of_sums(sums: Tensor) -> Tensor:
    """Return the means of `sums_of_rows`, 0 where there are no rows: (2, M) -> (M,)."""
    rows = sums[1]
    return torch.where(rows > 0, sums[0] / torch.where(rows > 0, rows, 1), 0)


def nt_xent(left: Tensor, right: Tensor, temperature: float) -> Tensor:
    """Return SimCLR's loss of each pair of unit vectors: (n, D), (n, D) -> (n,).

    Each of the 2n vectors must find its partner among the 2n - 1 others; a pair's loss is the mean
    over its two vectors. With fewer than two pairs nothing is compared: the loss is 0.
    """
    if len(left) < 2:
        return 0.0 * (left.sum(1) + right.sum(1))
    with torch.autocast(left.device.type, enabled=False):
        vectors = torch.cat([left, right])
        logits = vectors @ vectors.T / temperature
        itself = torch.eye(len(vectors), dtype=torch.bool, device=left.device)
        partner = torch.arange(len(vectors), device=left.device).roll(len(left))
        losses = F.cross_entropy(logits.masked_fill(itself, -torch.inf), partner, reduction="none")
    return losses.unflatten(0, (2, -1)).mean(0)


def hidden_except(features: Mapping[str, Features], keep: Tensor) -> dict[str, Features]:
    """Return features in which each row has only the modalities of `keep`, bool (B, M)."""
    return {
        name: x._replace(mask=x.mask & is_kept[:, None])
        for (name, x), is_kept in zip(features.items(), keep.unbind(1), strict=True)
    }


def fuse_quietly(fusion: nn.Module, features: Mapping[str, Features]) -> FusionOutput:
    """Run the fusion in evaluation mode: no dropout, nothing random, no statistic moves."""
    with evaluating(fusion):
        output: FusionOutput = fusion(features)
    return output


def fuse_subset(fusion: nn.Module, features: Mapping[str, Features], keep: Tensor) -> FusionOutput:
    """Run the fusion quietly with only the modalities of `keep` present, bool (B, M)."""
    return fuse_quietly(fusion, hidden_except(features, keep))


class SubsetDraws:
    """Random subsets and orders, from tables over the samples of the training split.

    A table depends on seed, name, epoch and round alone, so no draw depends on batches, on their
    order or on the number of processes. Strategies with the same seed and name draw the same.
    """

    def __init__(self, size: int, num_modalities: int, seed: int, name: str = "subsets") -> None:
        self.size, self.num_modalities, self.seed, self.name = size, num_modalities, seed, name
        self.tables: dict[tuple[int, int], Tensor] = {}  # (epoch, round) -> (N, M) in [0, 1)

    def table(self, epoch: int, number: int) -> Tensor:
        """Return uniform numbers, (N, M)."""
        key = (epoch, number)
        if key not in self.tables:
            self.tables = {k: table for k, table in self.tables.items() if k[0] == epoch}
            generator = torch.Generator().manual_seed(seed_of(self.seed, self.name, *key))
            self.tables[key] = torch.rand(self.size, self.num_modalities, generator=generator)
        return self.tables[key]

    def proper(self, present: Tensor, rows: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Draw a proper, non-empty subset of each row's modalities, uniformly: (B, M) bool.

        Also returns which rows have one (B,); the others, with fewer than two modalities, keep
        what they have.
        """
        drawable = present.sum(1) > 1
        undecided, subset = drawable.clone(), present.clone()
        for number in count():
            if not undecided.any():
                return subset, drawable
            drawn = present & (self.table(epoch, number)[rows.cpu()] < 0.5).to(present.device)
            sizes = drawn.sum(1)
            decided = undecided & (sizes > 0) & (sizes < present.sum(1))
            subset[decided] = drawn[decided]
            undecided = undecided & ~decided
        raise AssertionError

    def places(self, present: Tensor, rows: Tensor, epoch: int) -> Tensor:
        """Draw an order of each row's modalities: its place from 0, absent ones last (B, M)."""
        uniform = self.table(epoch, 0)[rows.cpu()].to(present.device)
        return uniform.masked_fill(~present, 2.0).argsort(1).argsort(1)


class BatchSum:
    """A sum over the batches of one update, and at its end over the processes."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.update: tuple[int, str | None] | None = None  # step and turn that `values` belong to

    def add(self, values: Tensor, context: StepContext) -> None:
        """Add the values of one batch; those of an update that was never made are dropped."""
        update = (context.step, context.turn)
        if self.update != update:
            self.values, self.update = [], update
        self.values.append(values)

    def take(self, world: World) -> Tensor:
        """Return the sum, and start anew."""
        summed = total(torch.stack(self.values).sum(0), world)
        self.values, self.update = [], None
        return summed


class ModalityHeads(nn.Module):
    """One linear head per modality on its pooled features, z_m = head_m(x_m).

    The loss of a head is taken over the rows that have its modality. Unlike those of
    `UnimodalHeads`, which only monitor the modalities, its gradients reach the encoders.
    """

    def __init__(self, widths: Mapping[str, int], num_outputs: int) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(w, num_outputs) for name, w in widths.items()})

    def losses(
        self, context: StepContext, label: str, weights: Mapping[str, float | Tensor]
    ) -> dict[str, LossTerm]:
        """Return the loss of each modality in `weights`, named `label/modality`."""
        target, terms = context.batch.target, {}
        assert target is not None
        for name, weight in weights.items():
            x, present = pooled_of(context.features, name)
            values = context.criterion(self.heads[name](x), target)
            terms[f"{label}/{name}"] = LossTerm(values, present, weight)
        return terms
