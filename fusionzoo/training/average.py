"""The mean of a model of one modality and a linear model, held by the same modules.

Models that err differently err less on average (Breiman 1996, "Stacked regressions"), and on small
data a trained model and a linear one do: perf/default.py, results/LOG.md.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusionzoo.encoders.tabular import TabM
from fusionzoo.evaluation.measure import Answers
from fusionzoo.features.frozen import StoredModality
from fusionzoo.fsdp import sharded
from fusionzoo.fusion.late.late_mean import LateMean
from fusionzoo.model import FusionModel
from fusionzoo.standardise import Standardise

from .fitted.linear import LinearMap
from .multitask import Tasks
from .trainer import Trainer


class LoneHead(NamedTuple):
    """What a model of one modality answers by: logits = W pooled + b."""

    modality: str
    encoder: nn.Module
    linear: nn.Linear

    @classmethod
    def of(cls, model: FusionModel) -> LoneHead | None:
        """Return that of a model; None of several modalities, or where layers lie between."""
        [(name, encoder), *others], fusion = model.named_encoders(), model.fusion
        is_mean = isinstance(fusion, LateMean) and fusion.space == "logit" and not fusion.projects
        if others or not is_mean or fusion.linear_skip is not None:
            return None
        linear = fusion.get_submodule(f"heads.{name}")
        assert isinstance(linear, nn.Linear)
        return cls(name, encoder, linear)


def can_average(trainer: Trainer, processor: Any) -> bool:
    """Whether a model can hold a linear one: of a table's columns, or of cached features."""
    head = LoneHead.of(trainer.module.model)
    if head is None or trainer.ema is not None or sharded(trainer.module):
        return False
    is_table = isinstance(head.encoder, TabM) and head.linear.out_features <= head.encoder.dim
    return is_table or isinstance(processor, StoredModality)


@torch.no_grad()
def add_linear(model: FusionModel, added: LinearMap) -> None:
    """Let the logits be the mean of what they were and of a linear map: of the features that the
    head W reads, or of a table's columns x. There, with V the map's weight, what W reads gains
    W^+ V x, of which W W^+ V x = V x is left.
    """
    head = LoneHead.of(model)
    assert head is not None
    linear, weight, bias = head.linear, added.weight, added.bias
    if isinstance(head.encoder, TabM):
        inverse = torch.linalg.pinv(linear.weight.double().cpu())  # (dim, K)
        head.encoder.add_linear((weight @ inverse.T).to(linear.weight))
        weight = torch.zeros(linear.weight.T.shape)
    elif head.modality in model.standardise:
        scaled = model.standardise[head.modality]
        assert isinstance(scaled, Standardise)
        mean, scale = (x.double().cpu() for x in (scaled.pooled_mean, scaled.pooled_scale))
        weight, bias = weight / scale[:, None], bias + mean @ weight
    linear.weight.add_(weight.T.to(linear.weight)).mul_(0.5)
    linear.bias.add_(bias.to(linear.bias)).mul_(0.5)


def is_worse(tasks: Tasks, answers: Answers, than: Answers) -> bool:
    """Whether answers have a larger loss than others to the same samples, by more than a standard
    error: others were chosen by these samples, and look better there than they are."""
    tasks = copy.deepcopy(tasks).cpu()
    difference = _losses(tasks, answers) - _losses(tasks, than)
    error = difference.std(correction=0) / len(difference) ** 0.5
    return bool(difference.mean() > error)


def _losses(tasks: Tasks, answers: Answers) -> Tensor:
    return tasks.criterion(answers.fused, answers.target).double()
