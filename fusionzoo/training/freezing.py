"""Which parameters learn in a step, unfreezing, and memory options that change no result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fusionzoo.config import OptimConfig, RunConfig
from fusionzoo.encoders.base import fully_frozen, layer_numbers
from fusionzoo.errors import FusionZooError
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.structures import Phase, StepContext


def first_epoch(cfg: OptimConfig, modality: str) -> int:
    """Return the epoch, from 0, in which the encoder's last layer is unfrozen."""
    return cfg.unfreeze_at_epoch.get(modality, cfg.gradual_unfreeze.get(modality, 0))


class Unfreezing:
    """Which encoder parameters are frozen in an epoch.

    DDP needs `requires_grad` to stay constant, so frozen parameters are listed in `resting` and
    their gradients dropped before the step. Modules whose parameters are all frozen are in
    evaluation mode (running statistics stay), and below the first trained one they build no graph,
    so their activations are not held for the backward pass.
    """

    def __init__(self, model: FusionModel, cfg: OptimConfig, epochs: int) -> None:
        self.resting: list[nn.Parameter] = []  # in the epoch that was entered last
        self._epoch = -1
        self._starts: dict[int, int] = {}  # id of a parameter -> epoch in which it is unfrozen
        self._encoders = [
            (encoder, tuple(encoder.eval_modules), _starts(name, encoder, cfg, epochs))
            for name, encoder in model.named_encoders()
            if first_epoch(cfg, name)
        ]
        for encoder, _, starts in self._encoders:
            self._starts |= {id(parameter): start for parameter, start in starts}
            _Graphless.install(encoder)

    def enter(self, epoch: int) -> bool:
        """Prepare an epoch; return whether train/eval modes must be set again."""
        if epoch == self._epoch:
            return False
        self._epoch, self.resting = epoch, []
        for encoder, still, starts in self._encoders:
            frozen = [parameter for parameter, start in starts if epoch < start]
            frozen_ids = {id(p) for p in frozen}
            frozen_ids |= {id(p) for p in encoder.parameters() if not p.requires_grad}
            parts = tuple(fully_frozen(encoder, frozen_ids))
            encoder.frozen = parts == (encoder,)
            encoder.eval_modules = still if encoder.frozen else (*still, *parts)
            _Graphless.set(encoder, parts)
            self.resting += frozen
        return bool(self._encoders)

    def span(self, parameters: list[nn.Parameter]) -> list[int]:
        """Return the first and last epoch that unfreezes any of them; [] if none is frozen."""
        starts = [self._starts.get(id(parameter), 0) for parameter in parameters]
        return [min(starts), max(starts)] if any(starts) else []


class _Graphless:
    """Runs frozen modules whose inputs need no gradient without building a graph.

    By hooks that ask the module itself whether it is frozen, so that a copied model works too. A
    compiled encoder leaves them out.
    """

    @staticmethod
    def install(encoder: nn.Module) -> None:
        """Add the hooks to all modules of an encoder; they do nothing until `set`."""
        for module in encoder.modules():
            if not hasattr(module, "graphless"):
                module.register_forward_pre_hook(_Graphless._before, with_kwargs=True)
                module.register_forward_hook(_Graphless._after, always_call=True)
                module.graphless = module.graph_off = False  # type: ignore[assignment]

    @staticmethod
    def set(encoder: nn.Module, frozen_parts: tuple[nn.Module, ...]) -> None:
        """Say which parts of an encoder are frozen."""
        parts = {id(part) for part in frozen_parts}
        for module in encoder.modules():
            module.graphless = id(module) in parts  # type: ignore[assignment]

    @staticmethod
    def _before(module: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if module.graphless and torch.is_grad_enabled():
            leaves = tree_leaves((args, kwargs))
            module.graph_off = not any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
            if module.graph_off:
                torch.set_grad_enabled(False)

    @staticmethod
    def _after(module: Any, args: Any, output: Any) -> None:
        if module.graph_off:
            module.graph_off = False
            torch.set_grad_enabled(True)


def _starts(
    name: str, encoder: nn.Module, cfg: OptimConfig, epochs: int
) -> list[tuple[nn.Parameter, int]]:
    """Pair each trainable parameter with the epoch in which it is unfrozen."""
    first, epochs_per_layer = first_epoch(cfg, name), cfg.gradual_unfreeze.get(name, 0)
    if first >= epochs:
        setting = "unfreeze_at_epoch" if name in cfg.unfreeze_at_epoch else "gradual_unfreeze"
        raise FusionZooError(
            f"--optim.{setting}.{name} {first}: the run ends after {epochs}, so its encoder"
            f" would never learn; --encoders.{name}.freeze all says so"
        )
    numbers = layer_numbers(encoder)
    trained = [(numbers[key], p) for key, p in encoder.named_parameters() if p.requires_grad]
    order = sorted({number for number, _ in trained}, reverse=True)
    return [
        (parameter, first + epochs_per_layer * order.index(number)) for number, parameter in trained
    ]


def frozen_in_phase(model: FusionModel, phase: Phase) -> list[nn.Parameter]:
    """Return the parameters that are frozen in a phase of the fusion."""
    named = model.fusion.named_parameters()
    frozen = [p for name, p in named if not name.startswith(phase.trains)]
    return frozen if phase.encoders else [*frozen, *model.encoders.parameters()]


class FreezePlan:
    """Which parameters are frozen and which modules are in evaluation mode, step by step."""

    def __init__(self, module: nn.Module, model: FusionModel, cfg: RunConfig) -> None:
        self.phases = model.fusion.phases
        self.unfreezing = Unfreezing(model, cfg.optim, cfg.train.epochs)
        self._module, self._model = module, model
        self._by_phase = [frozen_in_phase(model, phase) for phase in self.phases]
        self._by_modality = {
            name: _specific_to(module, set(model.encoders), name) for name in model.encoders
        }
        self._modes: tuple[int, str | None] | None = None  # phase and turn that modes are set for

    def frozen(self, context: StepContext) -> list[nn.Parameter]:
        """Return the parameters that are frozen in this phase, epoch and turn."""
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
        encoders = self._model.encoders
        encoders.train(self.phases[context.phase].encoders)
        for name, encoder in encoders.items():
            if context.turn not in (None, name):
                encoder.eval()
        self._modes = modes
        return True


def _specific_to(module: nn.Module, modalities: set[str], modality: str) -> list[nn.Parameter]:
    """Return the parameters specific to one modality: encoder, head and projection."""
    maps = [
        m for m in module.modules() if isinstance(m, nn.ModuleDict) and {*m.keys()} == modalities
    ]
    return [p for by_modality in maps for p in by_modality[modality].parameters()]
