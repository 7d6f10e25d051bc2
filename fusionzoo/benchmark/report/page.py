"""Write the report: index.html and the tables beside it; read that of an earlier run."""

from __future__ import annotations

import json
import math
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fusionzoo.datasets.opening.naming import data_title
from fusionzoo.errors import FusionZooError, explained
from fusionzoo.evaluation.calibration import risk_coverage
from fusionzoo.evaluation.measure import WEIGHTED_BY, weighted_by
from fusionzoo.evaluation.metrics import metric_name
from fusionzoo.evaluation.shapley import subsets
from fusionzoo.files import write_files
from fusionzoo.ground.console import print_table
from fusionzoo.html.template import Table, template

from ..bench import CTRL_C, metric_named
from ..candidates import ALONE
from . import plots
from .checklist import Line, checklist
from .leaderboard import ECE_NOTE, TERMINAL, page_table, text_table
from .results import (
    MAJORITY,
    PRIOR,
    RATES,
    CandidateResults,
    Summary,
    best_single,
    chosen_fusion,
    corruption_curves,
    missing_curve,
    pareto,
    reliability_of,
    row_label,
    severities,
)
from .tables import costs, latex, markdown, parquet
from .verdict import pairwise

if TYPE_CHECKING:
    import pandas as pd


PACKAGE = "fusionzoo.benchmark.report"  # of the pages
HIGHLIGHTED = 4  # fusions drawn in colour where all are drawn


