"""The base class of training strategies: what a strategy may change in a step, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fusionzoo.config import RunConfig
from fusionzoo.errors import FusionZooError, check_known
from fusionzoo.fusion import Fusion
from fusionzoo.ground.registry import Entry, Registry
from fusionzoo.machine.distributed import World
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.structures import Batch, Features, FusionOutput, StepContext, seed_of

from ..optim import EMA

BALANCE: Registry[Balance, Entry[Balance]] = Registry(
    "training strategy", "fusionzoo zoo", Entry, ("data", "loss", "gradient", "schedule")
)


class StrategyInputs(NamedTuple):
    """Constructor arguments shared by all strategies."""

    model: FusionModel
    targets: Tensor  # (N,) of the training split
    seed: int
    world: World


class LossTerm(NamedTuple):
    """A loss: the mean of `values` where `mask` holds, over the rows of all processes.

    The objective multiplies the rows of a term by their weights in the data, if there are any.
    """

    values: Tensor  # (B,) float32
    mask: Tensor  # (B,) bool
    weight: float | Tensor = 1.0
    by_row: bool = True  # False: `values` are of the whole batch, and weighted already

    @classmethod
    def everywhere(cls, values: Tensor, weight: float, *, by_row: bool = True) -> LossTerm:
        """Return a loss for which all values count."""
        return cls(values, torch.ones_like(values, dtype=torch.bool), weight, by_row)


class MeanLoss(NamedTuple):
    """A loss of the batch after averaging, as `Balance.weigh` receives it."""

    value: Tensor  # this process's share: its mean over processes is the mean over all rows
    rows: Tensor  # number of rows behind it on all processes, float64; 0: the value is 0


@runtime_checkable
class RestartsSchedule(Protocol):
    """A strategy that may restart the learning-rate schedule of a modality's encoder."""

    def restarts(self) -> Mapping[str, int]:
        """Return modality -> epoch of the last restart: read in each step, so from plain numbers.

        Part of the strategy's state, and equal on all processes.
        """


class RunningTrainer(Protocol):
    """What a strategy may use of the trainer before an epoch (`training.trainer.Trainer`)."""

    cfg: RunConfig
    world: World
    module: Any  # the Objective
    optimizer: torch.optim.Optimizer
    ema: EMA | None

    def step(self, batches: Sequence[Batch], context: StepContext) -> Any:
        """Make an optimiser step."""

    def share_statistics(self) -> None:
        """Give every process the running statistics of the main one, before evaluation mode."""

    def copy(self, edit: Callable[[Any], None]) -> RunningTrainer:
        """Return a trainer of copies of module and optimiser, the module changed by `edit`."""


class Overrides:
    """A flag of a class that says whether a subclass overrides a hook."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def __set_name__(self, owner: type, name: str) -> None:
        self.default = getattr(owner, self.hook)

    def __get__(self, strategy: object, cls: type) -> bool:
        return getattr(cls, self.hook) is not self.default


class DataHooks:
    """What changes the data: the batch that is encoded, and the features that the fusion reads."""

    raw_inputs = True  # whether it may read or change `batch.inputs`, or read tokens of features
    # Whether rows stand for two samples; then only family `data` goes with it, and `main_loss` has
    # to weigh both by `context.sample_weight`.
    mixes_rows = False

    makes_views = Overrides("views")

    def edit_batch(self, batch: Batch, rows: Tensor, context: StepContext) -> Batch:
        """Change the batch before it is encoded; on the CPU."""
        return batch

    def views(self, batch: Batch, rows: Tensor, context: StepContext) -> tuple[Batch, Batch]:
        """Return two augmented versions of the batch, after `edit_batch` and on the CPU.

        Both are encoded besides the batch itself, and `extra_losses` finds their features in
        `context.views`. `batch.second` has the inputs of a second augmentation by the encoders'
        processors.
        """
        raise NotImplementedError

    def edit_features(self, context: StepContext) -> Mapping[str, Features]:
        """Change the features that the fusion reads; the modalities' own heads read the others."""
        return context.features


