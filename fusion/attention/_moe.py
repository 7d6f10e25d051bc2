"""A sparse mixture of experts over tokens.

Shapes: `N` tokens of the whole batch, `D` width, `E` experts.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import einsum
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError


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


class Routing(NamedTuple):
    """What a router says of N tokens, each (N, E)."""

    scores: Tensor
    gates: Tensor  # rows sum to 1 over the chosen experts
    load: Tensor  # in training the probability of being chosen, else whether it is


class Router(nn.Module):
    """Score experts for a token, by x W or by -|x - w_e| (Laplace), and keep the `top_k` best.

    In training scores carry normal noise of standard deviation `noise`, which makes being among the
    best a matter of chance; that probability has a gradient for every expert (Shazeer et al. 2017,
    arXiv:1701.06538, appendix A), the choice itself only for the chosen.
    """

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

    def forward(self, x: Tensor, routed: Tensor) -> Routing:
        """Route tokens (N, D); those where `routed` (N,) is False go nowhere."""
        scores = self.scores(x)
        noisy = scores + self.noise * torch.randn_like(scores) if self.training else scores
        best = noisy.topk(min(self.top_k + 1, len(self.centres)), dim=-1)
        values, indices = best.values[:, : self.top_k], best.indices[:, : self.top_k]
        gates = torch.zeros_like(noisy).scatter(1, indices, values.softmax(-1))
        if self.training and self.noise > 0 and self.top_k < len(self.centres):
            load = self._probability(scores, noisy, best.values)
        else:
            load = (gates > 0).to(gates.dtype)
        absent = ~routed[:, None]
        return Routing(scores, gates.masked_fill(absent, 0), load.masked_fill(absent, 0))

    def _probability(self, scores: Tensor, noisy: Tensor, best: Tensor) -> Tensor:
        """Return P(score + fresh noise is among the best `top_k`), others' noise as drawn: (N, E).

        best (N, top_k + 1): the highest noisy scores. To be chosen an expert must beat the k-th of
        the others: number k + 1 of all where it is chosen itself, else number k.
        """
        chosen = noisy > best[:, -1:]
        bar = torch.where(chosen, best[:, -1:], best[:, -2:-1])
        return torch.special.ndtr((scores - bar) / self.noise)

    def scores(self, x: Tensor) -> Tensor:
        """Return how well each expert suits each token: (N, D) -> (N, E)."""
        if self.gate == "softmax":
            return x @ self.centres.T
        # As |x|^2 - 2 x c + |c|^2: no (N, E, D) differences. The sum cancels, so never in bfloat16.
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.centres.dtype)
            lengths = x.square().sum(-1, keepdim=True) + self.centres.square().sum(-1)
            squared = lengths - 2 * x @ self.centres.T
            return -squared.clamp(min=1e-12).sqrt()


def imbalance(gates: Tensor, load: Tensor) -> Tensor:
    """Return CV^2 of the experts' importance plus CV^2 of their load: (N, E) x 2 -> ().

    Importance is the sum of an expert's gates, load the number of tokens that it may expect.
    """
    return _squared_variation(gates.sum(0)) + _squared_variation(load.sum(0))


def _squared_variation(x: Tensor) -> Tensor:
    return x.var(unbiased=False) / (x.mean().square() + 1e-10)
