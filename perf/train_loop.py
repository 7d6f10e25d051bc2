"""CPU time of a training against a bare PyTorch loop that does the same: `perf/train_loop.py`.

Both build the same model and train it on `digits` (or `--data`), shuffled by a DataLoader without
workers, with a cosine schedule and clipping; after each epoch they evaluate on the validation
split, write a checkpoint of model and optimiser, and another one if the epoch was the best; at the
end the best weights are tested and saved. Left out, as a bare loop has none: the unimodal heads,
and the fusion given each modality only. Bar: at most 1.03 times the CPU time of the bare loop.
`--profile` prints where ours spends its time instead.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import io
import json
import math
import pstats
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from _timing import ratio
from safetensors.torch import save_model
from torch.utils.data import DataLoader

from fusionzoo import create_dataset, create_model
from fusionzoo.config import RunConfig, from_args
from fusionzoo.datasets import PairedDataset
from fusionzoo.distributed import World
from fusionzoo.memory import keep_freed_memory
from fusionzoo.model import FusionModel
from fusionzoo.scripts.train import train
from fusionzoo.structures import Batch
from fusionzoo.training import report


def ours(dataset: PairedDataset, flags: list[str]) -> None:
    """Train as train.py does."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        mock.patch.object(report, "reports_each_alone", return_value=False),
    ):
        cfg = from_args(RunConfig, [*flags, "--out", f"{folder}/run", "--log", "none"])
        train(cfg, World(), dataset)


def bare(dataset: PairedDataset, cfg: RunConfig) -> None:
    """Train as one writes it by hand."""
    torch.manual_seed(cfg.seed)
    model = create_model(cfg.fusion, dataset.default_encoders, classes=dataset.classes)
    splits = {name: dataset.split(name) for name in ("train", "val", "test")}
    loaders = {
        name: DataLoader(
            split,  # type: ignore[arg-type]
            cfg.train.batch_size,
            shuffle=name == "train",
            collate_fn=model.collate(train=name == "train"),
        )
        for name, split in splits.items()
    }
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    decay = cfg.optim.weight_decay
    optimizer = torch.optim.AdamW(groups, lr=cfg.optim.lr, weight_decay=decay, fused=True)
    steps = cfg.train.epochs * len(loaders["train"])
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    best = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(cfg.train.epochs):
            model.train()
            for batch in loaders["train"]:
                loss = F.cross_entropy(model(batch).logits, batch.target)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.clip or 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            accuracy = evaluate(model, loaders["val"])
            checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(checkpoint, folder / "last.pt")
            if accuracy > best:
                best = accuracy
                torch.save(checkpoint, folder / "best.pt")
        model.load_state_dict(torch.load(folder / "best.pt", weights_only=True)["model"])
        evaluate(model, loaders["test"])
        save_model(model, str(folder / "model.safetensors"))


@torch.no_grad()
def evaluate(model: FusionModel, loader: DataLoader[Batch]) -> float:
    """Return the accuracy on a split."""
    model.eval()
    pairs = [(model(batch).logits, batch.target) for batch in loader]
    logits, target = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    F.cross_entropy(logits, target).item()
    return (logits.argmax(1) == target).double().mean().item()


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", default="digits")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", metavar="ORDER", help="tottime or cumulative")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as train.py does at its start; it holds for the whole process
    flags = ["--train.unimodal", "false", "--train.epochs", str(parsed.epochs)]
    flags += ["--data.name", parsed.data]
    cfg = from_args(RunConfig, flags)
    dataset = create_dataset(parsed.data)
    works: dict[str, Any] = {
        "ours": lambda: ours(dataset, flags),
        "bare": lambda: bare(dataset, cfg),
    }
    if parsed.profile:
        for name, work in works.items():
            work()
            profile = cProfile.Profile()
            profile.runcall(work)
            print(name)
            pstats.Stats(profile).sort_stats(parsed.profile).print_stats(60)
        return
    figures = ratio(works["ours"], works["bare"], parsed.rounds)
    print(json.dumps({"benchmark": "train_loop", "data": parsed.data, **figures}))


if __name__ == "__main__":
    main()
