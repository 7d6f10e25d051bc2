"""`fusionzoo analyse`: what a data set needs of a fusion, or what a model makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from fusionzoo.benchmark.bench import Bench, open_bench
from fusionzoo.benchmark.prepare import build_encoders, is_untrained, prepare
from fusionzoo.config import BenchmarkConfig, EvaluateConfig
from fusionzoo.config.flags import Tree
from fusionzoo.config.load import Usage, run_command
from fusionzoo.config.schema import TARGET, Count, option
from fusionzoo.console import print_table
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.pid import (
    FoldFeatures,
    Interactions,
    Pair,
    PidInputs,
    advise_fusion,
    advise_model,
    interactions,
)
from fusionzoo.evaluation.pid_probes import decompose_data
from fusionzoo.features.cache import load_features
from fusionzoo.files import write_json
from fusionzoo.inference import (
    encode_batches,
    encode_labels,
    labelled,
    open_data,
    open_model,
    tasks_of_model,
)
from fusionzoo.inputs.command import complete_run, required
from fusionzoo.model import FusionModel
from fusionzoo.plugins import load_plugins
from fusionzoo.structures import Features
from fusionzoo.tools.data_convert import PLUGINS
from fusionzoo.training.multitask import targets_of

USAGE = Usage(
    name="analyse",
    purpose="Ask what a data set needs of a fusion: redundancy, uniqueness, synergy in bits.",
    words=("data",),
    examples=(
        "my.csv --target diagnosis",
        "my.csv --target diagnosis --json needs.json",
        "my.csv --model runs/a",
    ),
    common=("data", "target", "model", "encoders", "folds", "samples", "json"),
    more="From features of frozen encoders (pid). With --model: how much of that model's score"
    " needs interactions (emap).",
)


@dataclass(frozen=True, kw_only=True)
class AnalyseConfig:
    """Settings of an analysis."""

    data: Tree = option({}, "data set and its settings (required): `fusionzoo data list`")
    target: str | list[str] = option("", TARGET)
    plugins: str | list[str] = option("", PLUGINS)
    model: str = option("", "model or run folder: analyse its interactions (emap), not the data")
    encoders: dict[str, Tree] = option({}, "modality -> encoder; empty = the data set's default")
    folds: Annotated[int, Ge(0)] | None = option(
        None, "cross-validation folds; 0 = the data's split; none = 5 below 5,000 samples, else 0"
    )
    clusters: Count | None = option(
        None, "K-means clusters of each source; none = chosen on training rows left out"
    )
    split: str = option("test", "emap: train | val | test | all")
    samples: Count = option(400, "emap: most samples; two modalities take their square of passes")
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
    bench, opened = open_bench(cfg, DataSpec(dataset=opened) if data.is_in_memory else None)
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
    """The result of an analysis: of the data (`pid`), or of a model (`emap`)."""

    source: str
    pairs: tuple[Pair, ...] = ()
    emap: Interactions | None = None
    notes: tuple[str, ...] = ()
    advice: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        contents: dict[str, Any] = {"source": self.source, "unit": "bits", "advice": self.advice}
        contents |= {"notes": list(self.notes)}
        if self.emap is not None:
            return {**contents, "emap": self.emap.to_dict()}
        return {**contents, "pid": [pair.to_dict() for pair in self.pairs]}


def analyse(
    cfg: AnalyseConfig, model: FusionModel | None = None, data: DataSpec | None = None
) -> Analysis:
    """Analyse the data that `cfg` names, or a model's answers on it if there is a model."""
    if model is not None or cfg.model:
        return _analyse_model(cfg, model, data)
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


def _analyse_model(
    cfg: AnalyseConfig, model: FusionModel | None, data: DataSpec | None
) -> Analysis:
    settings = EvaluateConfig.of(cfg)
    model = open_model(settings, model)
    opened = labelled(model, open_data(settings, model, data))
    complete = opened.present.all(1).nonzero()[:, 0]
    if len(complete) < 2 or len(model.modalities) < 2:
        raise FusionZooError(
            f"{opened.source}: {len(complete)} samples of split {cfg.split!r} have all of"
            f" {', '.join(model.modalities)}, and emap needs at least 2 of 2 modalities"
        )
    generator = torch.Generator().manual_seed(cfg.seed)
    chosen = complete[torch.randperm(len(complete), generator=generator)[: cfg.samples]]
    samples = opened.subset(chosen.sort().values)
    labels = encode_labels(model, samples)
    tasks = tasks_of_model(model, labels)

    def score(logits: Tensor) -> tuple[str, float]:
        return tasks.leading, tasks.metrics(logits.float(), labels)[tasks.leading]

    encoded = encode_batches(model, samples, settings, "encode", by_length=False)
    batches = [features for _, features in encoded]
    features = {name: join_batches([batch[name] for batch in batches]) for name in batches[0]}
    result = interactions(model.fusion, features, score, seed=cfg.seed)
    note = f"{len(chosen)} of {len(complete)} complete samples of split {cfg.split!r}"
    return Analysis(source=opened.source, emap=result, notes=(note,), advice=advise_model(result))


def join_batches(batches: list[Features]) -> Features:
    """Put batches together, padded to the most tokens."""
    most = max(batch.tokens.shape[1] for batch in batches)
    tokens, masks = [], []
    for batch in batches:
        padding = most - batch.tokens.shape[1]
        tokens.append(torch.nn.functional.pad(batch.tokens, (0, 0, 0, padding)))
        masks.append(torch.nn.functional.pad(batch.mask, (0, padding)))
    return Features(torch.cat(tokens), torch.cat(masks), torch.cat([b.pooled for b in batches]))


def analyse_command(args: Sequence[str]) -> int:
    """Run `fusionzoo analyse DATA ...`; return its exit code."""
    return run_command(AnalyseConfig, USAGE, args, _start)


def _start(cfg: AnalyseConfig) -> int:
    load_plugins(cfg.plugins)
    analysis = analyse(cfg)
    print_analysis(analysis)
    if cfg.json:
        write_json(Path(cfg.json), analysis.to_dict())
        print(f"wrote {cfg.json}")
    return 0


def print_analysis(analysis: Analysis) -> None:
    """Print the figures as a table, notes, and what follows."""
    if analysis.emap is not None:
        result = analysis.emap
        header = (f"{result.metric} of the model", "without interactions", "gain", "variance")
        figures = (f"{result.model:.3f}", f"{result.additive:.3f}", f"{result.gain:+.3f}")
        share = f"{result.share:.1%} of interactions (standard error {result.share_error:.1%})"
        row = (*figures, share)
        print_table(f"Interactions on {analysis.source}", header, [row])
    else:
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
