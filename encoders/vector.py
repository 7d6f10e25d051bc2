"""Encoders of pre-extracted features: a vector per sample, or a sequence of vectors.

Shapes: `B` batch, `T` tokens, `D` width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features

from .base import ENCODERS, Encoder, Item, Processor, TokenTransformer, one_token


class VectorProcessor(Processor):
    """Check the width of a vector (D,) and convert it to float32."""

    def __init__(self, in_dim: int) -> None:
        self.in_dim = in_dim

    def __call__(self, value: Tensor, generator: torch.Generator | None = None) -> Item:
        if value.shape != (self.in_dim,):
            raise FusionZooError(
                f"a vector of shape {tuple(value.shape)}; expected ({self.in_dim},)"
            )
        return {"values": value.float()}

    def varies(self, value: Tensor) -> bool:
        return False

    def blank(self) -> Item:
        return {"values": torch.zeros(self.in_dim)}


class SequenceProcessor(VectorProcessor):
    """Check the width of a sequence (T, D), cut it to `max_length` and convert it to float32."""

    def __init__(self, in_dim: int, max_length: int) -> None:
        super().__init__(in_dim)
        self.max_length = max_length

    def check(self, value: Tensor) -> None:
        """Refuse a sequence of another width, or without steps."""
        if value.ndim != 2 or value.shape[1] != self.in_dim or not value.shape[0]:
            raise FusionZooError(
                f"a sequence of shape {tuple(value.shape)};"
                f" expected (T, {self.in_dim}), T at least 1"
            )

    def __call__(self, value: Tensor, generator: torch.Generator | None = None) -> Item:
        self.check(value)
        values = value[: self.max_length].float()
        return {"values": values, "lengths": torch.tensor(len(values))}

    def cuts(self, value: Tensor) -> bool:
        return value.shape[0] > self.max_length

    def blank(self) -> Item:
        return {"values": torch.zeros(1, self.in_dim), "lengths": torch.tensor(1)}

    def collate(self, items: Any) -> Item:
        lengths = torch.stack([item["lengths"] for item in items])
        return {**super().collate([{"values": i["values"]} for i in items]), "lengths": lengths}


class VectorEncoder(Encoder):
    """Base of the vector encoders: each vector becomes one token."""

    kind = "vector"

    def __init__(self, in_dim: int) -> None:
        super().__init__()
        if in_dim < 1:
            raise FusionZooError("in_dim is missing: the width of the input vectors")
        self.in_dim = in_dim
        self.net: nn.Module = nn.Identity()

    def processor(self, train: bool) -> Processor:
        return VectorProcessor(self.in_dim)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        return one_token(self.net(inputs["values"]))


@ENCODERS.register("vector/identity", family="vector")
class VectorIdentity(VectorEncoder):
    """Use vectors as they are, as one token each.

    Settings:
        in_dim: width of the vectors, at least 1; data sets fill it in

    Shapes: inputs["values"] (B, in_dim) -> Features of (B, 1, in_dim), (B, 1), (B, in_dim)
    """

    def __init__(self, *, in_dim: int = 0) -> None:
        super().__init__(in_dim)
        self.dim = in_dim


@ENCODERS.register("vector/mlp", family="vector")
class VectorMLP(VectorEncoder):
    """Encode vectors by layer norm and a perceptron with one hidden layer.

    Settings:
        in_dim: width of the vectors, at least 1; data sets fill it in
        dim: width of the output
        hidden: width of the hidden layer
        dropout: after the hidden layer, 0 to 1

    Shapes: inputs["values"] (B, in_dim) -> Features of (B, 1, dim), (B, 1), (B, dim)
    """

    def __init__(
        self, *, in_dim: int = 0, dim: int = 256, hidden: int = 256, dropout: float = 0.1
    ) -> None:
        super().__init__(in_dim)
        self.dim = dim
        self.net = nn.Sequential(
            nn.LayerNorm(in_dim),
            nn.Linear(in_dim, hidden),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, dim),
        )


@ENCODERS.register("sequence/transformer", family="sequence")
class SequenceTransformer(Encoder):
    """Encode sequences of feature vectors with a small pre-norm transformer, learned positions.

    Settings:
        in_dim: width of the input vectors, at least 1; data sets fill it in
        dim: width of tokens and pooled vector, divisible by `num_heads`
        num_layers: transformer layers
        num_heads: attention heads
        dropout: in attention and feed-forward layers, 0 to 1
        max_length: vectors kept of a sequence

    Shapes: inputs["values"] (B, T, in_dim), inputs["lengths"] (B,) -> (B, T, dim), (B, T), (B, dim)
    """

    kind = "sequence"
    cut_by = "max_length"

    def __init__(
        self,
        *,
        in_dim: int = 0,
        dim: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        dropout: float = 0.1,
        max_length: int = 512,
    ) -> None:
        super().__init__()
        if in_dim < 1:
            raise FusionZooError("in_dim is missing: the width of the input tokens")
        self.in_dim, self.dim, self.max_length = in_dim, dim, max_length
        self.project = nn.Linear(in_dim, dim)
        self.transformer = TokenTransformer(dim, num_layers, num_heads, dropout, max_length)

    def processor(self, train: bool) -> Processor:
        return SequenceProcessor(self.in_dim, self.max_length)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        values = inputs["values"]
        steps = torch.arange(values.shape[1], device=values.device)
        mask = steps < inputs["lengths"][:, None]
        return self.transformer(self.project(values), mask)
