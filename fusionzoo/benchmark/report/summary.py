"""Collect the jobs of each candidate, add the baselines and controls, list the rows of results."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.evaluation import statistics
from fusionzoo.evaluation.metrics import row_mean
from fusionzoo.evaluation.shapley import subset_label
from fusionzoo.fusion import fusion_info
from fusionzoo.targets import mean_prediction

from ..bench import Bench, damaged_rows, learned_rows, tasks_of
from ..candidates import EVERYTHING, fusion_of, is_fitted, is_single, modalities_of, single_modality
from ..examine import scored
from ..fit_models import prior_logits
from ..schedule import JobResult, Results
from ..store import SeedResult
from .leaderboard import EXTERNAL, SIGNIFICANT, leaderboard
from .results import (
    BEST_PRESENT,
    ENSEMBLE,
    MAJORITY,
    MEAN_PRESENT,
    PRIOR,
    PRODUCT_PRESENT,
    CandidateResults,
    Summary,
    Validation,
    choose,
    chosen_fusion,
    of_shared_seeds,
)

CHOSEN_ALONE = "single by validation"
EARLIER_NAMES = {"mean of single modalities": PRODUCT_PRESENT}  # of rows, in earlier reports
PER_MODEL = ("parameters", "macs", "seconds", "latency_ms")  # costs that grow with the models
NOT_RUN = "The control with shuffled labels was not run."
RENAMINGS = 10_000  # random permutations of the class names


def summarise(bench: Bench, results: Results) -> Summary:
    """Join the jobs' results by candidate, add baselines, compare with the best single modality."""
    target = torch.cat([bench.targets[fold.test] for fold in bench.folds])
    every = [*results.reported, *results.untuned]
    failed = {result.job.candidate: result.error for result in every if result.error}
    listed = dict.fromkeys(result.job.candidate for result in results.reported)
    done = {name: _complete_seeds(bench, name, results.reported) for name in listed}
    names = [name for name, seeds in done.items() if seeds and name not in failed]
    candidates = [_candidate(bench, name, results, done[name]) for name in names]
    controls = {name: _control(bench, name, results.reported) for name in names}
    run_controls = {name: x for name, x in controls.items() if x is not None}
    summary = Summary(bench, target, candidates, run_controls, failed)
    _add_baselines(summary)
    for name, by_fold in bench.predictions.items():
        logits = torch.cat(by_fold[: len(bench.folds)]).expand(bench.cfg.seeds, -1, -1)
        seeds = range(bench.cfg.seed, bench.cfg.seed + bench.cfg.seeds)
        constructed = _constructed(summary, name, seeds, logits)
        summary.candidates.append(replace(constructed, kind=EXTERNAL, family=EXTERNAL))
    summary.leaderboard = leaderboard(summary)
    return summary


def parquet_rows(summary: Summary) -> list[dict[str, Any]]:
    """Return a row per candidate, fold, seed, subset and corruption.

    Where one modality was taken from another sample, `subset` says so: `a+b, a of another sample`.
    """
    all_modalities = list(summary.bench.modalities)
    rows = []
    for candidate in summary.candidates:
        modalities = all_modalities
        if is_single(candidate.name):
            modalities = modalities_of(summary.bench, candidate.name)
        names = {"candidate": candidate.name, "family": candidate.family}
        for row in candidate.rows:
            subset = subset_label(modalities) if row["subset"] == "full" else row["subset"]
            if row["corruption"] == "pairing":  # a control, which must not pass for a result
                subset += f", {row['modality']} of another sample"
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


def _complete_seeds(bench: Bench, name: str, results: Sequence[JobResult]) -> set[int]:
    """Return the seeds of a candidate that are done on every fold."""
    done = _seed_results(name, results)
    folds = range(len(bench.folds))
    return {seed for seed, _ in done if all((seed, fold) in done for fold in folds)}


