"""The base class of training strategies: what a strategy may change in a step, and when.

Shapes: `B` batch, `M` modalities, `K` outputs, `N` samples of the training split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusionzoo.distributed.process_group import World, total
from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.fusion import Fusion
from fusionzoo.model import FusionModel
from fusionzoo.registry import Entry, Registry
from fusionzoo.rng import seed_of
from fusionzoo.structures import Batch, Features, FusionOutput, StepContext

from ._types import LossTerm, MeanLoss, RunningTrainer, StrategyInputs

__all__ = [
    "BALANCE",
    "Balance",
    "BatchSum",
    "LossTerm",
    "MeanLoss",
    "RunningTrainer",
    "StrategyInputs",
    "at_least_float32",
    "build_balance",
    "pooled_of",
    "presence",
]


class Balance(nn.Module):
    """Change how a model is trained, never what it is: evaluation and the saved model know nothing.

    The hooks below stand in the order in which training calls them, and only while the strategy is
    `active`; a strategy that is switched off leaves every weight as plain training would, bit for
    bit. So nothing here may draw from the global generators: `draw` gives a generator that depends
    on the seed and its key alone, the same on every process.
    Buffers are state: checkpoints keep them, and they must be equal on all processes (sum over
    `world` what each process computed). Parameters learn in a group of their own, clipped by their
    own norm.

    Settings:
        start: epochs of training before the strategy becomes active, 0 or more; may be fractional
        end: epochs of training after which it becomes inactive; None for never
    """

    surgery = False  # whether it decides how fast each encoder learns; a run takes one of these
    shards = True  # whether it works with weights that FSDP shards
    aligns = False  # whether `embed` maps modalities into one space, where partners are near
    encoders_only = False  # whether it changes nothing where all encoders are frozen
    raw_inputs = True  # whether it may read or change `batch.inputs`, or read tokens of features
    mixes_rows = False  # whether rows stand for two samples; then only family `data` goes with it
    two_pass = False  # whether `combine_gradients` wants those of `extra_losses` by themselves
    makes_views = False  # whether `views` returns something
    lr_scale = 1.0  # learning rate of its own parameters, as a multiple of the base rate

    def __init__(
        self, inputs: StrategyInputs, *, start: float = 0.0, end: float | None = None
    ) -> None:
        super().__init__()
        self.world, self.seed, self.start, self.end = inputs.world, inputs.seed, start, end
        self.widths = {name: encoder.dim for name, encoder in inputs.model.named_encoders()}
        self._model = (inputs.model,)  # in a tuple, so that it is no submodule

    @property
    def model(self) -> FusionModel:
        """The model that is trained."""
        return self._model[0]

    @property
    def fusion(self) -> Fusion:
        """The model's fusion."""
        return self.model.fusion

    @property
    def name(self) -> str:
        """The name it is registered under."""
        registered = (name for name in BALANCE if BALANCE[name].cls is type(self))
        return next(registered, type(self).__name__)

    def require(self, condition: bool, message: str) -> None:
        """Refuse a setting in one line."""
        if not condition:
            raise FusionZooError(f"{self.name}: {message}")

    def require_classes(self, targets: Tensor) -> None:
        """Refuse targets other than one class for each sample."""
        self.require(
            targets.ndim == 1 and not targets.is_floating_point(),
            "it scores the probability of the right class, so the target must be one class for"
            " each sample",
        )

    def per_modality(self, setting: str, value: float | Mapping[str, float]) -> dict[str, float]:
        """Resolve a number for all modalities, or one for some of them (the others have 0)."""
        if not isinstance(value, Mapping):
            return dict.fromkeys(self.widths, float(value))
        for modality in value:
            self.require(
                modality in self.widths,
                f"{setting}.{modality}: the model has no modality {modality!r}."
                f"{did_you_mean(modality, self.widths)} It has: {', '.join(self.widths)}.",
            )
        return {name: float(value.get(name, 0)) for name in self.widths}

    def active(self, context: StepContext) -> bool:
        """Whether the strategy does anything; subclasses add their own ways of being off."""
        return self.start <= context.epoch and (self.end is None or context.epoch < self.end)

    def begin_epoch(
        self, trainer: RunningTrainer, loaders: Mapping[str, Any], context: StepContext
    ) -> None:
        """Prepare an epoch; not called when a run resumes within one."""

    def turns(self, context: StepContext) -> Sequence[str | None]:
        """Return who learns in this step, in turn: a modality's encoder alone, or None for all."""
        return (None,)

    def edit_batch(self, batch: Batch, rows: Tensor, context: StepContext) -> Batch:
        """Change the batch before it is encoded; on the CPU."""
        return batch

    def edit_features(self, context: StepContext) -> Mapping[str, Features]:
        """Change the features that the fusion reads; the modalities' own heads read the others."""
        return context.features

    def views(self, batch: Batch, rows: Tensor, context: StepContext) -> tuple[Batch, Batch]:
        """Return two augmented versions of the batch, after `edit_batch` and on the CPU.

        Called where `makes_views` is set. Both are encoded besides the batch itself, and
        `extra_losses` finds their features in `context.views`. `batch.second` has the inputs of a
        second augmentation by the encoders' processors.
        """
        raise NotImplementedError

    def edit_output(self, context: StepContext) -> FusionOutput:
        """Change the fusion's output before its loss is computed."""
        return context.output

    def main_loss(self, context: StepContext, loss: LossTerm) -> LossTerm:
        """Change the fusion's own loss."""
        return loss

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        """Return losses to add to the fusion's own; each is logged under its name."""
        return {}

    def weigh(self, means: Mapping[str, MeanLoss]) -> Mapping[str, MeanLoss]:
        """Change the mean losses of a batch before they are summed, those of other strategies too.

        The fusion's own loss has the name "". Names must stay. The log holds the losses before.
        """
        return means

    def combine_gradients(self, main: list[Tensor], extra: list[Tensor]) -> list[Tensor]:
        """Combine an encoder's gradients of the main loss and of `extra_losses`.

        Must commute with scaling, for a loss scaler may have scaled both.
        """
        raise NotImplementedError

    def edit_gradients(
        self, encoders: Mapping[str, Sequence[nn.Parameter]], context: StepContext
    ) -> None:
        """Change the gradients, unscaled and summed over processes, before they are clipped."""

    def after_step(self) -> None:
        """Constrain the strategy's own parameters after an update."""

    def draw(self, *key: int) -> torch.Generator:
        """Return a CPU generator that depends on the seed, the strategy's name and `key` alone."""
        return torch.Generator().manual_seed(seed_of(self.seed, self.name, *key))


