"""Flex-MoE: experts that know which modalities are there, and a bank for those that are not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features, FusionOutput, StepContext, masked_mean

from ..base import FUSIONS, combination_of
from ._blocks import Attention, TokenFusion
from ._moe import Experts, Router, Routing, imbalance


@FUSIONS.register(family="attention", paper="Yun et al. 2024, arXiv:2410.08245", reads="tokens")
class FlexMoE(TokenFusion):
    """Fill what is missing from a bank indexed by what is there, and route by that combination.

    An absent m becomes bank[pattern, m], `slots` tokens; x += SA(LN x); x += sum_{e in top k} g_e
    E_e(LN x) with g = softmax of the k best x W; embedding = mean over m of the mean of LN(x_m).
    Loss: cross-entropy + `balance_weight` (CV^2 as in `fuse_moe`, over tokens of complete
    samples, + CE(scores, index of the combination) over tokens of incomplete ones; index 0 is the
    complete one, so at least 2^M - 1 experts). Left out: the paper's warm-up that sorts samples by
    completeness. Its code adds the attention to itself instead of to x; here the skip is kept.

    Missing: replaced by learned tokens of its combination, which count in the mean.
    Pitfall: a combination that training never showed has an untrained bank: train with missing
    data, or with `missing_tokens`, which falls back to one token per modality.
    Use when: combinations of missing modalities are few, known, and all present in training.

    Shapes:
        features[name].tokens: (B, T, dims[name]), any T for each
        returns: embedding (B, dim), logits (B, K)
    """

    learns_absence = True

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        num_experts: int | None = None,
        top_k: int = 4,
        slots: int = 4,
        num_heads: int = 4,
        noise: float = 0.1,
        balance_weight: float = 1e-2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        patterns = 2 ** len(dims) - 1
        num_experts = max(16, patterns) if num_experts is None else num_experts
        if num_experts < patterns:
            raise FusionZooError(
                f"num_experts={num_experts}; {len(dims)} modalities have {patterns} combinations,"
                " and each needs an expert"
            )
        self.balance_weight = balance_weight
        self.bank = nn.Parameter(torch.randn(patterns, len(dims), slots, dim) * 0.02)
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads)
        self.expert_norm = nn.LayerNorm(dim)
        self.router = Router(dim, num_experts, top_k, "softmax", noise)
        self.experts = Experts(dim, num_experts)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present = self.present(features)
        combination = combination_of(present)
        tokens, masks = self._filled(features, present, combination)
        lengths = [y.shape[1] for y in tokens]
        x, mask = torch.cat(tokens, dim=1), torch.cat(masks, dim=1)
        normed = self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, normed, mask))
        normed = self.expert_norm(x)
        flat = rearrange(normed, "b t d -> (b t) d")
        routing: Routing = self.router(flat, mask.flatten())
        answer = self.experts(flat, routing.gates)
        x = x + self.dropout(rearrange(answer, "(b t) d -> b t d", t=x.shape[1]))
        streams = zip(self.norm(x).split(lengths, dim=1), masks, strict=True)
        means = torch.stack([masked_mean(own, real) for own, real in streams], dim=1)
        embedding = self.or_null(means.mean(1), present)
        extra = {**routing._asdict(), "mask": mask, "combination": combination}
        return FusionOutput(embedding, self.head(embedding), {}, None, extra)

    def _filled(
        self, features: Mapping[str, Features], present: Tensor, combination: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Append the bank's tokens to each modality's; they are real where it is absent."""
        embedded, masks = self.embedded(features)
        stand_ins = self.bank[combination.clamp(max=len(self.bank) - 1)]  # (B, M, slots, D)
        some = present.any(1, keepdim=True)
        absent = repeat(~present & some, "b m -> b m s", s=self.bank.shape[2])
        tokens = [
            torch.cat([x, own.to(x.dtype)], dim=1)
            for x, own in zip(embedded.values(), stand_ins.unbind(1), strict=True)
        ]
        real = [
            torch.cat([mask, here], dim=1)
            for mask, here in zip(masks.values(), absent.unbind(1), strict=True)
        ]
        return tokens, real

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        mask, combination = output.extra["mask"], output.extra["combination"]
        of_token = repeat(combination, "b -> (b t)", t=mask.shape[1])
        complete = (of_token == 0)[:, None]
        balance = imbalance(
            output.extra["gates"].float().masked_fill(~complete, 0),
            output.extra["load"].float().masked_fill(~complete, 0),
        )
        wanted = of_token.clamp(max=output.extra["scores"].shape[1] - 1)
        each = nn.functional.cross_entropy(output.extra["scores"].float(), wanted, reduction="none")
        counted = mask & (combination > 0)[:, None]
        own = rearrange(each, "(b t) -> b t", t=mask.shape[1]).masked_fill(~counted, 0).sum(1)
        routing = own / counted.sum(1).clamp(min=1)
        return context.criterion(output.logits, target) + self.balance_weight * (balance + routing)
