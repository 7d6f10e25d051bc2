"""An exponential moving average (EMA) of a model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fusionzoo.distributed.fsdp import like, reshard, whole


class EMA:
    """Average the weights: mean <- d mean + (1 - d) weight after every step.

    d = min(decay, (1 + n) / (10 + n)) after n steps, so that a short run forgets its start too
    (the warm-up of timm's `ModelEmaV3` and of TensorFlow's moving averages). Buffers are not
    averaged: batch norms have an average of their own.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.module, self.decay, self.steps = module, decay, 0
        self.weights = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.means = {name: p.detach().clone() for name, p in self.weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Average in the weights after a step."""
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        self.steps += 1
        torch._foreach_lerp_(list(self.means.values()), list(self.weights.values()), 1 - decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Give the module the averaged weights for a block."""
        trained = {name: p.detach().clone() for name, p in self.weights.items()}
        self._set_weights(self.means)
        try:
            yield
        finally:
            self._set_weights(trained)

    @torch.no_grad()
    def _set_weights(self, values: dict[str, torch.Tensor]) -> None:
        reshard(self.module)
        for name, value in values.items():
            self.weights[name].copy_(value)

    def state_dict(self) -> dict[str, object]:
        """Return what a checkpoint keeps; called by all processes."""
        return {"steps": self.steps, "means": {n: whole(x).cpu() for n, x in self.means.items()}}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue from what `state_dict` returned."""
        means = state["means"]
        assert isinstance(means, dict) and isinstance(state["steps"], int)
        self.steps = state["steps"]
        for name, mean in self.means.items():
            mean.copy_(like(means[name], mean))
