"""A plain `nn.Module` as an encoder: `wrap_encoder(module, dim=512, processor=prepare)`.

Shapes: `B` batch, `T` tokens, `D` width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fusionzoo.errors import FusionZooError, check_choice, check_number, explained, one_line
from fusionzoo.structures import KINDS, Audio, Features

from .base import Encoder, Item, Processor, mean_pooled, one_token, unmasked, unread_parameters

WRAPPED = "wrapped"  # the name that a model folder records for a module that it cannot rebuild
BLANKS: dict[str, Any] = {  # by kind: a value that stands for a sample without the modality
    "image": torch.zeros(3, 32, 32, dtype=torch.uint8),
    "text": "",
    "audio": Audio(torch.zeros(1600), 16_000),
}
Prepare = Callable[[Any], Any]


class BlankItem(dict[str, Tensor]):
    """An item that stands for a sample without the modality."""


class FunctionProcessor(Processor):
    """Prepare values with a function that returns a tensor, or a mapping of tensors.

    Tensors of different lengths are padded with zeros; of a single tensor the lengths are kept.
    """

    def __init__(self, function: Prepare, blank: Any) -> None:
        self.function, self.blank_value = function, blank

    def __call__(self, value: Any, generator: torch.Generator | None = None) -> Item:
        with explained(f"the processor cannot prepare a value of type {type(value).__name__}"):
            prepared = self.function(value)
        item = dict(prepared) if isinstance(prepared, Mapping) else {"values": prepared}
        for name, x in item.items():
            if not isinstance(x, Tensor):
                raise FusionZooError(
                    f"the processor must return a tensor or a dict of tensors; {name!r} is of type"
                    f" {type(x).__name__}"
                )
        if not isinstance(prepared, Mapping) and prepared.ndim:
            item["lengths"] = torch.tensor(len(prepared))
        return item

    def blank(self) -> Item:
        return BlankItem(self(self.blank_value))

    def collate(self, items: Sequence[Item]) -> Item:
        """Stack items; a blank one takes the shape of another, which it is never encoded with."""
        real = next((item for item in items if not isinstance(item, BlankItem)), None)
        if real is not None:
            zeros = {name: torch.zeros_like(x) for name, x in real.items()}
            items = [zeros if isinstance(item, BlankItem) else item for item in items]
        scalars = [name for name, x in items[0].items() if not x.ndim]
        stacked = {name: torch.stack([item[name] for item in items]) for name in scalars}
        rest = [{n: x for n, x in item.items() if n not in scalars} for item in items]
        problem = "the processor must return tensors of one shape, but for the first dimension"
        with explained(problem, RuntimeError):
            return {**super().collate(rest), **stacked}


class WrappedEncoder(Encoder):
    """Any module as an encoder; `wrap_encoder` says what it may return.

    Shapes: inputs["values"] (B, ...) and inputs["lengths"] (B,), or what the processor returns, by
        name -> Features of (B, T, dim), (B, T), (B, dim)
    """

    def __init__(self, module: nn.Module, dim: int, prepare: Prepare, blank: Any) -> None:
        super().__init__()
        self.module, self.dim = module, dim
        self._prepare, self._blank = prepare, blank
        self.one_length = True  # the module knows nothing of padding

    def processor(self, train: bool) -> Processor:
        blank = BLANKS.get(self.kind) if self._blank is None else self._blank
        if blank is None:
            raise FusionZooError(
                f"wrap_encoder of a {self.kind} needs blank=, a value as the data holds it, such as"
                " torch.zeros(12)"
            )
        return FunctionProcessor(self._prepare, blank)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        if "values" not in inputs:
            mask = inputs.get("attention_mask")
            return self._features(self.module(**inputs), None if mask is None else mask.bool())
        values = inputs["values"]
        if "lengths" not in inputs or torch.compiler.is_exporting():
            return self._features(self.module(values))
        lengths = inputs["lengths"]
        different = lengths.unique().tolist()
        if len(different) < 2:
            return self._features(self.module(values[:, : max(different, default=0)]))
        # Rows of one length at a time: the module knows nothing of padding.
        parts: list[Features | None] = [None] * values.shape[0]
        for length in different:
            rows = (lengths == length).nonzero()[:, 0]
            group = self._features(self.module(values[rows, :length]))
            for number, row in enumerate(rows.tolist()):
                parts[row] = Features(*(x[number] for x in group))
        return _padded([part for part in parts if part is not None])

    def _features(self, output: Any, mask: Tensor | None = None) -> Features:
        """Turn what the module returned into features."""
        tokens = getattr(output, "last_hidden_state", output)
        if isinstance(output, Features):
            features = output
        elif not isinstance(tokens, Tensor) or tokens.ndim not in (2, 3):
            is_tensor = isinstance(tokens, Tensor)
            returned = tuple(tokens.shape) if is_tensor else type(output).__name__
            raise FusionZooError(
                f"the wrapped module of {self.modality!r} returned {returned}; it must return"
                " (B, D), (B, T, D), Features, or an output with last_hidden_state"
            )
        elif tokens.ndim == 2:
            features = one_token(tokens)
        else:
            features = unmasked(tokens) if mask is None else mean_pooled(tokens, mask)
        if features.tokens.shape[-1] != self.dim:
            raise FusionZooError(
                f"the wrapped module of {self.modality!r} returns features of width"
                f" {features.tokens.shape[-1]}, and dim={self.dim}"
            )
        return features


def wrap_encoder(
    module: nn.Module,
    *,
    dim: int,
    processor: Prepare = torch.as_tensor,
    kind: str | None = None,
    blank: Any = None,
) -> Encoder:
    """Make an encoder of a module: `create_model(encoders={"image": wrap_encoder(net, dim=512)})`.

    The module returns one vector for each row, (B, dim); tokens, (B, T, dim); `Features`; or, as
    transformers do, an object with `last_hidden_state`. `processor` turns a value of the data
    (`structures.Sample` says what those are) into a tensor, or into a dict of tensors that the
    module takes by name, in which `attention_mask` says which tokens are real; it runs in the
    loader's workers, so it must be picklable. `kind` is what the data holds: image, text, audio,
    vector or sequence; default: the modality's name. `blank` is a value for samples that lack the
    modality; only vectors and sequences, and modules that refuse a small black image, need it.
    """
    check_number("dim", dim, 1)
    encoder = WrappedEncoder(module, dim, processor, blank)
    if kind is not None:
        check_choice("kind", kind, KINDS)
        encoder.kind = kind
    return encoder


def adopt(encoder: Encoder, modality: str, kind: str | None) -> Encoder:
    """Give an encoder that was built in Python its place in a model, as `create_encoder` does."""
    kind = getattr(encoder, "kind", kind or modality)
    if kind not in KINDS:
        raise FusionZooError(
            f"encoders.{modality}: say what it encodes, kind= one of {', '.join(KINDS)}"
        )
    encoder.modality, encoder.kind = modality, kind
    if not encoder.spec:
        encoder.spec = {"name": WRAPPED, "kind": kind, "dim": encoder.dim}
    if not isinstance(encoder, WrappedEncoder):
        return encoder
    try:  # a wrong width or processor is found here
        encoder.unread = unread_parameters(encoder)
    except Exception as error:
        raise FusionZooError(
            f"encoders.{modality}: the wrapped module cannot encode a blank {kind},"
            f" which stands for a missing one ({one_line(error)}); blank= gives it another value"
        ) from error
    return encoder


def _padded(rows: Sequence[Features]) -> Features:
    """Join rows of different lengths: (T, D), (T,), (D,) each."""
    return Features(
        pad_sequence([row.tokens for row in rows], batch_first=True),
        pad_sequence([row.mask for row in rows], batch_first=True),
        torch.stack([row.pooled for row in rows]),
    )
