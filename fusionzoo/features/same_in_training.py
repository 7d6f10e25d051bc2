"""Refuse to cache features of values that training prepares in another way than evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusionzoo.encoders import Item, Processor, varies


class NotCacheable(Exception):
    """Why the features of a frozen encoder cannot stand in for its inputs."""


class SameInTraining(Processor):
    """Prepare as in evaluation; refuse a value that training would prepare in another way."""

    def __init__(self, evaluation: Processor, training: Processor) -> None:
        self.evaluation, self.training = evaluation, training

    def __call__(self, value: Any, generator: torch.Generator | None = None) -> Item:
        return self.items(value)[0]

    def items(self, value: Any, generator: torch.Generator | None = None) -> list[Item]:
        if varies(self.training, value):
            raise NotCacheable("training crops or augments it at random")
        return self.evaluation.items(value)

    def blank(self) -> Item:
        return self.evaluation.blank()

    def collate(self, items: Sequence[Item]) -> Item:
        return self.evaluation.collate(items)