def _candidate(
    bench: Bench, name: str, results: Results, complete: Collection[int]
) -> CandidateResults:
    """Join a candidate's results of the seeds that are done on every fold."""
    seed_results = {
        key: x for key, x in _seed_results(name, results.reported).items() if key[0] in complete
    }
    seeds = sorted(complete)
    by_seed = [[seed_results[seed, fold] for fold in range(len(bench.folds))] for seed in seeds]
    subsets = [np.concatenate([t.scores for t in folds], 1) for folds in by_seed]
    whole = [len(fold.test) for fold in bench.folds]
    damaged = [len(damaged_rows(bench, fold)) for fold in bench.folds]
    rows = [
        {"fold": fold, "seed": seed, "samples": samples[fold], **row}
        for (seed, fold), seed_result in sorted(seed_results.items())
        for row in seed_result.rows
        for samples in [whole if row["corruption"] in ("", "pairing") else damaged]
    ]
    facts = {
        key: float(np.mean([seed_result.facts[key] for seed_result in seed_results.values()]))
        for key in next(iter(seed_results.values())).facts
    }
    scores = np.stack(subsets).astype(np.float64)  # (S, U, N)
    logits_by_seed = [[torch.from_numpy(t.logits) for t in folds] for folds in by_seed]
    return CandidateResults(
        name,
        *_kind_and_family(name),
        seeds,
        torch.stack([torch.cat(parts) for parts in logits_by_seed]),
        scores[:, 0],
        [
            _validation(bench, name, fold, [folds[fold] for folds in by_seed])
            for fold in range(len(whole))
        ],
        rows,
        {} if is_fitted(name) else facts,
        scores,
        _untuned(bench, name, results, complete),
        _tuned_settings(bench, name, results),
    )


def _tuned_settings(bench: Bench, name: str, results: Results) -> str:
    """Say how tuned settings differ from the default ones, over the folds; empty if not tuned."""
    before = {x.job.fold: x.job.settings for x in results.untuned if x.job.candidate == name}
    if not before:
        return ""
    tuned = [x.job for x in results.reported if x.job.candidate == name and x.job.training]
    by_fold = {job.fold: job for job in tuned}
    parameters = fusion_info(fusion_of(name)).parameters
    of_fusion = {key: parameter.default for key, parameter in parameters.items()}
    of_training = {**vars(bench.cfg.optim), "epochs": bench.cfg.epochs}
    values: dict[str, list[Any]] = {}
    for fold, job in by_fold.items():
        training = dict(job.training)
        training |= training.pop("optim", {})
        default = of_training | of_fusion | before[fold]
        for key, value in (job.settings | training).items():
            if value != default.get(key):
                values.setdefault(key, []).append(value)
    words = [f"{len(before) - len(by_fold)} of {len(before)} {bench.fold_word}s default"]
    for key, found in values.items():
        if isinstance(found[0], int | float) and not isinstance(found[0], bool):
            ends = dict.fromkeys(f"{x:.2g}" for x in (min(found), max(found)))
            words.append(f"{key} {' to '.join(ends)}")
        else:
            counts = Counter(json.dumps(x) for x in found)
            words += [f"{key} {text} in {count}" for text, count in counts.items()]
    return ", ".join(words)


def _untuned(bench: Bench, name: str, results: Results, seeds: Collection[int]) -> float:
    """Return the score with default settings over these seeds; NaN if it was not tuned."""
    before = _seed_results(name, results.untuned)
    scores = {key: x.scores[0] for key, x in before.items() if key[0] in seeds}
    if not scores:
        return math.nan
    weights = None
    if bench.weights is not None:
        parts = [bench.weights[bench.folds[fold].test] for _, fold in scores]
        weights = torch.cat(parts).double().numpy()
    return float(np.average(np.concatenate([*scores.values()]), weights=weights))


