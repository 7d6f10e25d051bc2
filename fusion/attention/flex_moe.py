"""Flex-MoE: experts for combinations of present modalities, and a bank for missing ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features, FusionOutput, StepContext, masked_mean

from ..base import FUSIONS, combination_of
from ._blocks import Attention, Experts, Router, Routing, TokenFusion, imbalance


@FUSIONS.register(family="attention", paper="Yun et al. 2024, arXiv:2410.08245", reads="tokens")
class FlexMoE(TokenFusion):
    """Replace missing modalities by learned tokens and route tokens by the present combination.

    An absent m becomes bank[pattern, m], where pattern is the combination of present modalities;
    x += SA(LN x); x += sum_{e in top k} g_e E_e(LN x) with g = softmax of the k largest x W;
    embedding = mean over m of the mean of LN(x_m). Loss: cross-entropy + balance_weight (CV^2 as
    in `fuse_moe`, over the tokens of complete samples, + CE(scores, index of the combination) over
    the tokens of incomplete ones; index 0 is the complete combination). Differs from the paper: no
    warm-up that sorts samples by completeness. Differs from its code, which adds the attention
    output to itself instead of to x, has experts 2 D wide (here 4 D), adds learned positions,
    learns the noise from x, balances the incomplete tokens too, and ends in an MLP of the
    concatenated means, without the last LN; it may have more layers, every second one without
    experts.

    Missing: replaced by learned tokens of its combination, which count in the mean.
    Pitfall: the tokens of a combination that never occurs in training stay untrained: train with
    missing data, or use `missing_tokens`, which falls back to one token per modality. With a few
    hundred samples a linear classifier of pooled features does better (docs/which.md).
    Use when: combinations of missing modalities are few, known, and all occur in training.

    Settings:
        num_experts: number of experts, at least 2^M - 1, one per combination of the M modalities;
            None for the larger of 16 and 2^M - 1 (paper: 16)
        top_k: experts per token, 1 to `num_experts`
        slots: learned tokens for each missing modality and combination, at least 1
        num_heads: attention heads; must divide `dim`
        noise: standard deviation of the noise added to routing scores in training, at least 0
        balance_weight: weight of the routing loss, at least 0
        dropout: dropout rate on the output of attention and experts, 0 to below 1

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
        lengths = [y.shape[1] for y in tokens]  # per modality
        x, mask = torch.cat(tokens, dim=1), torch.cat(masks, dim=1)
        normed = self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, normed, mask))
        normed = self.expert_norm(x)
        flat = rearrange(normed, "b t d -> (b t) d")
        routing: Routing = self.router(flat, mask.flatten())
        expert_output = self.experts(flat, routing.gates)
        x = x + self.dropout(rearrange(expert_output, "(b t) d -> b t d", t=x.shape[1]))
        streams = zip(self.norm(x).split(lengths, dim=1), masks, strict=True)
        means = torch.stack([masked_mean(y, mask_m) for y, mask_m in streams], dim=1)
        embedding = self.or_null(means.mean(1), present)
        extra = {**routing._asdict(), "mask": mask, "combination": combination}
        return FusionOutput(embedding, self.head(embedding), {}, None, extra)

    def _filled(
        self, features: Mapping[str, Features], present: Tensor, combination: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Append the bank's tokens to each modality's, unmasked only where it is absent."""
        embedded, masks = self.embedded(features)
        bank_tokens = self.bank[combination.clamp(max=len(self.bank) - 1)]  # (B, M, slots, D)
        any_present = present.any(1, keepdim=True)
        absent = repeat(~present & any_present, "b m -> b m s", s=self.bank.shape[2])
        tokens = [
            torch.cat([x, stand_in.to(x.dtype)], dim=1)
            for x, stand_in in zip(embedded.values(), bank_tokens.unbind(1), strict=True)
        ]
        extended_masks = [
            torch.cat([mask, bank_mask], dim=1)
            for mask, bank_mask in zip(masks.values(), absent.unbind(1), strict=True)
        ]
        return tokens, extended_masks

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        mask, combination = output.extra["mask"], output.extra["combination"]
        token_pattern = repeat(combination, "b -> (b t)", t=mask.shape[1])
        complete = (token_pattern == 0)[:, None]
        balance = imbalance(
            output.extra["gates"].float().masked_fill(~complete, 0),
            output.extra["load"].float().masked_fill(~complete, 0),
        )
        scores = output.extra["scores"].float()
        expert = token_pattern.clamp(max=scores.shape[1] - 1)
        token_losses = nn.functional.cross_entropy(scores, expert, reduction="none")
        token_losses = rearrange(token_losses, "(b t) -> b t", t=mask.shape[1])
        incomplete = mask & (combination > 0)[:, None]
        summed = token_losses.masked_fill(~incomplete, 0).sum(1)
        routing = summed / incomplete.sum(1).clamp(min=1)
        return context.criterion(output.logits, target) + self.balance_weight * (balance + routing)
