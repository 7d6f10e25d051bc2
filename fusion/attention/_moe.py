"""A sparse mixture of experts over tokens.

Shapes: `N` tokens of the whole batch, `D` width, `E` experts.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from einops import einsum
from torch import Tensor, nn

from ...errors import FusionZooError


class Experts(nn.Module):
    """E perceptrons of 8 D^2 + 5 D parameters; a token goes to the few that its gates name."""

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(num_experts, dim, 4 * dim) * dim**-0.5)
        self.wide_bias = nn.Parameter(torch.zeros(num_experts, 4 * dim))
        self.narrow = nn.Parameter(torch.randn(num_experts, 4 * dim, dim) * (4 * dim) ** -0.5)
        self.narrow_bias = nn.Parameter(torch.zeros(num_experts, dim))

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        """Return sum_e gates_e E_e(x): (N, D), (N, E) with zeros where an expert is not asked.

        A compiled or exported graph has no room for a number of tokens that depends on the data:
        there every expert sees every token, and the gates leave the same sum.
        """
        if torch.compiler.is_compiling():
            hidden = F.gelu(einsum(x, self.wide, "n d, e d h -> e n h") + self.wide_bias[:, None])
            each = einsum(hidden, self.narrow, "e n h, e h d -> e n d") + self.narrow_bias[:, None]
            return einsum(each, gates, "e n d, n e -> n d")
        asked = [column.nonzero()[:, 0] for column in gates.unbind(1)]
        # unbind, for the gradient of an index would be as large as all experts together
        weights = (self.wide, self.wide_bias, self.narrow, self.narrow_bias)
        experts = zip(asked, gates.unbind(1), *(w.unbind(0) for w in weights), strict=True)
        answers = [
            gate[rows, None] * (F.gelu(x[rows] @ wide + wide_bias) @ narrow + narrow_bias)
            for rows, gate, wide, wide_bias, narrow, narrow_bias in experts
        ]
        together = torch.cat(answers)
        out = torch.zeros_like(x, dtype=together.dtype)
        return out.index_add(0, torch.cat(asked), together).to(x.dtype)


class Router(nn.Module):
    """Score experts for a token, by x W or by -|x - w_e| (Laplace), and keep the `top_k` best."""

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        gate: Literal["softmax", "laplace"],
        noise: float,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise FusionZooError(f"top_k={top_k} is not within 1 to num_experts={num_experts}")
        self.top_k, self.gate, self.noise = top_k, gate, noise
        self.centres = nn.Parameter(torch.randn(num_experts, dim) * dim**-0.5)

    def forward(self, x: Tensor, routed: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and gates (N, E); tokens where `routed` (N,) is False go nowhere."""
        scores = self.scores(x)
        noisy = scores + self.noise * torch.randn_like(scores) if self.training else scores
        best = noisy.topk(self.top_k, dim=-1)
        gates = torch.zeros_like(noisy).scatter(1, best.indices, best.values.softmax(-1))
        return scores, gates.masked_fill(~routed[:, None], 0)

    def scores(self, x: Tensor) -> Tensor:
        """Return how well each expert suits each token: (N, D) -> (N, E)."""
        if self.gate == "softmax":
            return x @ self.centres.T
        squared = (x[:, None] - self.centres).square().sum(-1)
        return -(squared + 1e-12).sqrt()


def imbalance(gates: Tensor) -> Tensor:
    """Return CV^2 of the experts' importance plus CV^2 of their load: (N, E) -> ().

    Importance is the sum of an expert's gates, load the number of tokens it is given.
    """
    load = (gates > 0).to(gates.dtype)
    return _squared_variation(gates.sum(0)) + _squared_variation(load.sum(0))


def _squared_variation(x: Tensor) -> Tensor:
    return x.var(unbiased=False) / (x.mean().square() + 1e-10)