def _validation(
    bench: Bench, name: str, number: int, seed_results: Sequence[SeedResult]
) -> Validation:
    """Return a candidate's figures on a fold's validation samples, means over seeds."""
    fold = bench.folds[number]
    tasks, target = tasks_of(bench, fold.train), bench.targets[fold.val]
    columns = [list(bench.modalities).index(x) for x in modalities_of(bench, name)]
    present, weights = bench.present[fold.val][:, columns].any(1), bench.weights_of(fold.val)
    present_weights = None if weights is None else weights[present]
    figures = []
    for seed_result in seed_results:
        logits = torch.from_numpy(seed_result.val_logits)
        score = row_mean(tasks.scores(logits, target, weights), weights)
        loss = row_mean(tasks.criterion(logits, target), weights)
        scores = tasks.scores(logits[present], target[present], present_weights)
        figures.append([score, loss, row_mean(scores, present_weights)])
    return Validation(*np.mean(figures, 0).tolist())


def _kind_and_family(name: str) -> tuple[str, str]:
    """Return a candidate's kind, and its family in tables."""
    if name in EVERYTHING:
        return "baseline", "baseline"
    single = is_single(name)
    return ("single", "single") if single else ("fusion", fusion_info(fusion_of(name)).family)


def _control(bench: Bench, name: str, results: Sequence[JobResult]) -> Tensor | None:
    """Return the logits (N, K) of a candidate trained on shuffled labels; None if a fold lacks."""
    logits = {
        result.job.fold: torch.from_numpy(result.seed_results[0].logits)
        for result in results
        if result.job.candidate == name and result.job.shuffled
    }
    if len(logits) < len(bench.folds):
        return None
    return torch.cat([logits[fold] for fold in sorted(logits)])


def _add_baselines(summary: Summary) -> None:
    """Add the candidates that need no training: the labels' prior, combinations of singles."""
    bench = summary.bench
    singles = [candidate for candidate in summary.candidates if candidate.kind == "single"]
    singles = of_shared_seeds(singles) if singles else []
    seeds = singles[0].seeds if singles else [bench.cfg.seed]
    prior = _prior(bench).expand(len(seeds), -1, -1)
    baselines = {MAJORITY if bench.scheme is None else PRIOR: prior}
    of_modality = {
        name: [single for single in singles if single_modality(single.name) == name]
        for name in bench.modalities
    }
    if all(of_modality.values()):
        chosen = [choose(summary, several, name).results for name, several in of_modality.items()]
        baselines |= _of_present(summary, torch.stack([x.logits for x in chosen]), prior)
    if singles and not summary.present.all():
        baselines[BEST_PRESENT] = _cascade(summary, singles, prior)
    for name, logits in baselines.items():
        summary.candidates.append(_constructed(summary, name, seeds, logits))
    if singles:
        summary.candidates.append(choose(summary, singles, CHOSEN_ALONE).results)
    fusion = chosen_fusion(summary)
    if fusion is not None and len(summary.of_kind("fusion")) > 1:
        summary.candidates.append(fusion.results)
    if fusion is not None and len(fusion.results.seeds) > 1:
        summary.candidates.append(_ensemble(summary, fusion.results))


def _of_present(summary: Summary, logits: Tensor, prior: Tensor) -> dict[str, Tensor]:
    """Return the logits (S, N, K) of combinations of the singles that a sample has: (M, S, N, K).

    The mean of their predictions and, of classes, the product of their probabilities (its M-th
    root); a sample without any modality gets the prior.
    """
    present = torch.from_numpy(summary.present.T)[..., None]  # (M, N, 1)
    weights = present.double() / present.sum(0).clamp(min=1)
    means = [mean_prediction(summary.targets, x, weights) for x in logits.unbind(1)]
    combined = {MEAN_PRESENT: torch.stack(means)}
    if summary.bench.scheme is None:
        shares = logits.log_softmax(-1) * present[:, None]
        combined[PRODUCT_PRESENT] = shares.sum(0) / present.sum(0).clamp(min=1)
    return {name: torch.where(present.any(0), x, prior) for name, x in combined.items()}


