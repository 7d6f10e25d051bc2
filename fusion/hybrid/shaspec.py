"""ShaSpec: shared and specific features; an absent modality gets the mean shared feature."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import torch
from torch import Tensor, nn

from fusionzoo.structures import Features, FusionOutput, StepContext

from ..base import FUSIONS, Fusion, present_mean


@FUSIONS.register(family="hybrid", paper="Wang et al. 2023, arXiv:2307.14126", reads="pooled")
class ShaSpec(Fusion):
    """Encode each modality by a shared and a specific network; impute by the shared mean.

    s_m = S(a_m), q_m = P_m(a_m), f_m = s_m + W [s_m; q_m]; an absent m has f_m = mean of the
    present s_n; embedding = MLP [f_1; ...; f_M]. Loss: cross-entropy + alignment mean over pairs of
    |s_m - s_n| + domain cross-entropy of classifying the modality from q_m. Differs from the
    authors' code, which imputes the first present s_n; the mean is the paper's text. Its networks
    are U-Nets of volumes: S and P_m are whole encoders, W is a convolution without bias of their
    deepest maps, and a decoder that also reads the maps of S takes the place of the MLP.

    Missing: f_m is the mean of the present modalities' shared features.
    Pitfall: complementary modalities share little, which makes the mean uninformative. The MLP
    never sees that mean if all training samples are complete: train with missing data.
    Use when: modalities show the same thing in different ways (MRI sequences, sensors).

    Settings:
        alignment: weight of the distance between shared features, at least 0
        domain: weight of the modality classification loss, at least 0

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
        pairs = zip(self.specific.values(), aligned.unbind(1), strict=True)
        specific = torch.stack([network(a) for network, a in pairs], dim=1)
        fused = shared + self.mix(torch.cat([shared, specific], dim=-1))
        imputed = present_mean(shared, present)[:, None]
        completed = torch.where(present[..., None], fused, imputed)
        embedding = self.or_null(self.join(completed.flatten(1)), present)
        extra = {"shared": shared, "specific": specific, "present": present}
        return FusionOutput(embedding, self.head(embedding), {}, None, extra)

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        shared, present = output.extra["shared"].float(), output.extra["present"]
        loss = context.criterion(output.logits, target)
        pairs = list(combinations(range(len(self.dims)), 2))
        for m, n in pairs:
            distance = (shared[:, m] - shared[:, n]).abs().mean(-1)
            both_present = present[:, m] & present[:, n]
            loss = loss + self.alignment / len(pairs) * distance.masked_fill(~both_present, 0)
        for column, q in enumerate(output.extra["specific"].unbind(1)):
            modality_logits = self.namer(q).float()
            modality = torch.full((len(q),), column, device=q.device)
            error = nn.functional.cross_entropy(modality_logits, modality, reduction="none")
            loss = loss + self.domain * error.masked_fill(~present[:, column], 0)
        return loss
