"""HTML pages of an audit and of a contact sheet: self-contained files, escaped by Jinja."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from fusionzoo.errors import FusionZooError
from fusionzoo.files import write_text
from fusionzoo.html.samples import show_sample
from fusionzoo.html.template import template

from .scan import AuditReport, Finding, ScannedData

PACKAGE = "fusionzoo.tools.audit"  # of the pages
MAX_GROUPS = 12  # of a finding on the page
MAX_MEMBERS = 6  # of a group
MAX_FILES = 20  # names of files of a finding


def write_report(report: AuditReport, path: Path) -> None:
    """Write the page of an audit."""
    counts = Counter(finding.severity for finding in report.findings)
    dataset = report.scan.dataset
    sizes = Counter(report.scan.splits[report.scan.rows].tolist())
    splits = [*report.scan.split_names, *([""] if sizes[""] else [])]
    page = template("page.html", PACKAGE).render(
        title=f"Audit of {dataset.source}",
        report=report,
        dataset=dataset,
        counts=counts,
        splits=[(name or "no split", sizes[name]) for name in splits],
        findings=[_finding(report, finding) for finding in report.findings],
    )
    write_text(path, page)


def _finding(report: AuditReport, finding: Finding) -> dict[str, Any]:
    names = [finding.modality] if finding.modality in report.scan.dataset.modalities else None
    scan, details = report.scan, finding.details
    shown = [group[:MAX_MEMBERS] for group in finding.groups[:MAX_GROUPS]]
    groups = [[_sample(scan, x, names, details.get(x, "")) for x in group] for group in shown]
    return {
        "finding": finding,
        "name": finding.title,
        "groups": groups,
        "more": len(finding.rows) - len({row for group in shown for row in group}),
        "files": finding.files[:MAX_FILES],
        "more_files": max(0, len(finding.files) - MAX_FILES),
    }


def _sample(
    scan: ScannedData, row: int, names: list[str] | None, detail: str = ""
) -> dict[str, Any]:
    label = scan.labels[row]
    return {
        "row": scan.row_number(row),
        "id": scan.ids[row],
        "split": scan.splits[row],
        "label": "" if label is None else str(label),
        "detail": detail,
        "previews": show_sample(scan.dataset, row, names),
    }


def pick_rows(scan: ScannedData, number: int, seed: int) -> list[int]:
    """Draw rows at random, the classes in turn, so that each is shown once before any twice."""
    rows = np.random.default_rng(seed).permutation(scan.rows)
    rank: dict[str, int] = {}
    turns = []
    for row in rows:
        label = str(scan.labels[row])
        rank[label] = rank.get(label, 0) + 1
        turns.append(rank[label])
    return [int(row) for row in rows[np.argsort(turns, kind="stable")][:number]]


def write_contact_sheet(scan: ScannedData, rows: list[int], path: Path) -> None:
    """Write a page of some rows."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise FusionZooError(f"--out {path}: a contact sheet is a .html file")
    title = f"{len(rows)} of {len(scan.rows):,} samples of {scan.dataset.source}"
    samples, page = [_sample(scan, row, None) for row in rows], template("sheet.html", PACKAGE)
    write_text(path, page.render(title=title, samples=samples))
