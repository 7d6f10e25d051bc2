"""Encoders that are frozen for a time: until an epoch, or layer by layer from the last one down."""

from __future__ import annotations

from torch import nn

from fusionzoo.config import OptimConfig
from fusionzoo.encoders.layers import fully_frozen, layer_numbers
from fusionzoo.errors import FusionZooError
from fusionzoo.model import FusionModel


def first_epoch(cfg: OptimConfig, modality: str) -> int:
    """Return the epoch, from 0, in which the encoder's last layer begins to learn."""
    return cfg.unfreeze_at_epoch.get(modality, cfg.gradual_unfreeze.get(modality, 0))


class Unfreezing:
    """What of the encoders rests in an epoch.

    DDP wants every parameter to keep `requires_grad`, so what rests is named here, and its gradient
    is dropped before the step. Modules all of whose parameters rest are in evaluation mode: no
    running statistic moves. An encoder that rests as a whole builds no graph.
    """

    def __init__(self, model: FusionModel, cfg: OptimConfig, epochs: int) -> None:
        self.resting: list[nn.Parameter] = []  # in the epoch that was entered last
        self._epoch = -1
        self._starts: dict[int, int] = {}  # id of a parameter -> epoch in which it begins to learn
        self._encoders = [
            (encoder, tuple(encoder.eval_modules), _starts(name, encoder, cfg, epochs))
            for name, encoder in model.named_encoders()
            if first_epoch(cfg, name)
        ]
        for _, _, starts in self._encoders:
            self._starts |= {id(parameter): start for parameter, start in starts}

    def enter(self, epoch: int) -> bool:
        """Prepare an epoch; return whether modules must be told their mode again."""
        if epoch == self._epoch:
            return False
        self._epoch, self.resting = epoch, []
        for encoder, still, starts in self._encoders:
            own = [parameter for parameter, start in starts if epoch < start]
            rests = {id(p) for p in own}
            rests |= {id(p) for p in encoder.parameters() if not p.requires_grad}
            parts = tuple(fully_frozen(encoder, rests))
            encoder.frozen = parts == (encoder,)
            encoder.eval_modules = still if encoder.frozen else (*still, *parts)
            self.resting += own
        return bool(self._encoders)

    def span(self, parameters: list[nn.Parameter]) -> list[int]:
        """Return the first and the last epoch in which they begin to learn; [] if in epoch 0."""
        starts = [self._starts.get(id(parameter), 0) for parameter in parameters]
        return [min(starts), max(starts)] if any(starts) else []


def _starts(
    name: str, encoder: nn.Module, cfg: OptimConfig, epochs: int
) -> list[tuple[nn.Parameter, int]]:
    """Pair each trainable parameter with the epoch in which it begins to learn."""
    first, each = first_epoch(cfg, name), cfg.gradual_unfreeze.get(name, 0)
    if first >= epochs:
        setting = "unfreeze_at_epoch" if name in cfg.unfreeze_at_epoch else "gradual_unfreeze"
        raise FusionZooError(
            f"--optim.{setting}.{name} {first}: the run ends after {epochs}, so its encoder"
            f" would never learn; --encoders.{name}.freeze all says so"
        )
    numbers = layer_numbers(encoder)
    trained = [(numbers[key], p) for key, p in encoder.named_parameters() if p.requires_grad]
    order = sorted({number for number, _ in trained}, reverse=True)
    return [(parameter, first + each * order.index(number)) for number, parameter in trained]
