"""Types that all rooms share: plain tuples, so that DDP, compile and export see pytrees; seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias
from zlib import crc32

from fusionzoo.errors import FusionZooError

if TYPE_CHECKING:  # torch takes a second, and a mistake in a table is answered without it
    import numpy as np
    import torch
    from torch import Tensor, nn

KINDS = ("image", "text", "audio", "vector", "sequence", "tabular")
# In an encoder's inputs: how many of a row's items are real, int64 (B,); the other tensors are then
# (B, items, ...). Absent where every row has one item.
ITEM_COUNTS = "item_counts"


LACK_FLOAT64 = ("mps",)  # kinds of devices
# Of an encoder, by name; `Features`: encoded already.
Inputs: TypeAlias = "dict[str, Tensor] | Features"
# Logits (B, K), target (B, ...) -> loss (B,).
Criterion: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
MASK = (1 << 64) - 1
FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def in_float64(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, or in float32 on a device that lacks it."""
    return tensor.float() if tensor.device.type in LACK_FLOAT64 else tensor.double()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to `device`, asynchronously on CUDA.

    Elsewhere a copy may still read memory that the next batch is written to.
    """
    return tensor.to(device, non_blocking=str(device).startswith("cuda"))


class Audio(NamedTuple):
    """A mono clip in memory, at its original rate."""

    samples: Tensor  # (n,) float32 in [-1, 1]
    rate: int  # Hz

    @property
    def frames(self) -> int:
        """The number of samples."""
        return len(self.samples)

    def read(self, start: int, count: int) -> Tensor:
        """Return samples `start` to `start + count`; fewer at the end."""
        return self.samples[start : start + count]


class Clip(Protocol):
    """A mono clip, in memory (`Audio`) or in a file that is read in parts."""

    @property
    def rate(self) -> int:
        """Samples per second."""

    @property
    def frames(self) -> int:
        """The number of samples."""

    @property
    def samples(self) -> Tensor:
        """All of it, float32 (frames,) in [-1, 1]."""

    def read(self, start: int, count: int) -> Tensor:
        """Return samples `start` to `start + count`; fewer at the end."""


class Sample(NamedTuple):
    """One row of a paired data set, decoded.

    A value is, by kind: image uint8 (3, H, W) RGB; text str; audio a `Clip`;
    vector float32 (D,); sequence float32 (T, D); tabular a dict of cells by column, each a number,
    text or, if empty, None; of several images or clips a list of two or more; None where the
    sample lacks the modality.
    """

    id: str
    split: str
    target: int | tuple[float, ...] | None  # a class, or the numbers of several targets
    values: Mapping[str, Any]
    seed: int = 0  # of augmentation in this epoch, independent of the loader's workers
    # Whether to keep the sample without a modality that cannot be used (`on_error`).
    goes_on: Callable[[str, FusionZooError], bool] | None = None
    weight: float | None = None  # in losses and metrics, at least 0; None: all count alike

    def __repr__(self) -> str:
        shown = zip(self._fields[:4], self[:4], strict=True)
        return f"Sample({', '.join(f'{name}={value!r}' for name, value in shown)})"

    def without(self, modality: str, error: FusionZooError) -> Sample | None:
        """Return the sample without an unusable value; None if the sample is to be skipped."""
        if self.goes_on is None:
            raise FusionZooError(f"sample {self.id!r}, {modality}: {error}") from error
        if not self.goes_on(modality, error):
            return None
        return self._replace(values={**self.values, modality: None})


class Features(NamedTuple):
    """Encoder output for one modality; a sample lacks it where its mask row is all False."""

    tokens: Tensor  # (B, T, D)
    mask: Tensor  # (B, T) bool, True = real token
    pooled: Tensor  # (B, D)


class FusionOutput(NamedTuple):
    """Fusion output for a batch."""

    embedding: Tensor  # (B, dim)
    logits: Tensor  # (B, K)
    unimodal: dict[str, Tensor]  # modality -> (B, K); empty where the strategy has none
    weights: Tensor | None  # (B, M), rows sum to 1 over the present modalities
    extra: Mapping[str, Tensor] = {}  # inputs of the fusion's own loss


class Phase(NamedTuple):
    """A part of training in which only some parameters are trained."""

    name: str
    share: float  # of all steps
    trains: tuple[str, ...] = ("",)  # prefixes of the fusion's parameter names
    encoders: bool = True  # whether the encoders are trained too


class CopiedPresence(NamedTuple):
    """What a batch's `present` held when it was copied to a device."""

    copy: Tensor  # (B, M) on the device
    version: int  # of the copy, which torch counts up at each edit in place
    values: np.ndarray  # (B, M) bool


