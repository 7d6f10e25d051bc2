"""The least informative coupling of batches of samples (mode `batch` of `pid`).

Shapes: `N` samples, `B` of a batch, `D` width, `C` classes, `H` embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from .codes import Features
from .decompose import Parts, information
from .probes import Probabilities

BATCH, EMBEDDING, HIDDEN = 256, 10, 64
RATE, EPOCHS, FEWEST_STEPS = 1e-3, 10, 200
ROUNDS, TOLERANCE = 500, 0.01  # of Sinkhorn's scaling while it learns, in p(y | x)
LAST_ROUNDS, LAST_TOLERANCE = 5000, 1e-7  # of the scaling that is measured


class Coupling(nn.Module):
    """Give each pair of a batch a weight for each class.

    A_y(i, j) = exp(g_1(x_1i)_y g_2(x_2j)_y / sqrt H), with networks g_m of one hidden layer, whose
    outputs are standardised over their H entries.
    """

    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.networks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes * EMBEDDING)
            )
            for width in widths
        )

    def forward(self, sources: Sequence[Tensor]) -> Tensor:
        """Return A: (B, D_1), (B, D_2) -> (C, B, B)."""
        first, second = (
            layer_norm(g(x).unflatten(1, (self.classes, EMBEDDING)), (EMBEDDING,)).transpose(0, 1)
            for g, x in zip(self.networks, sources, strict=True)
        )
        return (first @ second.mT / sqrt(EMBEDDING)).exp()


def scale(a: Tensor, first: Tensor, second: Tensor, rounds: int, tolerance: float) -> Tensor:
    """Scale A (C, B, B) to the marginals (C, B) of both sources, class by class, by Sinkhorn.

    Ends where no p(y, x) misses its target by more than `tolerance` / B.
    """
    column = torch.ones_like(second)[..., None]
    row = first[..., None] / (a @ column)
    for _ in range(rounds):
        column = second[..., None] / (a.mT @ row)
        sums = a @ column
        error = (row * sums)[..., 0] - first
        row = first[..., None] / sums
        if error.detach().abs().max() * first.shape[1] < tolerance:
            break
    return a * row * (second[..., None] / (a.mT @ row)).mT


def coupled_information(q: Tensor) -> Tensor:
    """Return I_q(X1 X2; Y) in bits: (C, B, B) -> ()."""
    shares = q.sum((1, 2), keepdim=True)
    return (q * (q / (q.sum(0) * shares)).log()).sum() / log(2)


def marginals(probabilities: Sequence[Probabilities]) -> tuple[Probabilities, ...]:
    """Return p(x, y) of a batch for p(y | x_1), p(y | x_2), p(y | x_12), each (B, C).

    The shares of the classes are those of the last, so that a coupling exists.
    """
    joint = probabilities[2] / len(probabilities[2])
    shares = joint.sum(0)
    return (*(p * (shares / p.sum(0)) for p in probabilities[:2]), joint)


def decompose_batches(
    sources: Sequence[Features], probabilities: Sequence[Probabilities], seed: int
) -> Parts:
    """Return the mean parts of batches of up to 256 rows: two (N, D), three (N, C) -> bits.

    The networks g learn for 10 epochs, at least 200 steps, to lower I_q of the batches, whose q has
    the marginals p(y | x_1) and p(y | x_2) of the probes. R = I_1 + I_2 - I_q, U_m = I_m - R and
    S = I_12 - I_q, of the probes' probabilities in the batch (Liang et al. 2023, NeurIPS,
    arXiv:2302.12247). Memory: C x 256 x 256 numbers.
    """
    order = np.random.default_rng(seed).permutation(len(sources[0]))
    batches = np.array_split(order, ceil(len(order) / BATCH))
    scaled = [torch.from_numpy((x - x.mean(0)) / np.maximum(x.std(0), 1e-12)) for x in sources]
    tables = [marginals([p[rows] for p in probabilities]) for rows in batches]
    coupling = _learn(scaled, batches, tables, seed)
    parts = []
    with torch.no_grad():
        for rows, (first, second, joint) in zip(batches, tables, strict=True):
            q = _couple(coupling, scaled, rows, first, second, LAST_ROUNDS, LAST_TOLERANCE)
            least, alone_1, alone_2 = (
                float(coupled_information(q)),
                information(first),
                information(second),
            )
            redundancy = alone_1 + alone_2 - least
            both = information(joint)
            parts.append((redundancy, alone_1 - redundancy, alone_2 - redundancy, both - least))
    return Parts(*np.mean(parts, axis=0).tolist())


def _learn(
    sources: Sequence[Tensor],
    batches: Sequence[NDArray[np.int64]],
    tables: Sequence[tuple[Probabilities, ...]],
    seed: int,
) -> Coupling:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        coupling = Coupling([x.shape[1] for x in sources], tables[0][0].shape[1]).double()
    optimizer = torch.optim.Adam(coupling.parameters(), lr=RATE)
    for _ in range(max(EPOCHS, ceil(FEWEST_STEPS / len(batches)))):
        for rows, (first, second, _joint) in zip(batches, tables, strict=True):
            q = _couple(coupling, sources, rows, first, second, ROUNDS, TOLERANCE)
            optimizer.zero_grad()
            coupled_information(q).backward()
            optimizer.step()
    return coupling


def _couple(
    coupling: Coupling,
    sources: Sequence[Tensor],
    rows: NDArray[np.int64],
    first: Probabilities,
    second: Probabilities,
    rounds: int,
    tolerance: float,
) -> Tensor:
    a = coupling([x[torch.from_numpy(rows)] for x in sources])
    return scale(a, torch.from_numpy(first).mT, torch.from_numpy(second).mT, rounds, tolerance)
