"""What makes a step faster or smaller and leaves what it learns alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from ..config import TrainConfig
from ..encoders import Encoder
from ..model import FusionModel


def prepare(model: FusionModel, cfg: TrainConfig) -> None:
    """Set memory format, recomputation and compilation of encoders and fusion, in place."""
    for _, encoder in model.named_encoders():
        if cfg.channels_last and encoder.kind in ("image", "audio"):
            encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if cfg.checkpointing and not encoder.frozen:
            recompute(encoder)
        if cfg.compile:
            encoder.compile()
    if cfg.compile:
        model.fusion.compile()


def recompute(encoder: Encoder) -> int:
    """Let each block of an encoder forget its activations and compute them again in the backward
    pass; return how many blocks there are. Batch norms count a batch once."""
    found = list(blocks(encoder))
    for block in found:
        again = partial(_contexts, block)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=again)
    return len(found)


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of the outermost lists and sequences: layers, stages, residual blocks."""
    for child in module.children():
        members = list(child.children())
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(members) > 1:
            yield from (one for one in members if any(True for _ in one.parameters()))
        else:
            yield from blocks(child)


def _contexts(
    block: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _uncounted(block)


@contextmanager
def _uncounted(block: nn.Module) -> Iterator[None]:
    """Keep running statistics as they are."""
    norms = [m for m in block.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    kept = [(m.momentum, m.num_batches_tracked) for m in norms]
    for norm in norms:
        norm.momentum = 0.0
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked = norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, (momentum, counted) in zip(norms, kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, counted
