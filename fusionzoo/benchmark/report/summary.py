"""Collect the jobs of each candidate, add the baselines and controls, list the rows of results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.evaluation import statistics
from fusionzoo.evaluation.robustness import subset_label
from fusionzoo.fusion import fusion_info

from ..bench import Bench, Condition, sample_scores, tasks_of
from ..candidates import LINEAR, fusion_of, is_single, modalities_of, parse
from ..jobs import SeedResult, score_row, takes_part
from ..schedule import JobResult, Results
from .leaderboard import SIGNIFICANT, leaderboard
from .results import MAJORITY, PRIOR, CandidateResults, Summary, best_on_validation

MEAN_ALONE, CHOSEN_ALONE = "mean of single modalities", "single by validation"


def summarise(bench: Bench, results: Results) -> Summary:
    """Join the jobs' results by candidate, add baselines, compare with the best single modality."""
    target = torch.cat([bench.targets[fold.test] for fold in bench.folds])
    every = [*results.reported, *results.untuned]
    failed = {result.job.candidate: result.error for result in every if result.error}
    names = dict.fromkeys(result.job.candidate for result in results.reported)
    candidates = [_candidate(bench, name, results) for name in names if name not in failed]
    controls = {name: _control(name, results.reported) for name in names if name not in failed}
    run_controls = {name: x for name, x in controls.items() if x is not None}
    summary = Summary(bench, target, candidates, run_controls, failed)
    _add_baselines(summary)
    summary.leaderboard = leaderboard(summary)
    return summary


def parquet_rows(summary: Summary) -> list[dict[str, Any]]:
    """Return a row per candidate, fold, seed, subset and corruption."""
    all_modalities = list(summary.bench.modalities)
    rows = []
    for candidate in summary.candidates:
        modalities = all_modalities
        if is_single(candidate.name):
            modalities = modalities_of(summary.bench, candidate.name)
        names = {"strategy": candidate.name, "family": candidate.family}
        for row in candidate.rows:
            subset = subset_label(modalities) if row["subset"] == "full" else row["subset"]
            rows.append({**names, **row, "subset": subset})
    return rows


def _seed_results(name: str, results: Sequence[JobResult]) -> dict[tuple[int, int], SeedResult]:
    """Return the results of a candidate, without its control, by seed and fold."""
    return {
        (seed_result.seed, result.job.fold): seed_result
        for result in results
        if result.job.candidate == name and not result.job.shuffled
        for seed_result in result.seed_results
    }


def _candidate(bench: Bench, name: str, results: Results) -> CandidateResults:
    seed_results = _seed_results(name, results.reported)
    seeds = sorted({seed for seed, _ in seed_results})
    by_seed = [[seed_results[seed, fold] for fold in range(len(bench.folds))] for seed in seeds]
    subsets = [np.concatenate([t.scores for t in folds], 1) for folds in by_seed]
    rows = [
        {"fold": fold, "seed": seed, **row}
        for (seed, fold), seed_result in sorted(seed_results.items())
        for row in seed_result.rows
    ]
    val_scores, val_losses = [], []
    for (_, fold), seed_result in seed_results.items():
        tasks, val = tasks_of(bench, bench.folds[fold].train), bench.folds[fold].val
        logits = torch.from_numpy(seed_result.val_logits)
        val_scores.append(sample_scores(tasks, logits, bench.targets[val]).mean().item())
        val_losses.append(tasks.criterion(logits, bench.targets[val]).mean().item())
    facts = {
        key: float(np.mean([seed_result.facts[key] for seed_result in seed_results.values()]))
        for key in next(iter(seed_results.values())).facts
    }
    untuned = [
        seed_result.scores[0].mean()
        for (seed, _), seed_result in _seed_results(name, results.untuned).items()
        if seed == bench.cfg.seed
    ]
    scores = np.stack(subsets).astype(np.float64)  # (S, U, N)
    logits_by_seed = [[torch.from_numpy(t.logits) for t in folds] for folds in by_seed]
    return CandidateResults(
        name,
        *_kind_and_family(name),
        seeds,
        torch.stack([torch.cat(parts) for parts in logits_by_seed]),
        scores[:, 0],
        float(np.mean(val_scores)),
        float(np.mean(val_losses)),
        rows,
        facts if name not in LINEAR else {},
        scores,
        float(np.mean(untuned)) if untuned else math.nan,
        *_lost_parts(bench, by_seed),
    )


