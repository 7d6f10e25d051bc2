"""Collect the trials of each strategy, add the baselines, and list the rows of results.parquet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.evaluation.modalities import subset_label
from fusionzoo.fusion import fusion_info

from ..bench import Bench, Condition, tasks_of
from ..metric import sample_scores
from ..strategies import LINEAR, fusion_of, is_single, modalities_of, parse
from ..trials.examine import score_row, takes_part
from ..trials.schedule import Results, UnitResult
from ..trials.store import TrialResult
from .leaderboard import leaderboard
from .results import MAJORITY, PRIOR, StrategyResults, Summary, best_on_validation

MEAN_ALONE, CHOSEN_ALONE = "mean of single modalities", "single by validation"


def summarise(bench: Bench, results: Results) -> Summary:
    """Join trials to strategies, add the baselines, compare with the best single modality."""
    target = torch.cat([bench.targets[fold.test] for fold in bench.folds])
    every = [*results.reported, *results.untuned]
    failed = {result.unit.strategy: result.error for result in every if result.error}
    names = dict.fromkeys(result.unit.strategy for result in results.reported)
    strategies = [_strategy(bench, name, results) for name in names if name not in failed]
    controls = {name: _control(name, results.reported) for name in names if name not in failed}
    run_controls = {name: x for name, x in controls.items() if x is not None}
    summary = Summary(bench, target, strategies, run_controls, failed)
    _add_baselines(summary)
    summary.leaderboard = leaderboard(summary)
    return summary


def parquet_rows(summary: Summary) -> list[dict[str, Any]]:
    """Return a row per strategy, fold, seed, subset and corruption."""
    all_modalities = list(summary.bench.modalities)
    rows = []
    for strategy in summary.strategies:
        modalities = all_modalities
        if is_single(strategy.name):
            modalities = modalities_of(summary.bench, strategy.name)
        names = {"strategy": strategy.name, "family": strategy.family}
        for row in strategy.rows:
            subset = subset_label(modalities) if row["subset"] == "full" else row["subset"]
            rows.append({**names, **row, "subset": subset})
    return rows


def _trials(name: str, results: Sequence[UnitResult]) -> dict[tuple[int, int], TrialResult]:
    """Return the trials of a strategy, without its control, by seed and fold."""
    return {
        (trial.seed, result.unit.fold): trial
        for result in results
        if result.unit.strategy == name and not result.unit.shuffled
        for trial in result.trials
    }


def _strategy(bench: Bench, name: str, results: Results) -> StrategyResults:
    trials = _trials(name, results.reported)
    seeds = sorted({seed for seed, _ in trials})
    by_seed = [[trials[seed, fold] for fold in range(len(bench.folds))] for seed in seeds]
    subsets = [np.concatenate([t.scores for t in folds], 1) for folds in by_seed]
    rows = [
        {"fold": fold, "seed": seed, **row}
        for (seed, fold), trial in sorted(trials.items())
        for row in trial.rows
    ]
    val_scores, val_losses = [], []
    for (_, fold), trial in trials.items():
        tasks, val = tasks_of(bench, bench.folds[fold].train), bench.folds[fold].val
        logits = torch.from_numpy(trial.val_logits)
        val_scores.append(sample_scores(tasks, logits, bench.targets[val]).mean().item())
        val_losses.append(tasks.criterion(logits, bench.targets[val]).mean().item())
    facts = {
        key: float(np.mean([trial.facts[key] for trial in trials.values()]))
        for key in next(iter(trials.values())).facts
    }
    untuned = [
        trial.scores[0].mean()
        for (seed, _), trial in _trials(name, results.untuned).items()
        if seed == bench.cfg.seed
    ]
    scores = np.stack(subsets).astype(np.float64)  # (S, U, N)
    logits_by_seed = [[torch.from_numpy(t.logits) for t in folds] for folds in by_seed]
    return StrategyResults(
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
    bench: Bench, by_seed: Sequence[Sequence[TrialResult]]
) -> tuple[NDArray[np.float64] | None, list[Condition]]:
    """Return the scores (S, C, n) of the damaged samples, by lost part, and what C stands for."""
    folds_by_seed = [[trial.lost_scores for trial in folds] for folds in by_seed]
    known = [[scores for scores in folds if scores is not None] for folds in folds_by_seed]
    if [len(folds) for folds in known] != [len(folds) for folds in by_seed]:
        return None, []  # not tested, or by an earlier version
    tested = [(row["modality"], row["corruption"], row["severity"]) for row in by_seed[0][0].rows]
    conditions = [condition for condition in tested if takes_part(bench, condition)]
    scores = np.stack([np.concatenate(folds, 1) for folds in known])
    return scores.astype(np.float64), conditions


def _kind_and_family(name: str) -> tuple[str, str]:
    """Return a strategy's kind, and its family in tables."""
    if name in LINEAR:
        return "baseline", "baseline"
    family = "single" if is_single(name) else fusion_info(fusion_of(name)).family
    if parse(name).incomplete:
        return "incomplete", family
    return ("single" if is_single(name) else "fusion"), family


def _control(name: str, results: Sequence[UnitResult]) -> Tensor | None:
    """Return the logits (N, K) of a strategy trained on shuffled labels, None if not run."""
    logits = {
        result.unit.fold: torch.from_numpy(result.trials[0].logits)
        for result in results
        if result.unit.strategy == name and result.unit.shuffled
    }
    return torch.cat([logits[fold] for fold in sorted(logits)]) if logits else None


def _add_baselines(summary: Summary) -> None:
    """Add the strategies that need no training: the labels' prior, combinations of singles."""
    bench = summary.bench
    singles = [strategy for strategy in summary.strategies if strategy.kind == "single"]
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
        summary.strategies.append(
            StrategyResults(
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
