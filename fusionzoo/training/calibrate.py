"""Calibrate a trained model on its validation split, and measure what that brings on another.

Nothing here touches training: it reads logits of the finished model.

Shapes: `N` samples; `K` logits and `C` label columns of all targets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fusionzoo.evaluation.calibration import calibration as calibration_figures
from fusionzoo.evaluation.measure import Answers
from fusionzoo.evaluation.metrics import multilabel_macro_f1, row_mean
from fusionzoo.model.confidence import Calibration, TargetCalibration
from fusionzoo.targets import AnyOf, Level, Number, Target, words

from .tasks import OBJECTIVES, standard_objective

Mode = Literal["none", "temperature", "auto"]
FOLDS = 5  # of the validation split, to measure what a temperature or threshold brings
FEWEST = 50  # labelled validation samples for temperatures and thresholds by `auto`
MAX_SCORES = 10_000  # stored of each target, evenly from lowest to highest
COVERAGE = 0.9  # of the sets and intervals that are measured


def calibratable(answers: Answers) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return logits, labels and weights of the samples that have a modality.

    One without any is answered by the prior, which needs no calibration.
    """
    rows = answers.has_any(answers.present)
    weights = None if answers.weights is None else answers.weights[rows]
    return answers.fused[rows], answers.target[rows], weights


def calibrate(
    targets: Sequence[Target],
    logits: Tensor,
    labels: Tensor,
    mode: Mode,
    weights: Tensor | None = None,
) -> Calibration:
    """Fit temperatures, thresholds and conformal scores to a validation split: (N, K), (N, C).

    `auto` keeps a temperature where it lowers the negative log-likelihood, and thresholds where
    they raise the macro F1, of samples left out (five folds); `temperature` keeps every
    temperature. Labels of one class may be indices (N,); missing ones are NaN. Samples count by
    their `weights` (N,), in the conformal scores as if the sample occurred so often.
    """
    return Calibration(
        targets={
            target.name: _calibrate(target, part, label, mode, weight)
            for target, part, label, weight in _by_target(targets, logits, labels, weights)
        }
    )


def _by_target(
    targets: Sequence[Target], logits: Tensor, labels: Tensor, weights: Tensor | None
) -> list[tuple[Target, Tensor, Tensor, Tensor]]:
    """Return each target with logits (n, width) float64, labels (n, C) and weights (n,) float64 of
    the rows that have a label and count."""
    weights = logits.new_ones(len(logits)) if weights is None else weights
    labels = labels[:, None] if labels.ndim == 1 else labels
    parts = logits.double().split([target.width for target in targets], dim=-1)
    columns = labels.double().split([target.columns for target in targets], dim=-1)
    rows = [~label.isnan().any(-1) & (weights > 0) for label in columns]
    return [
        (target, part[row], label[row], weights[row].double())
        for target, part, label, row in zip(targets, parts, columns, rows, strict=True)
    ]


def _calibrate(
    target: Target, logits: Tensor, labels: Tensor, mode: Mode, weights: Tensor
) -> TargetCalibration:
    temperature, thresholds = None, {}
    enough = len(logits) >= FEWEST
    if not isinstance(target, Number) and len(logits) and (enough or mode == "temperature"):
        temperature = fit_temperature(target, logits, labels, weights)
        if mode == "auto" and not _temperature_helps(target, logits, labels, weights):
            temperature = None
    scaled = logits if temperature is None else logits / temperature
    if isinstance(target, AnyOf) and enough and _thresholds_help(scaled, labels, weights):
        values = best_thresholds(scaled, labels, weights).tolist()
        thresholds = dict(zip(target.classes, values, strict=True))
    scores = _stored_scores(target.misfit(scaled, labels), weights)
    return TargetCalibration(temperature=temperature, thresholds=thresholds, scores=scores.tolist())


def _stored_scores(scores: Tensor, weights: Tensor) -> Tensor:
    """Return scores from lowest to highest, at most `MAX_SCORES`, each of which stands for the same
    weight; rounded up, so that a limit is never too low."""
    scores, order = scores.sort()
    count = min(len(scores), MAX_SCORES)
    below = weights[order].cumsum(0)
    shares = torch.arange(1, count + 1, dtype=below.dtype) / max(count, 1)
    places = torch.searchsorted(below, shares * (1 - 1e-12) * weights.sum())
    return scores[places.clamp(max=len(scores) - 1)]


