"""From cells to figures: strategies seed by seed, baselines, curves, the leaderboard.

Shapes: `S` seeds, `N` test samples (of all folds), `K` classes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..evaluation import statistics
from ..evaluation.calibration import calibration, reliability, risk_coverage
from ..evaluation.metrics import classification, right
from ..evaluation.modalities import expected, subset_label, subsets
from ..evaluation.robustness import SEVERITIES
from ..fusion import fusion_info
from .cells import ALONE, Row, names_of
from .prepare import Bench
from .protocol import Result

RATES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of missing modalities
FIGURES = ("accuracy", "macro_f1", "ece", "brier", "nll")
SIGNIFICANT = 1 - statistics.LEVEL
MAJORITY, MEAN_ALONE = "majority class", "mean of single modalities"
CHOSEN_ALONE = "single by validation"


@dataclass
class Strategy:
    """All that is known of one strategy, seed by seed."""

    name: str
    kind: str  # fusion | single | baseline
    family: str
    seeds: list[int]
    logits: Tensor  # (S, N, K)
    val_accuracy: float
    val_loss: float
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)  # means over seeds and folds
    right: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))  # (S, N)

    def figure(self, name: str, **where: Any) -> float:
        """Average a metric over seeds and folds, where the row says so: the whole, by default."""
        wanted = {"subset": "full", "corruption": "", **where}
        found = [r[name] for r in self.rows if all(r[k] == v for k, v in wanted.items())]
        return float(np.mean(found)) if found else math.nan

    def by_subset(self, modalities: Sequence[str]) -> dict[frozenset[str], float]:
        """Return the accuracy for every subset of the modalities."""
        return {
            some: self.figure("accuracy", subset=label(some, modalities))
            for some in subsets(modalities)
        }


@dataclass
class Summary:
    """Everything that the report shows."""

    bench: Bench
    target: Tensor  # (N,)
    strategies: list[Strategy]
    controls: dict[str, float]  # strategy -> accuracy after training on shuffled labels
    failed: dict[str, str]
    leaderboard: list[dict[str, Any]] = field(default_factory=list)

    def of(self, name: str) -> Strategy:
        """Return one strategy."""
        return next(one for one in self.strategies if one.name == name)

    def line(self, name: str) -> dict[str, Any]:
        """Return one strategy's line of the leaderboard."""
        return next(line for line in self.leaderboard if line["strategy"] == name)

    def kind(self, kind: str) -> list[Strategy]:
        """Return the strategies of a kind, the best first."""
        found = [one for one in self.strategies if one.kind == kind]
        return sorted(found, key=lambda one: (-one.figure("accuracy"), one.name))


def label(some: frozenset[str], modalities: Sequence[str]) -> str:
    """Name a subset as the rows do: `full`, `none`, `audio+text`."""
    return "full" if len(some) == len(modalities) else subset_label(some)


def summarise(bench: Bench, results: Sequence[Result]) -> Summary:
    """Join units to strategies, add the baselines, compare with the best single modality."""
    target = torch.cat([bench.targets[fold.test] for fold in bench.folds])
    failed = {r.unit.strategy: r.error for r in results if r.error}
    controls: dict[str, list[float]] = defaultdict(list)
    names = dict.fromkeys(r.unit.strategy for r in results)
    for result in results:
        if result.unit.shuffled:
            controls[result.unit.strategy] += [c.rows[0]["accuracy"] for c in result.cells]
    strategies = [_strategy(bench, name, results) for name in names if name not in failed]
    means = {name: float(np.mean(own)) for name, own in controls.items() if own}
    summary = Summary(bench, target, strategies, means, failed)
    _add_baselines(summary)
    for one in summary.strategies:
        one.right = right(one.logits, target).numpy()
    summary.leaderboard = _leaderboard(summary)
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


# ---- the leaderboard


