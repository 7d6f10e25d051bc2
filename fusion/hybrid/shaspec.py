"""ShaSpec: a shared and a specific vector per modality; an absent one borrows what is shared."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import torch
from torch import Tensor, nn

from fusionzoo.structures import Features, FusionOutput, StepContext

from ..base import FUSIONS, Fusion, present_mean


@FUSIONS.register(family="hybrid", paper="Wang et al. 2023, arXiv:2307.14126", reads="pooled")
class ShaSpec(Fusion):
    """Encode each modality by a shared and a specific network; fill gaps with the shared mean.

    s_m = S(a_m), q_m = P_m(a_m), f_m = s_m + W [s_m; q_m]; an absent m has f_m = mean of the
    present s_n; embedding = MLP [f_1; ...; f_M]. Loss: cross-entropy + `alignment` mean over
    pairs of |s_m - s_n| + `domain` cross-entropy of naming the modality from q_m. The paper's
    text takes the mean, its code the first that is present; this follows the text.

    Missing: f_m is the mean of what the present modalities share.
    Pitfall: complementary modalities share little, and then the mean says little. What follows has
    never met that mean if training samples are complete: train with missing data.
    Use when: modalities show the same thing in different ways (MRI sequences, sensors).

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K)
    """

    learns_absence = True

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        alignment: float = 0.1,
        domain: float = 0.02,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.alignment, self.domain = alignment, domain
        self.project = self.align()

        def network() -> nn.Sequential:
            return nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

        self.shared = network()
        self.specific = nn.ModuleDict({name: network() for name in dims})
        self.mix = nn.Linear(2 * dim, dim)
        self.namer = nn.Linear(dim, len(dims))
        self.join = nn.Sequential(nn.Linear(len(dims) * dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        aligned, present = self.aligned(features)
        shared = self.shared(aligned)
        rows = zip(self.specific.values(), aligned.unbind(1), strict=True)
        specific = torch.stack([network(a) for network, a in rows], dim=1)
        own = shared + self.mix(torch.cat([shared, specific], dim=-1))
        borrowed = present_mean(shared, present)[:, None]
        joined = torch.where(present[..., None], own, borrowed)
        embedding = self.or_null(self.join(joined.flatten(1)), present)
        extra = {"shared": shared, "specific": specific, "present": present}
        return FusionOutput(embedding, self.head(embedding), {}, None, extra)

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        shared, present = output.extra["shared"].float(), output.extra["present"]
        loss = context.criterion(output.logits, target)
        pairs = list(combinations(range(len(self.dims)), 2))
        for m, n in pairs:
            gap = (shared[:, m] - shared[:, n]).abs().mean(-1)
            both = present[:, m] & present[:, n]
            loss = loss + self.alignment / len(pairs) * gap.masked_fill(~both, 0)
        for column, q in enumerate(output.extra["specific"].unbind(1)):
            named = self.namer(q).float()
            own = torch.full((len(q),), column, device=q.device)
            error = nn.functional.cross_entropy(named, own, reduction="none")
            loss = loss + self.domain * error.masked_fill(~present[:, column], 0)
        return loss
