"""The mean of a table's model and the linear model of its columns, held by the same modules.

Models that err differently err less on average (Breiman 1996, "Stacked regressions"), and on small
tables a network and a linear model do: perf/default.py, results/LOG.md.
"""

from __future__ import annotations

import torch
from torch import nn

from fusionzoo.encoders.tabular import TabM
from fusionzoo.evaluation.measure import Answers
from fusionzoo.fsdp import sharded
from fusionzoo.fusion.late.late_mean import LateMean
from fusionzoo.model import FusionModel

from .fitted.linear import LinearMap
from .multitask import Tasks
from .trainer import Trainer


def lone_table(model: FusionModel) -> tuple[TabM, nn.Linear] | None:
    """Return encoder and head of a model whose logits are a linear map of the `TabM` of one table;
    of any other model None."""
    [(name, encoder), *others], fusion = model.named_encoders(), model.fusion
    is_mean = isinstance(fusion, LateMean) and fusion.space == "logit" and not fusion.projects
    if others or not isinstance(encoder, TabM) or not is_mean or fusion.linear_skip is not None:
        return None
    head = fusion.get_submodule(f"heads.{name}")
    assert isinstance(head, nn.Linear)
    return (encoder, head) if head.out_features <= encoder.dim else None


def can_average(trainer: Trainer) -> bool:
    """Whether a model can hold a linear one: that of one table, whose weights are no averages."""
    module = trainer.module
    return lone_table(module.model) is not None and trainer.ema is None and not sharded(module)


@torch.no_grad()
def add_linear(model: FusionModel, added: LinearMap) -> None:
    """Let the logits be the mean of what they were and of a linear map of the columns.

    The head W reads p; with V the map's weight, p gains W^+ V x, of which W W^+ V x = V x is left.
    """
    parts = lone_table(model)
    assert parts is not None
    encoder, head = parts
    inverse = torch.linalg.pinv(head.weight.double().cpu())  # (dim, K)
    encoder.add_linear((added.weight @ inverse.T).to(head.weight))
    head.weight.mul_(0.5)
    head.bias.add_(added.bias.to(head.bias)).mul_(0.5)


def is_worse(tasks: Tasks, answers: Answers, than: Answers) -> bool:
    """Whether answers have a larger loss than others to the same samples, by more than a standard
    error: others were chosen by these samples, and look better there than they are."""
    tasks = tasks.on_cpu()
    losses = [tasks.criterion(x.fused, x.target).double() for x in (answers, than)]
    difference = losses[0] - losses[1]
    error = difference.std(correction=0) / len(difference) ** 0.5
    return bool(difference.mean() > error)
