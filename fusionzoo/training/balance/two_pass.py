"""The gradients of two losses, kept apart until a training strategy combines them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from fusionzoo.machine.distributed import World, total

from .base import Balance


class TwoPassBackward:
    """Accumulate the encoders' gradients of the main loss and of a strategy's losses separately.

    DDP sums what one backward pass leaves, so it must be kept from summing here (`no_sync`), and
    `combine` sums over the processes itself.
    """

    def __init__(
        self, strategy: Balance, encoders: Mapping[str, Sequence[nn.Parameter]], scaler: GradScaler
    ) -> None:
        self.strategy, self.scaler = strategy, scaler
        self.trainable = {
            name: [p for p in parameters if p.requires_grad]
            for name, parameters in encoders.items()
        }
        self.main_grads, self.extra_grads = (
            {name: [torch.zeros_like(p) for p in ps] for name, ps in self.trainable.items()}
            for _ in range(2)
        )

    def backward(self, main: Tensor, extra: Tensor | float) -> None:
        """Add the encoders' gradients of both losses, and leave none on their parameters."""
        passes = ((main, self.main_grads, True), (extra, self.extra_grads, False))
        for loss, sums, retain_graph in passes:
            if isinstance(loss, Tensor) and loss.requires_grad:
                self.scaler.scale(loss).backward(retain_graph=retain_graph)
            for name, parameters in self.trainable.items():
                for grad_sum, parameter in zip(sums[name], parameters, strict=True):
                    if parameter.grad is not None:
                        grad_sum += parameter.grad
                        parameter.grad = None

    def combine(self, others: Iterable[nn.Parameter], world: World) -> None:
        """Average over the processes, of the `others` too, and let the strategy combine the two."""
        gradients = [p.grad for p in others if p.grad is not None]
        for sums in (self.main_grads, self.extra_grads):
            gradients += [grad for grads in sums.values() for grad in grads]
        for gradient in gradients:
            gradient.copy_(total(gradient, world) / world.size)
        for name, parameters in self.trainable.items():
            if not parameters:
                continue
            combined = self.strategy.combine_gradients(
                self.main_grads[name], self.extra_grads[name]
            )
            for parameter, gradient in zip(parameters, combined, strict=True):
                parameter.grad = gradient
