"""From cells to figures and words: the leaderboard, the comparisons, the verdict.

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
from ..evaluation.metrics import classification
from ..evaluation.modalities import expected, interactions, shapley, subsets
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

    def by_subset(
        self, modalities: Sequence[str], metric: str = "accuracy"
    ) -> dict[frozenset[str], float]:
        """Return the metric for every subset of the modalities."""
        return {
            some: self.figure(metric, subset=label(some, modalities))
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
    figures: dict[str, Any] = field(default_factory=dict)  # of summary.json

    def of(self, name: str) -> Strategy:
        """Return one strategy."""
        return next(one for one in self.strategies if one.name == name)

    def kind(self, kind: str) -> list[Strategy]:
        """Return the strategies of a kind, the best first."""
        found = [one for one in self.strategies if one.kind == kind]
        return sorted(found, key=lambda one: (-one.figure("accuracy"), one.name))


def label(some: frozenset[str], modalities: Sequence[str]) -> str:
    """Name a subset as the rows do: `full`, `none`, `audio+text`."""
    return "full" if len(some) == len(modalities) else "+".join(sorted(some)) or "none"


def summarise(bench: Bench, results: Sequence[Result]) -> Summary:
    """Join units to strategies, add the baselines, compare, and find the words."""
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
        one.right = (one.logits.argmax(-1) == target).double().numpy()
    summary.leaderboard = _leaderboard(summary)
    summary.figures = _figures(summary)
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
        best = max(singles, key=lambda one: (one.val_accuracy, -one.val_loss))
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
    return max(fusions, key=lambda one: (one.val_accuracy, -one.val_loss), default=None)


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


# ---- what is said


def pairwise(strategies: Sequence[Strategy]) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Compare every two; return win/tie/loss of row against column, and the comparisons."""
    pairs = [(i, j) for i in range(len(strategies)) for j in range(i)]
    found = [statistics.compare(strategies[i].right, strategies[j].right) for i, j in pairs]
    corrected = statistics.holm([one.p for one in found])
    matrix = [[""] * len(strategies) for _ in strategies]
    lines = []
    for (i, j), one, p in zip(pairs, found, corrected, strict=True):
        matrix[i][j] = outcome(one.difference, p)
        matrix[j][i] = outcome(-one.difference, p)
        about = {"a": strategies[i].name, "b": strategies[j].name}
        lines.append({**about, **one._asdict(), "p_holm": p})
    return matrix, lines


def tied_with_leader(summary: Summary) -> list[str]:
    """Return the fusions that cannot be told apart from the one that leads, that one first."""
    leader, *rest = summary.kind("fusion")
    compared = [statistics.compare(leader.right, one.right) for one in rest]
    corrected = statistics.holm([one.p for one in compared])
    ties = [o.name for o, p in zip(rest, corrected, strict=True) if p >= SIGNIFICANT]
    return [leader.name, *ties]


def _figures(summary: Summary) -> dict[str, Any]:
    """Return what summary.json holds; nothing in it depends on how fast the machine was."""
    bench = summary.bench
    modalities = list(bench.modalities)
    chosen, best = chosen_fusion(summary), best_single(summary)
    found: dict[str, Any] = {
        "verdict": verdict(summary),
        "data": {
            "name": bench.cfg.data["name"],
            "modalities": bench.modalities,
            "classes": len(bench.classes),
            "folds": len(bench.folds) if bench.cfg.folds else 0,
            "train": len(bench.folds[0].train),
            "val": len(bench.folds[0].val),
            "test": len(summary.target),
            "missing": {
                name: float((~bench.present[:, column]).double().mean())
                for column, name in enumerate(modalities)
            },
        },
        "mode": bench.cfg.mode,
        "seeds": bench.cfg.seeds,
        "tuning_trials": bench.cfg.tune,
        "notes": bench.notes,
        "failed": summary.failed,
        "leaderboard": summary.leaderboard,
        "controls": controls(summary),
    }
    if chosen is not None and best is not None:
        line = next(x for x in summary.leaderboard if x["strategy"] == chosen.name)
        found |= {
            "chosen_on_validation": chosen.name,
            "best_single": best.name.removeprefix(ALONE),
            "gain": {key: line[f"gain_{key}"] for key in ("difference", "low", "high", "p")},
            "leader": summary.kind("fusion")[0].name,
            "cannot_be_told_apart": tied_with_leader(summary),
        }
        scores = {one.name: one.by_subset(modalities) for one in summary.kind("fusion")}
        found["shapley"] = {name: shapley(own, modalities) for name, own in scores.items()}
        found["interactions"] = {
            name: {"+".join(pair): v for pair, v in interactions(own, modalities).items()}
            for name, own in scores.items()
        }
    return found


