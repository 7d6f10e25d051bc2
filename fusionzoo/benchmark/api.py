"""Run a benchmark: data, features, trials, report."""

from __future__ import annotations

from pathlib import Path

from fusionzoo.config import BenchmarkConfig, write_yaml
from fusionzoo.datasets import PairedDataset
from fusionzoo.distributed.malloc import keep_freed_memory
from fusionzoo.errors import FusionZooError
from fusionzoo.fusion import fusion_info

from . import strategies
from .bench import open_bench
from .executors import check_main_module
from .features.prepare import prepare
from .report import summary, verdict, writers
from .report.report import Report
from .trials import schedule, tune


def run(cfg: BenchmarkConfig, dataset: PairedDataset | None = None) -> Report:
    """Run what is not done yet and write the report; `dataset` replaces the one of `cfg.data`."""
    # ---- data: names and settings are checked before anything is computed
    check_main_module()
    writers.require_packages()
    if cfg.combine:
        raise FusionZooError("--combine ranks over finished reports: benchmark.py --combine ...")
    if cfg.tune:
        tune.require_optuna()
    keep_freed_memory()
    bench, dataset = open_bench(cfg, dataset)
    singles = [f"{strategies.ALONE}{name}" for name in bench.modalities]
    fusions = strategies.select_fusions(cfg.fusions, len(bench.modalities))
    strategies.check_settings(cfg, [*singles, *fusions])
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    write_yaml(cfg, out / "config.yaml")

    # ---- features: encoders run once, for all strategies and seeds
    tokens = any(fusion_info(name).reads == "tokens" for name in fusions)
    bench = prepare(bench, dataset, tokens)

    # ---- trials: strategies x folds x seeds, and the controls
    results = schedule.run_all(bench, [*singles, *fusions])

    # ---- report
    whole = summary.summarise(bench, results)
    writers.write(whole, verdict.figures(whole), out)
    return Report.read(out)