class Batch(NamedTuple):
    """Aligned samples, padded; `inputs` and the columns of `present` have one order."""

    ids: list[str]
    inputs: dict[str, Inputs]  # modality -> (B, ...) tensors
    present: Tensor  # (B, M) bool
    target: Tensor | None  # (B,) int64; of other targets (B, W) float, NaN where a label is missing
    second: dict[str, Inputs] | None = None  # `inputs` of another augmentation, if asked for
    weight: Tensor | None = None  # (B,) float32, how much each row counts; None: all alike
    copied: CopiedPresence | None = None  # by `to`

    def to(self, device: torch.device) -> Batch:
        """Copy the tensors to `device`, see `to_device`."""
        values = self.presence().copy()
        moved = self.map(lambda tensor: to_device(tensor, device))
        if moved.present.is_inference():  # torch counts no edits of it
            return moved
        return moved._replace(copied=CopiedPresence(moved.present, moved.present._version, values))

    def presence(self) -> np.ndarray:
        """Return `present` in the CPU's memory, (B, M) bool.

        Waits for the device only where `present` lies there and was replaced or edited after `to`.
        """
        last = self.copied
        if last and last.copy is self.present and last.version == self.present._version:
            return last.values
        return self.present.numpy(force=True)

    def take(self, rows: Tensor) -> Batch:
        """Return some rows, which are numbered on the CPU; the padding stays."""
        ids = [self.ids[row] for row in rows.tolist()]
        return self.map(lambda tensor: tensor[to_device(rows, tensor.device)])._replace(ids=ids)

    def pin_memory(self) -> Batch:
        """Pin the tensors (the DataLoader calls this)."""
        return self.map(lambda tensor: tensor.pin_memory())

    def map(self, edit: Callable[[Tensor], Tensor]) -> Batch:
        """Return a batch of edited tensors."""
        inputs = _map_inputs(self.inputs, edit)
        target = None if self.target is None else edit(self.target)
        second = None if self.second is None else _map_inputs(self.second, edit)
        weight = None if self.weight is None else edit(self.weight)
        return Batch(self.ids, inputs, edit(self.present), target, second, weight)


def _map_inputs(
    inputs: Mapping[str, Inputs], edit: Callable[[Tensor], Tensor]
) -> dict[str, Inputs]:
    return {
        modality: Features(*map(edit, x))
        if isinstance(x, Features)
        else {name: edit(tensor) for name, tensor in x.items()}
        for modality, x in inputs.items()
    }


