"""Contrastive alignment of modalities in a common space: CLIP, SigLIP or ImageBind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.errors import check_choice, check_modality
from fusionzoo.machine.distributed import gathered_rows
from fusionzoo.structures import Features, StepContext

from ._shared import check_contrast
from .base import BALANCE, Balance, LossTerm, StrategyInputs, at_least_float32, pooled_of, presence

MAX_LOG_SCALE = math.log(100)  # as in CLIP


@BALANCE.register(
    family="loss",
    paper="Radford et al. 2021, arXiv:2103.00020; Girdhar et al. 2023, arXiv:2305.05665;"
    " Zhai et al. 2023, arXiv:2303.15343",
)
class ContrastiveAlign(Balance):
    """Align the modalities of a sample in a common space, away from those of other samples.

    e_m = V_m x_m / |V_m x_m|; S = s e_m e_n' over the n rows that have both modalities; s = exp(t)
    with t clipped to log 100 after each step. CLIP: mean of the cross-entropies of S and S' with
    the diagonal as target, t = log(1 / 0.07) initially. SigLIP: -(1/n) sum_ij log sigmoid(y_ij
    (S_ij + b)), y = 1 on the diagonal, else -1; t = log 10, b = -10 initially. The rows are those
    of all processes (but not of accumulated batches); gradients equal those of one process with
    all rows.

    Missing: a pair uses the rows that have both modalities; its loss is 0 with fewer than 2
    (SigLIP: 1).
    Pitfall: negatives come from the batch: small batches teach little, and repeated samples are
    false negatives.
    Use when: pairs are plentiful and labels few, or for retrieval across modalities.

    Settings:
        mode: "clip", "siglip", or "imagebind", which is "clip" for the pairs with an anchor
        anchor: modality that is in every pair; None for all pairs, for "imagebind" the image, or
            the first modality if there is no image
        weight: weight of the loss of each pair, at least 0; 0 switches it off
        dim: dimensions of the common space, at least 1
        prefixes: lengths of prefixes of e_m that are aligned as well (Kusupati et al. 2022), each
            from 1 to `dim`, so that vectors may be cut

    Shapes: features[name].pooled (B, D) -> embeddings (B, dim), a loss per row and pair (n,)
    """

    encoders_only = True
    raw_inputs = False
    weighs_rows = False  # its losses are of pairs of samples
    off_at_zero = ("weight",)

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        mode: Literal["clip", "siglip", "imagebind"] = "clip",
        anchor: str | None = None,
        weight: float = 1.0,
        dim: int = 128,
        prefixes: Sequence[int] = (),
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        check_choice("mode", mode, ("clip", "siglip", "imagebind"))
        check_contrast(self, weight=weight, dim=dim)
        for size in prefixes:
            self.require(1 <= size <= dim, f"prefixes: {size}, and dim={dim}")
        self.weight, self.mode, self.prefixes = weight, mode, sorted({*prefixes})
        if mode == "imagebind" and anchor is None and "image" in self.widths:
            anchor = "image"
        self.pairs = list(combinations(self.widths, 2))
        if anchor is not None or mode == "imagebind":
            anchor = check_modality("anchor", anchor, self.widths)
            self.pairs = [(anchor, name) for name in self.widths if name != anchor]
        self.project = nn.ModuleDict({name: nn.Linear(w, dim) for name, w in self.widths.items()})
        siglip = mode == "siglip"
        # Vectors of one entry, because FSDP cannot shard scalars.
        self.scale = nn.Parameter(torch.tensor([math.log(10 if siglip else 1 / 0.07)]))
        self.bias = nn.Parameter(torch.tensor([-10.0])) if siglip else None

    def embed(self, features: Mapping[str, Features]) -> dict[str, Tensor]:
        """Return each modality's unit vectors in the common space, zeros where it is absent."""
        embeddings = {}
        for name, project in self.project.items():
            x, present = pooled_of(features, name)
            embeddings[name] = F.normalize(at_least_float32(project(x)), dim=1).where(
                present[:, None], 0
            )
        return embeddings

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        embeddings = self.embed(context.features)
        rows, present = gathered_rows(embeddings, presence(context.features), self.world)
        column = dict(zip(embeddings, present.unbind(1), strict=True))
        terms: dict[str, LossTerm] = {}
        for a, b in self.pairs:
            both_present = column[a] & column[b]
            left, right = rows[a][both_present], rows[b][both_present]
            losses = {f"{self.name}/{a}-{b}": self.loss(left, right)}
            for size in self.prefixes:
                short = (F.normalize(x[:, :size], dim=1) for x in (left, right))
                losses[f"{self.name}/{a}-{b}/{size}"] = self.loss(*short)
            terms |= {name: LossTerm.everywhere(x, self.weight) for name, x in losses.items()}
        return terms

    @torch.no_grad()
    def after_step(self) -> None:
        # Not in `loss`: a clamp has no gradient above the limit, so the scale could not decrease.
        self.scale.clamp_(max=MAX_LOG_SCALE)

    def loss(self, left: Tensor, right: Tensor) -> Tensor:
        """Return a loss per pair of matching unit vectors: (n, dim), (n, dim) -> (n,)."""
        if len(left) < (1 if self.mode == "siglip" else 2):
            return 0.0 * (left.sum() + right.sum() + self.scale)
        with torch.autocast(left.device.type, enabled=False):
            logits = self.scale.exp() * left @ right.T
            if self.bias is not None:
                signs = 2 * torch.eye(len(left)).to(logits) - 1
                return -F.logsigmoid(signs * (logits + self.bias)).sum(1)
            diagonal = torch.arange(len(left), device=left.device)
            losses = (F.cross_entropy(x, diagonal, reduction="none") for x in (logits, logits.T))
            return sum(losses, torch.zeros_like(diagonal, dtype=logits.dtype)) / 2
