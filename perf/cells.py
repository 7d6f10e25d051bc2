"""A job of the benchmark against a bare loop: `python perf/cells.py`. Needs the data set `mfeat`.

The same model (vector/mlp encoders, one fusion), batches of 128, 20 epochs, on tensors in memory,
with AdamW, cosine schedule, clipping and a look at the validation split after each epoch in both.
CPU time, in interleaved rounds: median and quartiles of the ratio. Writes results/cells.csv.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from _timing import compare, cpu_seconds

from fusionzoo.benchmark import bench as setup
from fusionzoo.benchmark import candidates, jobs, prepare, train
from fusionzoo.config import BenchmarkConfig, from_tree, read_yaml
from fusionzoo.distributed import keep_freed_memory, seed_everything

ROOT = Path(__file__).parents[1]
FUSIONS = ("concat", "gmu", "late_mean", "lmf")


def bare(bench: setup.Bench, job: setup.Job) -> float:
    """Train as one writes it by hand; return the CPU seconds."""
    cfg, fold = bench.cfg, bench.folds[0]
    (model,), feed = jobs.build(bench, job)
    data = {name: feed.whole.inputs[name]["values"] for name in bench.modalities}
    y = bench.targets
    began = cpu_seconds()
    seed_everything(job.seeds[0])
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": cfg.optim.weight_decay}]
    groups += [{"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=cfg.optim.lr, fused=True)
    steps = math.ceil(len(fold.train) / cfg.batch_size) * cfg.epochs
    warm = round(cfg.optim.warmup * steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            (step + 1) / warm
            if step < warm
            else 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))
        ),
    )

    def logits(rows: torch.Tensor) -> torch.Tensor:
        features = {name: model.encoders[name]({"values": x[rows]}) for name, x in data.items()}
        return model.fusion(features).logits

    best, kept = math.inf, {}
    for _ in range(cfg.epochs):
        model.train()
        for places in torch.randperm(len(fold.train)).split(cfg.batch_size):
            rows = fold.train[places]
            F.cross_entropy(logits(rows), y[rows]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(logits(fold.val), y[fold.val]).item()
        if loss < best:
            best, kept = loss, {k: v.clone() for k, v in model.state_dict().items()}
    assert kept
    return cpu_seconds() - began


def ours(bench: setup.Bench, job: setup.Job) -> float:
    """Train as benchmark.py does; return the CPU seconds."""
    fold = bench.folds[0]
    (model,), feed = jobs.build(bench, job)
    began = cpu_seconds()
    trainer = train.SingleTrainer(model, bench.cfg, bench.targets[fold.train])
    train.fit(trainer, feed, bench.targets, fold.train, fold.val, job.seeds)
    return cpu_seconds() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    keep_freed_memory()
    recipe = read_yaml(ROOT / "configs" / "benchmarks" / "mfeat.yaml")
    bench, dataset = setup.open_bench(
        from_tree(BenchmarkConfig, {**recipe, "mode": "finetune", "patience": None, "folds": 0})
    )
    bench = prepare.prepare(bench, dataset, tokens=True)
    with (ROOT / "results" / "cells.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["fusion", "ours_s", "bare_s", "ratio", "quartile_low", "quartile_high"])
        for name in FUSIONS:
            job = setup.Job(name, 0, (0,), False, candidates.settings_of(bench.cfg, name), {})
            bare(bench, job)
            pairs = [(ours(bench, job), bare(bench, job)) for _ in range(flags.rounds)]
            figures = compare(*zip(*pairs, strict=True))
            writer.writerow([name, *(f"{x:.3f}" for x in figures.values())])
            print(name, *(f"{x:.3f}" for x in figures.values()), flush=True)


if __name__ == "__main__":
    main()