class StepContext(NamedTuple):
    """One training step: its place in the run and, once known, its batch and the model's output.

    The trainer sets the place, the objective's forward pass the rest; until then a field is None.
    """

    step: int = 0  # optimiser steps made before this one
    epoch: float = 0.0  # epochs done, with the fraction of the current one
    phase: int = 0  # index into the fusion's `phases`
    turn: str | None = None  # the modality that learns alone in this step; None: all of them
    rows: Tensor = None  # type: ignore[assignment]  # (B,) int64 rows of the training split; -1: none
    batch: Batch = None  # type: ignore[assignment]  # on the model's device
    features: Mapping[str, Features] = None  # type: ignore[assignment]  # that the fusion reads
    output: FusionOutput = None  # type: ignore[assignment]  # of the fusion
    criterion: Criterion = None  # type: ignore[assignment]  # the objective's loss, per row
    row_weight: Tensor | None = None  # (B,) class weights, in `criterion` already; None: all 1
    sample_weight: Tensor | None = None  # (B,) of the data's column, over its mean; None: all 1
    row_weight_of: Callable[[Tensor], Tensor | None] | None = None  # of other labels
    memory: nn.Module | None = None  # the result of `Fusion.prepare`
    augmented: tuple[Batch, Batch] | None = None  # two views of the batch, if a strategy makes them
    views: tuple[dict[str, Features], ...] = ()  # the features of `augmented`

    def weighted(self, loss: Tensor) -> Tensor:
        """Return a loss that reads labels, (B,), times the weights of the rows' classes, if any."""
        return loss if self.row_weight is None else self.row_weight * loss


FIRST_STEP = StepContext()


def masked_mean(tokens: Tensor, mask: Tensor) -> Tensor:
    """Average the real tokens: (B, T, D), (B, T) -> (B, D); zero where a row has none."""
    real_tokens = tokens.masked_fill(~mask[..., None], 0)
    return real_tokens.sum(1) / mask.sum(1, keepdim=True).clamp(min=1).to(tokens.dtype)


def keep_only(features: Mapping[str, Features], *names: str) -> dict[str, Features]:
    """Return features in which every modality but `names` is absent."""
    return {
        name: x if name in names else x._replace(mask=x.mask.new_zeros(x.mask.shape))
        for name, x in features.items()
    }


class Prediction(NamedTuple):
    """The predicted class, or level, of one sample: a text, number or truth value, as the labels of
    the training data were."""

    label: Any
    probability: float
    probabilities: dict[Any, float]


class Labels(NamedTuple):
    """The predicted labels of one sample: those above 0.5, or above the model's thresholds."""

    labels: list[Any]
    probabilities: dict[Any, float]


def predictions(
    classes: Sequence[str], shares: Tensor, chosen: Sequence[int] | None = None
) -> list[Any]:
    """Build a `Prediction` per row of probabilities (N, K), of the classes with indices `chosen`
    (None: the most likely)."""
    rows = [dict(zip(classes, row, strict=True)) for row in shares.tolist()]
    likeliest = [max(row, key=row.__getitem__) for row in rows]
    best = likeliest if chosen is None else [classes[index] for index in chosen]
    return [Prediction(label, row[label], row) for label, row in zip(best, rows, strict=True)]


def check_finite(*values: Tensor, ids: Sequence[str] | None = None) -> None:
    """Raise an error that names the first sample, by its id or number, that has a value (N, ...)
    that is not a finite number."""
    for tensor in values:
        fine = tensor.flatten(1).isfinite().all(1)
        if not fine.all():
            row = int((~fine).nonzero()[0])
            who = f"sample {row}" if ids is None else f"sample {ids[row]!r}"
            raise FusionZooError(
                f"{who}: the answer is no finite number: its values are too large for the model, as"
                " those of a sensor's or map's code for no data are"
            )


def seed_of(*parts: int | str) -> int:
    """Return a seed from 1 to 2^63 - 1 that depends on every part and on their order.

    The same in every process and on every machine. A word counts by its CRC-32; the sum of the
    parts, each times a factor of its own, goes through the finaliser of splitmix64 (Steele, Lea and
    Flood 2014).

    >>> seed_of(0, 1, 2) != seed_of(0, 2, 1)
    True
    """
    mixed = 0
    for place, part in enumerate(parts):
        number = crc32(part.encode()) if isinstance(part, str) else part
        factor = FACTORS[place % 3] * (2 * (place // 3) + 1)
        mixed = (mixed + number * factor) & MASK
    for shift, factor in ((30, FACTORS[1]), (27, FACTORS[2])):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & MASK
    return (mixed ^ (mixed >> 31)) >> 1 or 1


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode: no dropout, nothing random, no statistic moves."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
