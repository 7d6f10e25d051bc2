"""Controls: labels shuffled in training, and each modality's pairing broken in testing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusionzoo.evaluation import statistics

from ..bench import tasks_of
from ..metric import sample_scores
from .leaderboard import SIGNIFICANT
from .results import PRIOR, Summary

NOT_RUN = "The control with shuffled labels was not run."
RENAMINGS = 10_000  # random permutations of the class names


def controls(summary: Summary) -> dict[str, Any]:
    """Return the controls' figures and, under `words`, what they show.

    A strategy that was trained on shuffled labels knows nothing about the test labels. Its accuracy
    is tested in three ways: does one strategy exceed what chance allows on so many samples; if so,
    do its predictions follow the true classes, or was its shuffle a lucky one; and are the
    strategies above chance on average (one-sided t-test: each has its own shuffle)?
    """
    from scipy.stats import ttest_1samp

    broken = {
        fusion.name: {
            name: fusion.mean() - fusion.mean(modality=name, corruption="pairing")
            for name in summary.bench.modalities
        }
        for fusion in summary.of_kind("fusion")
    }
    if summary.bench.scheme is not None:
        return {**_of_scores(summary), "loss_when_pairing_is_broken": broken}
    target = summary.target
    predictions = {name: logits.argmax(-1) for name, logits in summary.controls.items()}
    counts = torch.bincount(target)
    chance = float(counts.max() / counts.sum())
    accuracies = {name: float((x == target).double().mean()) for name, x in predictions.items()}
    values, limit = list(accuracies.values()), chance_limit(chance, len(target), len(predictions))
    beyond = [name for name, accuracy in accuracies.items() if accuracy > limit]
    leaking = [
        name
        for name in beyond
        if renaming_p(predictions[name], target, len(counts)) * len(predictions) < SIGNIFICANT
    ]
    mean_p = 1.0
    if len(values) > 1 and max(values) > min(values):
        mean_p = float(ttest_1samp(values, chance, alternative="greater").pvalue)
    words = NOT_RUN
    if values:
        words = _figures(accuracies, chance, limit, len(target))
        words += _conclusion(accuracies, beyond, leaking, mean_p)
    return {
        "words": words,
        "chance": chance,
        "limit": limit,
        "labels_shuffled": accuracies,
        "beyond_noise": beyond,
        "above_chance": bool(leaking) or mean_p < SIGNIFICANT,
        "loss_when_pairing_is_broken": broken,
    }


def _of_scores(summary: Summary) -> dict[str, Any]:
    """Test targets other than classes: is any control better than an answer without input?

    One-sided paired tests against the labels' prior over the test samples, Holm-corrected.
    """
    bench, metric = summary.bench, summary.bench.metric
    if not summary.controls:
        return {"words": NOT_RUN, "above_chance": False}
    tasks = tasks_of(bench, bench.folds[0].train)
    prior = summary.strategy(PRIOR)
    scores, p_values = {}, []
    for name, logits in summary.controls.items():
        sample = sample_scores(tasks, logits, summary.target).numpy()[None]
        gain = statistics.by_group(sample - prior.scores[:1], summary.groups)
        interval, p = statistics.crossed(gain, summary.folds)
        scores[name] = float(metric.shown(sample.mean()))
        p_values.append(p / 2 if interval.mean > 0 else 1 - p / 2)
    corrected = dict(zip(scores, statistics.holm(p_values), strict=True))
    leaking = [name for name, p in corrected.items() if p < SIGNIFICANT]
    chance = metric.shown(float(prior.scores.mean()))
    words = (
        f"Trained on shuffled labels, {len(scores)} strategies reach a {metric.title} of"
        f" {np.mean(list(scores.values())):.3f} on average ({min(scores.values()):.3f} to"
        f" {max(scores.values()):.3f}); the {PRIOR} alone reach {chance:.3f}."
    )
    words += " None is better than those: no sign of a leak."
    if leaking:
        names = ", ".join(f"`{name}` ({scores[name]:.3f})" for name in leaking)
        words = words.rpartition(" None")[0] + f" BETTER THAN CHANCE, SOMETHING LEAKS: {names}."
    return {
        "words": words,
        "chance": chance,
        "labels_shuffled": scores,
        "above_chance": bool(leaking),
    }


def chance_limit(chance: float, samples: int, tests: int) -> float:
    """Return the accuracy that the best of `tests` ignorant models exceeds in 5 % of cases.

    The number of correct predictions is binomial. `chance` is the share of the most frequent class:
    without knowledge, always predicting it is best.
    """
    from scipy.stats import binom

    return float(binom.ppf(statistics.LEVEL ** (1 / max(tests, 1)), samples, chance)) / samples


def renaming_p(predictions: Tensor, target: Tensor, classes: int) -> float:
    """Return the p-value of a permutation test that renames the predicted classes at random.

    A model trained on shuffled labels may predict one class for a whole cluster of samples, so its
    accuracy varies far more than that of independent guesses; but which class a cluster gets is
    chance, and any other is as likely. The agreement that follows from the shares of the classes is
    subtracted first. With few classes there are few permutations, and a leak in one control cannot
    be distinguished from luck.
    """
    table = np.zeros((classes, classes))
    np.add.at(table, (target.numpy(), predictions.numpy()), 1 / len(target))
    excess = table - table.sum(1, keepdims=True) * table.sum(0)
    generator = np.random.default_rng(0)
    names = generator.permuted(np.tile(np.arange(classes), (RENAMINGS, 1)), axis=1)
    renamed = excess[np.arange(classes), names].sum(1)
    at_least = int((renamed >= np.trace(excess) - 1e-12).sum())
    return (at_least + 1) / (RENAMINGS + 1)


def _figures(accuracies: dict[str, float], chance: float, limit: float, samples: int) -> str:
    values = list(accuracies.values())
    if len(values) == 1:
        reached = f"`{next(iter(accuracies))}` reaches {values[0]:.3f}"
    else:
        reached = f"{len(values)} strategies reach {np.mean(values):.3f} on average"
        reached += f" ({min(values):.3f} to {max(values):.3f})"
    return (
        f"Trained on shuffled labels, {reached}. The test split's most frequent class makes"
        f" {chance:.3f}; on {samples} samples chance allows the best of them {limit:.3f} (95 %)."
    )


def _conclusion(
    accuracies: dict[str, float], beyond: list[str], leaking: list[str], mean_p: float
) -> str:
    labels = {name: f"`{name}` ({accuracies[name]:.3f})" for name in beyond}
    words = ""
    if leaking:
        words += f" ABOVE CHANCE, SOMETHING LEAKS: {', '.join(labels[name] for name in leaking)}"
        words += f" {_verb(leaking, 'follows', 'follow')} the true classes more closely than a"
        words += " lucky shuffle would."
    lucky = [labels[name] for name in beyond if name not in leaking]
    if lucky:
        words += f" {', '.join(lucky)} {_verb(lucky, 'exceeds', 'exceed')} it: a leak, or a lucky"
        words += " shuffle of classes that form clusters; other seeds (--seed) tell which."
    if mean_p < SIGNIFICANT:
        words += f" ABOVE CHANCE ON AVERAGE, SOMETHING LEAKS (p = {mean_p:.2g})."
    return words or " None exceeds it: no sign of a leak."


def _verb(subjects: list[str], singular: str, plural: str) -> str:
    return singular if len(subjects) == 1 else plural
