"""Parts of `i2moe`: losses of its experts, running moments of features, the router's MLP.

Shapes: `B` batch, `M` modalities, `E` = M + 2 experts, `K` outputs, `D` width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.structures import Features

from ..base import RunningMeans, present_mean

MARGIN = 1.0  # by which losing a modality should change the answer more than losing another


def interaction_losses(answers: Tensor, perturbed: Tensor, present: Tensor) -> Tensor:
    """Return the losses of all experts: (B, E, K), (B, E, M, K) -> (B, E).

    The order of the experts is that of `I2MoE.expert_names`; `present` is (B, M).
    """
    modalities = present.shape[1]
    before = answers[:, :, None].expand_as(perturbed)
    distance = F.pairwise_distance(before, perturbed, eps=1e-7)  # (B, E, M)
    single = answers.shape[-1] == 1  # the cosine of two numbers is 1 or -1
    change = (before - perturbed).square().mean(-1) if single else distance
    losses = []
    for i in range(modalities):
        hinge = (change[:, i] - change[:, i, i, None] + MARGIN).clamp(min=0)
        others = present & present[:, i, None]
        others = others & (torch.arange(modalities, device=present.device) != i)
        losses.append(present_mean(hinge, others))
    if single:
        synergy, redundancy = -change[:, -2].clamp(max=MARGIN), change[:, -1]
    else:
        similarity = F.cosine_similarity(before, perturbed, dim=-1)
        synergy, redundancy = similarity[:, -2], 1 - similarity[:, -1]
    losses += [present_mean(synergy, present), present_mean(redundancy, present)]
    return torch.stack(losses, dim=1)


class RunningMoments(RunningMeans):
    """Running mean and standard deviation of each feature, of tokens and of pooled vectors."""

    def __init__(self, dims: Mapping[str, int]) -> None:
        super().__init__(
            {f"{m}_{kind}": 2 * w for m, w in dims.items() for kind in ("tokens", "pooled")}
        )

    def observe(
        self,
        tokens: Mapping[str, Tensor],
        pooled: Mapping[str, Tensor],
        features: Mapping[str, Features],
    ) -> None:
        """Update the moments from the real tokens and the present pooled vectors of a batch."""
        vectors, masks = {}, {}
        for name in tokens:
            mask = features[name].mask
            for kind, x, rows in (
                ("tokens", tokens[name].flatten(0, 1), mask.flatten()),
                ("pooled", pooled[name], mask.any(1)),
            ):
                vectors[f"{name}_{kind}"] = torch.cat([x, x.square()], dim=-1)
                masks[f"{name}_{kind}"] = rows
        self._update(vectors, masks)

    def of(self, name: str) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation, (D,) each."""
        mean, square = self.mean(name).chunk(2)
        return mean, (square - mean.square()).clamp(min=0).sqrt()


@contextmanager
def paused_means(module: nn.Module) -> Iterator[None]:
    """Keep the running means of a module from learning from noise."""
    learning = [x for x in module.modules() if isinstance(x, RunningMeans) and x.training]
    for means in learning:
        means.training = False
    try:
        yield
    finally:
        for means in learning:
            means.training = True


def perceptron(sizes: Sequence[int], dropout: float) -> nn.Sequential:
    """Return an MLP of some widths, with ReLU and dropout on its hidden layers."""
    layers: list[nn.Module] = []
    for width, following in pairwise(sizes):
        layers += [nn.Linear(width, following), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers[:-2])