def _cascade(summary: Summary, singles: Sequence[CandidateResults], prior: Tensor) -> Tensor:
    """Return the logits (S, N, K) of the best single that each sample has; without any, the prior.

    The best is that of the fold's validation samples which have the modality.
    """
    logits, modalities = prior.clone(), list(summary.bench.modalities)
    for fold, part in enumerate(summary.fold_slices):
        best_last = sorted(singles, key=lambda x: np.nan_to_num(x.validation[fold][2], nan=-np.inf))
        for single in best_last:
            column = modalities.index(single_modality(single.name) or "")
            there = torch.from_numpy(summary.present[part, column])[:, None]
            logits[:, part] = torch.where(there, single.logits[:, part], logits[:, part])
    return logits


def _ensemble(summary: Summary, chosen: CandidateResults) -> CandidateResults:
    """Return the mean prediction of all seeds of the chosen fusion, at the cost of all of them."""
    logits, models = mean_prediction(summary.targets, chosen.logits), len(chosen.seeds)
    ensemble = _constructed(summary, ENSEMBLE, chosen.seeds[:1], logits[None])
    facts = {key: x * models if key in PER_MODEL else x for key, x in chosen.facts.items()}
    if "samples_per_second" in facts:
        facts["samples_per_second"] /= models
    return replace(ensemble, kind="chosen", facts=facts)


def _constructed(
    summary: Summary, name: str, seeds: Sequence[int], logits: Tensor
) -> CandidateResults:
    """Return the results of a baseline made of others' logits (S, N, K)."""
    scored = [_score(summary, seed, x) for seed, x in zip(seeds, logits, strict=True)]
    scores, rows = zip(*scored, strict=True)
    every_row = list(itertools.chain(*rows))
    return CandidateResults(
        name, "baseline", "baseline", list(seeds), logits, np.stack(scores), [], every_row
    )


def _score(
    summary: Summary, seed: int, logits: Tensor
) -> tuple[NDArray[np.float64], list[dict[str, Any]]]:
    """Return each test sample's score, and a row of metrics for each fold."""
    scores, rows = [], []
    for number, (part, fold) in enumerate(
        zip(summary.fold_slices, summary.bench.folds, strict=True)
    ):
        tasks = tasks_of(summary.bench, fold.train)
        target, weights = summary.target[part], summary.bench.weights_of(fold.test)
        of_samples, row = scored(tasks, logits[part], target, weights)
        scores.append(of_samples)
        rows.append({"fold": number, "seed": seed, "samples": len(target)} | row)
    return torch.cat(scores).double().numpy(), rows


def _prior(bench: Bench) -> Tensor:
    """Return the logits of an answer without any input, for every test sample: (N, K)."""
    parts = [
        prior_logits(bench, learned_rows(bench, fold)).expand(len(fold.test), -1)
        for fold in bench.folds
    ]
    return torch.cat(parts)


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
    once = torch.from_numpy(summary.first_tests)
    target = summary.target[once]
    predictions = {name: x[once].argmax(-1) for name, x in summary.controls.items()}
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
    prior = summary.candidate(PRIOR)
    scores, p_values = {}, []
    for name, logits in summary.controls.items():
        sample = _score(summary, bench.cfg.seed, logits)[0][None]
        interval, p = statistics.crossed(
            sample - prior.scores[:1],
            bench.test_share,
            groups=summary.groups,
            weights=summary.weights,
        )
        scores[name] = metric.shown(summary.mean(sample))
        p_values.append(p / 2 if interval.mean > 0 else 1 - p / 2)
    corrected = dict(zip(scores, statistics.holm(p_values), strict=True))
    leaking = [name for name, p in corrected.items() if p < SIGNIFICANT]
    chance = metric.shown(summary.mean(prior.scores))
    words = (
        f"Trained on shuffled labels, {len(scores)} candidates reach a {metric.title} of"
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
    return (int((renamed >= np.trace(excess) - 1e-12).sum()) + 1) / (RENAMINGS + 1)


def _figures(accuracies: dict[str, float], chance: float, limit: float, samples: int) -> str:
    values = list(accuracies.values())
    if len(values) == 1:
        reached = f"`{next(iter(accuracies))}` reaches {values[0]:.3f}"
    else:
        reached = f"{len(values)} candidates reach {np.mean(values):.3f} on average"
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