def _leaderboard(summary: Summary) -> list[dict[str, Any]]:
    """Return a line per strategy, the best first, each compared with the best single modality."""
    best = best_single(summary)
    fusions = summary.kind("fusion")
    against = {}
    if best is not None:
        against = {one.name: statistics.compare(one.right, best.right) for one in fusions}
    corrected = statistics.holm([one.p for one in against.values()])
    holm = dict(zip(against, corrected, strict=True))
    lines = []
    for one in summary.strategies:
        per_seed = one.right.mean(1).tolist()
        spread = statistics.seed_interval(per_seed)
        line = {
            "strategy": one.name,
            "family": one.family,
            "seeds": len(one.seeds),
            "accuracy": spread.mean,
            "low": spread.low,
            "high": spread.high,
            **{key: one.figure(key) for key in FIGURES[1:]},
            "aurc": float(np.mean([risk_coverage(x, summary.target).mean() for x in one.logits])),
            "val_accuracy": one.val_accuracy,
        }
        if one.name in against:
            compared = against[one.name]
            line |= {f"gain_{key}": value for key, value in compared._asdict().items()}
            line["gain_p_holm"] = holm[one.name]
            line["outcome"] = outcome(compared.difference, holm[one.name])
            line |= _robustness(summary, one)
        lines.append(line)
    return sorted(lines, key=lambda line: (-line["accuracy"], line["strategy"]))


def best_single(summary: Summary) -> Strategy | None:
    """Return the single modality that does best on the test split itself.

    Fusion has to beat every modality alone, so the strongest is the one to beat; that it is chosen
    where it is judged can only flatter it, not fusion.
    """
    return next(iter(summary.kind("single")), None)


def chosen_fusion(summary: Summary) -> Strategy | None:
    """Return the fusion that does best on the validation split: chosen without the test split."""
    fusions = summary.kind("fusion")
    return best_on_validation(fusions) if fusions else None


def best_on_validation(strategies: Sequence[Strategy]) -> Strategy:
    """Return who answers most validation samples, then who has the least loss there."""
    return max(strategies, key=lambda one: (one.val_accuracy, -one.val_loss))


def outcome(difference: float, p: float) -> str:
    """Say `win`, `loss`, or `tie` where no difference can be shown."""
    if p >= SIGNIFICANT:
        return "tie"
    return "win" if difference > 0 else "loss"


def _robustness(summary: Summary, one: Strategy) -> dict[str, float]:
    """Return areas under the accuracy's curves: over missing rates, over severities by modality."""
    modalities = list(summary.bench.modalities)
    curve = missing_curve(one, modalities)
    areas = {"missing_area": _area(curve, RATES)}
    for modality in modalities:
        curves = damage_curves(one, modality)
        if curves:
            areas[f"damaged_{modality}_area"] = float(
                np.mean([_area(c, (0, *SEVERITIES)) for c in curves.values()])
            )
    return areas


def missing_curve(one: Strategy, modalities: Sequence[str], only: str | None = None) -> list[float]:
    """Return the expected accuracy at each of RATES: all modalities missing at random, or one."""
    scores = one.by_subset(modalities)
    return [
        expected(scores, {m: rate if only in (None, m) else 0.0 for m in modalities})
        for rate in RATES
    ]


def damage_curves(one: Strategy, modality: str) -> dict[str, list[float]]:
    """Return for each corruption of a modality the accuracy at severity 0 to 5."""
    names = dict.fromkeys(
        r["corruption"] for r in one.rows if r["modality"] == modality and r["severity"]
    )
    whole = one.figure("accuracy")
    return {
        name: [
            whole,
            *(
                one.figure("accuracy", modality=modality, corruption=name, severity=severity)
                for severity in SEVERITIES
            ),
        ]
        for name in names
    }


def _area(curve: Sequence[float], at: Sequence[float]) -> float:
    """Average a curve over its range (trapezoids)."""
    return float(np.trapezoid(curve, at) / (at[-1] - at[0]))


def reliability_of(one: Strategy, target: Tensor) -> list[tuple[float, float, int]]:
    """Return (confidence, accuracy, count) of each bin, the seeds pooled."""
    probabilities = one.logits.double().softmax(-1).flatten(0, 1)
    found = reliability(probabilities, target.repeat(len(one.logits)))
    return list(zip(*(x.tolist() for x in found), strict=True))


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


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return who is beaten by none in both: (cost, the lower the better; quality, the higher).

    >>> pareto({"a": (1, 0.5), "b": (2, 0.9), "c": (3, 0.8)})
    ['a', 'b']
    """
    front, best = [], -math.inf
    for name, (_, quality) in sorted(points.items(), key=lambda p: (p[1][0], -p[1][1])):
        if quality > best:
            front.append(name)
            best = quality
    return front
