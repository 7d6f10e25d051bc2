"""Figures by group of test samples: where fusion helps, and which group is worse off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np

from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.tables.table import word_list
from fusionzoo.evaluation.metrics import Metric
from fusionzoo.evaluation.statistics import Interval
from fusionzoo.evaluation.subgroups import (
    FEW,
    MISSING,
    Subgroup,
    Words,
    compare_subgroups,
    group_names,
    subgroup_cells,
    subgroup_figures,
    subgroup_gains,
)
from fusionzoo.html.template import Table

from ..bench import Bench, metric_named
from ..candidates import single_title
from ..store import Row
from .results import (
    CandidateResults,
    Cell,
    Choice,
    Summary,
    best_single,
    chosen_fusion,
    decimal,
    of_shared_seeds,
)

WORST, NAME = "worst_group_", "name_of_worst_group_"  # + column: keys of a line, of the leaderboard
TOO_FEW = f"no group has {FEW} samples, so where fusion helps cannot be told"
DIFFERENCES = ("gain", "difference")


def with_subgroups(bench: Bench, dataset: PairedDataset) -> Bench:
    """Return the bench with the groups of its samples, by the columns that `--subgroups` names."""
    if not bench.cfg.subgroups:
        return bench
    tested = sorted({row for fold in bench.folds for row in fold.test.tolist()})
    groups = {}
    for column in dict.fromkeys(word_list(bench.cfg.subgroups)):
        cells = subgroup_cells(dataset, column)
        group_names([cells[row] for row in tested], column)  # refuses what cannot be compared
        groups[column] = tuple(MISSING if cell is None else cell for cell in cells)
    return replace(bench, subgroups=groups)


def worst_groups(summary: Summary, candidate: CandidateResults) -> dict[str, float | str]:
    """Return for a line of the leaderboard a candidate's figure in its worst group, and its name.

    Of each column; groups of fewer than `FEW` samples do not count.
    """
    line: dict[str, float | str] = {}
    for column, names in summary.subgroups.items():
        scores = {
            name: summary.mean(candidate.scores[:, names == name], names == name)
            for name in np.unique(names[summary.first_tests]).tolist()
            if (names == name)[summary.first_tests & summary.counted].sum() >= FEW
        }
        if len(scores) > 1:
            worst = min(scores, key=lambda name: scores[name])
            shown = summary.bench.metric.shown(scores[worst])
            line |= {WORST + column: shown, NAME + column: worst}
    return line


def subgroup_rows(summary: Summary, candidate: CandidateResults, row: Row) -> list[Row]:
    """Return the rows of each group of test samples, of one that is about all of a fold's.

    `subset` names the group: `site=A`.
    """
    part, metric = summary.fold_slices[row["fold"]], summary.bench.metric
    of_fold = np.zeros(len(summary.rows), np.bool_)
    of_fold[part] = True
    scores = candidate.scores[candidate.seeds.index(row["seed"])][None]
    labels = {key: row[key] for key in ("fold", "seed", "modality", "corruption", "severity")}
    rows = []
    for column, names in summary.subgroups.items():
        for name in np.unique(names[part]).tolist():
            inside = of_fold & (names == name)
            score = summary.mean(scores[:, inside], inside)
            weights = None if summary.weights is None else summary.weights[inside]
            rows.append(
                {
                    **labels,
                    "subset": f"{column}={name}",
                    "samples": int(inside.sum()),
                    **({} if weights is None else {"weight": float(weights.sum())}),
                    "score": score,
                    metric.name: metric.shown(score),
                }
            )
    return rows


def figures_by_group(summary: Summary) -> dict[str, Any]:
    """Return for summary.json the figures by group, by column; nothing if there is no fusion."""
    choice, best = chosen_fusion(summary), best_single(summary)
    if choice is None:
        return {}
    return {
        column: _of_column(summary, column, names, choice, best)
        for column, names in summary.subgroups.items()
    }


def _of_column(
    summary: Summary, column: str, names: Words, choice: Choice, best: CandidateResults | None
) -> dict[str, Any]:
    """Return fusion, best single, leader and gain by group, the worst group, and the words.

    All of them, and every candidate, with the figures by group under `candidates`.
    """
    metric, share, fusion = summary.bench.metric, summary.bench.test_share, choice.results
    rows = summary.counted
    weights = None if summary.weights is None else summary.weights[rows]
    tests = (names[rows], list(compress(summary.groups, rows)))
    once = summary.first_tests[rows]
    compared = compare_subgroups(
        fusion.scores[:, rows], *tests, test_share=share, once=once, weights=weights
    )
    gains: dict[str, Interval] = {}
    if best is not None:
        a, b = of_shared_seeds([fusion, best])
        gains = subgroup_gains((a.scores - b.scores)[:, rows], *tests, share, weights)
    gains = {x.name: gains[x.name] for x in compared.groups if x.samples >= FEW and gains}
    groups = {group.name: _of_group(group, gains.get(group.name), metric) for group in compared[0]}
    found = {
        "metric": metric.name,
        "fusion": choice.name if len(choice.counts) == 1 else fusion.name,
        "single": None if best is None else best.name,
        "leader": _leader(summary, choice, best),
        "groups": groups,
        "worst": None if compared.worst is None else compared.worst.name,
        "candidates": {
            candidate.name: {
                name: metric.shown(summary.mean(candidate.scores[:, names == name], names == name))
                for name in groups
            }
            for candidate in (summary.candidate(x["candidate"]) for x in summary.leaderboard)
        },
    }
    return found | {"words": _words(column, found)}


def _leader(summary: Summary, choice: Choice, best: CandidateResults | None) -> str | None:
    """Return the best candidate of the table, where it is none of the two that stand there."""
    lines = [x for x in summary.leaderboard if x["kind"] != "chosen"]
    shown = [*choice.counts] if len(choice.counts) == 1 else []
    shown += [] if best is None else [best.name]
    first = str(lines[0]["candidate"])
    return None if first in shown else first


def _of_group(group: Subgroup, gain: Interval | None, metric: Metric) -> dict[str, Any]:
    """Return a group's figures, within 0 and 1 where they are shares, and the gain, if known."""
    figures = subgroup_figures(group, metric)
    figures["difference"] = _bounded(group.difference)
    if metric.share:
        figures |= {"low": max(figures["low"], 0.0), "high": min(figures["high"], 1.0)}
    elif math.isinf(figures["low"]):
        figures |= {"low": math.nan, "high": math.nan}
    return figures | ({} if gain is None else {"gain": _bounded(gain)})


