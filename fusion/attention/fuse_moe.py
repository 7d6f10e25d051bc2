"""FuseMoE: tokens of all modalities share a sparse set of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from fusionzoo.structures import Features, FusionOutput, StepContext, masked_mean

from ..base import FUSIONS, check_choice, present_mean
from ._blocks import Attention, TokenFusion, join
from ._moe import Experts, Router, Routing, imbalance


@FUSIONS.register(family="attention", paper="Han et al. 2024, arXiv:2402.03226", reads="tokens")
class FuseMoE(TokenFusion):
    """Attend over all tokens once, then send each token to the few experts that suit it.

    x += SA(LN x); x += sum_{e in top k} g_e E_e(LN x); g = softmax of the k best scores, which are
    -|x - w_e| (`gate="laplace"`, the paper's) or x W ("softmax"). `routers="modality"`: each
    modality has a router of its own. embedding = mean over present m of the mean of LN(x_m). Loss:
    cross-entropy + `balance_weight` (CV^2 of importance + CV^2 of load) over real tokens, load the
    probability of being among the best under the normal noise that scores carry in training, of
    standard deviation `noise` (0: a count, without a gradient). Differs from the paper, whose
    balance term is an entropy.

    Missing: its tokens are no keys and go to no expert.
    Pitfall: without the balance term one expert takes all; a large term blurs the experts.
    Use when: many modalities or many kinds of samples, and capacity must grow without its cost.

    Shapes:
        features[name].tokens: (B, T, dims[name]), any T for each
        returns: embedding (B, dim), logits (B, K)
    """

    symmetric = True

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        num_experts: int = 16,
        top_k: int = 4,
        gate: Literal["laplace", "softmax"] = "laplace",
        routers: Literal["joint", "modality"] = "joint",
        num_heads: int = 4,
        noise: float = 0.1,
        balance_weight: float = 1e-2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        check_choice("gate", gate, ("laplace", "softmax"))
        check_choice("routers", routers, ("joint", "modality"))
        self.balance_weight = balance_weight
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads)
        self.expert_norm = nn.LayerNorm(dim)
        count = len(dims) if routers == "modality" else 1
        self.routers = nn.ModuleList(
            Router(dim, num_experts, top_k, gate, noise) for _ in range(count)
        )
        self.experts = Experts(dim, num_experts)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedded, masks = self.embedded(features)
        present = self.present(features)
        lengths = [x.shape[1] for x in embedded.values()]
        x, mask = join(embedded, masks, next(iter(embedded.values())))
        normed = self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, normed, mask))
        normed = self.expert_norm(x)
        routing = self._route(normed, mask, lengths)
        answer = self.experts(rearrange(normed, "b t d -> (b t) d"), routing.gates)
        x = x + self.dropout(rearrange(answer, "(b t) d -> b t d", t=x.shape[1]))
        streams = zip(self.norm(x).split(lengths, dim=1), masks.values(), strict=True)
        means = torch.stack([masked_mean(own, real) for own, real in streams], dim=1)
        embedding = self.or_null(present_mean(means, present), present)
        return FusionOutput(embedding, self.head(embedding), {}, None, routing._asdict())

    def _route(self, x: Tensor, mask: Tensor, lengths: list[int]) -> Routing:
        """Route all tokens, (B T, E)."""
        if len(self.routers) == 1:
            routing: Routing = self.routers[0](rearrange(x, "b t d -> (b t) d"), mask.flatten())
            return routing
        parts = zip(self.routers, x.split(lengths, 1), mask.split(lengths, 1), strict=True)
        by_modality = [
            [
                rearrange(part, "(b t) e -> b t e", t=y.shape[1])
                for part in router(rearrange(y, "b t d -> (b t) d"), real.flatten())
            ]
            for router, y, real in parts
        ]
        columns = zip(*by_modality, strict=True)
        return Routing(*(rearrange(torch.cat(c, dim=1), "b t e -> (b t) e") for c in columns))

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        gates, load = output.extra["gates"].float(), output.extra["load"].float()
        balance = self.balance_weight * imbalance(gates, load)
        return context.criterion(output.logits, target) + balance
