"""index.html: one file with everything in it, for a screen, a phone and paper."""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fusionzoo.evaluation.calibration import risk_coverage
from fusionzoo.evaluation.modalities import subsets
from fusionzoo.evaluation.statistics import rank
from fusionzoo.version import __version__

from ..strategies import ALONE
from . import plots as figures
from .curves import RATES, damage_curves, missing_curve, pareto, reliability_of
from .leaderboard import ECE_NOTE
from .results import Strategy, Summary, best_single, chosen_fusion, label
from .verdict import pairwise

SHOWN = 4  # fusions that stand out in the crowded pictures
Table = tuple[Sequence[str], Sequence[Sequence[Any]]]  # header, rows


def page(summary: Summary, found: Mapping[str, Any]) -> str:
    """Render the report."""
    text = (
        environment()
        .get_template("page.html")
        .render(
            found=found,
            costs={one.name: one.facts for one in summary.strategies if one.facts},
            sections=sections(summary),
            heat=heat_map(summary, found.get("shapley", {})),
            ece_note=ECE_NOTE,
            version=__version__,
        )
    )
    return str(text)


def environment() -> Any:
    """Return Jinja's environment of the templates beside this file."""
    from jinja2 import Environment, PackageLoader

    made = Environment(
        loader=PackageLoader("fusionzoo.benchmark.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"points": lambda x: f"{100 * x:+.1f}", "csv": data_link}
    made.filters["code"] = code
    return made


def code(words: str) -> Any:
    """Show what stands between backticks as code, as Markdown does; the rest is escaped."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(words))))


def sections(summary: Summary) -> dict[str, dict[str, Any]]:
    """Return each picture with the table behind it; what the data does not allow is left out."""
    found = {"intervals": _intervals(summary), "ranks": _ranks(summary)}
    found |= {"missing": _missing(summary), "damage": _damage(summary)}
    found |= {"calibration": _calibration(summary), "pareto": _pareto(summary)}
    return {name: one for name, one in found.items() if one}


def data_link(table: Table) -> str:
    """Put a table into a link, so that the page stays one file."""
    return "data:text/csv;base64," + base64.b64encode(csv_text(*table).encode()).decode()


def csv_text(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Write a table as CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return out.getvalue()


def heat_map(summary: Summary, worth: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return accuracy by strategy and subset, with Shapley values beside it."""
    modalities = list(summary.bench.modalities)
    some = subsets(modalities)
    # Six modalities have 64 subsets: the smallest and the largest tell the most.
    if len(some) > 16:
        some = [s for s in some if len(s) <= 1 or len(s) >= len(modalities) - 1]
    rows = []
    for name, shares in worth.items():
        scores = summary.of(name).by_subset(modalities)
        rows.append((name, [scores[s] for s in some], [shares[m] for m in modalities]))
    values = [x for _, own, _ in rows for x in own]
    names = [label(s, modalities) for s in some]
    table = (
        ["strategy", *names, *(f"shapley {m}" for m in modalities)],
        [[name, *own, *shares] for name, own, shares in rows],
    )
    return {
        "names": names,
        "modalities": modalities,
        "rows": rows,
        "low": min(values, default=0.0),
        "high": max(values, default=1.0),
        "table": table,
    }


def shown(summary: Summary) -> list[str]:
    """Return who stands out: the one chosen on validation data, then the best on the test split."""
    names = [one.name for one in summary.kind("fusion")]
    chosen = chosen_fusion(summary)
    first = [chosen.name] if chosen else []
    return list(dict.fromkeys([*first, *names]))[:SHOWN]


def _intervals(summary: Summary) -> dict[str, Any]:
    lines = summary.leaderboard
    single = best_single(summary)
    picture = figures.intervals(lines, single.figure("accuracy") if single else None)
    header = list(dict.fromkeys(key for line in lines for key in line))
    return {"svg": picture, "table": (header, [[x.get(k, "") for k in header] for x in lines])}


def _ranks(summary: Summary) -> dict[str, Any] | None:
    fusions = [one for one in summary.kind("fusion") if len(one.seeds) == summary.bench.cfg.seeds]
    if len(fusions) < 3 or summary.bench.cfg.seeds < 2:
        return None
    ranking = rank(np.stack([one.right.mean(1) for one in fusions], axis=1))
    names = [one.name for one in fusions]
    matrix, lines = pairwise(fusions)
    counts = [[row.count(x) for x in ("win", "tie", "loss")] for row in matrix]
    return {
        "svg": figures.critical_difference(names, ranking),
        "p": ranking.p,
        "width": ranking.critical_difference,
        "names": names,
        "matrix": matrix,
        "counts": counts,
        "table": (["strategy", "average rank"], list(zip(names, ranking.ranks, strict=True))),
        "pairs": (list(lines[0]), [list(line.values()) for line in lines]),
    }


def _missing(summary: Summary) -> dict[str, Any] | None:
    modalities = list(summary.bench.modalities)
    fusions = summary.kind("fusion")
    if not fusions:
        return None
    panels = {
        title: {one.name: missing_curve(one, modalities, only) for one in fusions}
        for title, only in (("any modality", None), *((f"{m} only", m) for m in modalities))
    }
    rows = [
        [title, name, *curve] for title, curves in panels.items() for name, curve in curves.items()
    ]
    picture = figures.missing(panels, RATES, shown(summary))
    return {"svg": picture, "table": (["missing", "strategy", *RATES], rows)}


def _damage(summary: Summary) -> dict[str, Any] | None:
    panels: dict[str, dict[str, dict[str, list[float]]]] = {}
    for modality in summary.bench.modalities:
        alone = [one for one in summary.kind("single") if one.name == f"{ALONE}{modality}"]
        for one in [*summary.kind("fusion"), *alone]:
            for corruption, curve in damage_curves(one, modality).items():
                panels.setdefault(modality, {}).setdefault(corruption, {})[one.name] = curve
    if not panels:
        return None
    rows = [
        [modality, corruption, name, *curve]
        for modality, found in panels.items()
        for corruption, curves in found.items()
        for name, curve in curves.items()
    ]
    names = [*shown(summary), *(one.name for one in summary.kind("single"))]
    header = ["modality", "corruption", "strategy", *(f"severity {s}" for s in range(6))]
    return {"svg": figures.damage(panels, names), "table": (header, rows)}


def _calibration(summary: Summary) -> dict[str, Any]:
    chosen, single = chosen_fusion(summary), best_single(summary)
    picked: list[Strategy] = [one for one in (chosen, single) if one]
    picked += [summary.of(name) for name in shown(summary) if name not in {o.name for o in picked}]
    picked = picked[:4]
    bins = {one.name: reliability_of(one, summary.target) for one in picked}
    risks = {
        one.name: np.mean([risk_coverage(x, summary.target).numpy() for x in one.logits], axis=0)
        for one in picked
    }
    rows = [[name, *line] for name, lines in bins.items() for line in lines]
    header = ["strategy", "confidence", "accuracy", "count"]
    return {"svg": figures.calibration(bins, risks), "table": (header, rows)}


def _pareto(summary: Summary) -> dict[str, Any] | None:
    measured = [one for one in summary.strategies if one.facts and one.kind == "fusion"]
    if not measured:
        return None
    panels: dict[str, dict[str, tuple[float, float]]] = {
        title: {one.name: (one.facts[key], one.figure("accuracy")) for one in measured}
        for title, key in (
            ("multiply-accumulates of a sample", "macs"),
            ("training, seconds a seed", "seconds"),
        )
    }
    fronts: Mapping[str, Sequence[str]] = {title: pareto(own) for title, own in panels.items()}
    families = {one.name: one.family for one in measured}
    keys = list(measured[0].facts)
    rows = [[one.name, one.figure("accuracy"), *one.facts.values()] for one in measured]
    picture = figures.pareto(panels, fronts, families)
    return {"svg": picture, "table": (["strategy", "accuracy", *keys], rows)}
