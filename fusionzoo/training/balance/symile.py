"""Symile: contrast all modalities at once by their multilinear product."""

from __future__ import annotations

import math
from functools import reduce
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.errors import check_choice
from fusionzoo.machine.distributed import gathered, gathered_rows
from fusionzoo.structures import StepContext

from ._shared import check_contrast
from .base import BALANCE, Balance, LossTerm, StrategyInputs, at_least_float32, pooled_of, presence

MOST_LOGITS = 2_000_000  # of an anchor's row


@BALANCE.register(family="loss", paper="Saporta et al. 2024, NeurIPS, arXiv:2411.01053")
class Symile(Balance):
    """Align all modalities of a sample at once by the product of their embeddings.

    e_m = V_m x_m / |V_m x_m|; the score of a tuple is s sum_d prod_m e_md, s = exp(t). For each
    anchor modality the row's own tuple of the others must score above others; the loss is the mean
    of the anchors' cross-entropies. Negatives: "n", n - 1 tuples of rows that are shuffled for each
    modality; "all", every other tuple of the batch. Rows are those of all processes (but not of
    accumulated batches). Two modalities with "all" are CLIP. A product of M unit vectors of width d
    is at most d^(1 - M/2) if they are spread evenly, so t starts at, and is clipped to, CLIP's
    values plus (M/2 - 1) log d (ours).

    Missing: only rows with every modality take part; with fewer than 2 the loss is 0.
    Pitfall: shuffled tuples may hold false positives, and "n" duplicates; the product depends on
    the axes of the common space.
    Use when: there are three modalities or more, and one can be predicted only from the others
    together.

    Settings:
        weight: weight of the loss, at least 0; 0 switches it off
        dim: dimensions of the common space, at least 1
        negatives: "n" or "all"

    Shapes: features[name].pooled (B, D) -> embeddings (B, dim) -> a loss per row (n,)
    """

    encoders_only = True
    raw_inputs = False
    weighs_rows = False  # its losses are of pairs of samples
    off_at_zero = ("weight",)

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        weight: float = 1.0,
        dim: int = 128,
        negatives: Literal["n", "all"] = "n",
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        check_choice("negatives", negatives, ("n", "all"))
        check_contrast(self, weight=weight, dim=dim)
        self.weight, self.negatives = weight, negatives
        self.project = nn.ModuleDict({name: nn.Linear(w, dim) for name, w in self.widths.items()})
        lift = (len(self.widths) / 2 - 1) * math.log(dim)
        self.most = math.log(100) + lift
        # A vector of one entry, because FSDP cannot shard scalars.
        self.scale = nn.Parameter(torch.tensor([math.log(1 / 0.07) + lift]))

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        embeddings = {}
        for name, project in self.project.items():
            x, _ = pooled_of(context.features, name)
            embeddings[name] = F.normalize(at_least_float32(project(x)), dim=1)
        rows, present = gathered_rows(embeddings, presence(context.features), self.world)
        # In the order of samples, so that shuffles do not depend on the number of processes.
        order = gathered(context.rows, self.world).argsort(stable=True)
        order = order[present.all(1)[order]]
        vectors = torch.stack([x[order] for x in rows.values()])
        values = self.loss(vectors, self.draw(context.step))
        return {self.name: LossTerm.everywhere(values, self.weight)}

    def loss(self, vectors: Tensor, generator: torch.Generator) -> Tensor:
        """Return a loss per row of unit vectors: (M, n, dim) -> (n,)."""
        count = vectors.shape[1]
        if count < 2:
            return 0.0 * (vectors.sum() + self.scale)
        per_anchor = []
        with torch.autocast(vectors.device.type, enabled=False):
            for anchor in range(len(vectors)):
                others = [x for m, x in enumerate(vectors) if m != anchor]
                if self.negatives == "all":
                    logits, target = self._all_tuples(vectors[anchor], others)
                else:
                    logits, target = self._shuffled_tuples(vectors[anchor], others, generator)
                scaled = self.scale.exp() * logits
                per_anchor.append(F.cross_entropy(scaled, target, reduction="none"))
        return torch.stack(per_anchor).mean(0)

    def _all_tuples(self, anchor: Tensor, others: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the products with every tuple, and the place of each row's own."""
        count = len(anchor)
        self.require(
            count ** len(others) <= MOST_LOGITS,
            f"negatives=all makes {count ** len(others):,} tuples for each row, more than"
            f" {MOST_LOGITS:,}: take a smaller batch, or negatives=n",
        )
        tuples = reduce(lambda x, y: (x[:, None] * y[None]).flatten(0, 1), others)
        step = sum(count**power for power in range(len(others)))
        return anchor @ tuples.T, torch.arange(count, device=anchor.device) * step

    def _shuffled_tuples(
        self, anchor: Tensor, others: list[Tensor], generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the products with shuffled tuples, the row's own on the diagonal."""
        count = len(anchor)
        shuffled = [x[torch.randperm(count, generator=generator).to(x.device)] for x in others]
        negative = anchor @ torch.stack(shuffled).prod(0).T
        positive = (anchor * torch.stack(others).prod(0)).sum(1)
        diagonal = torch.eye(count, dtype=torch.bool, device=anchor.device)
        return torch.where(diagonal, positive[:, None], negative), diagonal.long().argmax(1)

    @torch.no_grad()
    def after_step(self) -> None:
        self.scale.clamp_(max=self.most)