def log_loss(
    target: Target, logits: Tensor, labels: Tensor, weights: Tensor | None = None
) -> float:
    """Return the mean negative log-likelihood in nats: (N, width), (N, C), weights (N,).

    That of the kind's standard objective, whatever the loss that the model was trained with.
    """
    task = OBJECTIVES.create(standard_objective(target.kind), target, labels)
    return float(row_mean(task.criterion(logits, labels).double(), weights))


def fit_temperature(
    target: Target, logits: Tensor, labels: Tensor, weights: Tensor | None = None
) -> float:
    """Return the number to divide logits by for the least `log_loss` (Guo et al. 2017,
    arXiv:1706.04599), from 1 / 20 to 20."""
    from scipy.optimize import minimize_scalar

    def loss(log_temperature: float) -> float:
        return log_loss(target, logits / math.exp(log_temperature), labels, weights)

    bound = math.log(20.0)
    return math.exp(minimize_scalar(loss, bounds=(-bound, bound), method="bounded").x)


def _temperature_helps(target: Target, logits: Tensor, labels: Tensor, weights: Tensor) -> bool:
    """Whether temperatures fitted on four fifths lower the loss of the fifth left out."""
    before = after = 0.0
    for rest, fold in _folds(len(logits)):
        temperature = fit_temperature(target, logits[rest], labels[rest], weights[rest])
        tested = weights[fold]
        size = float(tested.sum())
        before += size * log_loss(target, logits[fold], labels[fold], tested)
        after += size * log_loss(target, logits[fold] / temperature, labels[fold], tested)
    return after < before


def _folds(count: int) -> list[tuple[Tensor, Tensor]]:
    """Return the rows left in and left out of each fold; the same in every run."""
    fold = torch.randperm(count, generator=torch.Generator().manual_seed(0)) % FOLDS
    return [((fold != k).nonzero()[:, 0], (fold == k).nonzero()[:, 0]) for k in range(FOLDS)]


