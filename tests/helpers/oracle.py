"""What the tests of single fusions share: modules away from their start, inputs, comparison."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from fusionzoo.fusion import Fusion, create_fusion
from fusionzoo.structures import Features, StepContext
from fusionzoo.testing.fusions import DIMS, build, entropy

WIDTHS = dict(itertools.islice(DIMS.items(), 3))
TWO = dict(itertools.islice(DIMS.items(), 2))


def made(name: str, dims: dict[str, int] | None = None, **settings: object) -> Fusion:
    """Build a fusion in float64, every parameter away from its initial value."""
    return build(lambda *_: create_fusion(name, dims or WIDTHS, 8, 4, **settings))


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def copy(source: Fusion, target: Fusion, *, strict: bool = True) -> Fusion:
    """Give `target` the weights of `source`, those that it has too."""
    theirs = target.state_dict()
    own = {k: v for k, v in source.state_dict().items() if k in theirs}
    target.load_state_dict(own if strict else {**theirs, **own})
    return target


def given(**pooled: Tensor) -> dict[str, Features]:
    """Make features of one token each."""
    return {
        m: Features(x[:, None], torch.ones(len(x), 1, dtype=torch.bool), x)
        for m, x in pooled.items()
    }


def context(rows: int, *, epoch: float = 1.0, phase: int = 0, memory: object = None) -> StepContext:
    return StepContext(
        rows=torch.arange(rows), epoch=epoch, phase=phase, criterion=entropy, memory=memory
    )  # type: ignore[arg-type]


def aligned(fusion: Fusion, features: dict[str, Features]) -> dict[str, Tensor]:
    """Return a_m = V_m x_m + c_m of complete samples."""
    return {
        m: features[m].pooled @ fusion.project[m].weight.T + fusion.project[m].bias
        for m in fusion.dims
    }


def dempster(first: Tensor, second: Tensor) -> Tensor:
    """The reduced rule for two opinions, from evidence to evidence, as the paper writes it."""
    classes = first.shape[-1]
    masses = []
    for evidence in (first, second):
        strength = evidence.sum(-1, keepdim=True) + classes
        masses.append((evidence / strength, classes / strength))
    (b1, u1), (b2, u2) = masses
    conflict = b1.sum(-1, keepdim=True) * b2.sum(-1, keepdim=True) - (b1 * b2).sum(-1, keepdim=True)
    belief = (b1 * b2 + b1 * u2 + b2 * u1) / (1 - conflict)
    doubt = u1 * u2 / (1 - conflict)
    return belief * classes / doubt
