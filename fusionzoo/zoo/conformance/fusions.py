"""Helpers of the checks of fusions: small fusions, features with gaps, comparison of outputs.

Shapes: `B` batch, `M` modalities, `T` tokens, `D` width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.fusion import FUSIONS, Fusion
from fusionzoo.structures import Features, FusionOutput, StepContext

from .targets import find

Maker = Callable[..., Fusion]  # (dims, dim, num_outputs) -> Fusion
Inputs = dict[str, Features]
DIMS = {"image": 5, "text": 7, "audio": 3, "depth": 4, "table": 6}
DIM, OUTPUTS = 8, 4


def build(
    make: Maker,
    modalities: int = 3,
    *,
    dtype: torch.dtype = torch.float64,
    outputs: int = OUTPUTS,
) -> Fusion:
    """Build a fusion of the first few modalities, every parameter away from its initial value."""
    torch.manual_seed(0)
    fusion = make(dict(itertools.islice(DIMS.items(), modalities)), DIM, outputs)
    with torch.no_grad():
        for parameter in fusion.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return fusion.to(dtype).eval()


def features(presence: Tensor, *, seed: int = 1, dtype: torch.dtype = torch.float64) -> Inputs:
    """Make features of different lengths with padding, absent where `presence` (B, M) is False."""
    draw = torch.Generator().manual_seed(seed)
    by_modality = {}
    for column, (name, width) in enumerate(itertools.islice(DIMS.items(), presence.shape[1])):
        rows, length = len(presence), 3 + column
        tokens = torch.randn(rows, length, width, generator=draw).to(dtype)
        counts = torch.randint(2, length + 1, (rows,), generator=draw)
        mask = (torch.arange(length) < counts[:, None]) & presence[:, column, None]
        pooled = torch.randn(rows, width, generator=draw).to(dtype)
        by_modality[name] = Features(tokens, mask, pooled)
    return by_modality


def patterns(modalities: int) -> Tensor:
    """Return presence for every subset of modalities, from all to none: (2^M, M)."""
    rows = itertools.product([True, False], repeat=modalities)
    return torch.tensor(list(rows))


def full(rows: int, modalities: int = 3) -> Tensor:
    """Return presence of all modalities in all rows: (rows, M)."""
    return torch.ones(rows, modalities, dtype=torch.bool)


def poison(inputs: Mapping[str, Features], value: float) -> Inputs:
    """Overwrite padded tokens, and the pooled vectors of rows without the modality."""
    return {
        name: Features(
            torch.where(x.mask[..., None], x.tokens, value),
            x.mask,
            torch.where(x.mask.any(1)[:, None], x.pooled, value),
        )
        for name, x in inputs.items()
    }


def tensors_of(output: FusionOutput) -> dict[str, Tensor]:
    """Return an output's tensors by name."""
    tensors = {"embedding": output.embedding, "logits": output.logits}
    tensors |= {f"unimodal[{name}]": x for name, x in output.unimodal.items()}
    return tensors if output.weights is None else {**tensors, "weights": output.weights}


def assert_equal(
    output: FusionOutput, expected: FusionOutput, why: str, tolerance: float = 1e-10
) -> None:
    """Require equal outputs, to the bit where `tolerance` is 0."""
    tensors, wanted = tensors_of(output), tensors_of(expected)
    assert tensors.keys() == wanted.keys(), f"{why}: outputs {list(wanted)} became {list(tensors)}"
    for name, x in tensors.items():
        if not torch.allclose(x, wanted[name], rtol=tolerance, atol=tolerance, equal_nan=True):
            row = (x != wanted[name]).flatten(1).any(1).nonzero()[0, 0].item()
            off = (x - wanted[name]).abs().max().item()
            raise AssertionError(f"{why}: {name} differs by {off:.2g}, first in row {row}")


def rows_of(inputs: Mapping[str, Features], rows: Any) -> Inputs:
    """Return some rows."""
    return {name: Features(*(x[rows] for x in features)) for name, features in inputs.items()}


def loss_of(output: FusionOutput) -> Tensor:
    """Return a number that depends on every output."""
    return torch.stack([x.square().sum() for x in tensors_of(output).values()]).sum()


def entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of each row."""
    return F.cross_entropy(logits, target, reduction="none")


def own_loss(fusion: Fusion, output: FusionOutput, phase: int = 0) -> Tensor:
    """Return the fusion's own loss of each row, (B,), as training computes it."""
    rows = torch.arange(len(output.logits))
    target = rows % output.logits.shape[1]
    memory = fusion.prepare(target)
    context = StepContext(rows=rows, epoch=1.5, phase=phase, criterion=entropy, memory=memory)
    return fusion.loss(output, target, context)


def counts_for(make: Maker) -> list[int]:
    """Return the numbers of modalities that the fusion accepts, of 1, 2, 3 and 5."""
    cls = getattr(make, "func", make)  # of a `partial` with settings
    entry = next((FUSIONS[name] for name in FUSIONS if FUSIONS[name].cls is cls), None)
    least = entry.at_least if entry is not None else getattr(cls, "at_least", 1)
    return [n for n in (1, 2, 3, 5) if n >= least]


def maker(target: str, settings: Mapping[str, Any] | None = None) -> Maker:
    """Return what builds the fusion of a name, `module:Class` or `file.py:Class`."""
    cls: Maker = find(target, FUSIONS)
    return partial(cls, **settings) if settings else cls
