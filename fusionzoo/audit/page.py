"""HTML pages of an audit and of a contact sheet: self-contained files, escaped by Jinja."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from fusionzoo.errors import FusionZooError
from fusionzoo.files import write_text
from fusionzoo.version import __version__

from .findings import Finding, Report
from .pictures import show_sample
from .scan import Scan

MAX_GROUPS = 12  # of a finding on the page
MAX_MEMBERS = 6  # of a group
MAX_FILES = 20  # names of files of a finding
NAMES = {  # of findings, as titles of the page and the table
    "duplicate_id": "duplicate ids",
    "empty_id": "empty ids",
    "empty_sample": "empty samples",
    "path": "paths outside the folder",
    "split": "rows without a split",
    "column": "columns of one name",
    "file": "files out of place",
    "unreadable": "unreadable values",
    "silent": "silent sounds",
    "blank": "blank values",
    "near_empty_text": "nearly empty texts",
    "encoding_damage": "encoding damage",
    "orphan_files": "orphan files",
    "same_content": "copies across splits",
    "same_sample": "whole samples in several splits",
    "similar_content": "near copies across splits",
    "unlabelled": "no label",
    "split_of_one": "splits of one sample",
    "missing_split": "missing splits",
    "absent_class": "absent classes",
    "imbalance": "unbalanced classes",
    "mostly_missing": "mostly missing modality",
    "missing_by_class": "missing by class",
    "missing_by_split": "missing by split",
    "class_name_in_text": "text names the class",
    "one_word_rule": "one word predicts the class",
}


def write_report(report: Report, path: Path) -> None:
    """Write the page of an audit."""
    counts = Counter(finding.severity for finding in report.findings)
    dataset = report.scan.dataset
    write_text(
        path,
        _template("page.html").render(
            title=f"Audit of {dataset.source}",
            report=report,
            dataset=dataset,
            counts=counts,
            splits=_split_sizes(report.scan),
            findings=[_finding(report, finding) for finding in report.findings],
            facts=[_with_bars(table) for table in report.facts],
            seconds=sum(report.seconds.values()),
            version=__version__,
        ),
    )


def write_sheet(scan: Scan, rows: list[int], path: Path) -> None:
    """Write a contact sheet of some rows as a page."""
    samples = [_sample(scan, row, None) for row in rows]
    title = f"{len(rows)} of {len(scan.rows):,} samples of {scan.dataset.source}"
    write_text(
        path, _template("sheet.html").render(title=title, samples=samples, version=__version__)
    )


def _split_sizes(scan: Scan) -> list[tuple[str, int]]:
    counts = Counter(scan.splits[scan.rows].tolist())
    names = [*scan.split_names, *([""] if counts[""] else [])]
    return [(name or "no split", counts[name]) for name in names]


def _finding(report: Report, finding: Finding) -> dict[str, Any]:
    names = [finding.modality] if finding.modality in report.scan.dataset.modalities else None
    groups = [
        [
            _sample(report.scan, row, names, finding.details.get(row, ""))
            for row in group[:MAX_MEMBERS]
        ]
        for group in finding.groups[:MAX_GROUPS]
    ]
    shown = len({row for group in finding.groups[:MAX_GROUPS] for row in group[:MAX_MEMBERS]})
    return {
        "finding": finding,
        "name": NAMES.get(finding.check, finding.check),
        "groups": groups,
        "more": len(finding.rows) - shown,
        "files": finding.files[:MAX_FILES],
        "more_files": max(0, len(finding.files) - MAX_FILES),
    }


def _sample(scan: Scan, row: int, names: list[str] | None, detail: str = "") -> dict[str, Any]:
    label = scan.labels[row]
    return {
        "row": scan.row_number(row),
        "id": scan.ids[row],
        "split": scan.splits[row],
        "label": "" if label is None else str(label),
        "detail": detail,
        "pictures": show_sample(scan.dataset, row, names),
    }


def _with_bars(table: Any) -> dict[str, Any]:
    """Add the length of each bar, in per cent, to a histogram."""
    bars: list[float] = []
    if table.header == ("range", "values"):
        counts = [int(count.replace(",", "")) for _, count in table.rows]
        bars = [100 * count / max(counts) for count in counts]
    return {"title": table.title, "header": table.header, "rows": table.rows, "bars": bars}


def _template(name: str) -> Any:
    try:
        from jinja2 import Environment, PackageLoader
    except ImportError:
        raise FusionZooError("HTML pages need Jinja: pip install 'fusionzoo[benchmark]'") from None
    return Environment(
        loader=PackageLoader("fusionzoo.audit", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template(name)
