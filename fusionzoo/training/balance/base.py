"""What every training strategy shares: what it may change in a step, and when.

Shapes: `B` rows, `M` modalities, `K` outputs, `N` samples of the training split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fusionzoo.distributed.process_group import World, total
from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.fusion import Fusion
from fusionzoo.model import FusionModel
from fusionzoo.registry import Entry, Registry
from fusionzoo.structures import Batch, Features, FusionOutput

if TYPE_CHECKING:
    from ..trainer import Stepper

Criterion = Callable[[Tensor, Tensor], Tensor]  # (B, K), (B, ...) -> (B,)


class Now(NamedTuple):
    """Where in training a step is made."""

    step: int = 0  # optimiser steps made
    epoch: float = 0.0  # epochs done, with the fraction of the current one
    phase: int = 0  # of the fusion's `phases`
    turn: str | None = None  # the modality that learns alone; None = all do


START = Now()


class Setting(NamedTuple):
    """What a strategy is built for."""

    model: FusionModel
    targets: Tensor  # (N,) of the training split
    seed: int
    world: World


class Seen(NamedTuple):
    """What a forward pass of a training step made of a batch."""

    batch: Batch  # on the model's device, as `edit` left it
    rows: Tensor  # (B,) int64: the samples' numbers in the training split
    features: dict[str, Features]
    output: FusionOutput
    criterion: Criterion
    now: Now


class Term(NamedTuple):
    """A loss: the mean of `values` where `mask` holds, over the rows of all processes."""

    values: Tensor  # (B,) float32
    mask: Tensor  # (B,) bool
    weight: float | Tensor = 1.0


class Balance(nn.Module):
    """Change how a model is trained, never what it is: evaluation and the saved model know nothing.

    The hooks below stand in the order in which training calls them, and only while the strategy is
    `active`; a strategy that is switched off leaves every weight as plain training would, bit for
    bit. So nothing here may draw from the global generators: `draw` gives one that depends on the
    seed and the moment alone, the same on every process.
    Buffers are state: checkpoints keep them, and they must be equal on all processes (sum over
    `world` what each sees). Parameters learn in a group of their own, clipped on their own.
    """

    surgery = False  # whether it decides how fast each encoder learns; of these a run takes one
    shards = True  # whether FSDP may share out the weights
    aligns = False  # whether `embed` maps features into one space, where partners are near
    apart = False  # whether `combine` wants the gradients of its own terms by themselves

    def __init__(self, setting: Setting, *, start: float = 0.0, end: float | None = None) -> None:
        super().__init__()
        self.world, self.seed, self.start, self.end = setting.world, setting.seed, start, end
        self.widths = {name: encoder.dim for name, encoder in setting.model.named_encoders()}
        self._model = (setting.model,)  # in a tuple: it is no part of this module

    @property
    def model(self) -> FusionModel:
        """The model that is trained."""
        return self._model[0]

    @property
    def fusion(self) -> Fusion:
        """Its fusion."""
        return self.model.fusion

    @property
    def name(self) -> str:
        """The name it is registered under."""
        names = (name for name in BALANCE if BALANCE[name].cls is type(self))
        return next(names, type(self).__name__)

    def require(self, holds: bool, says: str) -> None:
        """Refuse a setting in one line."""
        if not holds:
            raise FusionZooError(f"{self.name}: {says}")

    def require_classes(self, targets: Tensor) -> None:
        """Refuse targets other than one class for each sample."""
        self.require(
            targets.ndim == 1 and not targets.is_floating_point(),
            "it scores the probability of the right class, so the target must be one class for"
            " each sample",
        )

    def each(self, what: str, given: float | Mapping[str, float]) -> dict[str, float]:
        """Resolve a number for all modalities, or one for some of them (the others have 0)."""
        if not isinstance(given, Mapping):
            return dict.fromkeys(self.widths, float(given))
        for key in given:
            self.require(
                key in self.widths,
                f"{what}.{key}: the model has no modality {key!r}."
                f"{did_you_mean(key, self.widths)} It has: {', '.join(self.widths)}.",
            )
        return {name: float(given.get(name, 0)) for name in self.widths}

    def active(self, now: Now) -> bool:
        """Whether the strategy does anything; subclasses add their own ways of being off."""
        return self.start <= now.epoch and (self.end is None or now.epoch < self.end)

    def begin_epoch(self, learn: Stepper, loaders: Mapping[str, Any], now: Now) -> None:
        """Get ready for an epoch; not called when a run resumes within one."""

    def turns(self, now: Now) -> Sequence[str | None]:
        """Return who learns in this step, in turn: a modality's encoder alone, or None for all."""
        return (None,)

    def edit(self, batch: Batch, rows: Tensor, now: Now) -> Batch:
        """Change the batch before it is encoded; on the CPU."""
        return batch

    def respond(self, seen: Seen) -> FusionOutput:
        """Change what the fusion's loss reads."""
        return seen.output

    def main(self, seen: Seen, loss: Term) -> Term:
        """Change the fusion's own loss."""
        return loss

    def terms(self, seen: Seen) -> dict[str, Term]:
        """Return losses beside the fusion's own; each is logged under its name."""
        return {}

    def combine(self, joint: list[Tensor], own: list[Tensor]) -> list[Tensor]:
        """Join an encoder's gradients of the main loss and of the terms; must commute with scaling,
        for a loss scaler may have scaled both."""
        raise NotImplementedError

    def gradients(self, encoders: Mapping[str, Sequence[nn.Parameter]], now: Now) -> None:
        """Change the gradients, unscaled and summed over processes, before they are clipped."""

    def after_step(self) -> None:
        """Constrain the strategy's own parameters, which an update has just changed."""

    def draw(self, *key: int) -> torch.Generator:
        """Return a CPU generator that depends on the seed, this class and `key` alone."""
        name = sum(ord(letter) * 31**i for i, letter in enumerate(type(self).__name__[:6]))
        mixed = hash((self.seed, name, *key)) % 2**63  # of integers: the same in every process
        return torch.Generator().manual_seed(mixed)


