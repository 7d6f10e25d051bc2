"""Helpers of the checks of objectives: a target of each kind, its labels and logits.

Shapes: `N` rows, `K` logits, `C` numbers of a label.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fusionzoo.targets import AnyOf, Level, Number, OneOf, Target
from fusionzoo.training.tasks.base import OBJECTIVES, Task

from .targets import find

ROWS = 60
TARGETS: dict[str, Target] = {
    "classification": OneOf("y", ("a", "b", "c")),
    "multilabel": AnyOf("y", ("a", "b", "c")),
    "regression": Number("y", mean=3.0, deviation=2.0),
    "ordinal": Level("y", ("1", "2", "3", "4")),
    "none": Target(""),
}


@dataclass
class Subject:
    """An objective to be checked, and the kind of target that it learns."""

    cls: Callable[..., Task]
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def build(self, **more: Any) -> Task:
        """Build the objective for labels of the training split."""
        return self.cls(self.target, self.labels, **{**self.settings, **more})

    def takes(self, setting: str) -> bool:
        """Whether the constructor has a setting."""
        return setting in inspect.signature(self.cls).parameters

    @property
    def target(self) -> Target:
        """The target that it learns."""
        return TARGETS[self.kind]

    @property
    def learns(self) -> bool:
        """Whether it has a loss of its own: without a target only training strategies have."""
        return self.kind != "none"

    @cached_property
    def labels(self) -> Tensor:
        """Labels in which every class and level occurs: (N,) int64 of classes, else (N, C)."""
        draw = torch.Generator().manual_seed(0)
        if self.kind == "classification":
            return torch.tensor([0, 1, 0, 2, 1, 0]).repeat(ROWS // 6)
        if self.kind == "multilabel":
            shares = torch.tensor([0.2, 0.5, 0.7])
            return (torch.rand(ROWS, 3, generator=draw) < shares).float()
        if self.kind == "regression":
            values = torch.randn(ROWS, 1, generator=draw)
            return (values - values.mean()) / values.std(correction=0)
        if self.kind == "ordinal":
            return torch.tensor([0.0, 1, 1, 3, 2, 1]).repeat(ROWS // 6)[:, None]
        return torch.zeros(ROWS, 0)

    @cached_property
    def logits(self) -> Tensor:
        """Logits that have nothing to do with the labels, (N, K)."""
        draw = torch.Generator().manual_seed(1)
        return torch.randn(ROWS, max(1, self.target.width), generator=draw)


def gradient_of(task: Task, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's loss (N,) and the gradient of their sum (N, K)."""
    leaf = logits.clone().requires_grad_()
    loss = task.criterion(leaf, labels)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), gradient


def subject(target: str, settings: Mapping[str, Any] | None = None) -> Subject:
    """Return the objective of a name, `module:Class` or `file.py:Class`.

    An objective learns the kind of target that it is named after, or that of the registered class
    that it derives from; else one class of several.
    """
    cls = find(target, OBJECTIVES)
    names = {OBJECTIVES[name].cls: name for name in OBJECTIVES}
    known = [names[base] for base in inspect.getmro(cls) if names.get(base) in TARGETS]
    return Subject(cls, known[0] if known else "classification", settings or {})
