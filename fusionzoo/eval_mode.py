"""Evaluation mode for a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def quiet(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode: no dropout, nothing random, no statistic moves."""
    training = [one for one in module.modules() if one.training]
    module.eval()
    try:
        yield
    finally:
        for one in training:
            one.training = True
