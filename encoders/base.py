"""Base classes of encoders and processors, and the registry of encoders.

Shapes: `B` batch, `T` tokens, `D` width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fusionzoo.registry import Entry, Registry
from fusionzoo.structures import ITEM_COUNTS, KINDS, Features
from fusionzoo.worker_memory import reserve

from ._items import encode_items
from .layers import freeze

Item = dict[str, Tensor]


class Processor(ABC):
    """Turn decoded values into tensors, in the data loader's workers; picklable."""

    @abstractmethod
    def __call__(self, value: Any, generator: torch.Generator | None = None) -> Item:
        """Prepare one value; only augmentation draws from `generator` (None: no augmentation)."""

    def windows(self, value: Any, generator: torch.Generator | None = None) -> list[Item]:
        """Prepare one value as several items, such as windows of a long clip; usually it is one."""
        return [self(value, generator)]

    def items(self, value: Any, generator: torch.Generator | None = None) -> list[Item]:
        """Prepare the items of a sample: a list of values, or one value."""
        if not isinstance(value, list):
            return self.windows(value, generator)
        return [item for part in value for item in self.windows(part, generator)]

    def varies(self, value: Any) -> bool:
        """Return whether training may prepare `value` in another way than evaluation does.

        If no value varies, features of a frozen encoder may be cached (`--train.cache_frozen`).
        """
        return True

    @abstractmethod
    def blank(self) -> Item:
        """Return the smallest valid item, a placeholder for samples that lack the modality."""

    def collate(self, items: Sequence[Item]) -> Item:
        """Stack items; where their first dimensions differ, pad with zeros at the end."""
        return {name: _batched([item[name] for item in items]) for name in items[0]}


def _batched(tensors: list[Tensor]) -> Tensor:
    first = tensors[0]
    if any(x.shape != first.shape for x in tensors):
        return pad_sequence(tensors, batch_first=True)
    return torch.stack(tensors, out=reserve((len(tensors), *first.shape), first.dtype))


def varies(processor: Processor, value: Any) -> bool:
    """Return whether training may prepare any item of a sample's value in another way."""
    values = value if isinstance(value, list) else [value]
    return any(processor.varies(part) for part in values)


class Augment(Protocol):
    """Adds random changes to a processor of training samples."""

    @property
    def note(self) -> str:
        """What it does, in a few words."""
        raise NotImplementedError

    def __call__(self, processor: Processor) -> Processor:
        """Return a processor that changes values at random before it prepares them."""
        raise NotImplementedError


class Encoder(nn.Module):
    """Turn one modality's batch into `Features`, independently of other modalities.

    `dim` is the width of tokens and of the pooled vector. `spec` holds the arguments of
    `create_encoder` that rebuild the encoder.
    """

    kind: str
    dim: int
    modality: str = ""
    spec: Mapping[str, Any] = {}
    checkpoint_settings: Mapping[str, Any] = {}  # read from files beside the weights, if any
    frozen: bool = False
    sharded: bool = False  # whether its weights are sharded over processes
    eval_modules: Sequence[nn.Module] = ()  # frozen parts, which stay in evaluation mode
    frozen_rows: int | None = None  # rows that a frozen encoder runs at once on a CPU; None: all
    augmentation: Augment | None = None  # of training samples (`augment.py`); None: none
    masks_spectrogram = False  # whether `encode` applies the input `masks` of augmentation

    @abstractmethod
    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        """Compute features of rows that all have the modality."""

    @abstractmethod
    def processor(self, train: bool) -> Processor:
        """Return the processor that prepares this encoder's inputs."""

    def loader_processor(self, train: bool) -> Processor:
        """Return the processor, for training with the run's augmentation."""
        processor = self.processor(train)
        if not train or self.augmentation is None:
            return processor
        return self.augmentation(processor)

    def forward(self, inputs: Mapping[str, Tensor]) -> Features:
        encode = self._encode_frozen if self.frozen else self.encode
        return encode_items(encode, inputs) if ITEM_COUNTS in inputs else encode(inputs)

    @torch.no_grad()
    def _encode_frozen(self, inputs: Mapping[str, Tensor]) -> Features:
        return self._encode_in_parts(inputs)

    def _encode_in_parts(self, inputs: Mapping[str, Tensor]) -> Features:
        """Encode `frozen_rows` rows at a time, which keeps the activations small.

        This changes no result, as the rows of a frozen encoder do not depend on each other.
        """
        first = next(iter(inputs.values()))
        rows = self.frozen_rows
        # With sharded weights, all processes must call the encoder equally often.
        if rows is None or len(first) <= rows or first.device.type != "cpu" or self.sharded:
            return self.encode(inputs)
        parts = [
            self.encode({name: x[start : start + rows] for name, x in inputs.items()})
            for start in range(0, len(first), rows)
        ]
        return Features(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def freeze(self, mode: str = "all") -> None:
        """Freeze parameters and running statistics: of `all`, or of a part, see `layers.freeze`."""
        if mode == "all":
            self.frozen = True
            self.requires_grad_(False)
            self.eval()
        elif mode != "none":
            self.eval_modules = freeze(self, mode, f"encoders.{self.modality}.freeze")

    def train(self, mode: bool = True) -> Encoder:
        super().train(mode and not self.frozen)
        for part in self.eval_modules:
            part.eval()
        return self

    def save_assets(self, folder: Path) -> None:
        """Write files other than weights that rebuilding needs, such as a tokenizer; often none."""


@dataclass(frozen=True, kw_only=True)
class EncoderEntry(Entry[Encoder]):
    """Facts about one encoder, or about a library of them; its family is the kind it encodes."""

    takes_model: bool = False  # whether a model's name follows: `timm/resnet18`

    @property
    def prefix(self) -> str:
        """What stands before the model's name: `hf` of `hf-text`, which shares it with others."""
        return self.name.removesuffix(f"-{self.family}")

    @property
    def pattern(self) -> str:
        """How a list shows it: `timm/*` where a model's name follows, else its name."""
        return f"{self.prefix}/*" if self.takes_model else self.name


ENCODERS: Registry[Encoder, EncoderEntry] = Registry(
    "encoder", "fusionzoo zoo", EncoderEntry, KINDS, base=Encoder
)


def run_by_length(
    lengths: Tensor, rows: Tensor, run: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Run rows of equal length together, unpadded: (B, N, ...) -> (B, T, D), mask (B, T).

    For models whose output depends on padding, for instance by a group norm over time. Processors
    round lengths up, so that many rows have equal lengths.
    """
    tokens: list[Tensor] = [torch.empty(0)] * len(rows)
    for length in lengths.unique().tolist():
        group = (lengths == length).nonzero()[:, 0]
        for row, output in zip(group.tolist(), run(rows[group, :length]), strict=True):
            tokens[row] = output
    counts = torch.tensor([len(x) for x in tokens], device=rows.device)
    padded = pad_sequence(tokens, batch_first=True)
    return padded, torch.arange(padded.shape[1], device=rows.device) < counts[:, None]