class BatchSum:
    """A sum over the batches of one update, and at its end over the processes."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.update: tuple[int, str | None] | None = None  # step and turn that `values` belong to

    def add(self, values: Tensor, context: StepContext) -> None:
        """Add the values of one batch; those of an update that was never made are dropped."""
        update = (context.step, context.turn)
        if self.update != update:
            self.values, self.update = [], update
        self.values.append(values)

    def take(self, world: World) -> Tensor:
        """Return the sum, and start anew."""
        summed = total(torch.stack(self.values).sum(0), world)
        self.values, self.update = [], None
        return summed


BALANCE: Registry[Balance, Entry[Balance]] = Registry(
    "training strategy", "fusionzoo zoo", Entry, ("data", "loss", "gradient", "schedule")
)


def build_balance(
    names: str | Sequence[str], settings: Mapping[str, Mapping[str, Any]], inputs: StrategyInputs
) -> nn.ModuleDict:
    """Build the strategies of a run, say `"ogm_ge,modality_dropout"`; global generators stay."""
    listed = names.split(",") if isinstance(names, str) else names
    chosen = [name.strip() for name in listed if name.strip()]
    for name in settings:
        if name not in chosen:
            BALANCE[name]  # an unknown name is an error that names the nearest
            raise FusionZooError(f"--balance_settings.{name}: --balance does not name {name!r}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(inputs.seed)
        built = {name: BALANCE.create(name, inputs, **settings.get(name, {})) for name in chosen}
    effects = {"surgery": "decide how fast the encoders learn", "makes_views": "augment the batch"}
    for attribute, effect in (*effects.items(), ("two_pass", effects["surgery"])):
        rivals = [name for name, strategy in built.items() if getattr(strategy, attribute)]
        if len(rivals) > 1:
            raise FusionZooError(f"--balance: {' and '.join(rivals)} each {effect}: take one")
    mixers = [name for name, strategy in built.items() if strategy.mixes_rows]
    readers = [name for name in built if name not in mixers[:1] and BALANCE[name].family != "data"]
    if mixers and readers:
        raise FusionZooError(
            f"--balance: {mixers[0]} mixes samples, and {' and '.join(readers)} would read the"
            " label of one of the two: leave one out"
        )
    return nn.ModuleDict(built)


def presence(features: Mapping[str, Features]) -> Tensor:
    """Return which modalities each row has, in the order of the model: (B, M)."""
    return torch.stack([x.mask.any(1) for x in features.values()], dim=1)


def pooled_of(features: Mapping[str, Features], name: str) -> tuple[Tensor, Tensor]:
    """Return a modality's pooled vectors (B, D), zeros where it is absent, and presence (B,)."""
    present = features[name].mask.any(1)
    return torch.where(present[:, None], features[name].pooled, 0), present


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in single precision at least."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