class Tally:
    """A sum over the batches of one update, and at its end over the processes."""

    def __init__(self) -> None:
        self.held: list[Tensor] = []
        self.moment: tuple[int, str | None] | None = None

    def add(self, values: Tensor, now: Now) -> None:
        """Add what one batch gives; what an update left that never came about is forgotten."""
        if self.moment != (now.step, now.turn):
            self.held, self.moment = [], (now.step, now.turn)
        self.held.append(values)

    def take(self, world: World) -> Tensor:
        """Return the sum, and begin anew."""
        summed = total(torch.stack(self.held).sum(0), world)
        self.held, self.moment = [], None
        return summed


BALANCE: Registry[Balance, Entry[Balance]] = Registry(
    "training strategy", "fusionzoo zoo", Entry, ("data", "loss", "gradient", "schedule")
)


def build_balance(
    names: str | Sequence[str], settings: Mapping[str, Mapping[str, Any]], setting: Setting
) -> nn.ModuleDict:
    """Build the strategies of a run, `"ogm_ge,modality_dropout"`, without drawing from our seed."""
    listed = names.split(",") if isinstance(names, str) else names
    chosen = [name.strip() for name in listed if name.strip()]
    for name in settings:
        if name not in chosen:
            BALANCE[name]  # names the nearest
            raise FusionZooError(f"--balance_settings.{name}: --balance does not name {name!r}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setting.seed)
        made = {name: BALANCE.create(name, setting, **settings.get(name, {})) for name in chosen}
    for what in ("surgery", "apart"):
        rivals = [name for name, one in made.items() if getattr(one, what)]
        if len(rivals) > 1:
            raise FusionZooError(
                f"--balance: {' and '.join(rivals)} each decide how fast the encoders learn:"
                " take one"
            )
    return nn.ModuleDict(made)


def mask_to(features: Mapping[str, Features], *kept: str) -> dict[str, Features]:
    """Return features in which every modality but `kept` is absent."""
    return {
        name: own if name in kept else own._replace(mask=torch.zeros_like(own.mask))
        for name, own in features.items()
    }


def presence(features: Mapping[str, Features]) -> Tensor:
    """Return which modalities each row has, in the order of the model: (B, M)."""
    return torch.stack([own.mask.any(1) for own in features.values()], dim=1)


def pooled_of(features: Mapping[str, Features], name: str) -> tuple[Tensor, Tensor]:
    """Return a modality's pooled vectors (B, D), zeros where it is absent, and where it is (B,)."""
    present = features[name].mask.any(1)
    return torch.where(present[:, None], features[name].pooled, 0), present


def widened(x: Tensor) -> Tensor:
    """Return `x` in single precision at least."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
