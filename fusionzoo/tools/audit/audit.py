"""`fusionzoo data check` and `data show`: open the data leniently, scan it, run every check."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusionzoo.config import split_name
from fusionzoo.config.flags import Tree
from fusionzoo.config.load import run_command
from fusionzoo.config.schema import PLUGINS, TARGET, Count, option
from fusionzoo.datasets import DATASETS, PairedDataset
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.datasets.tables.paths import Refusal, collecting
from fusionzoo.files import write_json
from fusionzoo.ground.console import print_table
from fusionzoo.ground.plugins import load_plugins

from .checks import (
    absent_class,
    blank,
    class_balance,
    class_table,
    encoding_damage,
    label_in_text,
    missing_rates,
    near_empty_text,
    orphan_files,
    refused,
    silent,
    splits,
    unlabelled,
    unreadable,
)
from .copies import duplicates
from .scan import (
    SEVERITIES,
    AuditReport,
    Check,
    ScannedData,
    counted,
    scan_values,
)

# Findings of equal severity are shown in this order.
CHECKS: tuple[Check, ...] = (
    *(refused, unreadable, unlabelled, splits, duplicates, label_in_text, absent_class),
    *(missing_rates, class_balance, silent, blank, near_empty_text, encoding_damage),
    orphan_files,
)
CHECK_HELP = """
Check a data set: `fusionzoo data check my.csv --target label --html audit.html`.

DATA is a data set's name, a file, a folder or a URL of shards. Reads every value once. Exit code 0:
fit for training; 1: a finding is an error; 2: the data cannot be opened.
"""
SHOW_HELP = """
Write a contact sheet: `fusionzoo data show my.csv --n 9 --out sheet.html`.

DATA is a data set's name, a file, a folder or a URL of shards. Classes are shown in turn.
"""
UNFIT = 1  # exit code
DATA = "data set and its settings (required): `fusionzoo data list`"


def open_leniently(settings: Mapping[str, Any]) -> tuple[PairedDataset, list[Refusal]]:
    """Open a data set by its settings; return it with what `create_dataset` would refuse."""
    name, options = split_name(settings, "data")
    options |= {"on_error": "missing", "max_errors": 1.0}
    with collecting() as refusals:
        dataset = DATASETS.create(name, **options)
    return dataset, refusals


def audit(data: PairedDataset | Mapping[str, Any], *, progress: bool = False) -> AuditReport:
    """Check a data set, or the data set of settings such as `{"name": "digits"}`.

    A `PairedDataset` was opened without errors, so nothing in it is refused. Files that no sample
    names are looked for only with the settings of a manifest or a class folder.
    """
    start = time.perf_counter()
    if isinstance(data, PairedDataset):
        dataset, refusals, root, name = data, list[Refusal](), "", ""
    else:
        dataset, refusals = open_leniently(data)
        name, root = str(data["name"]), str(data.get("root", ""))
    scan = ScannedData(
        dataset=dataset,
        refusals=refusals,
        values=scan_values(dataset, progress=progress),
        files_are_listed=bool(name) and DATASETS[name].family == "format",
        manifest=root if name == "manifest" else "",
    )
    findings = [finding for check in CHECKS for finding in check(scan)]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    seconds = time.perf_counter() - start
    return AuditReport(scan=scan, findings=findings, classes=class_table(scan), seconds=seconds)


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Settings of `fusionzoo data check`."""

    data: Tree = option({}, DATA)
    target: str | list[str] = option("", TARGET)
    plugins: str | list[str] = option("", PLUGINS)
    json: str = option("", "file for the findings, with every row")
    html: str = option("", "file for a page with the findings and samples of each")


@dataclass(frozen=True, kw_only=True)
class ShowConfig:
    """Settings of `fusionzoo data show`."""

    data: Tree = option({}, DATA)
    target: str | list[str] = option("", TARGET)
    plugins: str | list[str] = option("", PLUGINS)
    n: Count = option(9, "number of samples")
    seed: int = option(0, "seed of the choice of samples")
    out: str = option("sheet.html", "page to write")


def check_command(args: Sequence[str]) -> int:
    """Run `fusionzoo data check DATA ...`; return its exit code."""
    return run_command(CheckConfig, CHECK_HELP, args, _check, words=("data",))


def show_command(args: Sequence[str]) -> int:
    """Run `fusionzoo data show DATA ...`; return its exit code."""
    return run_command(ShowConfig, SHOW_HELP, args, _show, words=("data",))


def _check(cfg: CheckConfig) -> int:
    from .page import write_report

    report = audit(_settings(cfg), progress=True)
    print_report(report)
    if cfg.json:
        write_json(Path(cfg.json), report.to_dict())
        print(f"wrote {cfg.json}")
    if cfg.html:
        write_report(report, Path(cfg.html))
        print(f"wrote {cfg.html}")
    return 0 if report.fit else UNFIT


def print_report(report: AuditReport) -> None:
    """Print the findings as a table, and whether the data is fit."""
    dataset = report.scan.dataset
    rows = [
        (
            finding.severity,
            finding.title,
            finding.modality,
            f"{len(finding.rows):,}" if finding.rows else "",
            f"{finding.message}. {finding.advice[:1].upper()}{finding.advice[1:]}",
        )
        for finding in report.findings
    ]
    if rows:
        header = ("severity", "finding", "column", "samples", "more")
        print_table(f"Findings in {dataset.source}", header, rows)
    errors = sum(finding.severity == "error" for finding in report.findings)
    verdict = "fit" if report.fit else f"not fit: {counted(errors, 'error')}"
    checked = f"checked in {report.seconds:.1f} s"
    print(f"{dataset.source}: {len(dataset):,} samples, {verdict} ({checked})")


def _show(cfg: ShowConfig) -> int:
    from .page import pick_rows, write_contact_sheet

    dataset, refusals = open_leniently(_settings(cfg))
    scan = ScannedData(dataset=dataset, refusals=refusals, values={}, files_are_listed=False)
    write_contact_sheet(scan, pick_rows(scan, cfg.n, cfg.seed), Path(cfg.out))
    print(f"wrote {cfg.out}")
    return 0


def _settings(cfg: CheckConfig | ShowConfig) -> Tree:
    """Return explicit settings of the data; what its columns hold is shown."""
    from fusionzoo.inputs.command import complete_data

    load_plugins(cfg.plugins)
    spec = complete_data(DataSpec(settings=cfg.data), cfg.target)
    spec.show()
    return spec.settings
