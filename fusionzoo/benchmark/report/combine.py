"""Combine the reports of several data sets: average ranks, and tests of their differences."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fusionzoo.datasets.tables.table import word_list
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.metrics import Metric
from fusionzoo.evaluation.statistics import LEVEL, Ranking, rank
from fusionzoo.files import write_files
from fusionzoo.ground.console import print_table
from fusionzoo.html.template import template

from ..bench import metric_named
from . import plots
from .page import PACKAGE, Report, require_packages
from .tables import booktabs, in_bold

FEWEST = 5  # data sets from which on Friedman's chi-squared is near its distribution


def combine(folders: str | Sequence[str], out: Path, *, pdf: bool = False) -> int:
    """Write page and tables: average ranks, Friedman's and Nemenyi's tests; `pdf`: the figure, too.

    Each data set is a block, ranked by the mean over seeds of its report's own metric, which its
    column names. Below `FEWEST` data sets there are ranks, and no tests. Candidates that a report
    lacks are left out and named.
    """
    require_packages()
    reports = _read_all(word_list(folders), out)
    every = dict.fromkeys(name for _, _, scores in reports for name in scores)
    common = [name for name in every if all(name in scores for _, _, scores in reports)]
    left_out = [name for name in every if name not in common]
    if len(common) < 3:
        raise FusionZooError(f"ranks need three candidates that all reports have, not {common}")
    scores = np.array([[by_name[name] for name in common] for _, _, by_name in reports])
    ranking = rank(scores)
    if len(reports) < FEWEST:
        ranking = Ranking(ranking.ranks, math.nan, math.nan)
    data_sets = [data_set for data_set, _, _ in reports]
    metrics = [metric for _, metric, _ in reports]
    order = np.argsort(ranking.ranks, kind="stable")
    rows = [
        (
            common[i],
            f"{ranking.ranks[i]:.2f}",
            *(f"{metric.shown(x):.3f}" for metric, x in zip(metrics, scores[:, i], strict=True)),
        )
        for i in order
    ]
    columns = [f"{data} ({x.title})" for data, x in zip(data_sets, metrics, strict=True)]
    header = ("candidate", "average rank", *columns)
    words = verdict(common, ranking, data_sets)
    figures: dict[str, Any] = {
        "verdict": words,
        "data_sets": data_sets,
        "metrics": [metric.name for metric in metrics],
        "friedman_p": None if math.isnan(ranking.p) else ranking.p,
        "critical_difference": None if math.isnan(ranking.p) else ranking.critical_difference,
        "ranks": {common[i]: float(ranking.ranks[i]) for i in order},
        "left_out": left_out,
    }
    contents = {
        "summary.json": json.dumps(figures, indent=1) + "\n",
        "table.md": _markdown(words, header, rows),
        "table.tex": _rank_table(header, rows, metrics, words),
    }
    with plots.pdf_files(pdf) as pdfs:
        svg = plots.critical_difference(common, ranking)
        shown = {"figures": figures, "header": header, "rows": rows, "svg": svg}
        contents["index.html"] = template("combined.html", PACKAGE).render(**shown)
    write_files(out, {**contents, **pdfs})
    print_table("Average ranks", header, rows)
    print(f"\n{words}\n\nreport  {out / 'index.html'}")
    return 0


def _read_all(folders: Sequence[str], out: Path) -> list[tuple[str, Metric, dict[str, float]]]:
    """Read reports that are to be combined in the folder `out`, each of other data."""
    if len(folders) < 2:
        raise FusionZooError("--combine needs two reports or more: '[report_a, report_b]'")
    if out.resolve() in [Path(folder).resolve() for folder in folders]:
        raise FusionZooError(f"--out {out} is a report to combine: name another folder")
    reports = [_read(folder) for folder in folders]
    for number, report in enumerate(reports):
        if report in reports[:number]:
            raise FusionZooError(f"{folders[number]} is a report of the same data as one before it")
    return reports


def verdict(names: Sequence[str], ranking: Ranking, data_sets: Sequence[str]) -> str:
    """Say in words which candidate leads over the data sets, and whether the candidates differ."""
    order = np.argsort(ranking.ranks, kind="stable")
    best = names[order[0]]
    words = (
        f"Over {len(data_sets)} data sets ({', '.join(data_sets)}) `{best}` has the best average"
        f" rank, {ranking.ranks[order[0]]:.2f} of {len(names)}."
    )
    if math.isnan(ranking.p):
        return words + f" Friedman's test needs {FEWEST} data sets or more: no test was made."
    if ranking.p >= 1 - LEVEL:
        return words + f" Friedman's test shows no difference between them (p = {ranking.p:.2f})."
    near = ranking.ranks <= ranking.ranks.min() + ranking.critical_difference
    return (
        f"{words} The candidates differ (Friedman p = {ranking.p:.2g}); {int(near.sum())} cannot be"
        f" told apart from the best (Nemenyi, critical difference"
        f" {ranking.critical_difference:.2f})."
    )


def _read(folder: str) -> tuple[str, Metric, dict[str, float]]:
    """Return the data set's name, its metric, and the score of each fusion, higher is better."""
    figures = Report.read(folder).figures
    if figures.get("stopped"):
        raise FusionZooError(f"{folder} was stopped before its end: the same command goes on")
    scores = {
        line["candidate"]: line["score"]
        for line in figures["leaderboard"]
        if line["kind"] == "fusion"
    }
    data = figures["data"]
    return data.get("title", data["name"]), metric_named(figures["metric"]), scores


def _rank_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], metrics: Sequence[Metric], words: str
) -> str:
    """Return the average ranks for a paper, the best of each column in bold."""
    names, *numbers = zip(*rows, strict=True)
    bold = [[False] * len(names)]
    for texts, pick in zip(
        numbers, (min, *(max if x.higher else min for x in metrics)), strict=True
    ):
        best = pick(map(float, texts))
        bold.append([float(text) == best for text in texts])
    return booktabs(header, in_bold(rows, [*zip(*bold, strict=True)]), words, "ranks")


def _markdown(words: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [words, "", f"| {' | '.join(header)} |", f"| {' | '.join(['---'] * len(header))} |"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"
