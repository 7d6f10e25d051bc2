"""Gradients of the main loss and of a strategy's terms, kept apart until it joins them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from fusionzoo.distributed.process_group import World, total

from . import Balance

Encoders = Mapping[str, Sequence[nn.Parameter]]


class Apart:
    """Two backward passes for each batch; what the encoders get from each is added up by itself.

    DDP sums what one backward pass leaves, so it must be kept from summing here (`no_sync`), and
    `join` sums over the processes by hand.
    """

    def __init__(self, strategy: Balance, encoders: Encoders, scaler: GradScaler) -> None:
        self.strategy, self.scaler = strategy, scaler
        self.learning = {n: [p for p in own if p.requires_grad] for n, own in encoders.items()}
        self.joint, self.own = (
            {n: [torch.zeros_like(p) for p in own] for n, own in self.learning.items()}
            for _ in range(2)
        )

    def backward(self, main: Tensor, own: Tensor | float) -> None:
        """Add the encoders' gradients of both losses, and leave none on their parameters."""
        for loss, held, more in ((main, self.joint, True), (own, self.own, False)):
            if isinstance(loss, Tensor) and loss.requires_grad:
                self.scaler.scale(loss).backward(retain_graph=more)
            for name, parameters in self.learning.items():
                for sum_, parameter in zip(held[name], parameters, strict=True):
                    if parameter.grad is not None:
                        sum_ += parameter.grad
                        parameter.grad = None

    def join(self, others: Iterable[nn.Parameter], world: World) -> None:
        """Average over the processes, of the `others` too, and let the strategy join the two."""
        every = [p.grad for p in others if p.grad is not None]
        every += [x for held in (self.joint, self.own) for own in held.values() for x in own]
        for gradient in every:
            gradient.copy_(total(gradient, world) / world.size)
        for name, parameters in self.learning.items():
            joined = self.strategy.combine(self.joint[name], self.own[name]) if parameters else []
            for parameter, gradient in zip(parameters, joined, strict=True):
                parameter.grad = gradient
