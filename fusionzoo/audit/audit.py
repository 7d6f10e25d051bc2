"""Run the audit: open the data leniently, scan it, run every check."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fusionzoo.config import split_name
from fusionzoo.datasets import DATASETS, PairedDataset
from fusionzoo.datasets.refusals import Refusal, collecting

from .duplicates import duplicates
from .findings import SEVERITIES, Check, Describe, Finding, Report
from .labels import (
    absent_class,
    class_balance,
    label_in_text,
    missing_rates,
    splits,
    unlabelled,
)
from .scan import Scan, scan_values
from .tables import class_table, length_tables
from .values import (
    blank,
    encoding_damage,
    near_empty_text,
    orphan_files,
    refused,
    silent,
    unreadable,
)

# Findings of equal severity are shown in this order.
CHECKS: tuple[Check, ...] = (
    *(refused, unreadable, unlabelled, splits, duplicates, label_in_text, absent_class),
    *(missing_rates, class_balance, silent, blank, near_empty_text, encoding_damage),
    orphan_files,
)
FACTS: tuple[Describe, ...] = (class_table, length_tables)


def open_leniently(settings: Mapping[str, Any]) -> tuple[PairedDataset, list[Refusal]]:
    """Open a data set by its settings; return it with what `create_dataset` would refuse."""
    name, options = split_name(settings, "data")
    for key, value in (("on_error", "missing"), ("max_errors", 1.0)):
        if key in DATASETS[name].parameters:
            options[key] = value
    with collecting() as refusals:
        dataset = DATASETS.create(name, **options)
    return dataset, refusals


def audit(
    data: PairedDataset | Mapping[str, Any], *, threads: int | None = None, progress: bool = False
) -> Report:
    """Check a data set, or the data set of settings such as `{"name": "digits"}`.

    A `PairedDataset` was opened without errors, so nothing in it is refused. Files that no sample
    names are looked for only with the settings of a manifest or a class folder.
    """
    start = time.perf_counter()
    seconds: dict[str, float] = {}
    if isinstance(data, PairedDataset):
        dataset, refusals, root, name = data, list[Refusal](), "", ""
    else:
        dataset, refusals = open_leniently(data)
        name, root = str(data["name"]), str(data.get("root", ""))
    seconds["open"] = time.perf_counter() - start
    start = time.perf_counter()
    scan = Scan(
        dataset=dataset,
        refusals=refusals,
        values=scan_values(dataset, threads=threads, progress=progress),
        files_are_listed=bool(name) and DATASETS[name].family == "format",
        manifest=root if name == "manifest" else "",
    )
    seconds["decode and measure"] = time.perf_counter() - start
    findings: list[Finding] = []
    for check in CHECKS:
        start = time.perf_counter()
        findings += check(scan)
        seconds[check.__name__] = time.perf_counter() - start
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    facts = [table for describe in FACTS for table in describe(scan)]
    return Report(scan=scan, findings=findings, facts=facts, seconds=seconds)
