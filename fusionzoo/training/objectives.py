"""What DDP wraps: the model, each modality's own head beside it, and their losses per row.

Shapes: `B` rows, `K` outputs, `D` width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model import FusionModel
from ..structures import Batch, Features, Sample


class Step(NamedTuple):
    """A forward pass, row by row, so that any strategy can average it as it must."""

    logits: Tensor  # (B, K) of the fusion
    loss: Tensor  # (B,)
    unimodal: dict[str, Tensor]  # modality -> (B, K) of its own head
    unimodal_loss: dict[str, Tensor]  # modality -> (B,), 0 where the row lacks it


class UnimodalHeads(nn.Module):
    """A two-layer classifier of each modality alone, on its encoder's pooled features.

    It says what the fusion gained, and must not change what the fusion learns: no gradient flows
    back into the encoders, and nothing random happens here. A row that lacks the modality is
    answered with the training split's class frequencies, `prior` (K,).
    """

    prior: Tensor

    def __init__(self, dims: Mapping[str, int], dim: int, prior: Tensor) -> None:
        super().__init__()
        self.register_buffer("prior", prior)
        self.heads = nn.ModuleDict(
            {
                name: nn.Sequential(
                    nn.LayerNorm(width),
                    nn.Linear(width, dim),
                    nn.GELU(),
                    nn.Linear(dim, len(prior)),
                )
                for name, width in dims.items()
            }
        )

    def forward(self, features: Mapping[str, Features]) -> dict[str, Tensor]:
        return {name: self._logits(name, features[name]) for name in self.heads}

    def _logits(self, name: str, features: Features) -> Tensor:
        present = features.mask.any(1)[:, None]  # (B, 1)
        pooled = torch.where(present, features.pooled.detach(), 0)
        logits = self.heads[name](pooled)
        return torch.where(present, logits, self.prior.log().to(logits.dtype))


class Objective(nn.Module):
    """Cross-entropy of the fusion and of each modality's own head."""

    def __init__(
        self, model: FusionModel, heads: UnimodalHeads, label_smoothing: float = 0
    ) -> None:
        super().__init__()
        self.model, self.heads, self.label_smoothing = model, heads, label_smoothing

    def forward(self, batch: Batch) -> Step:
        features = self.model.encode(batch)
        logits = self.model.fusion(features).logits
        unimodal = self.heads(features)
        return Step(
            logits,
            self._loss(logits, batch),
            unimodal,
            {
                name: self._loss(own, batch) * features[name].mask.any(1)
                for name, own in unimodal.items()
            },
        )

    def _loss(self, logits: Tensor, batch: Batch) -> Tensor:
        assert batch.target is not None
        smoothing = self.label_smoothing
        return F.cross_entropy(
            logits.float(), batch.target, reduction="none", label_smoothing=smoothing
        )


def freeze_unused(objective: Objective) -> list[str]:
    """Freeze the parameters that no loss reads, and return their names.

    A fusion that reads tokens leaves, say, an encoder's pooling head without a gradient. DDP would
    wait for it for ever; weight decay would shrink it. Found by one backward pass over two blank
    rows that claim to have every modality.
    """
    training = objective.training
    objective.eval()
    step = objective(_blank_batch(objective.model))
    (step.loss.sum() + sum(own.sum() for own in step.unimodal_loss.values())).backward()
    unused = []
    for name, parameter in objective.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.requires_grad_(False)
            unused.append(name.removeprefix("model."))
        parameter.grad = None
    objective.train(training)
    return unused


def _blank_batch(model: FusionModel) -> Batch:
    blank = Sample("", "", 0, dict.fromkeys(model.encoders))
    batch: Batch = model.collate()([blank, blank])
    return batch._replace(present=torch.ones_like(batch.present))
