"""Train encoders that have no pretrained weights, each alone, then freeze them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from tqdm import tqdm

from fusionzoo.config import BenchmarkConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.distributed.process_group import seed_everything
from fusionzoo.encoders import Encoder
from fusionzoo.errors import FusionZooError
from fusionzoo.files import cache_root, make_cache_folder
from fusionzoo.fusion import create_fusion
from fusionzoo.model import FusionModel
from fusionzoo.structures import Batch
from fusionzoo.training.runs import checkpoint_file

from ..bench import Bench
from ..fit import Given, Single, fit
from .encode import describe, key_of
from .feeds import BatchFeed, device

# ---- encoders that nobody trained before


def freeze(bench: Bench, dataset: PairedDataset, number: int, encoder: Encoder) -> Encoder:
    """Freeze an encoder; one without pretrained weights is first trained alone on a fold."""
    frozen = copy.deepcopy(encoder)
    if not untrained(encoder):
        frozen.freeze()
        return frozen
    cfg, name, fold = bench.cfg, encoder.modality, bench.folds[number]
    has = bench.present[:, list(bench.modalities).index(name)]
    train, val = fold.train[has[fold.train]], fold.val[has[fold.val]]
    if not len(train) or not len(val):
        raise FusionZooError(f"{name}: its encoder has no weights, and no sample to learn from")
    key = describe(encoder, dataset, trained_on=train.tolist(), judged_on=val.tolist())
    key |= {"epochs": cfg.encoder_epochs, "batch_size": cfg.batch_size, "seed": alone_seed(cfg)}
    key |= {"optim": asdict(cfg.optim)}
    path = make_cache_folder(cache_root() / "weights") / f"{key_of(key)}.pt"
    if path.is_file():
        kept = checkpoint_file.read(path)
        frozen.load_state_dict(kept["weights"])
        accuracy = kept["accuracy"]
    else:
        bar = tqdm(total=cfg.encoder_epochs, desc=f"train {name} alone", unit="epoch")
        accuracy = train_alone(bench, dataset, frozen, train, val, bar)
        bar.close()
        checkpoint_file.write({"weights": frozen.state_dict(), "accuracy": accuracy}, path)
    where = f" (fold {number})" if bench.cfg.folds else ""
    bench.notes.append(
        f"{name}{where}: {encoder.spec['name']} has no pretrained weights; it was trained alone on"
        f" {len(train)} training samples ({cfg.encoder_epochs} epochs, the best kept by validation"
        f" loss, accuracy there {accuracy:.3f}), then frozen."
    )
    frozen.freeze()
    return frozen


def untrained(encoder: Encoder) -> bool:
    """Whether an encoder has parameters that nothing has trained."""
    spec = encoder.spec
    given = spec.get("weights") is not None or spec.get("pretrained") is True
    return any(True for _ in encoder.parameters()) and not given


def alone_seed(cfg: BenchmarkConfig) -> int:
    """Return a seed that no strategy has.

    An encoder's features fit the head that it was trained under. A strategy whose head started from
    the same weights would know the labels before it sees any, even shuffled ones.
    """
    return crc32(f"encoders alone, {cfg.seed}".encode())


def train_alone(
    bench: Bench, dataset: PairedDataset, encoder: Encoder, train: Tensor, val: Tensor, bar: Any
) -> float:
    """Train one encoder under a linear head, keep its best epoch; return the accuracy there."""
    cfg = replace(bench.cfg, epochs=bench.cfg.encoder_epochs, patience=None)
    seed_everything(alone_seed(cfg))
    name = encoder.modality
    head = create_fusion("concat", {name: encoder.dim}, encoder.dim, len(bench.classes), hidden=())
    model = FusionModel({name: encoder}, head, {}, bench.classes)
    feed = BatchFeed(dataset.only(name), model, cfg)

    def told(chunks: Sequence[Tensor], epoch: int) -> Iterator[Given]:
        bar.update(epoch >= 0)
        return feed(chunks, epoch)

    model.to(device(cfg))
    targets = bench.targets.to(device(cfg))
    (best,) = fit(Single(model, cfg, targets[train]), told, targets, train, val, [cfg.seed])
    model.load_state_dict(best.weights)
    model.eval()
    with torch.no_grad():
        right = [
            (model(given).logits.argmax(-1) == targets[rows]).double()
            for rows, given in zip(val.split(256), feed(val.split(256), -1), strict=True)
            if isinstance(given, Batch)
        ]
    return float(torch.cat(right).mean())
