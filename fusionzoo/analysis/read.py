"""Read what `pid` counts: cached features of frozen encoders, in the folds of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fusionzoo.benchmark.bench import Bench, open_bench
from fusionzoo.benchmark.features.encoders import build_encoders
from fusionzoo.benchmark.features.prepare import prepare
from fusionzoo.benchmark.features.pretrain import is_untrained
from fusionzoo.benchmark.report.needs import setup_of
from fusionzoo.config import BenchmarkConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.errors import FusionZooError
from fusionzoo.training.build import open_dataset

from .pid import Setup


def read_features(
    cfg: BenchmarkConfig, dataset: PairedDataset | None, clusters: int | None
) -> tuple[Setup, list[str], list[str]]:
    """Return what `pid` decomposes, notes for the reader, and the ids of all rows.

    Vectors are taken as they are. Encoders without weights are trained alone on a fold's training
    rows, as in a benchmark.
    """
    opened = open_dataset(cfg.data, None, dataset)
    if opened.scheme is not None:
        raise FusionZooError(f"pid needs one class for each sample; {opened.source} has none")
    as_they_are: Mapping[str, Any] = {
        name: {"name": "vector/identity"}
        for name, kind in opened.modalities.items()
        if kind == "vector" and name not in cfg.encoders
    }
    cfg = replace(cfg, encoders={**cfg.encoders, **as_they_are})
    bench, opened = open_bench(cfg, opened if dataset is not None else None)
    untrained = [n for n, e in build_encoders(bench.cfg, opened).items() if is_untrained(e)]
    bench = prepare(bench, opened, tokens=False)
    notes = [f"features of: {', '.join(_describe(bench, name) for name in bench.modalities)}"]
    if untrained:
        notes.append(
            f"{', '.join(untrained)}: the encoder has no pretrained weights, and was trained alone"
            " on the labels, which may lose what only a combination tells"
        )
    setup = setup_of(bench, fixed=not untrained, clusters=clusters)
    return setup, notes, list(opened.ids)


def _describe(bench: Bench, name: str) -> str:
    return f"{name} ({bench.features[0][name]['encoder'].get('name', '-')})"
