"""Where a model is wrong: counts by class and label, the numbers, and the worst samples.

Shapes: `N` samples, `K` logits and `C` label columns of all targets.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusionzoo.datasets import PairedDataset
from fusionzoo.evaluation.measure import Answers, Figures, measure
from fusionzoo.evaluation.shapley import subsets
from fusionzoo.inference import Settings, collect_answers, labelled, tasks_of_model
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.structures import Labels, Prediction
from fusionzoo.targets import Number, Target, join_words
from fusionzoo.training.multitask import Tasks

MAX_CLASSES = 20  # of a confusion matrix; of more, the most frequent confusions are listed
MAX_LINES = 30  # of a table
MAX_EXACT = 5  # modalities of which every subset is measured; of more, each alone and left out
Table = tuple[list[str], list[list[str]]]  # header, rows


@dataclass(frozen=True)
class SplitAnswers:
    """A model's answers to a split, in the order of `answers.ids`."""

    model: FusionModel
    dataset: PairedDataset
    answers: Answers
    calibrated: Tensor  # logits of the fusion divided by the temperatures, (N, K)
    tasks: Tasks
    figures: Figures
    predictions: list[dict[str, Any]]  # by target: a Prediction, Labels or a number

    @classmethod
    def of(cls, model: FusionModel, dataset: PairedDataset, cfg: Settings) -> SplitAnswers:
        """Answer the samples of `dataset` that have a label."""
        dataset = labelled(model, dataset)
        answers = collect_answers(model, dataset, cfg, "report", _chosen(list(model.modalities)))
        calibrated, tasks = answers.calibrated, tasks_of_model(model, answers.target)
        assert calibrated is not None
        single = [target.name for target in model.answer_targets] == ["target"]
        decoded = model.decode(calibrated)
        predictions = [{"target": x} for x in decoded] if single else decoded
        figures = measure(tasks, answers, slow=True)
        return cls(model, dataset, answers, calibrated, tasks, figures, predictions)

    def labels(self) -> dict[str, tuple[Target, Tensor]]:
        """Return the encoded labels (N, C) of each target, NaN where they are missing."""
        targets, encoded = self.model.answer_targets, self.answers.target
        if self.model.targets is None:
            return {targets[0].name: (targets[0], encoded[:, None].double())}
        parts = encoded.double().split([target.columns for target in targets], 1)
        return {target.name: (target, x) for target, x in zip(targets, parts, strict=True)}


def _chosen(modalities: list[str]) -> list[frozenset[str]]:
    """Return the subsets to measure: all but the empty and the full one, if they are few."""
    if len(modalities) <= MAX_EXACT:
        return subsets(modalities)[1:-1]
    alone = [frozenset({name}) for name in modalities]
    return [*alone, *(frozenset(modalities) - single for single in alone)]


def given_table(measured: SplitAnswers) -> Table:
    """Return the metrics of the fusion given each subset of the modalities."""
    answers, figures = measured.answers, measured.figures
    shown = [(name, title) for name, title in measured.tasks.shown if name in figures.fused]
    lines = []
    for names, metrics in figures.by_subset.items():
        ordered = [name for name in measured.model.modalities if name in names]
        count = int(answers.has_any(names).sum())
        lines.append([", ".join(ordered), f"{count:,}", *_cells(metrics, shown)])
    everything = ["all modalities", f"{len(answers.ids):,}", *_cells(figures.fused, shown)]
    header = ["given", "samples", *(title for _, title in shown)]
    return header, [*lines[:MAX_LINES], everything]


