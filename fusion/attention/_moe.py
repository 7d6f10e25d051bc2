"""Sparse mixture of experts over tokens.

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
    """E expert MLPs of 8 D^2 + 5 D parameters each; a token uses those with a non-zero gate."""

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(num_experts, dim, 4 * dim) * dim**-0.5)
        self.wide_bias = nn.Parameter(torch.zeros(num_experts, 4 * dim))
        self.narrow = nn.Parameter(torch.randn(num_experts, 4 * dim, dim) * (4 * dim) ** -0.5)
        self.narrow_bias = nn.Parameter(torch.zeros(num_experts, dim))

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        """Return sum_e gates_e E_e(x): x (N, D), gates (N, E), zero for experts not selected.

        Compiled and exported graphs need static shapes: there every expert processes every token,
        which gives the same sum.
        """
        if torch.compiler.is_compiling():
            hidden = F.gelu(einsum(x, self.wide, "n d, e d h -> e n h") + self.wide_bias[:, None])
            outputs = einsum(hidden, self.narrow, "e n h, e h d -> e n d")
            outputs = outputs + self.narrow_bias[:, None]
            return einsum(outputs, gates, "e n d, n e -> n d")
        rows_by_expert = [column.nonzero()[:, 0] for column in gates.unbind(1)]
        # unbind instead of indexing: the gradient of an index is as large as all experts together
        weights = (self.wide, self.wide_bias, self.narrow, self.narrow_bias)
        experts = zip(rows_by_expert, gates.unbind(1), *(w.unbind(0) for w in weights), strict=True)
        outputs_by_expert = [
            gate[rows, None] * (F.gelu(x[rows] @ wide + wide_bias) @ narrow + narrow_bias)
            for rows, gate, wide, wide_bias, narrow, narrow_bias in experts
        ]
        values = torch.cat(outputs_by_expert)
        out = torch.zeros_like(x, dtype=values.dtype)
        return out.index_add(0, torch.cat(rows_by_expert), values).to(x.dtype)


class Routing(NamedTuple):
    """Router output for N tokens; each field has shape (N, E)."""

    scores: Tensor
    gates: Tensor  # rows sum to 1 over the selected experts
    load: Tensor  # training: probability that the expert is selected; else 1 if it is, 0 if not


class Router(nn.Module):
    """Score the experts for each token, by x W or by -|x - w_e| (Laplace), and select the `top_k`.

    In training, normal noise of standard deviation `noise` is added to the scores. The probability
    of being selected under this noise has a gradient for every expert (Shazeer et al. 2017,
    arXiv:1701.06538, appendix A), the gates only for the selected ones.
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
        """Route tokens (N, D); those with `routed` (N,) False get no expert."""
        scores = self.scores(x)
        noisy = scores + self.noise * torch.randn_like(scores) if self.training else scores
        highest = noisy.topk(min(self.top_k + 1, len(self.centres)), dim=-1)
        values, indices = highest.values[:, : self.top_k], highest.indices[:, : self.top_k]
        gates = torch.zeros_like(noisy).scatter(1, indices, values.softmax(-1))
        if self.training and self.noise > 0 and self.top_k < len(self.centres):
            load = self._selection_probability(scores, noisy, highest.values)
        else:
            load = (gates > 0).to(gates.dtype)
        unrouted = ~routed[:, None]
        return Routing(scores, gates.masked_fill(unrouted, 0), load.masked_fill(unrouted, 0))

    def _selection_probability(self, scores: Tensor, noisy: Tensor, highest: Tensor) -> Tensor:
        """Return P(score + new noise is among the `top_k`), the others' noise as drawn: (N, E).

        highest (N, top_k + 1): the highest noisy scores. To be selected, an expert must exceed the
        k-th highest of the others: number k + 1 of all if it is selected itself, else number k.
        """
        selected = noisy > highest[:, -1:]
        threshold = torch.where(selected, highest[:, -1:], highest[:, -2:-1])
        return torch.special.ndtr((scores - threshold) / self.noise)

    def scores(self, x: Tensor) -> Tensor:
        """Return the score of each expert for each token: (N, D) -> (N, E)."""
        if self.gate == "softmax":
            return x @ self.centres.T
        # |x|^2 - 2 x c + |c|^2 avoids (N, E, D) differences. The terms cancel: not in bfloat16.
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.centres.dtype)
            squared_norms = x.square().sum(-1, keepdim=True) + self.centres.square().sum(-1)
            squared_distances = squared_norms - 2 * x @ self.centres.T
            return -squared_distances.clamp(min=1e-12).sqrt()


def imbalance(gates: Tensor, load: Tensor) -> Tensor:
    """Return CV^2 of the experts' importance plus CV^2 of their load: (N, E) x 2 -> ().

    Importance is the sum of an expert's gates, load its expected number of tokens; CV is the
    coefficient of variation over the experts.
    """
    return _squared_variation(gates.sum(0)) + _squared_variation(load.sum(0))


def _squared_variation(x: Tensor) -> Tensor:
    return x.var(unbiased=False) / (x.mean().square() + 1e-10)
