"""FuseMoE: a sparse mixture of experts over the tokens of all modalities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from fusionzoo.errors import check_choice
from fusionzoo.structures import Features, FusionOutput, StepContext, masked_mean

from ..base import FUSIONS, present_mean
from ._blocks import Attention, Experts, Router, Routing, TokenFusion, imbalance, join


@FUSIONS.register(family="attention", paper="Han et al. 2024, arXiv:2402.03226", reads="tokens")
class FuseMoE(TokenFusion):
    """Apply self-attention over all tokens, then route each token to its `top_k` experts.

    x += SA(LN x); x += sum_{e in top k} g_e E_e(LN x), with g = softmax of the k largest scores;
    embedding = mean over present m of the mean of LN(x_m). Loss: cross-entropy + balance_weight
    (CV^2 of importance + CV^2 of load) over unmasked tokens. An expert's importance is the sum of
    its gates, its load the expected number of its tokens under the noise on the scores. Differs
    from the paper, whose balance term is an entropy.

    Missing: its tokens are masked as keys and routed to no expert.
    Pitfall: without the balance term one expert receives all tokens; with a large one the experts
    hardly specialise. With a few hundred samples a linear classifier of pooled features does better
    (docs/which.md).
    Use when: there are many modalities or kinds of samples, and capacity must grow at constant
    cost per token.

    Settings:
        num_experts: number of experts, at least 1
        top_k: experts per token, 1 to `num_experts`
        gate: score of expert e: "laplace" for -|x - w_e| (paper), "softmax" for x w_e
        routers: "joint" for one router, "modality" for one per modality
        num_heads: attention heads; must divide `dim`
        noise: standard deviation of the noise added to the scores in training; with 0 the load is
            a count and has no gradient
        balance_weight: weight of the balance term, at least 0
        dropout: dropout rate on the output of attention and experts, 0 to below 1

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
        expert_output = self.experts(rearrange(normed, "b t d -> (b t) d"), routing.gates)
        x = x + self.dropout(rearrange(expert_output, "(b t) d -> b t d", t=x.shape[1]))
        streams = zip(self.norm(x).split(lengths, dim=1), masks.values(), strict=True)
        means = torch.stack([masked_mean(y, mask_m) for y, mask_m in streams], dim=1)
        embedding = self.or_null(present_mean(means, present), present)
        return FusionOutput(embedding, self.head(embedding), {}, None, routing._asdict())

    def _route(self, x: Tensor, mask: Tensor, lengths: list[int]) -> Routing:
        """Route all tokens, each by its modality's router: fields of shape (B T, E)."""
        if len(self.routers) == 1:
            routing: Routing = self.routers[0](rearrange(x, "b t d -> (b t) d"), mask.flatten())
            return routing
        streams = zip(self.routers, x.split(lengths, 1), mask.split(lengths, 1), strict=True)
        routing_by_modality = [
            [
                rearrange(field, "(b t) e -> b t e", t=y.shape[1])
                for field in router(rearrange(y, "b t d -> (b t) d"), mask_m.flatten())
            ]
            for router, y, mask_m in streams
        ]
        fields = zip(*routing_by_modality, strict=True)
        return Routing(*(rearrange(torch.cat(f, dim=1), "b t e -> (b t) e") for f in fields))

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        gates, load = output.extra["gates"].float(), output.extra["load"].float()
        balance = self.balance_weight * imbalance(gates, load)
        return context.criterion(output.logits, target) + balance
