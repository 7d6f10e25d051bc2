"""The sections of the page: each plot with its table of figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fusionzoo.evaluation.calibration import risk_coverage
from fusionzoo.evaluation.modalities import subsets
from fusionzoo.evaluation.statistics import rank

from ..strategies import ALONE, is_single
from . import plots
from .curves import (
    RATES,
    corruption_curves,
    missing_curve,
    pareto,
    reliability_of,
    severities,
)
from .incomplete import incomplete
from .results import (
    MAJORITY,
    PRIOR,
    StrategyResults,
    Summary,
    best_single,
    chosen_fusion,
    row_label,
)
from .verdict import pairwise

HIGHLIGHTED = 4  # fusions drawn in colour where all are drawn


def sections(summary: Summary, metric: str) -> dict[str, dict[str, Any]]:
    """Return each plot with its table; those that the data does not allow are left out."""
    content = {
        "leaderboard": _leaderboard(summary),
        "intervals": _intervals(summary, metric),
        "ranks": _ranks(summary),
        "missing": _missing(summary, metric),
        "corruptions": _corruptions(summary, metric),
        "incomplete": incomplete(summary),
        "calibration": _calibration(summary),
        "pareto": _pareto(summary, metric),
    }
    return {name: section for name, section in content.items() if section}


def heat_map(summary: Summary, shapley: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return the figure by fusion and subset, with the modalities' Shapley values."""
    modalities = list(summary.bench.modalities)
    columns = subsets(modalities)
    # Six modalities have 64 subsets: show the smallest and the largest.
    if len(columns) > 16:
        columns = [s for s in columns if len(s) <= 1 or len(s) >= len(modalities) - 1]
    rows = []
    for name, values in shapley.items():
        score = _scores_where_present(summary, summary.strategy(name))
        figures = [summary.bench.metric.shown(score[s]) for s in columns]
        rows.append((name, figures, [values[m] for m in modalities]))
    cells = [figure for _, figures, _ in rows for figure in figures if not math.isnan(figure)]
    names = [row_label(subset, modalities) for subset in columns]
    table = (
        ["strategy", *names, *(f"shapley {m}" for m in modalities)],
        [[name, *figures, *values] for name, figures, values in rows],
    )
    return {
        "names": names,
        "modalities": modalities,
        "rows": rows,
        "shade": _shade(cells, higher=summary.bench.metric.higher),
        "table": table,
    }


def _shade(cells: Sequence[float], *, higher: bool) -> Callable[[float], str]:
    """Return what gives a cell's class, `h0` the worst to `h9` the best; none without a figure."""
    low, high = min(cells, default=0.0), max(cells, default=1.0)

    def shade(figure: float) -> str:
        if math.isnan(figure):
            return ""
        goodness = figure - low if higher else high - figure
        return f"h{min(9, int(10 * goodness / ((high - low) or 1)))}"

    return shade


def _scores_where_present(
    summary: Summary, strategy: StrategyResults
) -> dict[frozenset[str], float]:
    """Return the score given each subset of the modalities, among the test samples with one of
    them; given all or none, among all samples."""
    modalities = list(summary.bench.modalities)
    scores = strategy.score_by_subset(modalities)
    order = subsets(modalities)[::-1]
    if strategy.subset_scores is None or strategy.subset_scores.shape[1] != len(order):
        return scores
    present = summary.bench.present[summary.rows].numpy()
    for number, subset in enumerate(order[1:-1], 1):
        rows = present[:, [name in subset for name in modalities]].any(1)
        if not rows.all():
            known = strategy.subset_scores[:, number, rows]
            scores[subset] = float(known.mean()) if known.size else math.nan
    return scores


def highlighted(summary: Summary) -> list[str]:
    """Return the fusion chosen on validation data, then the best ones on the test split."""
    names = [fusion.name for fusion in summary.of_kind("fusion")]
    chosen = chosen_fusion(summary)
    first = [chosen.name] if chosen else []
    return list(dict.fromkeys([*first, *names]))[:HIGHLIGHTED]


def _leaderboard(summary: Summary) -> dict[str, Any]:
    lines = summary.leaderboard
    header = list(dict.fromkeys(key for line in lines for key in line))
    return {"table": (header, [[line.get(key, "") for key in header] for line in lines])}


def _intervals(summary: Summary, metric: str) -> dict[str, Any]:
    # The baselines without any input stand far below: the dots of the rest would touch.
    lines = [line for line in summary.leaderboard if line["strategy"] not in (MAJORITY, PRIOR)]
    single = best_single(summary)
    best = summary.line(single.name)[metric] if single else None
    svg = plots.intervals(lines, best, metric)
    header = ["strategy", metric, "low", "high"]
    return {"svg": svg, "table": (header, [[line[key] for key in header] for line in lines])}