def _bounded(interval: Interval) -> dict[str, float]:
    """Return a difference with NaN as bounds where nothing is known: of one cluster, or where no
    sample differs."""
    if math.isinf(interval.low) or interval == (0.0, 0.0, 0.0):
        interval = interval._replace(low=math.nan, high=math.nan)
    return dict(interval._asdict())


def page_section(column: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page shows of a column, from the contents of summary.json."""
    found, metric = figures["subgroups"][column], metric_named(figures["metric"])
    fusion, single, leader = (found[key] for key in ("fusion", "single", "leader"))
    points, others = ", points" * metric.share, [x for x in (single, leader) if x is not None]
    header = ["group", "samples", fusion, *others, *([f"gain{points}"] if single else [])]
    header.append(f"against all others{points}")
    lines = [line for line in figures["leaderboard"] if WORST + column in line]
    lines.sort(key=lambda x: x[WORST + column], reverse=metric.higher)
    worst = [
        [x["candidate"], *map(decimal, (x[metric.name], x[WORST + column])), x[NAME + column]]
        for x in lines
    ]
    by_candidate = [[name, *shown.values()] for name, shown in found["candidates"].items()]
    return {
        **{"column": column, "words": found["words"], "fusion": fusion, "few": FEW},
        "single": single and single_title(single),
        "header": header,
        "rows": [_cells(name, found, others, metric) for name in found["groups"]],
        "table": _table(found, others),
        "worst": worst,
        "by_candidate": (["candidate", *found["groups"]], by_candidate),
    }


def _cells(
    name: str, found: Mapping[str, Any], others: Sequence[str], metric: Metric
) -> list[Cell]:
    """Return the row of a group on the page."""
    group, large = found["groups"][name], found["groups"][name]["samples"] >= FEW
    figure, low, high = (group[key] for key in (metric.name, "low", "high"))
    known = not math.isnan(low + high)
    text = f"{decimal(figure)} ({decimal(low)} to {decimal(high)})" if known else decimal(figure)
    cells = [Cell(name), Cell(f"{group['samples']:,}"), Cell(text)]
    cells += [Cell(decimal(found["candidates"][other][name])) for other in others]
    differences = [group.get("gain")] if found["single"] else []
    for difference in (*differences, group["difference"]):
        if difference is None:
            cells.append(Cell(""))
            continue
        style = "win" if difference["low"] > 0 else "loss" if difference["high"] < 0 else ""
        cells.append(Cell(interval_text(difference, metric), style=style if large else ""))
    return cells


def _table(found: Mapping[str, Any], others: Sequence[str]) -> Table:
    """Return all figures by group, for the CSV."""
    ends = ("mean", "low", "high")
    header = ["group", "samples", found["metric"], "low", "high", *others]
    header += [f"{key}{'' if x == 'mean' else f'_{x}'}" for key in DIFFERENCES for x in ends]
    rows = []
    for name, group in found["groups"].items():
        row = [name, *(group[key] for key in header[1:5])]
        row += [found["candidates"][other][name] for other in others]
        row += [group.get(key, {}).get(x, "") for key in DIFFERENCES for x in ends]
        rows.append(row)
    return header, rows


def _words(column: str, found: Mapping[str, Any]) -> str:
    """Say in which groups fusion helps, and which groups are told apart as worse off."""
    metric, groups = metric_named(found["metric"]), found["groups"]
    parts = []
    gains = {name: group["gain"] for name, group in groups.items() if "gain" in group}
    if found["single"] is not None:
        against = single_title(found["single"])
        large = f" of {FEW} samples or more" * (len(gains) < len(groups))
        parts.append(_where_it_helps(gains, against, large) if gains else TOO_FEW)
    worse = [
        name
        for name, group in groups.items()
        if group["samples"] >= FEW and group["difference"]["high"] < 0
    ]
    if found["worst"] is None:
        parts.append(f"fewer than two groups have {FEW} samples")
    elif worse:
        which = ", ".join(_worse_off(name, groups[name], metric) for name in worse)
        parts.append(f"told apart as worse off than the others: {which}")
    else:
        figure = decimal(groups[found["worst"]][metric.name])
        parts.append(
            f"no group is told apart as worse off (the worst is {found['worst']!r}, {figure})"
        )
    return f"By {column}: {'; '.join(parts)}."


def _where_it_helps(gains: Mapping[str, Mapping[str, float]], single: str, large: str) -> str:
    """Say in which groups the gain is told from 0; `large` says which groups have one."""
    helps = [name for name, gain in gains.items() if gain["low"] > 0]
    hurts = [name for name, gain in gains.items() if gain["high"] < 0]
    open_ = [name for name in gains if name not in (*helps, *hurts)]
    for names, verb in ((helps, "helps"), (hurts, "hurts")):
        if len(names) == len(gains):
            return f"fusion {verb} in every group{large}, against {single}"
    if len(open_) == len(gains):
        return f"whether fusion helps in any group{large}, against {single}, cannot be told"
    parts = [f"{verb} in {_list(x)}" for x, verb in ((helps, "helps"), (hurts, "hurts")) if x]
    words = f"against {single} fusion {' and '.join(parts)}"
    return words + (f", and cannot be told to help or hurt in {_list(open_)}" if open_ else "")


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _worse_off(name: str, group: Mapping[str, Any], metric: Metric) -> str:
    mean, low, high = (metric.difference(group["difference"][x]) for x in ("mean", "low", "high"))
    gap = f"{mean}{' points' * metric.share} against all others, 95 % interval {low} to {high}"
    return f"{name!r} ({decimal(group[metric.name])}, {gap})"


def interval_text(figures: Mapping[str, float], metric: Metric) -> str:
    """Write a difference with its interval, above 0 = better."""
    mean, low, high = (figures[key] for key in ("mean", "low", "high"))
    if math.isnan(low) or math.isnan(high):
        return metric.difference(mean)
    low_text, high_text = metric.difference(low), metric.difference(high)
    return f"{metric.difference(mean)} ({low_text} to {high_text})"
