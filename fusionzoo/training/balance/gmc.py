"""Geometric multimodal contrastive learning: each modality near the fusion of all."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.machine.distributed import gathered_rows
from fusionzoo.structures import StepContext

from ._shared import check_contrast, nt_xent
from .base import BALANCE, Balance, LossTerm, StrategyInputs, at_least_float32, pooled_of, presence


@BALANCE.register(family="loss", paper="Poklukar et al. 2022, ICML, arXiv:2202.03390")
class GMC(Balance):
    """Contrast each modality's features with the fused embedding, through one shared network.

    z_0 = g(V_0 f(all)) and z_m = g(V_m x_m), of length 1, with g shared; L = sum_m NT(z_0, z_m), NT
    SimCLR's loss at temperature tau over the rows of all processes (but not of accumulated
    batches). Differs from the paper: any fusion in place of its joint network, and the fused loss
    is that of the task; log-sum-exp instead of sums of exponentials.

    Missing: the fused embedding has what is present; modality m counts in rows with m and another.
    Pitfall: negatives come from the batch: small batches teach little.
    Use when: the same head must serve any subset of the modalities.

    Settings:
        weight: weight of each modality's loss, at least 0; 0 switches it off
        temperature: temperature tau, above 0 (without labels: 0.1)
        dim: width of the shared network and its output, at least 1

    Shapes: features[name].pooled (B, D), embedding (B, dim of the fusion) -> a loss per row (n,)
    """

    raw_inputs = False
    weighs_rows = False  # its losses are of pairs of samples
    off_at_zero = ("weight",)

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        weight: float = 1.0,
        temperature: float = 0.3,
        dim: int = 64,
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        check_contrast(self, weight=weight, dim=dim, temperature=temperature)
        self.weight, self.temperature = weight, temperature
        self.fused = nn.Linear(self.fusion.dim, dim)
        self.project = nn.ModuleDict({name: nn.Linear(w, dim) for name, w in self.widths.items()})
        self.shared = nn.Sequential(nn.SiLU(), nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        vectors = {"": self.embed_in_common(self.fused(context.output.embedding))}
        for name, project in self.project.items():
            x, _ = pooled_of(context.features, name)
            vectors[name] = self.embed_in_common(project(x))
        rows, present = gathered_rows(vectors, presence(context.features), self.world)
        several = present.sum(1) > 1
        terms = {}
        for name, column in zip(self.widths, present.unbind(1), strict=True):
            mask = column & several
            values = nt_xent(rows[""][mask], rows[name][mask], self.temperature)
            if not len(values):
                values = 0.0 * (rows[""].sum() + rows[name].sum())[None]
            terms[f"{self.name}/{name}"] = LossTerm.everywhere(values, self.weight)
        return terms

    def embed_in_common(self, x: Tensor) -> Tensor:
        """Return unit vectors of projected features: (B, dim) -> (B, dim)."""
        return F.normalize(at_least_float32(self.shared(x)), dim=1)
