"""From cells to strategies and baselines; the rows of results.parquet."""

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
from ..strategies import ALONE, names_of
from ..trials.schedule import Result
from .leaderboard import FIGURES, leaderboard
from .results import MAJORITY, Strategy, Summary, best_on_validation

MEAN_ALONE, CHOSEN_ALONE = "mean of single modalities", "single by validation"


def summarise(bench: Bench, results: Sequence[Result]) -> Summary:
    """Join units to strategies, add the baselines, compare with the best single modality."""
    target = torch.cat([bench.targets[fold.test] for fold in bench.folds])
    failed = {r.unit.strategy: r.error for r in results if r.error}
    names = dict.fromkeys(r.unit.strategy for r in results)
    strategies = [_strategy(bench, name, results) for name in names if name not in failed]
    controls = {name: _control(name, results) for name in names if name not in failed}
    ran = {name: answers for name, answers in controls.items() if answers is not None}
    summary = Summary(bench, target, strategies, ran, failed)
    _add_baselines(summary)
    for one in summary.strategies:
        one.right = right(one.logits, target).numpy()
    summary.leaderboard = leaderboard(summary)
    return summary


def _strategy(bench: Bench, name: str, results: Sequence[Result]) -> Strategy:
    cells = {
        (cell.seed, result.unit.fold): cell
        for result in results
        if result.unit.strategy == name and not result.unit.shuffled
        for cell in result.cells
    }
    seeds = sorted({seed for seed, _ in cells})
    folds = range(len(bench.folds))
    logits = [
        torch.cat([torch.from_numpy(cells[seed, fold].logits) for fold in folds]) for seed in seeds
    ]
    rows = [
        {"fold": fold, "seed": seed, **row}
        for (seed, fold), cell in sorted(cells.items())
        for row in cell.rows
    ]
    judged = [
        classification(torch.from_numpy(cell.val_logits), bench.targets[bench.folds[fold].val])
        for (_, fold), cell in cells.items()
    ]
    facts = {
        key: float(np.mean([cell.facts[key] for cell in cells.values()]))
        for key in next(iter(cells.values())).facts
    }
    single = name.startswith(ALONE)
    return Strategy(
        name,
        "single" if single else "fusion",
        "single" if single else fusion_info(name).family,
        seeds,
        torch.stack(logits),
        float(np.mean([one["accuracy"] for one in judged])),
        float(np.mean([one["loss"] for one in judged])),
        rows,
        facts,
    )


def _control(name: str, results: Sequence[Result]) -> Tensor | None:
    """Return the answers (N,) of a strategy trained on shuffled labels, or None if it was not."""
    logits = {
        result.unit.fold: torch.from_numpy(result.cells[0].logits)
        for result in results
        if result.unit.strategy == name and result.unit.shuffled
    }
    return torch.cat([logits[fold] for fold in sorted(logits)]).argmax(-1) if logits else None


def _add_baselines(summary: Summary) -> None:
    """Add what needs no training of its own: the majority, and what the single models say."""
    bench, folds = summary.bench, summary.bench.folds
    parts = []
    for fold in folds:
        counts = torch.bincount(bench.targets[fold.train], minlength=len(bench.classes))
        parts.append((counts / counts.sum()).clamp(min=1e-9).log().expand(len(fold.test), -1))
    singles = [one for one in summary.strategies if one.kind == "single"]
    seeds = singles[0].seeds if singles else [bench.cfg.seed]
    prior = torch.cat(parts).expand(len(seeds), -1, -1)
    made = {MAJORITY: (prior, math.nan, math.nan)}
    if len(singles) == len(bench.modalities):
        stacked = torch.stack([one.logits.log_softmax(-1) for one in singles])  # (M, S, N, K)
        has = torch.cat([bench.present[fold.test] for fold in folds]).T[:, None, :, None]
        mean = (stacked * has).sum(0) / has.sum(0).clamp(min=1)
        made[MEAN_ALONE] = (torch.where(has.any(0), mean, prior), math.nan, math.nan)
        best = best_on_validation(singles)
        made[CHOSEN_ALONE] = (best.logits, best.val_accuracy, best.val_loss)
    for name, (logits, accuracy, loss) in made.items():
        rows = []
        for seed, own in zip(seeds, logits, strict=True):
            figures = classification(own, summary.target) | calibration(own, summary.target)
            about = {"fold": -1, "seed": seed, "subset": "full", "modality": "", "corruption": ""}
            rows.append({**about, "severity": 0, **{key: figures[key] for key in FIGURES}})
        summary.strategies.append(
            Strategy(name, "baseline", "baseline", list(seeds), logits, accuracy, loss, rows)
        )


def parquet_rows(summary: Summary) -> list[dict[str, Any]]:
    """Return a line per strategy, fold, seed, subset and damage."""
    modalities = list(summary.bench.modalities)
    lines = []
    for one in summary.strategies:
        seen = names_of(summary.bench, one.name) if one.kind == "single" else modalities
        for row in one.rows:
            subset = subset_label(seen) if row["subset"] == "full" else row["subset"]
            about = {"strategy": one.name, "family": one.family, **row, "subset": subset}
            lines.append(about)
    return lines
