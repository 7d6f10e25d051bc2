"""Time saved by the feature cache: `python perf/cache.py`. Needs `fusionzoo data fetch stamps`.

20 strategies x 3 seeds on `stamps`, cached, against the same cells whose frozen encoders run again
in every epoch. The encoder pass and a sample of cells are timed for real, both ways; uncached
cells are run for one epoch (all three encoders decode and encode the training and the validation
split) and multiplied by the epochs that the cached cell trained. Writes results/cache.csv.
"""

from __future__ import annotations

import csv
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from fusionzoo.benchmark import bench as setup
from fusionzoo.benchmark import fit, strategies, trainers
from fusionzoo.benchmark.features import encoders as encoding
from fusionzoo.benchmark.features import feeds
from fusionzoo.benchmark.trials import trial
from fusionzoo.config import BenchmarkConfig, from_tree, read_yaml
from fusionzoo.distributed.malloc import keep_freed_memory
from fusionzoo.fusion import fusion_info
from fusionzoo.model import FusionModel

ROOT = Path(__file__).parents[1]
SAMPLE = {"pooled": ("concat", "gmu", "late_mean", "lmf"), "tokens": ("mbt", "perceiver")}
STRATEGIES, SEEDS = {"pooled": 14, "tokens": 6}, 3  # twenty


def main() -> None:
    keep_freed_memory()
    recipe = read_yaml(ROOT / "configs" / "benchmarks" / "stamps.yaml")
    cfg = from_tree(BenchmarkConfig, {**recipe, "corruptions": False, "folds": 0, "tune": 0})
    bench, dataset = setup.open_bench(cfg)
    # The audio encoder is trained once, before the clock starts.
    untrained = encoding.build_encoders(cfg, dataset)
    encoders, _ = encoding.freeze_all(bench, dataset, 0, untrained)
    dims = {name: encoder.dim for name, encoder in encoders.items()}
    with tempfile.TemporaryDirectory() as empty:
        os.environ["FUSIONZOO_CACHE"] = empty
        began = time.perf_counter()
        features = {}
        for name, encoder in encoders.items():
            description = encoding.describe_features(bench, dataset, encoder, tokens=True)
            features[name] = {**description, "view": 0}
            encoding.store_features(bench, dataset, encoder, features[name])
        bench = replace(bench, dims=dims, features=(features,))
        encode_pass = time.perf_counter() - began
        rows = [_cell(bench, dataset, encoders, name) for kind in SAMPLE.values() for name in kind]
    cached = encode_pass
    again = 0.0
    for kind, names in SAMPLE.items():
        own = [row for row in rows if row["fusion"] in names]
        assert all(fusion_info(row["fusion"]).reads == kind for row in own)
        count = STRATEGIES[kind] * SEEDS
        cached += count * statistics.mean(row["cached_seconds"] for row in own)
        again += count * statistics.mean(row["uncached_seconds"] for row in own)
    with (ROOT / "results" / "cache.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in [*rows, {"fusion": "20 strategies x 3 seeds, with the encoder pass"}]:
            if "epochs" not in row:
                row |= {"epochs": 0, "cached_seconds": cached, "uncached_seconds": again}
                row |= {"ratio": again / cached}
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})
            print(row)
    print(f"encoder pass {encode_pass:.1f} s")


def _cell(bench: setup.Bench, dataset, encoders, name: str) -> dict[str, float | str]:  # type: ignore[no-untyped-def]
    fold = bench.folds[0]
    unit = setup.Unit(name, 0, (0,), False, strategies.settings_of(bench.cfg, name), {})
    began = time.perf_counter()
    (model,), feed = trial.build(bench, unit)
    trainer = trainers.SingleTrainer(model, bench.cfg, bench.targets[fold.train])
    (fitted,) = fit.fit(trainer, feed, bench.targets, fold.train, fold.val, [0])
    cached = time.perf_counter() - began

    torch.manual_seed(0)
    whole = FusionModel(encoders, model.fusion, {}, bench.classes)
    one_epoch = replace(bench.cfg, epochs=1)
    trainer = trainers.SingleTrainer(whole, one_epoch, bench.targets[fold.train])
    feed = feeds.BatchFeed(dataset, whole, one_epoch)
    began = time.perf_counter()
    fit.fit(trainer, feed, bench.targets, fold.train, fold.val, [0])
    epoch = time.perf_counter() - began
    return {
        "fusion": name,
        "epochs": fitted.epochs,
        "cached_seconds": cached,
        "uncached_seconds": epoch * fitted.epochs,
        "ratio": epoch * fitted.epochs / cached,
    }


if __name__ == "__main__":
    main()