class LossHooks:
    """What changes the loss: what it is computed from, its value for each row, and its mean."""

    aligns = Overrides("embed")

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

    def embed(self, features: Mapping[str, Features]) -> Mapping[str, Tensor]:
        """Map each modality into one space, where partners are near, in evaluation: (B, D) each."""
        raise NotImplementedError


class GradientHooks:
    """What changes the gradients: whose encoder learns in a step, and how fast."""

    surgery = False  # whether it decides how fast each encoder learns; a run takes one of these
    two_pass = Overrides("combine_gradients")  # `extra_losses` then have a backward pass of theirs

    def turns(self, context: StepContext) -> Sequence[str | None]:
        """Return who learns in this step, in turn: a modality's encoder alone, or None for all.

        Each turn has a forward and a backward pass and an update of its own.
        """
        return (None,)

    def combine_gradients(self, main: list[Tensor], extra: list[Tensor]) -> list[Tensor]:
        """Combine an encoder's gradients of the main loss and of `extra_losses`.

        Must commute with scaling, for a loss scaler may have scaled both.
        """
        raise NotImplementedError

    def edit_gradients(
        self, encoders: Mapping[str, Sequence[nn.Parameter]], context: StepContext
    ) -> None:
        """Change the gradients, unscaled and summed over processes, before they are clipped."""


class Balance(DataHooks, LossHooks, GradientHooks, nn.Module):
    """Change how a model is trained, never what it is: evaluation and the saved model know nothing.

    Its hooks are those of `DataHooks`, `LossHooks` and `GradientHooks`, each in the order in which
    training calls them, and two about time: `begin_epoch` and `after_step`. They are called only
    while the strategy is `active`; one that is switched off leaves every weight as plain training
    would, bit for bit. So nothing here may draw from the global generators: `draw` gives a
    generator that depends on the seed and its key alone, the same on every process.

    Buffers are state: checkpoints keep them, and they must be equal on all processes (sum over
    `world` what each process computed). Parameters learn in a group of their own, clipped by their
    own norm.

    Settings:
        start: epochs of training before the strategy becomes active, 0 or more; may be fractional
        end: epochs of training after which it becomes inactive; None for never
    """

    shards = True  # whether it works with weights that FSDP shards
    encoders_only = False  # whether it changes nothing where all encoders are frozen
    weighs_rows = True  # whether it works with a column of weights (`--data.weight_column`)
    validates = False  # whether it learns from how well the model does on the validation split
    lr_scale = 1.0  # learning rate of its own parameters, as a multiple of the base rate
    off_at_zero: tuple[str, ...] = ()  # settings that switch it off where all of them are 0

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
            problem = f"{self.name}: {setting}.{modality}: the model has no modality {modality!r}"
            check_known(modality, self.widths, problem)
        return {name: float(value.get(name, 0)) for name in self.widths}

    def active(self, context: StepContext) -> bool:
        """Whether the strategy does anything; subclasses add their own ways of being off."""
        if self.off_at_zero and not any(getattr(self, name) for name in self.off_at_zero):
            return False
        return self.start <= context.epoch and (self.end is None or context.epoch < self.end)

    def begin_epoch(
        self, trainer: RunningTrainer, loaders: Mapping[str, Any], context: StepContext
    ) -> None:
        """Prepare an epoch; not called when a run resumes within one."""

    def after_step(self) -> None:
        """Constrain the strategy's own parameters after an update."""

    def draw(self, *key: int) -> torch.Generator:
        """Return a CPU generator that depends on the seed, the strategy's name and `key` alone."""
        return torch.Generator().manual_seed(seed_of(self.seed, self.name, *key))


def listed_strategies(names: str | Sequence[str]) -> list[str]:
    """Return the names of `--balance`.

    >>> listed_strategies("ogm_ge, modality_dropout")
    ['ogm_ge', 'modality_dropout']
    """
    listed = names.split(",") if isinstance(names, str) else names
    return [name.strip() for name in listed if name.strip()]


def build_balance(
    names: str | Sequence[str], settings: Mapping[str, Mapping[str, Any]], inputs: StrategyInputs
) -> nn.ModuleDict:
    """Build the strategies of a run, say `"ogm_ge,modality_dropout"`; global generators stay."""
    chosen = listed_strategies(names)
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
