"""Rank strategies over several data sets, from the reports of finished benchmarks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fusionzoo.console import print_table
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.statistics import LEVEL, Ranking, rank
from fusionzoo.version import __version__

from . import plots as figures
from .writers import check, replace


def combine(folders: Sequence[str], out: Path) -> int:
    """Write index.html, summary.json and table.md: average ranks, Friedman's and Nemenyi's tests.

    A data set is a block, and its figure the mean accuracy over seeds; strategies that some report
    lacks are left out and named.
    """
    check()
    if len(folders) < 2:
        raise FusionZooError(
            "--combine needs two reports or more: --combine '[report_a, report_b]'"
        )
    found = [_read(Path(folder)) for folder in folders]
    every = dict.fromkeys(name for _, own in found for name in own)
    common = [name for name in every if all(name in own for _, own in found)]
    left_out = [name for name in every if name not in common]
    if len(common) < 3:
        raise FusionZooError(
            f"ranks need three strategies or more that all reports have; there are {common}"
        )
    scores = np.array([[own[name] for name in common] for _, own in found])
    ranking = rank(scores)
    names = [name for name, _ in found]
    order = np.argsort(ranking.ranks, kind="stable")
    rows = [
        (common[i], f"{ranking.ranks[i]:.2f}", *(f"{x:.3f}" for x in scores[:, i])) for i in order
    ]
    header = ("strategy", "average rank", *names)
    words = verdict(common, ranking, names)
    about: dict[str, Any] = {
        "verdict": words,
        "data_sets": names,
        "friedman_p": ranking.p,
        "critical_difference": ranking.critical_difference,
        "ranks": {common[i]: float(ranking.ranks[i]) for i in order},
        "left_out": left_out,
    }
    out.mkdir(parents=True, exist_ok=True)
    replace(out / "summary.json", json.dumps(about, indent=1) + "\n")
    lines = [words, "", f"| {' | '.join(header)} |", f"| {' | '.join(['---'] * len(header))} |"]
    replace(out / "table.md", "\n".join([*lines, *(f"| {' | '.join(r)} |" for r in rows)]) + "\n")
    replace(out / "index.html", _page(about, header, rows, common, ranking))
    print_table("Average ranks", header, rows)
    print(f"\n{words}\n\nreport  {out / 'index.html'}")
    return 0


def verdict(names: Sequence[str], ranking: Ranking, data_sets: Sequence[str]) -> str:
    """Say in words who leads over the data sets, and whether that means anything."""
    order = np.argsort(ranking.ranks, kind="stable")
    best = names[order[0]]
    words = (
        f"Over {len(data_sets)} data sets ({', '.join(data_sets)}) `{best}` has the best average"
        f" rank, {ranking.ranks[order[0]]:.2f} of {len(names)}."
    )
    if ranking.p >= 1 - LEVEL:
        return words + f" Friedman's test shows no difference between them (p = {ranking.p:.2f})."
    near = ranking.ranks <= ranking.ranks.min() + ranking.critical_difference
    return (
        f"{words} The strategies differ (Friedman p = {ranking.p:.2g}); {int(near.sum())} cannot be"
        f" told apart from the best (Nemenyi, critical difference"
        f" {ranking.critical_difference:.2f})."
    )


def _read(folder: Path) -> tuple[str, dict[str, float]]:
    path = folder / "summary.json"
    if not path.is_file():
        raise FusionZooError(f"{folder} holds no finished report: {path} is not there")
    summary = json.loads(path.read_text())
    if "leaderboard" not in summary:
        raise FusionZooError(f"{folder} is itself a combination; give the reports behind it")
    own = {
        line["strategy"]: line["accuracy"]
        for line in summary["leaderboard"]
        if line["family"] not in ("single", "baseline")
    }
    return summary["data"]["name"], own


def _page(
    about: dict[str, Any],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    names: Sequence[str],
    ranking: Ranking,
) -> str:
    from .html import environment

    picture = figures.critical_difference(names, ranking)
    return str(
        environment()
        .get_template("combined.html")
        .render(found=about, header=header, rows=rows, svg=picture, version=__version__)
    )