def _lost_parts(
    bench: Bench, by_seed: Sequence[Sequence[SeedResult]]
) -> tuple[NDArray[np.float64] | None, list[Condition]]:
    """Return the scores (S, C, n) of the damaged samples, by lost part, and what C stands for."""
    folds_by_seed = [[seed_result.lost_scores for seed_result in folds] for folds in by_seed]
    known = [[scores for scores in folds if scores is not None] for folds in folds_by_seed]
    if [len(folds) for folds in known] != [len(folds) for folds in by_seed]:
        return None, []  # not tested, or by an earlier version
    tested = [(row["modality"], row["corruption"], row["severity"]) for row in by_seed[0][0].rows]
    conditions = [condition for condition in tested if takes_part(bench, condition)]
    scores = np.stack([np.concatenate(folds, 1) for folds in known])
    return scores.astype(np.float64), conditions


def _kind_and_family(name: str) -> tuple[str, str]:
    """Return a candidate's kind, and its family in tables."""
    if name in LINEAR:
        return "baseline", "baseline"
    family = "single" if is_single(name) else fusion_info(fusion_of(name)).family
    if parse(name).incomplete:
        return "incomplete", family
    return ("single" if is_single(name) else "fusion"), family


def _control(name: str, results: Sequence[JobResult]) -> Tensor | None:
    """Return the logits (N, K) of a candidate trained on shuffled labels, None if not run."""
    logits = {
        result.job.fold: torch.from_numpy(result.seed_results[0].logits)
        for result in results
        if result.job.candidate == name and result.job.shuffled
    }
    return torch.cat([logits[fold] for fold in sorted(logits)]) if logits else None


def _add_baselines(summary: Summary) -> None:
    """Add the candidates that need no training: the labels' prior, combinations of singles."""
    bench = summary.bench
    singles = [candidate for candidate in summary.candidates if candidate.kind == "single"]
    seeds = singles[0].seeds if singles else [bench.cfg.seed]
    prior = _prior(bench).expand(len(seeds), -1, -1)
    baselines = {MAJORITY if bench.scheme is None else PRIOR: (prior, math.nan, math.nan)}
    if len(singles) == len(bench.modalities):
        logits = torch.stack([s.logits for s in singles])  # (M, S, N, K)
        if bench.scheme is None:
            logits = logits.log_softmax(-1)
        present = torch.cat([bench.present[fold.test] for fold in bench.folds]).T[:, None, :, None]
        mean = (logits * present).sum(0) / present.sum(0).clamp(min=1)
        baselines[MEAN_ALONE] = (torch.where(present.any(0), mean, prior), math.nan, math.nan)
        best = best_on_validation(singles)
        baselines[CHOSEN_ALONE] = (best.logits, best.val_score, best.val_loss)
    for name, (logits, score, loss) in baselines.items():
        scores, rows = [], []
        for seed, seed_logits in zip(seeds, logits, strict=True):
            sample, row = _score(summary, seed_logits)
            scores.append(sample.numpy())
            rows.append({"fold": -1, "seed": seed, **row})
        summary.candidates.append(
            CandidateResults(
                name,
                "baseline",
                "baseline",
                list(seeds),
                logits,
                np.stack(scores),
                score,
                loss,
                rows,
            )
        )


def _score(summary: Summary, logits: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Return each test sample's score, and a row with the metrics over all folds."""
    bench = summary.bench
    tasks = tasks_of(bench, bench.folds[0].train)  # scores and metrics do not depend on the fold
    scores = sample_scores(tasks, logits, summary.target)
    return scores, score_row(tasks, logits, summary.target, scores, "full")


def _prior(bench: Bench) -> Tensor:
    """Return the logits of an answer without any input, for every test sample: (N, K)."""
    parts = []
    for fold in bench.folds:
        prior = tasks_of(bench, fold.train).prior(bench.targets[fold.train])
        parts.append(prior.float().clamp(min=1e-9).log().expand(len(fold.test), -1))
    return torch.cat(parts)


NOT_RUN = "The control with shuffled labels was not run."
RENAMINGS = 10_000  # random permutations of the class names


def controls(summary: Summary) -> dict[str, Any]:
    """Return the controls' figures and, under `words`, what they show.

    A candidate that was trained on shuffled labels knows nothing of the test labels. Its accuracy
    is tested in three ways: does one candidate exceed what chance allows on so many samples; if so,
    do its predictions follow the true classes, or was its shuffle a lucky one; and are the
    candidates above chance on average (one-sided t-test: each has its own shuffle)?
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
    prior = summary.candidate(PRIOR)
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
