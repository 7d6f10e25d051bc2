"""The quality report of one or two files of embeddings: figures, tables, a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fusionzoo.config.flags import Tree
from fusionzoo.config.load import run_command
from fusionzoo.config.schema import Count, option
from fusionzoo.console import print_table
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.statistics import Interval
from fusionzoo.files import write_json, write_text
from fusionzoo.html.template import template
from fusionzoo.plugins import load_plugins
from fusionzoo.version import __version__

from ..search.samples import SearchedSamples, open_samples
from ..search.vectors import VectorFile, open_vectors
from .figures import (
    MIN_ROWS,
    EmbeddedSample,
    cka_table,
    column_figures,
    draw_rows,
    map_data,
    pair_figures,
    read_sample,
    retrieval,
)

HOW = {
    "vectors": "Linear probe and nearest neighbours (10, cosine): accuracy over 5 grouped folds"
    " with 95 % intervals, beside the most frequent class of the training folds. Silhouette: -1 to"
    " 1, higher where classes lie apart. Uniformity (Wang & Isola 2020): lower is more evenly"
    " spread, 0 is a single point. Effective rank: how many directions are in use, of the width.",
    "pairs": "Alignment (Wang & Isola 2020): mean squared distance of a sample's vectors of two"
    " modalities, 0 is best; beside it that to another sample's. Gap: distance between the means"
    " of the modalities, 0 if they share one region.",
    "cka": "Linear CKA, debiased: 1 where two spaces are equal up to rotation and scale, about 0"
    " where they are unrelated.",
    "retrieval": "How well the vectors of one modality find those of another, in the common space,"
    " with 95 % intervals of a bootstrap over queries (over groups, if the data has some). Samples"
    " of equal content are one query and one item; items of the same content or group are"
    " relevant. recall@k: share of queries with a relevant item among the first k.",
}
TRAINED_ON = (
    "Rows of the training split are among them, on which a trained model is better than on new"
    " ones: --split test leaves them out."
)
HELP = """
Measure embeddings: `fusionzoo embed-report emb.parquet [other.parquet] --html report.html`.

