"""The command `fusionzoo embed-report`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fusionzoo.config.command import run_command
from fusionzoo.config.flags import Tree
from fusionzoo.config.schema import Count, option
from fusionzoo.console import print_table
from fusionzoo.errors import FusionZooError
from fusionzoo.files import write_json

HELP = """
Measure embeddings: `fusionzoo embed-report emb.parquet [other.parquet] --html report.html`.

Probes, neighbours, geometry, similarity of spaces and retrieval, with intervals, and a map.
"""


@dataclass(frozen=True, kw_only=True)
class EmbedReportConfig:
    """Settings of `fusionzoo embed-report`."""

    embeddings: str = option("", "file that `fusionzoo embed` wrote (required)")
    other: str = option("", "a second file with the same ids, say of another model")
    data: Tree = option({}, "data set behind the rows; empty = the one that the file names")
    plugins: str | list[str] = option("", "files or modules with components of your own")
    split: str = option("all", "rows to measure: train | val | test | all")
    samples: Count = option(5000, "rows that are drawn for the figures")
    points: Count = option(1500, "points of each map")
    thumbnails: int = option(1500, "samples that the page shows pictures of")
    html: str = option("embed-report.html", "page to write; empty = none")
    json: str = option("", "file for the figures")
    export: str | list[str] = option("", "also write for other viewers: tensorboard,atlas")
    out: str = option("", "folder of the exports; empty = embed-export")


def embed_report_command(args: Sequence[str]) -> int:
    """Run `fusionzoo embed-report FILE [OTHER] ...`; return 0, or 2 after a user's mistake."""
    flags, names = list(args), ("embeddings", "other")
    for number, name in enumerate(names):
        if number < len(flags) and not flags[number].startswith("-"):
            flags[number] = f"--{name}={flags[number]}"
        else:
            break
    return run_command(EmbedReportConfig, HELP, flags, _report)


def _report(cfg: EmbedReportConfig) -> int:
    from fusionzoo.datasets.table import word_list

    from .export import atlas_command, export
    from .report import embed_report

    if not cfg.embeddings:
        raise FusionZooError("no file of embeddings: it comes first, or as --embeddings")
    if cfg.out and not cfg.export:
        raise FusionZooError("--out is the folder of --export; --html names the page")
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
        print(f"wrote {report.to_html(cfg.html, cfg.points, cfg.thumbnails)}")
    folder = Path(cfg.out or "embed-export")
    for path in export(report.samples[0], word_list(cfg.export), folder) if cfg.export else ():
        opened = atlas_command(path) if path.suffix else f"tensorboard --logdir {path}"
        print(f"wrote {path}: {opened}")
    return 0