def _ranks(summary: Summary) -> dict[str, Any] | None:
    num_seeds = summary.bench.cfg.seeds
    fusions = [fusion for fusion in summary.of_kind("fusion") if len(fusion.seeds) == num_seeds]
    if len(fusions) < 3 or num_seeds < 2:
        return None
    ranking = rank(np.stack([fusion.scores.mean(1) for fusion in fusions], axis=1))
    names = [fusion.name for fusion in fusions]
    matrix, lines = pairwise(summary, fusions)
    counts = [[row.count(x) for x in ("win", "tie", "loss")] for row in matrix]
    return {
        "svg": plots.critical_difference(names, ranking),
        "p": ranking.p,
        "width": ranking.critical_difference,
        "names": names,
        "matrix": matrix,
        "counts": counts,
        "table": (["strategy", "average rank"], list(zip(names, ranking.ranks, strict=True))),
        "pairs": (list(lines[0]), [list(line.values()) for line in lines]),
    }


def _missing(summary: Summary, metric: str) -> dict[str, Any] | None:
    modalities = list(summary.bench.modalities)
    fusions = summary.of_kind("fusion")
    if not fusions:
        return None
    if all(math.isnan(missing_curve(fusion, modalities)[-1]) for fusion in fusions):
        return None  # no subsets were measured
    fusions += _incomplete_fusions(summary)
    panels = {
        title: {
            fusion.name: _shown(summary, missing_curve(fusion, modalities, only))
            for fusion in fusions
        }
        for title, only in (("any modality", None), *((f"{m} only", m) for m in modalities))
    }
    rows = [
        [title, name, *curve] for title, curves in panels.items() for name, curve in curves.items()
    ]
    svg = plots.missing(panels, RATES, highlighted(summary), metric)
    return {"svg": svg, "table": (["missing", "strategy", *RATES], rows)}


def _incomplete_fusions(summary: Summary) -> list[StrategyResults]:
    """Return the fusions that were trained with modalities removed or damaged."""
    return [s for s in summary.of_kind("incomplete") if not is_single(s.name)]


def _corruptions(summary: Summary, metric: str) -> dict[str, Any] | None:
    panels: dict[str, dict[str, dict[str, list[float]]]] = {}  # modality -> corruption -> strategy
    singles, at = summary.of_kind("single"), [0]
    fusions = [*summary.of_kind("fusion"), *_incomplete_fusions(summary)]
    for modality in summary.bench.modalities:
        alone = [single for single in singles if single.name == f"{ALONE}{modality}"]
        for strategy in [*fusions, *alone]:
            for corruption, curve in corruption_curves(strategy, modality).items():
                curves = panels.setdefault(modality, {}).setdefault(corruption, {})
                curves[strategy.name] = _shown(summary, curve)
                at = severities(strategy)
    if not panels:
        return None
    rows = [
        [modality, corruption, name, *curve]
        for modality, row in panels.items()
        for corruption, curves in row.items()
        for name, curve in curves.items()
    ]
    names = [*highlighted(summary), *(single.name for single in singles)]
    header = ["modality", "corruption", "strategy", *(f"severity {s}" for s in at)]
    return {"svg": plots.corruptions(panels, at, names, metric), "table": (header, rows)}


def _shown(summary: Summary, curve: Sequence[float]) -> list[float]:
    """Return the figures of scores."""
    return [summary.bench.metric.shown(score) for score in curve]


def _calibration(summary: Summary) -> dict[str, Any] | None:
    if not any("ece" in line for line in summary.leaderboard):
        return None  # no classes
    strategies = [s for s in (chosen_fusion(summary), best_single(summary)) if s]
    names = {strategy.name for strategy in strategies}
    strategies += [summary.strategy(name) for name in highlighted(summary) if name not in names]
    strategies = strategies[:4]
    target = summary.target
    bins = {strategy.name: reliability_of(strategy, target) for strategy in strategies}
    risks = {
        strategy.name: np.mean([risk_coverage(x, target).numpy() for x in strategy.logits], axis=0)
        for strategy in strategies
    }
    rows = [[name, *line] for name, lines in bins.items() for line in lines]
    header = ["strategy", "confidence", "accuracy", "count"]
    return {"svg": plots.calibration(bins, risks), "table": (header, rows)}


def _pareto(summary: Summary, metric: str) -> dict[str, Any] | None:
    fusions = [s for s in summary.strategies if s.facts and s.kind == "fusion"]
    if not fusions:
        return None
    panels: dict[str, dict[str, tuple[float, float]]] = {
        title: {fusion.name: (fusion.facts[key], fusion.mean()) for fusion in fusions}
        for title, key in (
            ("multiply-accumulates of a sample", "macs"),
            ("training, seconds a seed", "seconds"),
        )
    }
    fronts: Mapping[str, Sequence[str]] = {
        title: pareto(points) for title, points in panels.items()
    }
    shown = summary.bench.metric.shown
    panels = {
        title: {name: (cost, shown(score)) for name, (cost, score) in points.items()}
        for title, points in panels.items()
    }
    families = {fusion.name: fusion.family for fusion in fusions}
    header = ["strategy", metric, *fusions[0].facts]
    rows = [[fusion.name, shown(fusion.mean()), *fusion.facts.values()] for fusion in fusions]
    return {"svg": plots.pareto(panels, fronts, families, metric), "table": (header, rows)}
