"""Samples with several pictures or clips: encode all items of a batch, then join their tokens.

Shapes: `B` batch, `I` items of the sample with most, `N` real items of the batch, `T` tokens of an
item, `D` width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fusionzoo.structures import ITEM_COUNTS, Features


def encode_items(
    encode: Callable[[Mapping[str, Tensor]], Features], inputs: Mapping[str, Tensor]
) -> Features:
    """Encode items as rows of their own; a sample's tokens are those of its items, in order.

    The pooled vector is the mean over the items. Padding items are not encoded.

    Shapes: inputs (B, I, ...) and `ITEM_COUNTS` (B,) -> (B, I T or fewer, D), mask, (B, D)
    """
    counts = inputs[ITEM_COUNTS]
    tensors = {name: x for name, x in inputs.items() if name != ITEM_COUNTS}
    most = next(iter(tensors.values())).shape[1]
    is_real = torch.arange(most, device=counts.device) < counts[:, None]  # (B, I)
    places = is_real.flatten().nonzero()[:, 0]
    flat = encode({name: x.flatten(0, 1)[places] for name, x in tensors.items()})

    def by_sample(x: Tensor) -> Tensor:
        padded = x.new_zeros(is_real.numel(), *x.shape[1:]).index_copy(0, places, x)
        return padded.unflatten(0, is_real.shape)

    tokens, mask = by_sample(flat.tokens).flatten(1, 2), by_sample(flat.mask).flatten(1, 2)
    pooled = by_sample(flat.pooled).sum(1) / counts[:, None].to(flat.pooled.dtype)
    return Features(*_without_gaps(tokens, mask), pooled)


def _without_gaps(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move the real tokens of each row to its front, and cut what no row needs."""
    longest = int(mask.sum(1).max())
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
    index = order[..., None].expand(-1, -1, tokens.shape[-1])
    return tokens.gather(1, index), mask.gather(1, order)