def best_thresholds(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the probability above which each label is predicted, for the highest F1: (K,).

    Half-way between two samples' probabilities; 0.5 for a label that no sample has.
    """
    weights = logits.new_ones(len(logits)) if weights is None else weights
    thresholds = []
    for shares, truth in zip(logits.sigmoid().T, labels.T, strict=True):
        if not truth.any():
            thresholds.append(0.5)
            continue
        ordered, order = shares.sort(descending=True)
        right, predicted = (x[order].cumsum(0) for x in (weights * truth, weights))
        f1 = 2 * right / (predicted + right[-1])
        f1[:-1][ordered[:-1] == ordered[1:]] = -1  # equal probabilities are not told apart
        last = int(f1.argmax())  # of the samples that get the label
        below = float(ordered[last + 1]) if last + 1 < len(ordered) else 0.0
        thresholds.append((float(ordered[last]) + below) / 2)
    return torch.tensor(thresholds, dtype=torch.float64)


def _thresholds_help(logits: Tensor, labels: Tensor, weights: Tensor) -> bool:
    """Whether thresholds of four fifths raise the macro F1 of the predictions left out."""
    predicted = torch.zeros_like(labels, dtype=torch.bool)
    for rest, fold in _folds(len(logits)):
        limits = best_thresholds(logits[rest], labels[rest], weights[rest])
        predicted[fold] = logits[fold].sigmoid() > limits
    before = f1_of_occurring(logits > 0, labels, weights)
    return f1_of_occurring(predicted, labels, weights) > before


def f1_of_occurring(predicted: Tensor, labels: Tensor, weights: Tensor | None = None) -> float:
    """Return the mean F1 over the labels that occur: (N, K) bool, (N, K), weights (N,)."""
    occurs = labels.bool().any(0)
    if not occurs.any():
        return 0.0
    return multilabel_macro_f1(predicted[:, occurs], labels[:, occurs], weights).item()


def measure(
    calibration: Calibration,
    targets: Sequence[Target],
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
) -> dict[str, dict[str, float]]:
    """Return the figures of each target on a split other than the validation split.

    `temperature`, and before and after it `nll` and `ece`; of labels `macro_f1` before and after
    thresholds; of sets and intervals for a coverage of 0.9 their measured `coverage`, and `size`:
    the mean number of classes or labels, or half the width of an interval. `logits` (N, K) are not
    scaled. Samples count by their `weights` (N,).
    """
    return {
        target.name: _measure(calibration.targets[target.name], target, part, label, weight)
        for target, part, label, weight in _by_target(targets, logits, labels, weights)
        if len(part)
    }


def _measure(
    entry: TargetCalibration,
    target: Target,
    logits: Tensor,
    labels: Tensor,
    weights: Tensor,
) -> dict[str, float]:
    scaled = logits if entry.temperature is None else logits / entry.temperature
    figures: dict[str, float] = {"samples": len(logits)}
    if not isinstance(target, Number):
        figures["temperature"] = 1.0 if entry.temperature is None else entry.temperature
        for name, x in (("before", logits), ("after", scaled)):
            figures[f"nll_{name}"] = log_loss(target, x, labels, weights)
            figures[f"ece_{name}"] = expected_error(target, x, labels, weights)
    if isinstance(target, AnyOf):
        limits = [entry.thresholds.get(name, 0.5) for name in target.classes]
        predicted = scaled.sigmoid() > torch.tensor(limits)
        figures["macro_f1_before"] = f1_of_occurring(scaled > 0, labels, weights)
        figures["macro_f1_after"] = f1_of_occurring(predicted, labels, weights)
    count = len(entry.scores)
    if math.ceil((count + 1) * COVERAGE) <= count:
        limit = entry.limit(COVERAGE, target.name)
        figures["coverage"] = covered(target, scaled, labels, limit, weights)
        figures["size"] = mean_size(target, scaled, limit, weights)
    return figures


def expected_error(
    target: Target, logits: Tensor, labels: Tensor, weights: Tensor | None = None
) -> float:
    """Return the expected calibration error: of the class or level, or over all labels."""
    if isinstance(target, AnyOf):
        logit = logits.flatten()
        pairs = torch.stack([torch.zeros_like(logit), logit], dim=1)
        if weights is not None:
            weights = weights.repeat_interleave(logits.shape[1])
        return calibration_figures(pairs, labels.flatten().long(), weights)["ece"]
    if isinstance(target, Level):
        above = logits.sigmoid().cumprod(-1)
        edge = torch.ones_like(above[:, :1])
        shares = torch.cat([edge, above], 1) - torch.cat([above, 0 * edge], 1)
        logits = shares.clamp(min=1e-12).log()
    return calibration_figures(logits, labels[:, 0].long(), weights)["ece"]


def covered(
    target: Target, logits: Tensor, labels: Tensor, limit: float, weights: Tensor | None = None
) -> float:
    """Return the share of samples whose label lies in its set or interval."""
    return float(row_mean((target.misfit(logits, labels) <= limit).double(), weights))


def mean_size(target: Target, logits: Tensor, limit: float, weights: Tensor) -> float:
    """Return the mean number of members of a set, or half the width of an interval."""
    if isinstance(target, Number):
        return limit
    region = target.region(logits, limit)
    if "set" in region:
        sizes = [len(words(cell)) for cell in region["set"]]
    else:
        rank = {name: number for number, name in enumerate(target.classes)}
        ends = zip(region["lower"], region["upper"], strict=True)
        sizes = [rank[upper] - rank[lower] + 1 for lower, upper in ends]
    return float(row_mean(torch.tensor(sizes, dtype=torch.float64), weights))


def calibration_rows(
    figures: Mapping[str, Mapping[str, float]],
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table: a line per target, figures before -> after."""
    pairs = {"nll": "NLL", "ece": "ECE", "macro_f1": "macro F1 (thresholds)"}
    shown = {k: x for k, x in pairs.items() if any(f"{k}_after" in f for f in figures.values())}
    header = ["", *(["temperature"] if "nll" in shown else []), *shown.values()]
    header += [f"{COVERAGE:.0%} sets\ncover", "mean\nsize"]
    rows = []
    for name, values in figures.items():
        row = [name, *([_cell(values, "temperature")] if "nll" in shown else [])]
        for key in shown:
            before, after = (_cell(values, f"{key}_{when}") for when in ("before", "after"))
            row.append(f"{before} -> {after}" if before != "-" else "-")
        coverage = f"{values['coverage']:.1%}" if "coverage" in values else "-"
        rows.append([*row, coverage, _cell(values, "size")])
    return header, rows


def _cell(values: Mapping[str, Any], key: str) -> str:
    return f"{values[key]:.3f}" if key in values else "-"
