"""Encode the rows of a batch that have a modality."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .encoders import Encoder
from .eval_mode import quiet
from .structures import Features, Inputs


def encode_rows(encoder: Encoder, inputs: Inputs, present: Tensor) -> Features:
    """Encode the rows where `present` (B,) holds; the others get an empty mask and zeros.

    Inputs that are `Features` were encoded before.
    """
    if isinstance(inputs, Features):
        return inputs if bool(present.all()) else _hide_absent(inputs, present)
    if bool(present.all()) and len(present):
        return encoder(inputs)
    rows = present.nonzero()[:, 0]
    if not len(rows) and encoder.sharded:
        return _run_blank(encoder, inputs, len(present))
    if not len(rows):
        touch = sum((p.flatten()[:1].sum() for p in encoder.parameters() if p.requires_grad), 0.0)
        dtype = next((p.dtype for p in encoder.parameters()), torch.get_default_dtype())
        empty = torch.zeros(len(present), encoder.dim, device=present.device, dtype=dtype)
        pooled = empty + 0.0 * touch
        mask = torch.zeros(len(present), 1, dtype=torch.bool, device=present.device)
        return Features(pooled[:, None], mask, pooled)
    some: Features = encoder({name: x.index_select(0, rows) for name, x in inputs.items()})

    def scatter(x: Tensor) -> Tensor:
        return x.new_zeros(len(present), *x.shape[1:]).index_copy(0, rows, x)

    return Features(*map(scatter, some))


def _hide_absent(features: Features, present: Tensor) -> Features:
    return Features(
        features.tokens.masked_fill(~present[:, None, None], 0),
        features.mask & present[:, None],
        features.pooled.masked_fill(~present[:, None], 0),
    )


def _run_blank(encoder: Encoder, inputs: Mapping[str, Tensor], count: int) -> Features:
    """Encode one blank row with weight zero: where processes share weights, all must run alike."""
    if not count:
        blank = encoder.processor(False).blank()
        inputs = {name: blank[name][None].to(x) for name, x in inputs.items()}
    with quiet(encoder):
        made: Features = encoder({name: x[:1] for name, x in inputs.items()})
    tokens = (0.0 * made.tokens).expand(count, -1, -1)
    mask = torch.zeros(count, tokens.shape[1], dtype=torch.bool, device=tokens.device)
    return Features(tokens, mask, (0.0 * made.pooled).expand(count, -1))