def _cells(figures: Mapping[str, float], shown: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{figures[name]:.3f}" if name in figures else "" for name, _ in shown]


def confusion(target: Target, labels: Tensor, predicted: Sequence[Prediction]) -> dict[str, Any]:
    """Return counts of true and predicted classes: a matrix, or the most frequent confusions."""
    classes, counts = list(target.classes), Counter[tuple[str, str]]()
    for index, prediction in zip(labels[:, 0].tolist(), predicted, strict=True):
        if index == index:  # not NaN
            counts[classes[int(index)], prediction.label] += 1
    right = sum(count for (true, label), count in counts.items() if true == label)
    facts: dict[str, Any] = {"right": right, "of": counts.total(), "classes": classes}
    wrong = [(x, n) for x, n in counts.most_common() if x[0] != x[1]]
    if len(classes) > MAX_CLASSES:
        rows = [[short(true), short(label), f"{n:,}"] for (true, label), n in wrong[:MAX_LINES]]
        return facts | {"table": (["true", "predicted", "samples"], rows), "matrix": None}
    matrix = []
    for true in classes:
        row = [counts[true, label] for label in classes]
        total = max(1, sum(row))
        cells = [{"count": n, "shade": math.sqrt(n / total)} for n in row]  # few are seen too
        matrix.append({"name": short(true), "cells": cells, "total": sum(row)})
    return facts | {"table": None, "matrix": matrix, "names": [short(x) for x in classes]}


def per_label(target: Target, labels: Tensor, predicted: Sequence[Labels]) -> Table:
    """Return how often each label is there, is predicted, and both; the most frequent first."""
    known = ~labels.isnan().any(1)
    true = labels[known].bool()
    sets = [
        set(x.labels) for x, is_known in zip(predicted, known.tolist(), strict=True) if is_known
    ]
    rows = []
    for place in true.sum(0).argsort(descending=True, stable=True).tolist()[:MAX_LINES]:
        name, is_true = target.classes[place], true[:, place]
        is_predicted = torch.tensor([name in chosen for chosen in sets])
        num_true, said = int(is_true.sum()), int(is_predicted.sum())
        both = int((is_true & is_predicted).sum())
        shares = [
            f"{top / below:.3f}" if below else "-"
            for top, below in ((both, said), (both, num_true), (2 * both, num_true + said))
        ]
        rows.append([short(name), *(f"{x:,}" for x in (num_true, said, both)), *shares])
    return ["label", "true", "predicted", "both", "precision", "recall", "F1"], rows


def numbers_of(
    target: Number, labels: Tensor, predicted: Sequence[float]
) -> tuple[Tensor, Tensor] | None:
    """Return true and predicted numbers (N,), in the data's unit, of samples with a label."""
    known = ~labels[:, 0].isnan()
    if not known.any():
        return None
    return target.original(labels[known, 0]), torch.tensor(predicted, dtype=torch.float64)[known]


def error_table(numbers: Mapping[str, tuple[Tensor, Tensor]]) -> Table:
    """Return quantiles of the absolute errors, and the mean error, by target."""
    rows = []
    for name, (true, predicted) in numbers.items():
        error = predicted - true
        quantiles = error.abs().quantile(torch.tensor([0.5, 0.9, 1.0], dtype=torch.float64))
        figures = [*quantiles.tolist(), error.mean().item(), true.std(correction=0).item()]
        rows.append([short(name), f"{len(true):,}", *(f"{x:.4g}" for x in figures)])
    header = ["absolute error", "samples", "median", "90 % are below", "largest"]
    return [*header, "mean of predicted - true", "standard deviation of true"], rows


def worst(measured: SplitAnswers, most: int) -> list[tuple[int, float]]:
    """Return the samples with the largest losses, of those with a label: (place, loss)."""
    losses = measured.tasks.criterion(measured.calibrated, measured.answers.target).double()
    missing = torch.stack([x.isnan().any(1) for _, x in measured.labels().values()]).all(0)
    losses = losses.nan_to_num(nan=torch.inf).masked_fill(missing, -1)
    order = losses.argsort(descending=True, stable=True).tolist()[:most]
    return [(place, losses[place].item()) for place in order if losses[place] >= 0]


def answer_lines(measured: SplitAnswers, place: int) -> list[dict[str, Any]]:
    """Return the true and the predicted value of a sample's targets."""
    lines = []
    for name, (target, labels) in measured.labels().items():
        prediction, label = measured.predictions[place][name], labels[place]
        if label.isnan().any():
            continue
        kind, note = target.standard_kind(), ""
        if isinstance(prediction, Labels):
            true = join_words([x for x, is_in in zip(target.classes, label, strict=True) if is_in])
            said = join_words(prediction.labels)
            wrong = true != said
        elif isinstance(prediction, Prediction):
            true, said = target.classes[int(label[0])], prediction.label
            wrong = true != said
            share = prediction.probabilities.get(true, 0.0)
            note = f"{prediction.probability:.0%}" + (f", true one {share:.0%}" if wrong else "")
        else:
            number = target.original(label[0]).item() if isinstance(target, Number) else label[0]
            true, said, wrong = f"{number:.4g}", f"{prediction:.4g}", False
            note = f"{prediction - number:+.4g}" if kind == "regression" else ""
        shown = {"true": short(true) or "no label", "said": short(said) or "no label"}
        lines.append({"name": name, "wrong": wrong, "note": note, **shown})
    return lines


def short(text: str, most: int = 120) -> str:
    """Return the beginning of a long text."""
    return text if len(text) <= most else f"{text[:most]} ..."
