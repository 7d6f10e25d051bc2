"""Run a benchmark: `fusionzoo.benchmark(data, fusions=["gmu", "mbt"])`, and benchmark.py."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusionzoo.benchmark import candidates, schedule
from fusionzoo.config import BenchmarkConfig, from_settings, write_yaml
from fusionzoo.datasets import PairedDataset
from fusionzoo.distributed import keep_freed_memory
from fusionzoo.errors import FusionZooError
from fusionzoo.features import key_of
from fusionzoo.identity import data_identity
from fusionzoo.inputs import Data, data_settings, in_memory, read_data
from fusionzoo.plugins import load_plugins
from fusionzoo.training.multitask import targets_of

from .bench import open_bench, tuning_trials
from .clock import Clock
from .executors import check_main_module
from .prepare import prepare
from .report import page, summary, verdict
from .report.needs import analyse_needs
from .report.page import Report


def dataset_settings(dataset: PairedDataset) -> dict[str, Any]:
    """Return settings that identify a data set in memory; they cannot open it again."""
    encoders = json.loads(json.dumps(dataset.default_encoders, default=str))
    key = key_of([data_identity(dataset), encoders, dataset.on_error])
    return {"name": dataset.source, "in_memory": key}


def benchmark(
    data: Data = None,
    *,
    fusions: str | Sequence[str] | None = None,
    seeds: int | None = None,
    out: str | os.PathLike[str] | None = None,
    config: BenchmarkConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Report:
    """Compare fusions on a data set, write the report to the folder `out`, and return it.

    `data` is the name of a data set, the path of a manifest or of class folders, settings
    (`{"name": "digits", "missing": 0.2}`), a table or data set in memory, or a PairedDataset.
    Further settings have the names of the command line, sections are mappings: `epochs=5,
    optim={"lr": 1e-3}`. They override those of `config`: a recipe's path, a mapping or a
    BenchmarkConfig. A second call with the same settings runs nothing again.
    """
    keywords = {"fusions": fusions, "seeds": seeds, "out": None if out is None else os.fspath(out)}
    settings |= {name: value for name, value in keywords.items() if value is not None}
    data = read_data(data)
    if data is not None:
        settings["data"] = data_settings(data)
    cfg = from_settings(BenchmarkConfig, settings, config)
    dataset = in_memory(data, targets_of(cfg))
    if dataset is not None:
        augment = {key: cfg.data[key] for key in ("augment",) if key in cfg.data}
        cfg = replace(cfg, data={**dataset_settings(dataset), **augment})
    return run(cfg, dataset)


def run(cfg: BenchmarkConfig, dataset: PairedDataset | None = None) -> Report:
    """Run what is not done yet and write the report; `dataset` replaces the one of `cfg.data`."""
    # ---- data: names and settings are checked before anything is computed
    check_main_module()
    load_plugins(cfg.plugins)
    page.require_packages()
    if cfg.combine:
        raise FusionZooError("--combine ranks over finished reports: benchmark.py --combine ...")
    if tuning_trials(cfg):
        schedule.require_optuna()
    keep_freed_memory()
    clock = Clock(Path(cfg.out))
    bench, dataset = open_bench(cfg, dataset)
    names, notes = candidates.list_candidates(bench.cfg, bench)
    bench = replace(bench, notes=(*bench.notes, *notes))
    candidates.check_settings(bench.cfg, names)
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    write_yaml(bench.cfg, out / "config.yaml")

    # ---- features: encoders run once, for all candidates and seeds
    tokens = any(candidates.reads_tokens(name) for name in names)
    bench = prepare(bench, dataset, tokens, clock)
    if not bench.features:  # nothing for a linear model to read
        names = [name for name in names if name not in candidates.LINEAR]

    # ---- jobs: candidates x folds x seeds, and the controls
    results = schedule.run_all(bench, names, clock)

    # ---- report
    whole = summary.summarise(bench, results)
    clock.lap("statistics")
    figures = verdict.figures(whole)
    needs = analyse_needs(bench, whole, results)
    if needs is not None:
        figures["needs"] = needs
        clock.lap("analyses")
    clock.save(out)
    page.write(whole, figures, clock.laps(), out)
    return Report.read(out)
