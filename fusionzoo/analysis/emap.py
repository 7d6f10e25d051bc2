"""How much of a model's score needs interactions between modalities (EMAP).

Shapes: `n` samples, `K` outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.eval_mode import quiet
from fusionzoo.fusion import Fusion
from fusionzoo.structures import Features

CHUNK = 4096  # rows of a pass of the fusion
# Logits (R, K) of R samples put together from rows of each modality, (R,) each.
Logits = Callable[[Sequence[NDArray[np.int64]]], Tensor]


@dataclass(frozen=True, kw_only=True)
class Interactions:
    """A model's score with and without interactions."""

    metric: str
    model: float
    additive: float  # of the best additive function of its logits
    share: float  # of the logits' variance that no additive function has
    samples: int  # complete ones

    @property
    def gain(self) -> float:
        """How much interactions add to the score."""
        return self.model - self.additive

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "gain": self.gain}


def project(logits: Logits, rows: int, modalities: int, completions: int, seed: int) -> Tensor:
    """Return the logits' projection on additive functions of the modalities: (n, K).

    f_m(i) is the mean of F over the other modalities' rows, EMAP(i) = sum_m f_m(i) - (M - 1) mean F
    (Hessel and Lee 2020, EMNLP, arXiv:2010.06572). Two modalities: all n^2 pairs. More: the same
    `completions` random rows of the others for every i, and mean F over as many random matchings.
    """
    if modalities == 2:
        every = np.arange(rows)
        table = torch.stack([logits([np.full(rows, row), every]) for row in range(rows)])
        return table.mean(1) + table.mean(0) - table.mean((0, 1))
    generator = np.random.default_rng(seed)
    every = np.arange(rows)
    mean = torch.stack(
        [
            logits([generator.permutation(rows) for _ in range(modalities)]).mean(0)
            for _ in range(completions)
        ]
    ).mean(0)
    projection = mean.expand(rows, -1).clone()
    for modality in range(modalities):
        total = torch.zeros_like(projection)
        for _ in range(completions):
            drawn = generator.integers(rows, size=modalities)
            chosen = [np.full(rows, row) for row in drawn]
            chosen[modality] = every
            total += logits(chosen)
        single = total / completions
        projection += single - single.mean(0)
    return projection


def logits_of(fusion: Fusion, features: Mapping[str, Features]) -> Logits:
    """Return the function from rows of each modality to the fusion's logits."""

    @torch.no_grad()
    def logits(chosen: Sequence[NDArray[np.int64]]) -> Tensor:
        parts = []
        for start in range(0, len(chosen[0]), CHUNK):
            rows = [torch.from_numpy(x[start : start + CHUNK]) for x in chosen]
            mixed = {
                name: Features(*(part[index.to(part.device)] for part in x))
                for (name, x), index in zip(features.items(), rows, strict=True)
            }
            with quiet(fusion):
                parts.append(fusion(mixed).logits.double().cpu())
        return torch.cat(parts)

    return logits


def interactions(
    fusion: Fusion,
    features: Mapping[str, Features],
    score: Callable[[Tensor], tuple[str, float]],
    *,
    completions: int = 256,
    seed: int = 0,
) -> Interactions:
    """Compare a fusion with its additive projection, on samples that have every modality."""
    logits = logits_of(fusion, features)
    count = len(next(iter(features.values())).pooled)
    model = logits([np.arange(count)] * len(features))
    additive = project(logits, count, len(features), completions, seed)
    variance = (model - model.mean(0)).square().sum()
    residual = (model - additive).square().sum()
    metric, model_score = score(model)
    return Interactions(
        metric=metric,
        model=model_score,
        additive=score(additive)[1],
        share=float(residual / variance) if variance > 0 else 0.0,
        samples=count,
    )
