"""The command `fusionzoo analyse`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING

from fusionzoo.audit.command import source_first
from fusionzoo.config import merge
from fusionzoo.config.command import run_command
from fusionzoo.console import print_table
from fusionzoo.errors import FusionZooError
from fusionzoo.files import write_json
from fusionzoo.plugins import load_plugins

from .config import SOURCE, AnalyseConfig

if TYPE_CHECKING:
    from .analyse import Analysis
    from .pid import Pair

HELP = """
Analyse what a data set needs of a fusion: `fusionzoo analyse my.csv --json needs.json`.

Prints redundancy, uniqueness and synergy of its modalities in bits (pid), from features of frozen
encoders. With `--model runs/a`: how much of that model's score needs interactions (emap).
"""


def analyse_command(args: Sequence[str]) -> int:
    """Run `fusionzoo analyse SOURCE ...`; return its exit code."""
    return run_command(AnalyseConfig, HELP, source_first(args), _start)


def _start(cfg: AnalyseConfig) -> int:
    from fusionzoo.inputs import data_settings

    from .analyse import analyse
    from .sample_file import write_samples

    if not cfg.source:
        raise FusionZooError(f"no source: {SOURCE.removesuffix(' (required)')} comes first")
    load_plugins(cfg.plugins)
    found = analyse(replace(cfg, data=merge(data_settings(cfg.source), cfg.data)))
    print_analysis(found)
    if cfg.json:
        write_json(Path(cfg.json), found.to_dict())
        print(f"wrote {cfg.json}")
    if cfg.by_sample:
        write_samples(Path(cfg.by_sample), found.pairs)
        print(f"wrote {cfg.by_sample}")
    return 0


def print_analysis(found: Analysis) -> None:
    """Print the figures as a table, notes, and what follows."""
    if found.emap is not None:
        result = found.emap
        header = (f"{result.metric} of the model", "without interactions", "gain", "variance")
        figures = (f"{result.model:.3f}", f"{result.additive:.3f}", f"{result.gain:+.3f}")
        row = (*figures, f"{result.share:.1%} of interactions")
        print_table(f"Interactions on {found.source}", header, [row])
    else:
        columns = ("sources", "redundancy", "only the first", "only the second", "synergy", "sum")
        rows = [
            (
                f"{pair.first} | {pair.second}",
                *(
                    _with_interval(*bounds)
                    for bounds in zip(pair.parts, pair.low, pair.high, strict=True)
                ),
                f"{pair.parts.total:.3f}",
                *_clusters_of(pair, found.pid_mode),
                f"{pair.rows:,}",
            )
            for pair in found.pairs
        ]
        title = f"Information about the target in {found.source}, bits and 95 % interval"
        clusters = ("clusters",) if found.pid_mode == "cvx" else ()
        print_table(title, (*columns, *clusters, "samples"), rows)
    for note in found.notes:
        print(note)
    print(found.advice)


def _with_interval(value: float, low: float, high: float) -> str:
    return f"{value:.3f}" if isnan(low) else f"{value:.3f} ({low:.3f} to {high:.3f})"


def _clusters_of(pair: Pair, mode: str) -> tuple[str, ...]:
    """Return the cell of the clusters, of the mode that has some."""
    if mode != "cvx":
        return ()
    return ("/".join(map(str, dict.fromkeys(pair.clusters))) or "probes",)
