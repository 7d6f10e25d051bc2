"""Run a benchmark: `fusionzoo.benchmark(data, fusions=["gmu", "mbt"])`, and benchmark.py."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fusionzoo.benchmark import candidates, schedule
from fusionzoo.config import BenchmarkConfig, write_yaml
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.errors import FusionZooError, keyword_errors
from fusionzoo.inputs.command import complete_run
from fusionzoo.inputs.data import Data, configure
from fusionzoo.machine.memory import keep_freed_memory

from .bench import CTRL_C, GOES_ON, Bench, open_bench, tuning_trials
from .executors import OutOfTimeError, check_main_module, start_server, time_limit
from .fit_models import obstacle
from .prepare import prepare
from .report import page, summary, verdict
from .report.external import with_predictions
from .report.page import Report
from .report.results import Summary


@keyword_errors
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
    optim={"lr": 1e-3}`; those of the data stand among them: `target="diagnosis"`, `decimal=","`.
    They override those of `config`: a recipe's path, a mapping or a BenchmarkConfig. A second call
    with the same settings runs nothing again.
    """
    keywords = {"fusions": fusions, "seeds": seeds, "out": None if out is None else os.fspath(out)}
    settings |= {name: value for name, value in keywords.items() if value is not None}
    return run(*configure(BenchmarkConfig, data, settings, config))


def run(cfg: BenchmarkConfig, data: DataSpec | None = None) -> Report:
    """Run what is not done yet and write the report; `data` replaces that of `cfg.data`."""
    if cfg.combine or cfg.shard:
        flag = "--combine" if cfg.combine else "--shard"
        raise FusionZooError(f"{flag} makes no report of a run: `benchmark.py {flag} ...`")
    with time_limit(cfg.time_limit):
        bench, dataset, names = _open(cfg, data)

        # ---- features, then jobs: candidates x folds x seeds, the controls, tuning; a first answer
        # from the first fold, then a report after each stage
        answer: _Answer | None = None
        try:
            for answer in _stages(bench, dataset, names):
                if not answer.stage.last:
                    page.print_figures(answer.shown())
            assert answer is not None  # there is a stage
        except KeyboardInterrupt:  # between the stages, or where features are computed
            if answer is None:
                raise
            answer = answer.stopped(CTRL_C)

        # ---- report
        whole, figures = answer.whole, answer.shown()
        page.write(whole, figures, Path(cfg.out))
        return Report.read(cfg.out)


def run_shard(cfg: BenchmarkConfig, data: DataSpec | None = None) -> int:
    """Run one part of the jobs, `cfg.shard`, and write no report; return the exit code."""
    part, parts = schedule.read_shard(cfg.shard)
    try:
        with time_limit(cfg.time_limit):
            bench, names = _with_features(*_open(cfg, data))
            errors = schedule.run_shard(bench, names, part, parts)
    except OutOfTimeError:
        print(f"shard {cfg.shard} stopped by the time limit: the same command goes on")
        return 1
    for name, error in errors.items():
        print(f"failed  {name}: {error}")
    print(f"shard   {cfg.shard} is done")
    print("next    when all are done, the same command without --shard writes the report")
    return 1 if errors else 0


def _open(cfg: BenchmarkConfig, data: DataSpec | None) -> tuple[Bench, PairedDataset, list[str]]:
    """Check names and settings before anything is computed.

    Return the benchmark, its data and the candidates.
    """
    check_main_module()
    page.require_packages()
    if tuning_trials(cfg):
        schedule.require_optuna()
    keep_freed_memory()
    cfg, data = complete_run(cfg, data)
    data.show()
    start_server(cfg)
    bench, dataset = open_bench(cfg, data)
    names, notes = candidates.list_candidates(bench.cfg, bench)
    bench = replace(bench, notes=(*bench.notes, *notes))
    candidates.check_settings(bench.cfg, names)
    bench = with_predictions(bench, dataset.ids, names, dataset.provenance.id_column)
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    if not cfg.shard:
        write_yaml(bench.cfg, out / "config.yaml")
    return bench, dataset, names


def _with_features(
    bench: Bench, dataset: PairedDataset, names: list[str]
) -> tuple[Bench, list[str]]:
    """Run the encoders once, for all jobs; return the bench and the candidates that it allows."""
    tokens = any(candidates.reads_tokens(name) for name in names)
    bench = prepare(bench, dataset, tokens)
    fitted = [name for name in names if candidates.is_fitted(name)]
    if not bench.features:  # nothing for them to read
        return bench, [name for name in names if name not in fitted]
    obstacles = {name: obstacle(bench, name) for name in fitted}
    not_run = {name: reason for name, reason in obstacles.items() if reason}
    return replace(bench, not_run=not_run), [name for name in names if name not in not_run]


class _Answer(NamedTuple):
    """What a benchmark has found so far."""

    stage: schedule.Stage
    whole: Summary
    figures: dict[str, Any]  # without what says that they are provisional
    names: list[str]  # candidates that are asked for

    def shown(self) -> dict[str, Any]:
        """Return the figures of the report."""
        stage, shown = self.stage, dict(self.figures)
        if stage.stopped or not stage.last:
            words = verdict.provisional(self.whole, stage, self.names)
            shown["verdict"] = f"{words} {shown['verdict']}"
        return shown | {"stopped": stage.stopped}

    def stopped(self, by: str) -> _Answer:
        """Return what Ctrl-C or the time limit leaves after the stage."""
        return self._replace(stage=self.stage._replace(stopped=by, last=True))


def _stages(bench: Bench, dataset: PairedDataset, names: list[str]) -> Iterator[_Answer]:
    """Run the jobs stage by stage; yield what is known after each.

    Where there are folds, the first seed of the first one comes first, since only its encoders must
    have been trained: a first answer from a part of the samples.
    """
    first_fold = replace(bench, folds=bench.folds[:1], of_folds=len(bench.folds))
    answer: _Answer | None = None  # the last one
    for part in (first_fold, bench) if bench.cross_validated else (bench,):
        try:
            prepared, allowed = _with_features(part, dataset, names)
        except OutOfTimeError:
            by = f"the time limit of {bench.cfg.time_limit}"
            if answer is None:
                raise _nothing_yet(by) from None
            yield answer.stopped(by)
            return
        for stage in schedule.run_stages(prepared, allowed):
            whole = summary.summarise(prepared, stage.results)
            if any(x.kind in ("single", "fusion") for x in whole.candidates):
                answer = _Answer(stage, whole, verdict.figures(whole), allowed)
            elif not stage.stopped:
                if stage.part:  # other candidates or folds follow
                    continue
                name, error = next(iter(whole.failed.items()))
                raise FusionZooError(f"no candidate could be trained; {name}: {error}")
            elif answer is None:
                raise _nothing_yet(stage.stopped)
            else:
                answer = answer._replace(stage=stage, names=allowed)
            yield answer
            if stage.stopped:
                return


def _nothing_yet(stopped: str) -> FusionZooError:
    return FusionZooError(
        f"stopped by {stopped} before any candidate was trained on a fold: {GOES_ON}"
    )
