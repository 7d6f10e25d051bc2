"""MoMKE: the tokens of each modality run through the experts of all of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fusionzoo.errors import check_heads, check_number
from fusionzoo.structures import Features, FusionOutput, Phase, StepContext, masked_mean

from ..base import FUSIONS, Fusion, present_mean
from ._blocks import attend


@FUSIONS.register(family="attention", paper="Xu et al. 2024, ACM Multimedia", reads="tokens")
class MoMKE(Fusion):
    """Run each modality through the experts of all modalities, weighted token by token.

    Expert e is a transformer without norms: in each of L layers x <- x + y + MLP(y), y the
    attention of x to itself without an output projection. The tokens of modality n run through
    every expert: y_ne; a router, an MLP for each n, weights them: X_n = sum_e softmax(R_n a_n)_e
    y_ne. h = [mean X_1; ...; mean X_M], embedding = V (h + ReLU(W h)) + c. Phase "experts" trains
    expert n on modality n alone with a head of its own, phase "all" all but these. Differs from the
    authors' code, which fuses step by step modalities of equal length and classifies h + ReLU(W h)
    without V, and which shows in training only the subset that is tested: one model for each.

    Missing: its X_n is 0, its tokens are masked.
    Pitfall: a step costs M^2 passes of a modality through an expert. Complete samples never show a
    zero X_n: train with `modality_dropout` if modalities will be missing. There are no norms, so
    scale the features. With a few hundred samples a linear classifier of pooled features does
    better (docs/which.md).
    Use when: there are few modalities and they share structure, as streams of one conversation.

    Settings:
        num_layers: layers L of each expert, at least 1
        num_heads: attention heads; must divide `dim`
        dropout: dropout rate on the aligned tokens and on ReLU(W h), 0 to below 1
        expert_share: share of the training steps spent in phase "experts", 0 to below 1

    Shapes:
        features[name].tokens: (B, T, dims[name]), any T for each
        returns: embedding (B, dim), logits (B, K), extra routing (B, M, M): mean over a modality's
            tokens of the weight of each expert
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        num_layers: int = 4,
        num_heads: int = 2,
        dropout: float = 0.5,
        expert_share: float = 0.5,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        check_number("num_layers", num_layers, 1)
        check_number("expert_share", expert_share, 0, 1)
        count = len(dims)
        self.project = self.align()
        layers = {name: [ExpertLayer(dim, num_heads) for _ in range(num_layers)] for name in dims}
        self.experts = nn.ModuleDict({name: nn.ModuleList(x) for name, x in layers.items()})
        self.router = nn.ModuleDict({name: perceptron(dim, count) for name in dims})
        self.mix = nn.Linear(count * dim, count * dim)
        self.join = nn.Linear(count * dim, dim)
        self.head = nn.Linear(dim, num_outputs)
        self.dropout = nn.Dropout(dropout)
        if expert_share:
            self.expert_heads = nn.ModuleDict({name: nn.Linear(dim, num_outputs) for name in dims})
            alone = ("project", "experts", "expert_heads")
            together = ("project", "experts", "router", "mix", "join", "head", "null")
            first = Phase("experts", expert_share, trains=alone)
            self.phases = (first, Phase("all", 1 - expert_share, trains=together))

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present, tokens = self.present(features), self.tokens(features)
        masks = [features[name].mask for name in self.dims]
        aligned = [self.dropout(self.project[name](x)) for name, x in tokens.items()]
        routing = [
            self.router[name](x).softmax(-1) for name, x in zip(tokens, aligned, strict=True)
        ]
        lengths = [mask.shape[1] for mask in masks]
        x, mask = torch.cat(aligned, dim=1), torch.cat(masks, dim=1)
        visible = mask[:, None] & self._same_modality(lengths, mask.device)
        by_expert = []
        for layers in self.experts.values():
            y = x
            for layer in layers:  # type: ignore[attr-defined]
                y = layer(y, visible)
            by_expert.append(y)
        stacked = torch.stack(by_expert, dim=2)  # (B, T, M, D)
        mixed = (torch.cat(routing, dim=1)[..., None] * stacked).sum(2)
        pairs = zip(mixed.split(lengths, dim=1), masks, strict=True)
        h = torch.cat([masked_mean(part, own_mask) for part, own_mask in pairs], dim=1)
        hidden = h + self.dropout(self.mix(h).relu())
        embedding = self.or_null(self.join(hidden), present)
        weights = [masked_mean(w, m) for w, m in zip(routing, masks, strict=True)]
        extra = {"present": present, "routing": torch.stack(weights, dim=1)}
        if len(self.phases) > 1:
            extra["expert_logits"] = self._alone(stacked.split(lengths, dim=1), masks)
        return FusionOutput(embedding, self.head(embedding), {}, None, extra)

    def _alone(self, parts: tuple[Tensor, ...], masks: list[Tensor]) -> Tensor:
        """Return the logits of each modality from its own expert alone, (B, M, K)."""
        columns = zip(self.expert_heads.values(), parts, masks, strict=True)
        logits = [
            head(masked_mean(part[:, :, number], mask))
            for number, (head, part, mask) in enumerate(columns)
        ]
        return torch.stack(logits, dim=1)

    def _same_modality(self, lengths: list[int], device: torch.device) -> Tensor:
        """Return which tokens are of one modality, (T, T)."""
        pieces = [torch.full((n,), number, device=device) for number, n in enumerate(lengths)]
        modality = torch.cat(pieces)
        return modality[:, None] == modality

    def shares(self, output: FusionOutput) -> dict[str, Tensor]:
        mean = present_mean(output.extra["routing"], output.extra["present"])
        names = (f"expert of {name}" for name in self.dims)
        return dict(zip(names, mean.unbind(1), strict=True))

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        task = context.criterion(output.logits, target)
        if len(self.phases) == 1 or context.phase > 0:
            return task
        present = output.extra["present"]
        alone = output.extra["expert_logits"].unbind(1)
        losses = torch.stack([context.criterion(logits, target) for logits in alone], dim=1)
        return torch.where(present.any(1), present_mean(losses, present), task)


class ExpertLayer(nn.Module):
    """Attention without an output projection, then an MLP, no norm; 5 D^2 + 5 D parameters."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.mlp = perceptron(dim, dim)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """Update tokens (B, T, D); t attends to s where visible (B, T, S) is True."""
        attended = attend(self.query(x), self.key_value(x), visible, self.num_heads)
        attended = torch.where(visible.any(-1, keepdim=True), attended, 0)
        return x + attended + self.mlp(attended)


def perceptron(dim: int, width_out: int) -> nn.Sequential:
    """Return an MLP with a hidden layer as wide as its input."""
    return nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, width_out))
