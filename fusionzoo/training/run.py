"""The outside of training: open the data, build what is trained, claim a folder, report."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..config import RunConfig, Tree, merge, split_name, write_yaml
from ..datasets import PairedDataset, create_dataset
from ..errors import FusionZooError, did_you_mean
from ..model import create_model
from .balance import Setting, build_balance
from .checkpoint import State
from .distributed import World, from_main, gather
from .loop import Stepper
from .objectives import Objective, UnimodalHeads, freeze_unused
from .tracking import Tracker, environment

ALONE = World()
WRITTEN = ("checkpoints", "model", "tensorboard", "config.yaml", "metrics.json", "metrics.jsonl")


def open_dataset(settings: dict[str, Any]) -> PairedDataset:
    """Open the data set that `--data.name` and its settings describe."""
    name, rest = split_name(settings, "data")
    return create_dataset(name, **rest)


def choose_encoders(dataset: PairedDataset, chosen: dict[str, Tree]) -> dict[str, Tree]:
    """Lay what the user says of encoders on the data set's own choice."""
    own = dataset.default_encoders
    encoders = merge(own, chosen)
    for name, encoder in encoders.items():
        # The width of given vectors is a fact of the data, whichever encoder reads them.
        if "in_dim" in own.get(name, {}) and str(encoder.get("name")).startswith(
            ("vector/", "seq")
        ):
            encoder.setdefault("in_dim", own[name]["in_dim"])
    return encoders


def build_objective(
    cfg: RunConfig, train_set: PairedDataset, world: World = ALONE
) -> tuple[Objective, list[str]]:
    """Build model, heads and loss for the data; also return what no loss reads, now frozen."""
    for modality in cfg.encoders:
        if modality not in train_set.modalities:
            raise FusionZooError(
                f"--encoders.{modality}: the data has no modality {modality!r}."
                f"{did_you_mean(modality, train_set.modalities)}"
                f" It has: {', '.join(train_set.modalities)}."
            )
    if not train_set.classes:
        raise FusionZooError("the data has no target column, and training needs one")
    encoders = {name: cfg.encoders[name] for name in train_set.modalities}
    kinds = train_set.modalities
    model = create_model(cfg.fusion, encoders, classes=train_set.classes, kinds=kinds)
    counts = torch.bincount(train_set.targets, minlength=len(train_set.classes))
    dims = {name: encoder.dim for name, encoder in model.named_encoders()}
    dim = model.spec["fusion"]["dim"]
    heads = UnimodalHeads(dims if cfg.train.unimodal else {}, dim, counts / counts.sum())
    ids, targets = train_set.ids, train_set.targets
    objective = Objective(model, heads, cfg.train.label_smoothing, ids, targets)
    unused = freeze_unused(objective)
    if cfg.balance and cfg.dist.strategy == "dp":
        raise FusionZooError("--balance: strategies remember what dp's threads forget: use ddp")
    # After the blank batch above: of that a strategy must remember nothing.
    setting = Setting(model, targets, cfg.seed, world)
    objective.balance = build_balance(cfg.balance, cfg.balance_settings, setting)
    return objective, unused


def claim_folder(cfg: RunConfig, world: World) -> tuple[RunConfig, Path]:
    """Resolve the run folder on the main process, for all; a finished run is never overwritten."""
    claimed = problem = None
    if world.main:
        try:
            claimed = _claim(cfg)
        except (FusionZooError, OSError) as error:
            problem = str(error)
    claimed, problem = from_main((claimed, problem), world)
    if claimed is None:
        raise FusionZooError(problem)
    return replace(cfg, out=str(claimed)), claimed


def _claim(cfg: RunConfig) -> Path:
    folder = Path(cfg.out or f"runs/{cfg.data['name']}")
    if cfg.out is None:
        base, number = folder, 2
        while folder.exists():
            folder, number = base.with_name(f"{base.name}-{number}"), number + 1
    taken = (folder / "config.yaml").exists()
    if taken and not (cfg.resume or cfg.overwrite):
        raise FusionZooError(
            f"{folder} holds a run: --resume continues it, --overwrite replaces it,"
            " another --out leaves it alone"
        )
    if taken and cfg.overwrite and not cfg.resume:
        for name in WRITTEN:
            old = folder / name
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    stored = replace(cfg, out=str(folder), resume=False, overwrite=False)
    write_yaml(stored, folder / "config.yaml")
    return folder


def report(
    folder: Path, learn: Stepper, state: State, test: dict[str, Any], tracker: Tracker
) -> None:
    """Save the model, write metrics.json, and print what each modality and the fusion reach."""
    cfg, model = learn.cfg, learn.plain.model
    alone = test.pop("unimodal")
    seconds = {part: round(time, 2) for part, time in tracker.seconds.items()}
    # A run that resumes after its last step has nothing left to time.
    busy = seconds.get("data", 0.0) + seconds.get("train", 0.0)
    if tracker.world.main:
        model.save(folder / "model")
        results = {
            "train": {"loss": state.best["train_loss"]},
            "val": {name: state.best[name] for name in test},
            "test": test,
            "unimodal": alone,
            "best_epoch": state.best["epoch"],
            "throughput": {
                "samples_per_second": learn.rows / busy if busy else None,
                "seconds": seconds,
            },
            "environment": environment(tracker.world),
        }
        (folder / "metrics.json").write_text(json.dumps(results, indent=2) + "\n")
    rows: list[tuple[str, ...]] = [(f"{name} alone", *_figures(own)) for name, own in alone.items()]
    rows += [(f"fusion: {cfg.fusion['name']}", *_figures(test))]
    if len(alone) > 1:
        best = max(alone, key=lambda name: alone[name]["accuracy"])
        gain = {name: test[name] - alone[best][name] for name in ("accuracy", "macro_f1")}
        points = [f"{100 * x:+.1f} points" for x in gain.values()]
        rows += [(f"gain over {best} alone", *points)]
    tracker.table(
        f"Test split, best epoch {state.best['epoch']} by validation",
        ("", "accuracy", "macro F1"),
        rows,
    )
    data = cfg.data["name"]
    tracker.say(f"model   {folder / 'model'}   (fusionzoo.load reads it)")
    tracker.say(f"next    python embed.py --model {folder} --out {data}.parquet")
    tracker.say(f"        tensorboard --logdir {folder / 'tensorboard'}")


def report_failures(dataset: PairedDataset, tracker: Tracker) -> None:
    """Say how many files could not be read, on any process; nothing goes missing in silence."""
    failed = {one for shard in gather(dataset.failures(), tracker.world) for one in shard}
    if failed:
        some = ", ".join(f"{key} ({modality})" for key, modality in sorted(failed)[:5])
        tracker.say(f"warning: {len(failed)} values could not be decoded: {some} ...")


def _figures(metrics: dict[str, float]) -> tuple[str, str]:
    return f"{metrics['accuracy']:.3f}", f"{metrics['macro_f1']:.3f}"
