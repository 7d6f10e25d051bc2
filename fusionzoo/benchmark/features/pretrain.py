"""Freeze encoders; one without pretrained weights is first trained on its modality alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from fusionzoo.config import BenchmarkConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.distributed.process_group import seed_everything
from fusionzoo.encoders import Encoder
from fusionzoo.errors import FusionZooError
from fusionzoo.features.encode import describe, key_of
from fusionzoo.files import cache_root, make_cache_folder
from fusionzoo.fusion import create_fusion
from fusionzoo.model import FusionModel
from fusionzoo.rng import seed_of
from fusionzoo.training.runs import checkpoint_file

from ..bench import Bench, target_spec, tasks_of
from ..fit import fit
from ..metric import sample_scores
from ..trainers import ModelInput, SingleTrainer
from .feeds import BatchFeed, device_of


class TrainedAlone(NamedTuple):
    """How the encoder of one fold was trained."""

    samples: int
    score: float  # on the fold's validation samples


def freeze(
    bench: Bench,
    dataset: PairedDataset,
    fold_number: int,
    encoder: Encoder,
    progress: bool = True,
) -> tuple[Encoder, TrainedAlone | None]:
    """Return a frozen copy of an encoder, and how it was trained if it had to be.

    An encoder without pretrained weights is trained alone on the fold's training split; its weights
    are cached.
    """
    frozen = copy.deepcopy(encoder)
    if not is_untrained(encoder):
        frozen.freeze()
        return frozen, None
    cfg, name = bench.cfg, encoder.modality
    train, val = _rows(bench, fold_number, name)
    path = _path(bench, dataset, fold_number, encoder)
    if path.is_file():
        checkpoint = checkpoint_file.read(path)
        frozen.load_state_dict(checkpoint["weights"])
        score = checkpoint["score"]
    else:
        total, desc = cfg.encoder_epochs, f"train {name} alone"
        bar = tqdm(total=total, desc=desc, unit="epoch", disable=not progress)
        score = pretrain(bench, dataset, frozen, train, val, bar)
        bar.close()
        checkpoint_file.write({"weights": frozen.state_dict(), "score": score}, path)
    frozen.freeze()
    return frozen, TrainedAlone(len(train), score)


def trained_alone_note(bench: Bench, encoder: Encoder, folds: Sequence[TrainedAlone]) -> str:
    """Return what the report says of an encoder that was trained on each of the folds."""
    metric = bench.metric
    where = f"in each of {len(folds)} folds " if bench.cross_validated else ""
    samples = _extent([f"{fold.samples:,}" for fold in sorted(folds)])
    scores = _extent([f"{x:.3f}" for x in sorted(metric.shown(fold.score) for fold in folds)])
    return (
        f"{encoder.modality}: {encoder.spec['name']} has no pretrained weights; {where}it was"
        f" trained alone on {samples} training samples ({bench.cfg.encoder_epochs} epochs, the best"
        f" kept by validation loss, {metric.title} there {scores}), then frozen."
    )


def _extent(ordered: Sequence[str]) -> str:
    first, last = ordered[0], ordered[-1]
    return first if first == last else f"{first} to {last}"


def is_cached(bench: Bench, dataset: PairedDataset, fold_number: int, encoder: Encoder) -> bool:
    """Whether the weights of an encoder trained alone on a fold are in the cache."""
    return _path(bench, dataset, fold_number, encoder).is_file()


def _path(bench: Bench, dataset: PairedDataset, fold_number: int, encoder: Encoder) -> Path:
    cfg = bench.cfg
    train, val = _rows(bench, fold_number, encoder.modality)
    key = describe(encoder, dataset, trained_on=train.tolist(), judged_on=val.tolist())
    key |= {"epochs": cfg.encoder_epochs, "batch_size": cfg.batch_size, "seed": pretrain_seed(cfg)}
    key |= {"optim": asdict(cfg.optim), "objective": [cfg.objective, cfg.targets]}
    key |= {part: bench.identity.get(part) for part in ("targets", "classes")}
    return make_cache_folder(cache_root() / "weights") / f"{key_of(key)}.pt"


def _rows(bench: Bench, fold_number: int, name: str) -> tuple[Tensor, Tensor]:
    """Return the training and validation samples that have a modality."""
    fold = bench.folds[fold_number]
    present = bench.present[:, list(bench.modalities).index(name)]
    train, val = fold.train[present[fold.train]], fold.val[present[fold.val]]
    if not len(train) or not len(val):
        raise FusionZooError(f"{name}: its encoder has no weights, and no sample to learn from")
    return train, val


def is_untrained(encoder: Encoder) -> bool:
    """Whether an encoder has parameters, and neither weights from a file nor pretrained ones."""
    spec = encoder.spec
    has_weights = spec.get("weights") is not None or spec.get("pretrained") is True
    return any(True for _ in encoder.parameters()) and not has_weights


def augmentation_notes(cfg: BenchmarkConfig, encoders: Mapping[str, Encoder]) -> list[str]:
    """Return what the report says of augmentation; raise an error if it would change nothing."""
    augmented = [encoder for encoder in encoders.values() if encoder.augmentation is not None]
    if not augmented:
        return []
    done = "; ".join(encoder.augmentation.note for encoder in augmented if encoder.augmentation)
    if cfg.mode == "finetune":
        return [f"Training samples were augmented: {done}."]
    if cfg.views == 1 and not any(map(is_untrained, augmented)):
        raise FusionZooError(
            "--data.augment: the encoders are frozen and their features cached once: --views 4"
            " caches augmented passes too, --mode finetune trains the encoders"
        )
    cached = f"{cfg.views - 1} of {cfg.views} cached passes" if cfg.views > 1 else "no cached pass"
    return [
        f"Augmented were {cached}, and the samples on which encoders without weights were trained:"
        f" {done}."
    ]


def pretrain_seed(cfg: BenchmarkConfig) -> int:
    """Return a seed that no trial uses.

    An encoder's features fit the head that it was trained under. A strategy whose head started from
    the same weights would know the labels before it sees any, even shuffled ones.
    """
    return seed_of("encoders alone", cfg.seed)


def pretrain(
    bench: Bench, dataset: PairedDataset, encoder: Encoder, train: Tensor, val: Tensor, bar: Any
) -> float:
    """Train one encoder under a linear head, load its best epoch; return the score on `val`."""
    cfg = replace(bench.cfg, epochs=bench.cfg.encoder_epochs, patience=None)
    seed_everything(pretrain_seed(cfg))
    name = encoder.modality
    head = create_fusion("concat", {name: encoder.dim}, encoder.dim, bench.num_outputs, hidden=())
    model = FusionModel({name: encoder}, head, target_spec(bench), bench.classes)
    feed = BatchFeed(dataset.only(name), model, cfg)

    def feed_with_progress(chunks: Sequence[Tensor], epoch: int) -> Iterator[ModelInput]:
        bar.update(epoch >= 0)
        return feed(chunks, epoch)

    model.to(device_of(cfg))
    targets = bench.targets.to(device_of(cfg))
    tasks = tasks_of(bench, train)
    trainer = SingleTrainer(model, cfg, targets[train], tasks=tasks.to(device_of(cfg)))
    (best,) = fit(trainer, feed_with_progress, targets, train, val, [cfg.seed])
    model.load_state_dict(best.weights)
    model.eval()
    chunks = val.split(256)
    with torch.no_grad():
        logits = torch.cat([model(batch).logits.float().cpu() for batch in feed(chunks, -1)])
    return float(sample_scores(tasks.cpu(), logits, bench.targets[val]).mean())