def controls(summary: Summary) -> dict[str, Any]:
    """Judge the controls: labels shuffled in training, each modality's pairing broken in testing.

    With shuffled labels nothing can be learned. Every strategy has a shuffle of its own, so that
    their mean is compared with the test split's most frequent class (one-sided t-test).
    """
    from scipy.stats import ttest_1samp

    counts = torch.bincount(summary.target)
    chance, found = float(counts.max() / counts.sum()), list(summary.controls.values())
    above, words = False, "The control with shuffled labels was not run."
    if found:
        spread = statistics.seed_interval(found)
        if len(found) > 1 and max(found) > min(found):
            above = bool(ttest_1samp(found, chance, alternative="greater").pvalue < SIGNIFICANT)
        words = (
            f"Trained on shuffled labels, {len(found)} strategies reach {spread.mean:.3f} on"
            f" average ({min(found):.3f} to {max(found):.3f}); the test split's most frequent class"
            f" makes {chance:.3f}: {'ABOVE CHANCE, SOMETHING LEAKS' if above else 'nothing leaks'}."
        )
    pairing = {
        one.name: {
            name: one.figure("accuracy")
            - one.figure("accuracy", modality=name, corruption="pairing")
            for name in summary.bench.modalities
        }
        for one in summary.kind("fusion")
    }
    return {
        "words": words,
        "chance": chance,
        "labels_shuffled": summary.controls,
        "above_chance": above,
        "loss_when_pairing_is_broken": pairing,
    }


def verdict(summary: Summary) -> str:
    """Say in words whether fusion helped, by how much, and which fusions cannot be told apart."""
    chosen, best = chosen_fusion(summary), best_single(summary)
    if chosen is None or best is None:
        return "No verdict: no fusion or no single modality was trained to the end."
    found = statistics.compare(chosen.right, best.right)
    single = f"{best.name.removeprefix(ALONE)} alone"
    points = f"{100 * found.difference:+.1f} points"
    figures = f"(95 % interval {100 * found.low:.1f} to {100 * found.high:.1f})"
    p = "p < 0.001" if found.p < 0.001 else f"p = {found.p:.3f}"
    by = f"`{chosen.name}`, chosen on validation data"
    if found.p >= SIGNIFICANT:
        words = f"A tie: {points} {figures} over {single}, {p}; no difference can be shown ({by})."
    elif found.difference > 0:
        words = f"Fusion helps: {points} {figures} over {single}, {p} ({by})."
    else:
        words = f"Fusion hurts: {points} {figures} against {single}, {p} ({by})."
    fusions = summary.kind("fusion")
    if len(fusions) > 1:
        outcomes = [line["outcome"] for line in summary.leaderboard if "outcome" in line]
        wins, ties, losses = (outcomes.count(x) for x in ("win", "tie", "loss"))
        words += (
            f" Of {len(fusions)} fusions {wins} beat {single}, {ties} tie with it and {losses} lose"
            " to it (Holm-corrected)."
        )
        tied = tied_with_leader(summary)
        if len(tied) > 1:
            words += f" `{tied[0]}` leads; the best {len(tied)} cannot be told apart."
        else:
            words += f" `{tied[0]}` leads, ahead of every other."
    if len(chosen.seeds) == 1:
        words += (
            " One seed: the interval is over test samples alone; how much training's luck matters"
            " cannot be said."
        )
    if summary.failed:
        words += f" {len(summary.failed)} strategies failed: {', '.join(summary.failed)}."
    return words


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
            subset = "+".join(sorted(seen)) if row["subset"] == "full" else row["subset"]
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