Probes, neighbours, geometry, similarity of spaces and retrieval, with intervals, and a map.
"""


@dataclass(frozen=True)
class EmbeddingReport:
    """What `embed_report` measured."""

    samples: list[EmbeddedSample]
    columns: list[dict[str, Any]]
    pairs: list[dict[str, Any]]
    cka: tuple[list[str], list[list[float]]]
    retrieval: dict[str, dict[str, dict[str, Interval]]]  # file -> direction -> figure
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values, for JSON; NaN becomes None."""
        names, matrix = self.cka
        figures = {
            "files": [str(sample.file.path) for sample in self.samples],
            "columns": self.columns,
            "pairs": self.pairs,
            "cka": {"columns": names, "matrix": matrix},
            "retrieval": self.retrieval,
            "notes": self.notes,
        }
        return dict(_plain(figures))

    def sections(self) -> list[dict[str, Any]]:
        """Return the tables: title, how to read it, header, rows of text."""
        names, matrix = self.cka
        tables = [
            ("Vectors", "vectors", *_vector_rows(self.columns, len(self.samples) > 1)),
            ("Modalities in the common space", "pairs", *_pair_rows(self.pairs)),
            ("Similarity of spaces", "cka", ["CKA", *names], _cka_rows(names, matrix)),
        ]
        for file, directions in self.retrieval.items():
            title = f"Retrieval: {file}" if len(self.samples) > 1 else "Retrieval"
            tables.append((title, "retrieval", *_retrieval_rows(directions)))
        return [
            {"title": title, "how": HOW[how], "header": header, "rows": rows}
            for title, how, header, rows in tables
            if rows
        ]

    def to_html(self, path: str | Path, points: int = 1500) -> Path:
        """Write the page, with a map of at most `points` points of the first file."""
        path, first = Path(path), self.samples[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        page = template("page.html", "fusionzoo.tools.embedding_report").render(
            title=f"Embeddings of {' and '.join(sample.name for sample in self.samples)}",
            verdict=self.verdict(),
            notes=self.notes,
            sections=self.sections(),
            data=map_data(first, points),
            version=__version__,
        )
        write_text(path, page)
        return path

    def verdict(self) -> str:
        """Return the main figures in a sentence or two."""
        first, rows = self.samples[0], self.samples[0].file.rows
        drawn = "" if len(first.ids) == rows else f" ({len(first.ids):,} drawn for the figures)"
        parts = [f"{rows:,} rows{drawn}, vectors {', '.join(first.vectors)}."]
        probed = [x for x in self.columns if not math.isnan(x["linear_probe"].mean)]
        if probed:
            best = max(probed, key=lambda line: line["linear_probe"].mean)
            name = f"{best['vectors']} of {best['file']}" if self.samples[1:] else best["vectors"]
            probe, chance = best["linear_probe"], best["majority"].mean
            parts.append(
                f"Best linear probe: {name}, accuracy {probe.mean:.3f} [{probe.low:.3f},"
                f" {probe.high:.3f}]; the most frequent class has {chance:.3f}."
            )
        return " ".join(parts)


def embed_report(
    embeddings: str | Path | VectorFile,
    other: str | Path | VectorFile | None = None,
    *,
    data: Any = None,
    samples: int = 5000,
    split: str = "all",
    plugins: str | Sequence[str] = "",
    html: str | Path = "",
) -> EmbeddingReport:
    """Measure a file of embeddings: `embed_report("emb.parquet", html="report.html")`.

    `other`, a second file, say of another model, is measured on the same ids. At most `samples`
    rows are drawn at random, of a `split` or of all. `data` is the data set behind the rows, if not
    the one that the file names: thumbnails, groups and equal content come from there.
    """
    load_plugins(plugins)  # one may hold the file's format
    file = open_vectors(embeddings)
    if min(samples, file.rows) < MIN_ROWS:
        raise FusionZooError(f"{file.path}: a report needs at least {MIN_ROWS} rows")
    source = open_samples(file, data, plugins)
    notes = [f"Without thumbnails and groups: {source.problem}."] if source.problem else []
    measured = [read_sample(file, draw_rows(file, samples, split), source, file.path.stem)]
    if other is not None:
        measured.append(_same_ids(measured[0], open_vectors(other), source))
    if split == "all" and "train" in measured[0].splits:
        notes.append(TRAINED_ON)
    report = EmbeddingReport(
        measured,
        [column_figures(sample, column) for sample in measured for column in sample.vectors],
        [line for sample in measured for line in pair_figures(sample)],
        cka_table(measured),
        {sample.name: scores for sample in measured if (scores := retrieval(sample))},
        notes,
    )
    if html:
        report.to_html(html)
    return report


def _same_ids(first: EmbeddedSample, file: VectorFile, source: SearchedSamples) -> EmbeddedSample:
    """Read the rows of another file that have the ids of the first."""
    rows = np.array(file.rows_of(first.ids), np.int64)
    order = np.argsort(rows)
    name = file.path.stem if file.path.stem != first.name else str(file.path)
    drawn = read_sample(file, rows[order], source, name)
    back = np.argsort(order)
    assert [drawn.ids[row] for row in back] == first.ids
    return replace(
        first,
        name=name,
        file=file,
        rows=rows,
        splits=[drawn.splits[row] for row in back],
        targets=[drawn.targets[row] for row in back],
        vectors={n: x[back] for n, x in drawn.vectors.items()},
        usable={n: x[back] for n, x in drawn.usable.items()},
    )


def _vector_rows(
    columns: Sequence[Mapping[str, Any]], several: bool
) -> tuple[list[str], list[list[str]]]:
    header = [*(["file"] if several else []), "vectors", "width", "samples", "linear probe"]
    header += ["neighbours", "majority", "silhouette", "uniformity", "effective rank"]
    rows = []
    for line in columns:
        cells = [line["file"]] if several else []
        cells += [line["vectors"], f"{line['width']:,}", f"{line['samples']:,}"]
        cells += [_interval(line["linear_probe"]), _interval(line["knn"])]
        cells += [_number(line["majority"].mean), _number(line["silhouette"])]
        cells += [_number(line["uniformity"]), _number(line["effective_rank"], 1)]
        rows.append(cells)
    return header, rows


def _pair_rows(pairs: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["modalities", "samples", "alignment", "to other samples", "gap", "file"]
    names = ("alignment", "of_others", "gap")
    return header, [
        [x["pair"], f"{x['samples']:,}", *(_number(x[name]) for name in names), x["file"]]
        for x in pairs
    ]


def _cka_rows(names: Sequence[str], matrix: Sequence[Sequence[float]]) -> list[list[str]]:
    if len(names) < 2:
        return []
    return [[name, *map(_number, line)] for name, line in zip(names, matrix, strict=True)]


def _retrieval_rows(
    directions: Mapping[str, Mapping[str, Interval]],
) -> tuple[list[str], list[list[str]]]:
    header = ["query → items", *next(iter(directions.values()))]
    return header, [
        [name.replace("_to_", " → "), *map(_interval, figures.values())]
        for name, figures in directions.items()
    ]


def _number(value: float, digits: int = 3) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def _interval(x: Interval) -> str:
    return "" if math.isnan(x.mean) else f"{x.mean:.3f} [{x.low:.3f}, {x.high:.3f}]"


def _plain(value: Any) -> Any:
    if isinstance(value, Interval):
        return {name: _plain(x) for name, x in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(name): _plain(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    if isinstance(value, float) and math.isnan(value):
        return None
    return value


@dataclass(frozen=True, kw_only=True)
class EmbedReportConfig:
    """Settings of `fusionzoo embed-report`."""

    embeddings: str = option("", "file that `fusionzoo embed` wrote (required)")
    other: str = option("", "a second file with the same ids, say of another model")
    data: Tree = option({}, "data set behind the rows; empty = the one that the file names")
    plugins: str | list[str] = option("", "files or modules with components of your own")
    split: str = option("all", "rows to measure: train | val | test | all")
    samples: Count = option(5000, "rows that are drawn for the figures")
    html: str = option("embed-report.html", "page to write; empty = none")
    json: str = option("", "file for the figures")


def embed_report_command(args: Sequence[str]) -> int:
    """Run `fusionzoo embed-report FILE [OTHER] ...`; return 0, or 2 after a user's mistake."""
    flags = list(args)
    for number, name in enumerate(("embeddings", "other")):
        if number >= len(flags) or flags[number].startswith("-"):
            break
        flags[number] = f"--{name}={flags[number]}"
    return run_command(EmbedReportConfig, HELP, flags, _report)


def _report(cfg: EmbedReportConfig) -> int:
    if not cfg.embeddings:
        raise FusionZooError("no file of embeddings: it comes first, or as --embeddings")
    report = embed_report(
        cfg.embeddings,
        cfg.other or None,
        data=cfg.data or None,
        samples=cfg.samples,
        split=cfg.split,
        plugins=cfg.plugins,
    )
    for section in report.sections():
        print_table(section["title"], section["header"], section["rows"])
    print(report.verdict())
    for note in report.notes:
        print(f"note: {note}")
    if cfg.json:
        write_json(Path(cfg.json), report.to_dict())
        print(f"wrote {cfg.json}")
    if cfg.html:
        print(f"wrote {report.to_html(cfg.html)}")
    return 0