def sections(summary: Summary, metric: str) -> dict[str, dict[str, Any]]:
    """Return each plot with its table; those that the data does not allow are left out."""
    content = {
        "leaderboard": {"table": _table(summary.leaderboard)},
        "intervals": _intervals(summary, metric),
        "pairs": _pairs(summary),
        "missing": _missing(summary, metric),
        "corruptions": _corruptions(summary, metric),
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
        score = _scores_where_present(summary, summary.candidate(name))
        figures = [summary.bench.metric.shown(score[s]) for s in columns]
        rows.append((name, figures, [values[m] for m in modalities]))
    cells = [figure for _, figures, _ in rows for figure in figures if not math.isnan(figure)]
    names = [row_label(subset, modalities) for subset in columns]
    table = (
        ["candidate", *names, *(f"shapley {m}" for m in modalities)],
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
    summary: Summary, candidate: CandidateResults
) -> dict[frozenset[str], float]:
    """Return the score given each subset of the modalities, among the test samples with one of
    them; given all or none, or by a figure that is no mean of rows, among all samples."""
    modalities = list(summary.bench.modalities)
    scores = candidate.score_by_subset(modalities)
    order = subsets(modalities)[::-1]
    by_sample = candidate.subset_scores if summary.bench.metric.of_rows else None
    if by_sample is None or by_sample.shape[1] != len(order):
        return scores
    present = summary.bench.present[summary.rows].numpy()
    for number, subset in enumerate(order[1:-1], 1):
        columns = [name in subset for name in modalities]
        rows = np.asarray(present[:, columns].any(1), np.bool_)
        if not rows.all():
            known = by_sample[:, number, rows]
            scores[subset] = summary.mean(known, rows) if known.size else math.nan
    return scores


def highlighted(summary: Summary) -> list[str]:
    """Return the fusion chosen most often, then the best ones on the test split."""
    names = [fusion.name for fusion in summary.of_kind("fusion")]
    chosen = chosen_fusion(summary)
    first = [chosen.name] if chosen else []
    return list(dict.fromkeys([*first, *names]))[:HIGHLIGHTED]


def _intervals(summary: Summary, metric: str) -> dict[str, Any]:
    # The baselines without any input stand far below: the dots of the rest would touch.
    lines = [line for line in summary.leaderboard if line["candidate"] not in (MAJORITY, PRIOR)]
    single = best_single(summary)
    best = summary.line(single.name)[metric] if single else None
    svg = plots.intervals(lines, best, metric)
    header = ["candidate", metric, "low", "high"]
    return {"svg": svg, "table": (header, [[line[key] for key in header] for line in lines])}


def _pairs(summary: Summary) -> dict[str, Any] | None:
    fusions = summary.of_kind("fusion")
    if len(fusions) < 2:
        return None
    matrix, lines = pairwise(summary, fusions)
    return {
        "names": [fusion.name for fusion in fusions],
        "matrix": matrix,
        "counts": [[row.count(x) for x in ("win", "tie", "loss")] for row in matrix],
        "table": (list(lines[0]), [list(line.values()) for line in lines]),
    }


def _missing(summary: Summary, metric: str) -> dict[str, Any] | None:
    modalities = list(summary.bench.modalities)
    fusions = summary.of_kind("fusion")
    if all(math.isnan(missing_curve(fusion, modalities)[-1]) for fusion in fusions):
        return None  # no fusion, or no subsets were measured
    shown = summary.bench.metric.shown
    panels = {
        title: {
            fusion.name: list(map(shown, missing_curve(fusion, modalities, only)))
            for fusion in fusions
        }
        for title, only in (("any modality", None), *((f"{m} only", m) for m in modalities))
    }
    rows = [
        [title, name, *curve] for title, curves in panels.items() for name, curve in curves.items()
    ]
    svg = plots.missing(panels, RATES, highlighted(summary), metric)
    return {"svg": svg, "table": (["missing", "candidate", *RATES], rows)}


def _corruptions(summary: Summary, metric: str) -> dict[str, Any] | None:
    panels: dict[str, dict[str, dict[str, list[float]]]] = {}  # modality -> corruption -> candidate
    singles, at = summary.of_kind("single"), [0]
    fusions = summary.of_kind("fusion")
    for modality in summary.bench.modalities:
        alone = [single for single in singles if single.name == f"{ALONE}{modality}"]
        for candidate in [*fusions, *alone]:
            for corruption, curve in corruption_curves(candidate, modality).items():
                curves = panels.setdefault(modality, {}).setdefault(corruption, {})
                curves[candidate.name] = list(map(summary.bench.metric.shown, curve))
                at = severities(candidate)
    if not panels:
        return None
    rows = [
        [modality, corruption, name, *curve]
        for modality, row in panels.items()
        for corruption, curves in row.items()
        for name, curve in curves.items()
    ]
    names = [*highlighted(summary), *(single.name for single in singles)]
    header = ["modality", "corruption", "candidate", *(f"severity {s}" for s in at)]
    return {"svg": plots.corruptions(panels, at, names, metric), "table": (header, rows)}


def _calibration(summary: Summary) -> dict[str, Any] | None:
    if not any("ece" in line for line in summary.leaderboard):
        return None  # no classes
    chosen, best = chosen_fusion(summary), best_single(summary)
    candidates = [summary.candidate(x.name) for x in (chosen, best) if x]
    names = {candidate.name for candidate in candidates}
    candidates += [summary.candidate(name) for name in highlighted(summary) if name not in names]
    candidates, target = candidates[:4], summary.target
    bins = {candidate.name: reliability_of(candidate, target) for candidate in candidates}
    curves = {x.name: [risk_coverage(y, target).numpy() for y in x.logits] for x in candidates}
    risks = {name: np.mean(by_seed, axis=0) for name, by_seed in curves.items()}
    rows = [[name, *line] for name, lines in bins.items() for line in lines]
    header = ["candidate", "confidence", "accuracy", "count"]
    return {"svg": plots.calibration(bins, risks), "table": (header, rows)}


def _pareto(summary: Summary, metric: str) -> dict[str, Any] | None:
    fusions = [s for s in summary.candidates if s.facts and s.kind == "fusion"]
    if not fusions:
        return None
    shown = summary.bench.metric.shown
    panels: dict[str, dict[str, tuple[float, float]]] = {}
    fronts: dict[str, Sequence[str]] = {}
    for title, key in (
        ("multiply-accumulates of a sample", "macs"),
        ("training, seconds a seed", "seconds"),
    ):
        fronts[title] = pareto({x.name: (x.facts[key], x.mean()) for x in fusions})
        panels[title] = {x.name: (x.facts[key], shown(x.mean())) for x in fusions}
    families = {fusion.name: fusion.family for fusion in fusions}
    header = ["candidate", metric, *fusions[0].facts]
    rows = [[fusion.name, shown(fusion.mean()), *fusion.facts.values()] for fusion in fusions]
    return {"svg": plots.pareto(panels, fronts, families, metric), "table": (header, rows)}


def page(summary: Summary, figures: Mapping[str, Any]) -> str:
    """Render the report; `figures` are those of `verdict.figures`."""
    metric = str(figures["metric"])
    facts = {candidate.name: candidate.facts for candidate in summary.candidates}
    lines = [{**line, **facts.get(line["candidate"], {})} for line in figures["leaderboard"]]
    columns, cells = page_table(lines, metric)
    text = template("page.html", PACKAGE).render(
        figures=figures,
        title=data_title(summary.bench.cfg.data),
        metric=metric_name(metric),
        points=metric_named(metric).share,
        difference=metric_named(metric).difference,
        of_rows=summary.bench.metric.of_rows,
        columns=columns,
        rows=[(line["family"], row) for line, row in zip(lines, cells, strict=True)],
        sections=sections(summary, metric),
        heat=heat_map(summary, figures.get("shapley", {})),
        presence=_table(figures["presence"]) if "presence" in figures else None,
        checklist=checklist(figures),
        ece_note=ECE_NOTE,
    )
    return str(text)


def _table(lines: Sequence[Mapping[str, Any]]) -> Table:
    header = list(dict.fromkeys(key for line in lines for key in line))
    return header, [[line.get(key, "") for key in header] for line in lines]


def require_packages() -> None:
    """Raise an error if a package that the report needs is missing."""
    with explained("the report needs pip install 'fusionzoo[benchmark]'", ImportError):
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401


def write(summary: Summary, figures: Mapping[str, Any], out: Path) -> None:
    """Write all files, completely or not at all; `figures` are those of `verdict.figures`."""
    contents: dict[str, str | bytes] = {
        "summary.json": json.dumps(_without_nan(figures), indent=1) + "\n",
        "table.md": markdown(figures),
        "table.tex": latex(figures),
        "results.parquet": parquet(summary),
        "costs.csv": costs(summary),
    }
    with plots.pdf_files(summary.bench.cfg.figures == "pdf") as pdfs:
        contents["index.html"] = page(summary, figures)
    write_files(out, {**contents, **pdfs})


def print_figures(figures: Mapping[str, Any]) -> None:
    """Print the leaderboard's main columns and the verdict."""
    header, rows = text_table(figures["leaderboard"], figures["metric"], TERMINAL)
    column = figures.get(WEIGHTED_BY)  # earlier reports have none
    title = "Test samples" if column is None else f"Test samples, {weighted_by(column)}"
    print_table(title, header, rows)
    for name, error in figures["failed"].items():
        print(f"failed  {name}: {error}")
    for name, reason in figures.get("not_run", {}).items():  # earlier reports have none
        print(f"not run  {name}: {reason}")
    for other in figures.get("external", {}).values():
        print(other["words"])
    print(f"\n{figures['verdict']}")
    behind = figures.get("behind", ())  # earlier reports have one text
    print(f"({len(behind)} sentences behind it are in the report.)\n" if behind else "")


def _without_nan(tree: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(tree, Mapping):
        return {str(key): _without_nan(value) for key, value in tree.items()}
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        return [_without_nan(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


@dataclass(frozen=True)
class Report:
    """The report of a benchmark; `Report.read(folder)` reads that of an earlier one."""

    folder: Path
    figures: Mapping[str, Any] = field(repr=False)  # the contents of summary.json

    @classmethod
    def read(cls, folder: str | Path) -> Report:
        """Read the report in a folder."""
        path = Path(folder) / "summary.json"
        if not path.is_file():
            raise FusionZooError(f"{folder} holds no finished report: {path} is not there")
        figures = json.loads(path.read_text(encoding="utf-8"))
        if "leaderboard" not in figures:
            raise FusionZooError(f"{folder} combines reports: name the reports it was made of")
        figures["leaderboard"] = [
            {key: math.nan if value is None else value for key, value in line.items()}
            for line in figures["leaderboard"]
        ]
        return cls(Path(folder), figures)

    @property
    def verdict(self) -> str:
        """Whether fusion helped, in words; `figures["behind"]` has the sentences behind it."""
        return str(self.figures["verdict"])

    @property
    def leaderboard(self) -> pd.DataFrame:
        """The leaderboard as a pandas DataFrame: a row per candidate, the best first."""
        advice = "pip install pandas, or read Report.figures['leaderboard']"
        with explained(f"the leaderboard is a pandas DataFrame: {advice}", ImportError):
            import pandas as pd
        return pd.DataFrame(self.figures["leaderboard"])

    @property
    def checklist(self) -> list[Line]:
        """Whether the comparison can be relied on: questions, answers and their evidence."""
        return checklist(self.figures)

    @property
    def failed(self) -> dict[str, str]:
        """The error of each candidate that failed."""
        return dict(self.figures["failed"])

    @property
    def exit_code(self) -> int:
        """That of the command: 130 after Ctrl-C, 1 if a candidate failed, else 0."""
        return 130 if self.figures["stopped"] == CTRL_C else int(bool(self.failed))

    @property
    def page(self) -> Path:
        """The report as a web page."""
        return self.folder / "index.html"

    def open(self) -> None:
        """Show the web page in the browser."""
        webbrowser.open(self.page.resolve().as_uri())

    def print(self) -> None:
        """Print the leaderboard's main columns, the verdict and where the report is."""
        print_figures(self.figures)
        if self.figures.get("stopped"):
            print("the same command continues where it stopped")
        print(f"report  {self.page}")

    def _repr_html_(self) -> str:
        header, rows = text_table(self.figures["leaderboard"], self.figures["metric"])
        shown = template("notebook.html", PACKAGE)
        page = str(self.page)
        return str(shown.render(figures=self.figures, header=header, rows=rows, page=page))

    def _repr_markdown_(self) -> str:
        return (self.folder / "table.md").read_text(encoding="utf-8")
