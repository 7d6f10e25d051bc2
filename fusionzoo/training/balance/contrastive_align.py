"""Contrastive alignment: what belongs together lies together, by CLIP, SigLIP or ImageBind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.fusion.base import check_choice, check_modality
from fusionzoo.structures import Features, StepContext

from ._gather import gathered_rows
from .base import BALANCE, Balance, LossTerm, StrategyInputs, at_least_float32, pooled_of, presence

LARGEST = math.log(100)  # of the logit scale, as in CLIP


@BALANCE.register(
    family="loss",
    paper="Radford et al. 2021, arXiv:2103.00020; Girdhar et al. 2023, arXiv:2305.05665;"
    " Zhai et al. 2023, arXiv:2303.15343",
)
class ContrastiveAlign(Balance):
    """Draw a sample's modalities together in a common space, and those of others apart.

    e_m = V_m x_m / |V_m x_m|, S = s e_m e_n' over the n rows that have both, s = exp(t), t cut
    to log 100 after each step.
    `clip`: mean of the cross-entropies of S and S' with the diagonal as the answer, t = log(1 /
    0.07) at first. `siglip`: -(1/n) sum_ij log sigmoid(y_ij (S_ij + b)), y = 1 on the diagonal,
    else -1; t = log 10, b = -10. All pairs of modalities, or those with `anchor`; `imagebind` is
    `clip` with an anchor, by default the image. Rows are those of all processes (not of
    accumulated batches); gradients are those of one process with all rows.

    Missing: a pair's rows are those that have both; fewer than 2 (`siglip`: 1) give 0.
    Pitfall: negatives are the batch: small batches teach little, repeated samples are false ones.
    Use when: pairs are plenty and labels few, or retrieval across modalities is wanted.

    Shapes: features[name].pooled (B, D) -> embeddings (B, dim), a loss per row and pair (n,)
    """

    aligns = True

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        mode: Literal["clip", "siglip", "imagebind"] = "clip",
        anchor: str | None = None,
        weight: float = 1.0,
        dim: int = 128,
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        check_choice("mode", mode, ("clip", "siglip", "imagebind"))
        self.require(dim >= 1, f"dim={dim}; it must be at least 1")
        self.require(len(self.widths) > 1, "it aligns modalities, and the model has only one")
        self.weight, self.mode = weight, mode
        if mode == "imagebind" and anchor is None and "image" in self.widths:
            anchor = "image"
        self.pairs = list(combinations(self.widths, 2))
        if anchor is not None or mode == "imagebind":
            anchor = check_modality("anchor", anchor, self.widths)
            self.pairs = [(anchor, name) for name in self.widths if name != anchor]
        self.project = nn.ModuleDict({name: nn.Linear(w, dim) for name, w in self.widths.items()})
        sigmoid = mode == "siglip"
        # One number each, in a vector: FSDP cannot share out a scalar.
        self.scale = nn.Parameter(torch.tensor([math.log(10 if sigmoid else 1 / 0.07)]))
        self.bias = nn.Parameter(torch.tensor([-10.0])) if sigmoid else None

    def active(self, context: StepContext) -> bool:
        return bool(self.weight) and super().active(context)

    def embed(self, features: Mapping[str, Features]) -> dict[str, Tensor]:
        """Return each modality's unit vectors in the common space, zeros where it is absent."""
        found = {}
        for name, project in self.project.items():
            x, present = pooled_of(features, name)
            found[name] = F.normalize(at_least_float32(project(x)), dim=1).where(
                present[:, None], 0
            )
        return found

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        own = self.embed(context.features)
        rows, present = gathered_rows(own, presence(context.features), self.world)
        have = dict(zip(own, present.unbind(1), strict=True))
        found = {}
        for a, b in self.pairs:
            both = have[a] & have[b]
            values = self.loss(rows[a][both], rows[b][both])
            mask = torch.ones_like(values, dtype=torch.bool)
            found[f"{self.name}/{a}-{b}"] = LossTerm(values, mask, self.weight)
        return found

    @torch.no_grad()
    def after_step(self) -> None:
        # Not in `loss`: above the limit a clamp has no gradient, so the scale would never return.
        self.scale.clamp_(max=LARGEST)

    def loss(self, left: Tensor, right: Tensor) -> Tensor:
        """Return a loss per pair of matched unit vectors: (n, dim), (n, dim) -> (n,)."""
        if len(left) < (1 if self.mode == "siglip" else 2):
            return 0.0 * (left.sum() + right.sum() + self.scale)
        with torch.autocast(left.device.type, enabled=False):
            logits = self.scale.exp() * left @ right.T
            if self.bias is not None:
                matched = 2 * torch.eye(len(left)).to(logits) - 1
                return -F.logsigmoid(matched * (logits + self.bias)).sum(1)
            answer = torch.arange(len(left), device=left.device)
            each = (F.cross_entropy(x, answer, reduction="none") for x in (logits, logits.T))
            return sum(each, torch.zeros_like(answer, dtype=logits.dtype)) / 2
