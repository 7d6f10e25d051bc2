"""What does not learn in a step: by the fusion's phase, the epoch, and whose turn it is."""

from __future__ import annotations

from torch import nn

from fusionzoo.config import RunConfig
from fusionzoo.model import FusionModel
from fusionzoo.structures import Phase, StepContext

from .objective import Objective
from .optim.unfreezing import Unfreezing


def frozen_in_phase(model: FusionModel, phase: Phase) -> list[nn.Parameter]:
    """Return the parameters that do not learn in a phase of the fusion."""
    named = model.fusion.named_parameters()
    frozen = [p for name, p in named if not name.startswith(phase.trains)]
    return frozen if phase.encoders else [*frozen, *model.encoders.parameters()]


class FreezePlan:
    """Which parameters do not learn, and which modules are in evaluation mode, step by step."""

    def __init__(self, module: Objective, cfg: RunConfig) -> None:
        model = module.model
        self.phases = model.fusion.phases
        self.unfreezing = Unfreezing(model, cfg.optim, cfg.train.epochs)
        self._module = module
        self._by_phase = [frozen_in_phase(model, phase) for phase in self.phases]
        self._by_modality = {name: _specific_to(module, name) for name in model.encoders}
        self._modes: tuple[int, str | None] | None = None  # phase and turn that modes are set for

    def frozen(self, context: StepContext) -> list[nn.Parameter]:
        """Return the parameters that do not learn in this phase, epoch and turn."""
        frozen = [*self._by_phase[context.phase], *self.unfreezing.resting]
        for name, parameters in self._by_modality.items():
            frozen += parameters if context.turn not in (None, name) else []
        return frozen

    def set_modes(self, wrapped: nn.Module, context: StepContext) -> bool:
        """Set train/eval mode for this phase, epoch and turn; return whether anything changed.

        Skipped if nothing did, since the walk over all modules is slow.
        """
        modes = (context.phase, context.turn)
        thawed = self.unfreezing.enter(int(context.epoch))
        if self._module.training and modes == self._modes and not thawed:
            return False
        wrapped.train()
        encoders = self._module.model.encoders
        encoders.train(self.phases[context.phase].encoders)
        for name, encoder in encoders.items():
            if context.turn not in (None, name):
                encoder.eval()
        self._modes = modes
        return True


def _specific_to(module: Objective, modality: str) -> list[nn.Parameter]:
    """Return the parameters specific to one modality: encoder, head and projection."""
    modalities = set(module.model.encoders)
    maps = [
        m for m in module.modules() if isinstance(m, nn.ModuleDict) and {*m.keys()} == modalities
    ]
    return [p for by_modality in maps for p in by_modality[modality].parameters()]
