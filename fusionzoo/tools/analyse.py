"""`fusionzoo analyse`: what a data set needs of a fusion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from fusionzoo.benchmark.bench import Bench, open_bench
from fusionzoo.benchmark.prepare import build_encoders, is_untrained, prepare
from fusionzoo.config import BenchmarkConfig
from fusionzoo.config.flags import Tree
from fusionzoo.config.load import Usage, run_command
from fusionzoo.config.schema import PLUGINS, TARGET, Count, option
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.pid import (
    FoldFeatures,
    Pair,
    PidInputs,
    advise_fusion,
)
from fusionzoo.evaluation.pid_probes import decompose_data
from fusionzoo.features.cache import load_features
from fusionzoo.files import write_json
from fusionzoo.ground.console import print_table
from fusionzoo.inputs.command import complete_run, required
from fusionzoo.training.multitask import targets_of
from fusionzoo.zoo.cards import show_data_settings

USAGE = Usage(
    name="analyse",
    purpose="Ask what a data set needs of a fusion: redundancy, uniqueness, synergy in bits.",
    words=("data",),
    examples=(
        "my.csv --target diagnosis",
        "my.csv --target diagnosis --json needs.json",
    ),
    common=("data", "target", "encoders", "folds", "json"),
    more="From features of frozen encoders.",
    show_details=show_data_settings,
)


@dataclass(frozen=True, kw_only=True)
class AnalyseConfig:
    """Settings of an analysis."""

    data: Tree = option({}, "data set and its settings (required): `fusionzoo data list`")
    target: str | list[str] = option("", TARGET)
    plugins: str | list[str] = option("", PLUGINS)
    encoders: dict[str, Tree] = option({}, "modality -> encoder; empty = the data set's default")
    folds: Annotated[int, Ge(0)] | None = option(
        None, "cross-validation folds; 0 = the data's split; none = 5 below 5,000 samples, else 0"
    )
    clusters: Count | None = option(
        None, "K-means clusters of each source; none = chosen on training rows left out"
    )
    json: str = option("", "file for the figures")
    jobs: Count | None = option(None, "processes; none = one per core")
    num_workers: Annotated[int, Ge(0)] | None = option(None, "loader processes while encoding")
    device: str = option("auto", "auto | cpu | cuda | cuda:1 | xpu | mps")
    seed: int = option(0, "of folds, clusters and completions")


def read_features(
    cfg: BenchmarkConfig, data: DataSpec, clusters: int | None
) -> tuple[PidInputs, list[str]]:
    """Return what `pid` decomposes, and notes for the reader.

    Vectors are taken as they are. Encoders without weights are trained alone on a fold's training
    rows, as in a benchmark.
    """
    opened = data.open(targets_of(cfg))
    if opened.weight_column is not None:
        raise FusionZooError("pid takes no weights of samples: leave out --data.weight_column")
    if opened.scheme is not None:
        raise FusionZooError(f"pid needs one class for each sample; {opened.source} has none")
    as_they_are: Mapping[str, Any] = {
        name: {"name": "vector/identity"}
        for name, kind in opened.modalities.items()
        if kind == "vector" and name not in cfg.encoders
    }
    cfg = replace(cfg, encoders={**cfg.encoders, **as_they_are})
    bench, opened = open_bench(cfg, data)
    encoders = build_encoders(bench.cfg, opened)
    untrained = [name for name, encoder in encoders.items() if is_untrained(encoder)]
    bench = prepare(bench, opened, tokens=False)
    names = {n: bench.features[0][n]["encoder"].get("name", "-") for n in bench.modalities}
    notes = [f"features of: {', '.join(f'{n} ({x})' for n, x in names.items())}"]
    if untrained:
        notes.append(
            f"{', '.join(untrained)}: the encoder has no pretrained weights, and was trained alone"
            " on the labels, which may lose what only a combination tells"
        )
    setup = PidInputs(
        folds=[_fold(bench, number) for number in range(len(bench.folds))],
        classes=len(bench.classes),
        clusters=clusters,
        seed=bench.cfg.seed,
        fixed=not untrained,
    )
    return setup, notes


def _fold(bench: Bench, number: int) -> FoldFeatures:
    """Return the cached features and classes of a fold."""
    stored = {name: load_features(bench.features[number][name]) for name in bench.modalities}
    rows = bench.folds[number]
    return FoldFeatures(
        features={name: x.pooled.double().numpy() for name, x in stored.items()},
        present={name: x.present.numpy() for name, x in stored.items()},
        target=bench.targets.numpy().astype(np.int64),
        train=rows.train.numpy(),
        test=rows.test.numpy(),
    )


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The result of an analysis."""

    source: str
    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]
    advice: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        contents: dict[str, Any] = {"source": self.source, "unit": "bits", "advice": self.advice}
        pairs = [pair.to_dict() for pair in self.pairs]
        return {**contents, "notes": list(self.notes), "pid": pairs}


def analyse(cfg: AnalyseConfig, data: DataSpec | None = None) -> Analysis:
    """Analyse `data`, else the data that `cfg` names."""
    names = ("plugins", "data", "target", "encoders", "folds", "jobs", "num_workers", "device")
    settings = {name: getattr(cfg, name) for name in (*names, "seed")}
    bench = BenchmarkConfig(**settings, tune=0, corruptions="none")
    bench, data = complete_run(bench, required(data or DataSpec(settings=cfg.data)))
    data.show()
    setup, notes = read_features(bench, data, cfg.clusters)
    pairs = tuple(decompose_data(setup))
    source = str(cfg.data.get("root", cfg.data.get("name", ""))) or "data in memory"
    return Analysis(
        source=source,
        pairs=pairs,
        notes=(*notes, *(note for pair in pairs for note in pair.notes)),
        advice=advise_fusion(pairs),
    )


def analyse_command(args: Sequence[str]) -> int:
    """Run `fusionzoo analyse DATA ...`; return its exit code."""
    return run_command(AnalyseConfig, USAGE, args, _start)


def _start(cfg: AnalyseConfig) -> int:
    analysis = analyse(cfg)
    print_analysis(analysis)
    if cfg.json:
        write_json(Path(cfg.json), analysis.to_dict())
        print(f"wrote {cfg.json}")
    return 0


def print_analysis(analysis: Analysis) -> None:
    """Print the figures as a table, notes, and what follows."""
    columns = ("sources", "redundancy", "only the first", "only the second", "synergy", "sum")
    rows = [
        (
            f"{pair.first} | {pair.second}",
            *map(_with_interval, pair.parts, pair.low, pair.high),
            f"{pair.parts.total:.3f}",
            "/".join(map(str, dict.fromkeys(pair.clusters))),
            f"{pair.rows:,}",
        )
        for pair in analysis.pairs
    ]
    title = f"Information about the target in {analysis.source}, bits and 95 % interval"
    print_table(title, (*columns, "clusters", "samples"), rows)
    for note in analysis.notes:
        print(note)
    print(analysis.advice)


def _with_interval(value: float, low: float, high: float) -> str:
    return f"{value:.3f}" if isnan(low) else f"{value:.3f} ({low:.3f} to {high:.3f})"
