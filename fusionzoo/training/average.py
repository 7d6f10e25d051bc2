"""The mean of a model and the linear model of what it reads, held by the same modules.

Models that err differently err less on average (Breiman 1996, "Stacked regressions"), and on small
tables a network and a linear model do: perf/default.py, results/LOG.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fusionzoo.encoders.tabular import TabM
from fusionzoo.encoders.vector import VectorIdentity
from fusionzoo.evaluation.measure import Answers
from fusionzoo.fusion.late.late_mean import LateMean
from fusionzoo.machine.fsdp import sharded
from fusionzoo.model.fusion_model import FusionModel

from .fitted.linear import LinearMap
from .multitask import Tasks
from .trainer import Trainer


class ToAverage(NamedTuple):
    """Linear models of what a model reads from its data set or frozen encoders, side by side."""

    modalities: Sequence[str]
    of_train: LinearMap
    of_all: LinearMap  # learnt from train and val
    ids: Sequence[str]  # of the validation samples
    logits: Tensor  # of the first to these, (N, K)

    def mean(self, answers: Answers) -> Answers:
        """Return the mean of the answers to the validation samples and of the first model's."""
        place = {key: row for row, key in enumerate(self.ids)}
        logits = self.logits[[place[key] for key in answers.ids]]
        return replace(answers, fused=(answers.fused + logits.to(answers.fused)) / 2)


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


def can_average(trainer: Trainer, modalities: Collection[str]) -> bool:
    """Whether a model can hold a linear one of these modalities: that of one table, or, of several,
    one of what its fusion reads, which training does not change and has brought to mean 0.

    Its weights are no averages, in no shards and in no compiled graph.
    """
    module, cfg, model = trainer.module, trainer.cfg.train, trainer.module.model
    if trainer.ema is not None or sharded(module) or cfg.compile:
        return False
    if len(model.encoders) == 1:
        return lone_table(model) is not None
    fixed = {
        name
        for name, encoder in model.named_encoders()
        if name in model.standardise
        and (encoder.kind != "vector" or isinstance(encoder, VectorIdentity))
    }
    return fixed.issuperset(modalities) and cfg.standardise != "minmax" and model.fusion.ends_linear


@torch.no_grad()
def add_linear(model: FusionModel, added: LinearMap, modalities: Sequence[str]) -> None:
    """Let the logits be the mean of what they were and of a linear map of these modalities.

    The head W of a table reads p; with V the map's weight, p gains W^+ V x, of which W W^+ V x =
    V x is left. The vectors of several modalities have been standardised: x = m + z / s.
    """
    parts = lone_table(model) if len(model.encoders) == 1 else None
    if parts is None:
        weights, bias = {}, added.bias
        widths = [model.fusion.dims[name] for name in modalities]
        for name, weight in zip(modalities, added.weight.split(widths), strict=True):
            mean, scale = (
                model.get_buffer(f"standardise.{name}.pooled_{x}").double().cpu()
                for x in ("mean", "scale")
            )
            weights[name] = (weight / scale[:, None]).T
            bias = bias + mean @ weight
        model.fusion.average_with(weights, bias)
        return
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
