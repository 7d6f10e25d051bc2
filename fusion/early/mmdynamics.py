"""Multimodal dynamics: gated features, scaled by the predicted confidence of their modality."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, check_choice, check_number
from fusionzoo.structures import Features, FusionOutput, StepContext

from ..base import FUSIONS, Fusion, RunningMeans, present_mean


@FUSIONS.register(
    family="early", paper="Han et al. 2022, CVPR, pp. 20707-20717", reads="pooled", synergy=False
)
class MMDynamics(Fusion):
    """Gate each modality's features, scale them by predicted confidence, concatenate them.

    gamma_m = sigmoid(G_m x_m), f_m = ReLU(F_m (gamma_m * x_m)), z_m = K_m f_m, confidence t_m =
    T_m f_m (a number); logits = W [t_1 f_1; ...; t_M f_M], embedding = mean of the present t_m f_m.
    Loss: task loss + sum over present m of `gate` mean gamma_m (few features stay open) + (t_m -
    probability of the true class in softmax(z_m))^2 + CE(z_m). Layers, their initial values and
    loss are those of the authors' code; `join` and `detach` are not.

    Missing: t_m f_m is replaced by its mean over the training samples that have m.
    Pitfall: t_m is unbounded and may turn negative, which inverts a modality;
    `confidence="sigmoid"` keeps it within 0 to 1. G_m has as many weights as features squared.
    Use when: modalities are wide tables (omics) in which few features matter.

    Settings:
        hidden: width of f_m; null for `dim`, which it must be without `join` (paper: 1000)
        confidence: "linear" (paper) or "sigmoid"
        gate: weight of the sparsity of the gates, at least 0
        gate_rank: rank of G_m for modalities that are wider; null for full rank (paper)
        dropout: dropout rate on f_m, 0 to below 1 (paper: 0.5)
        join: whether a linear layer of [t_1 f_1; ...; t_M f_M; p], p presence bits, makes the
            embedding, which the classifier reads; not in the paper
        detach: whether the target of t_m is detached, so that no classifier is drawn towards its
            confidence; in the authors' code it is not

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)}
    """

    classes_only = True
    last_layers = ("head", "heads")

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        hidden: int | None = None,
        confidence: Literal["linear", "sigmoid"] = "linear",
        gate: float = 1.0,
        gate_rank: int | None = None,
        dropout: float = 0.5,
        join: bool = False,
        detach: bool = False,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        check_choice("confidence", confidence, ("linear", "sigmoid"))
        width = dim if hidden is None else hidden
        check_number("hidden", width, 1)
        check_number("gate", gate, 0)
        check_number("gate_rank", 1 if gate_rank is None else gate_rank, 1)
        if width != dim and not join:
            raise FusionZooError(f"hidden={hidden}, dim={dim}; they must be equal, or join=true")
        self.sigmoid, self.gate_weight = confidence == "sigmoid", gate
        self.detach = detach
        self.gates = nn.ModuleDict({name: _square(size, gate_rank) for name, size in dims.items()})
        self.encode = nn.ModuleDict({name: nn.Linear(size, width) for name, size in dims.items()})
        self.heads = nn.ModuleDict({name: nn.Linear(width, num_outputs) for name in dims})
        self.confidence = nn.ModuleDict({name: nn.Linear(width, 1) for name in dims})
        self.means = RunningMeans(dict.fromkeys(dims, width))
        self.dropout = nn.Dropout(dropout)
        self.join = nn.Linear(len(dims) * (width + 1), dim) if join else None
        self.head = nn.Linear(dim if join else len(dims) * width, num_outputs)
        self.apply(_start)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present = self.present(features)
        scaled, votes, openness, confidences = {}, [], [], []
        for column, (name, x) in enumerate(self.pooled(features).items()):
            gate = self.gates[name](x).sigmoid()
            hidden = self.dropout(self.encode[name](gate * x).relu())
            t = self.confidence[name](hidden)
            t = t.sigmoid() if self.sigmoid else t
            here = present[:, column, None]
            scaled[name] = (t * hidden).masked_fill(~here, 0)
            votes.append(self.heads[name](hidden).masked_fill(~here, 0))
            openness.append(gate.mean(-1))
            confidences.append(t[:, 0])
        filled = self.means(scaled, present)
        if self.join is None:
            seen = torch.cat([*filled.values()], dim=1)
            mean = present_mean(torch.stack([*scaled.values()], dim=1), present)
            embedding = self.or_null(mean, present)
        else:
            bits = present.to(votes[0].dtype)
            joined = self.join(torch.cat([*filled.values(), bits], dim=1))
            seen = embedding = self.or_null(joined, present)
        extra = {"present": present, "openness": torch.stack(openness, dim=1)}
        extra["confidence"] = torch.stack(confidences, dim=1)
        unimodal = dict(zip(self.dims, votes, strict=True))
        return FusionOutput(embedding, self.head(seen), unimodal, None, extra)

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        extra, terms = output.extra, []
        for column, logits in enumerate(output.unimodal.values()):
            target_logits = logits.detach() if self.detach else logits
            probability = target_logits.float().softmax(-1).gather(1, target[:, None])[:, 0]
            error = context.weighted(
                (extra["confidence"][:, column].float() - probability).square()
            )
            openness = self.gate_weight * extra["openness"][:, column].float()
            terms.append(context.criterion(logits, target) + error + openness)
        confidence_loss = torch.stack(terms, dim=1).masked_fill(~extra["present"], 0).sum(1)
        return context.criterion(output.logits, target) + confidence_loss


def _start(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _square(size: int, rank: int | None) -> nn.Module:
    """Return a linear map of a width to itself, of low rank if that is smaller."""
    if rank is None or rank >= size:
        return nn.Linear(size, size)
    return nn.Sequential(nn.Linear(size, rank, bias=False), nn.Linear(rank, size))
