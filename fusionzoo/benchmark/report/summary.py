"""Collect the trials of each strategy, add the baselines, and list the rows of results.parquet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusionzoo.evaluation.calibration import calibration
from fusionzoo.evaluation.metrics import classification, right
from fusionzoo.evaluation.modalities import subset_label
from fusionzoo.fusion import fusion_info

from ..bench import Bench
from ..strategies import ALONE, modalities_of
from ..trials.schedule import UnitResult
from .leaderboard import FIGURES, leaderboard
from .results import MAJORITY, StrategyResults, Summary, best_on_validation

MEAN_ALONE, CHOSEN_ALONE = "mean of single modalities", "single by validation"


def summarise(bench: Bench, results: Sequence[UnitResult]) -> Summary:
    """Join trials to strategies, add the baselines, compare with the best single modality."""
    target = torch.cat([bench.targets[fold.test] for fold in bench.folds])
    failed = {result.unit.strategy: result.error for result in results if result.error}
    names = [name for name in dict.fromkeys(r.unit.strategy for r in results) if name not in failed]
    strategies = [_strategy(bench, name, results) for name in names]
    controls = {name: _control(name, results) for name in names}
    run_controls = {name: x for name, x in controls.items() if x is not None}
    summary = Summary(bench, target, strategies, run_controls, failed)
    _add_baselines(summary)
    for strategy in summary.strategies:
        strategy.correct = right(strategy.logits, target).numpy()
    summary.leaderboard = leaderboard(summary)
    return summary


def parquet_rows(summary: Summary) -> list[dict[str, Any]]:
    """Return a row per strategy, fold, seed, subset and corruption."""
    all_modalities = list(summary.bench.modalities)
    rows = []
    for strategy in summary.strategies:
        modalities = all_modalities
        if strategy.kind == "single":
            modalities = modalities_of(summary.bench, strategy.name)
        names = {"strategy": strategy.name, "family": strategy.family}
        for row in strategy.rows:
            subset = subset_label(modalities) if row["subset"] == "full" else row["subset"]
            rows.append({**names, **row, "subset": subset})
    return rows


def _strategy(bench: Bench, name: str, results: Sequence[UnitResult]) -> StrategyResults:
    trials = {
        (trial.seed, result.unit.fold): trial
        for result in results
        if result.unit.strategy == name and not result.unit.shuffled
        for trial in result.trials
    }
    seeds = sorted({seed for seed, _ in trials})
    folds = range(len(bench.folds))
    logits = [
        torch.cat([torch.from_numpy(trials[seed, fold].logits) for fold in folds]) for seed in seeds
    ]
    rows = [
        {"fold": fold, "seed": seed, **row}
        for (seed, fold), trial in sorted(trials.items())
        for row in trial.rows
    ]
    val_metrics = [
        classification(torch.from_numpy(trial.val_logits), bench.targets[bench.folds[fold].val])
        for (_, fold), trial in trials.items()
    ]
    facts = {
        key: float(np.mean([trial.facts[key] for trial in trials.values()]))
        for key in next(iter(trials.values())).facts
    }
    single = name.startswith(ALONE)
    return StrategyResults(
        name,
        "single" if single else "fusion",
        "single" if single else fusion_info(name).family,
        seeds,
        torch.stack(logits),
        float(np.mean([metrics["accuracy"] for metrics in val_metrics])),
        float(np.mean([metrics["loss"] for metrics in val_metrics])),
        rows,
        facts,
    )


def _control(name: str, results: Sequence[UnitResult]) -> Tensor | None:
    """Return the predictions (N,) of a strategy trained on shuffled labels, None if not run."""
    logits = {
        result.unit.fold: torch.from_numpy(result.trials[0].logits)
        for result in results
        if result.unit.strategy == name and result.unit.shuffled
    }
    return torch.cat([logits[fold] for fold in sorted(logits)]).argmax(-1) if logits else None


def _add_baselines(summary: Summary) -> None:
    """Add the strategies that need no training: majority class, combinations of single models."""
    bench = summary.bench
    singles = [strategy for strategy in summary.strategies if strategy.kind == "single"]
    seeds = singles[0].seeds if singles else [bench.cfg.seed]
    prior = _class_shares(bench).expand(len(seeds), -1, -1)
    baselines = {MAJORITY: (prior, math.nan, math.nan)}
    if len(singles) == len(bench.modalities):
        log_probabilities = torch.stack([s.logits.log_softmax(-1) for s in singles])  # (M, S, N, K)
        present = torch.cat([bench.present[fold.test] for fold in bench.folds]).T[:, None, :, None]
        mean = (log_probabilities * present).sum(0) / present.sum(0).clamp(min=1)
        baselines[MEAN_ALONE] = (torch.where(present.any(0), mean, prior), math.nan, math.nan)
        best = best_on_validation(singles)
        baselines[CHOSEN_ALONE] = (best.logits, best.val_accuracy, best.val_loss)
    for name, (logits, accuracy, loss) in baselines.items():
        rows = [
            _baseline_row(seed, seed_logits, summary.target)
            for seed, seed_logits in zip(seeds, logits, strict=True)
        ]
        summary.strategies.append(
            StrategyResults(name, "baseline", "baseline", list(seeds), logits, accuracy, loss, rows)
        )


def _class_shares(bench: Bench) -> Tensor:
    """Return log shares of the classes in the training split, for every test sample: (N, K)."""
    parts = []
    for fold in bench.folds:
        counts = torch.bincount(bench.targets[fold.train], minlength=len(bench.classes))
        parts.append((counts / counts.sum()).clamp(min=1e-9).log().expand(len(fold.test), -1))
    return torch.cat(parts)


def _baseline_row(seed: int, logits: Tensor, target: Tensor) -> dict[str, Any]:
    metrics = classification(logits, target) | calibration(logits, target)
    labels = {"fold": -1, "seed": seed, "subset": "full", "modality": "", "corruption": ""}
    return {**labels, "severity": 0, **{name: metrics[name] for name in FIGURES}}
