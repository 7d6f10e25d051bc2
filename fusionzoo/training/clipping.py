"""Gradient norms, and clipping by them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fusionzoo.distributed.fsdp import whole


def grad_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the norm of all gradients together, (); of whole tensors where they are sharded."""
    grads = [p.grad for p in parameters if p.grad is not None]
    return whole(get_total_norm(grads, foreach=True))


def clip_gradients(
    groups: Sequence[Sequence[nn.Parameter]], max_norm: float | None, device: torch.device
) -> Tensor:
    """Clip each group by its own norm (None: not at all); return the norms before, (groups,)."""
    norms = []
    for parameters in groups:
        norms.append(grad_norm(parameters))
        if max_norm is not None:
            clip_grads_with_norm_(parameters, max_norm, norms[-1], foreach=True)
    return torch.stack([norm.to(device) for norm in norms])
