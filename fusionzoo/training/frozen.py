"""Encoders that stay frozen for a whole run: their features measured, standardised, cached."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor

from fusionzoo.config import RunConfig
from fusionzoo.datasets import Collate, PairedDataset
from fusionzoo.datasets.loader import make_loader
from fusionzoo.encoders import Encoder
from fusionzoo.errors import FusionZooError
from fusionzoo.features.frozen import Caching, FrozenFeatures, StoredModality
from fusionzoo.fusion import fusion_info
from fusionzoo.ground.progress import progress_bar
from fusionzoo.machine.distributed import World, gather
from fusionzoo.machine.fsdp import sharded
from fusionzoo.model.fusion_model import FusionModel, encode_rows
from fusionzoo.model.standardise import RAW_KINDS, Moments, Standardise
from fusionzoo.structures import evaluating, seed_of

from .loaders import num_workers
from .objective import Objective, dummy_batch
from .optim import AMP_DTYPES, autocast
from .trainer import Trainer

MAX_SAMPLES = 10_000  # of a larger split, at random: a mean is then off by 1 % of the std


def frozen_features(
    objective: Objective, dataset: PairedDataset, cfg: RunConfig, world: World
) -> FrozenFeatures:
    """Cache the features of encoders that stay frozen for the whole run (`--train.cache_frozen`).

    Called after a resumed run's weights are restored, as the features depend on them.
    """
    mode, train = cfg.train.cache_frozen, cfg.train
    frozen = {name: encoder for name, encoder in objective.model.named_encoders() if encoder.frozen}
    if mode == "off" or (mode == "auto" and not frozen):
        return FrozenFeatures({}, [])
    obstacle = None if frozen else "no encoder is frozen: --encoders.<modality>.freeze all"
    readers = [name for name, strategy in objective.balance.items() if strategy.raw_inputs]
    if readers:
        obstacle = f"--balance {','.join(readers)} reads what the encoders read"
    if dataset.edits:
        obstacle = "the data set is an edited view, whose values are not those that are stored"
    if cfg.dist.strategy == "fsdp":
        obstacle = "--dist.strategy fsdp shards their weights"
    if obstacle and mode == "on":
        raise FusionZooError(f"--train.cache_frozen on: {obstacle}")
    if obstacle:
        names = ", ".join(frozen)
        return FrozenFeatures({}, [f"{names}: frozen, but encoded anew in every epoch: {obstacle}"])
    rows = dataset.splits["train"]
    epoch_steps = -(-rows // (train.batch_size * train.accumulate * world.size))
    caching = Caching(
        mode=mode,
        with_tokens=fusion_info(cfg.fusion["name"]).reads == "tokens",
        passes=min(train.epochs, (train.max_steps or float("inf")) / epoch_steps),
        num_workers=num_workers(train.num_workers, world),
        amp=AMP_DTYPES[train.amp],
        world=world,
    )
    return caching.cached(frozen, dataset)


@torch.no_grad()
def standardise_frozen(
    trainer: Trainer, train_set: PairedDataset, stored: Mapping[str, StoredModality]
) -> list[str]:
    """Measure frozen encoders' features, and standardise them from now on; return what to say.

    `stored` are the modalities whose features `train_set` reads from the cache. Called by all
    processes, each of which encodes its share.
    """
    module, cfg = trainer.module, trainer.cfg
    encoders = {
        name: encoder
        for name, encoder in module.model.named_encoders()
        if encoder.frozen or not any(True for _ in encoder.parameters())
    }
    if cfg.train.standardise == "off" or not encoders:
        return []
    with evaluating(module), autocast(cfg.train, trainer.world.device):
        if sharded(module):
            # FSDP's first forward pass must be that of the outermost module.
            module(dummy_batch(module.model).to(trainer.world.device))
        modules = {
            name: _measure(trainer, encoder, train_set.only(name), stored.get(name))
            for name, encoder in encoders.items()
        }
    module.model.complete(standardise=modules)
    names = ", ".join(modules)
    said = f"--train.standardise {cfg.train.standardise}"
    return [f"{names}: features standardised by the training split ({said})"]


def restore_standardise(model: FusionModel, weights: Mapping[str, Tensor]) -> None:
    """Standardise the features of the modalities for which a checkpoint holds statistics."""
    means = {
        name: weights.get(f"model.standardise.{name}.pooled_mean")
        for name, _ in model.named_encoders()
    }
    modules = {name: Standardise(len(mean)) for name, mean in means.items() if mean is not None}
    model.complete(standardise=modules)


def _measure(
    trainer: Trainer, encoder: Encoder, samples: PairedDataset, stored: StoredModality | None
) -> Standardise:
    """Measure one modality's features on the training samples that have it."""
    cfg, world, name = trainer.cfg, trainer.world, encoder.modality
    loader = make_loader(
        samples,
        _share(trainer, samples, by_length=stored is None),
        Collate({name: stored or encoder.processor(False)}),
        num_workers=num_workers(cfg.train.num_workers, world),
    )
    pooled = tokens = Moments.of(torch.zeros(0, encoder.dim))
    label, silent = f"standardise {name}", not world.main
    for batch in progress_bar(loader, desc=label, unit="batch", disable=silent):
        batch = batch.to(world.device)
        features = encode_rows(encoder, batch.inputs[name], batch.presence()[:, 0])
        pooled = pooled.merge(_moments(features.pooled[features.mask.any(1)]))
        tokens = tokens.merge(_moments(features.tokens[features.mask]))
        trainer.heap.after_batch()
    shares = gather((pooled, tokens), world)
    pooled, tokens = (reduce(Moments.merge, parts) for parts in zip(*shares, strict=True))
    reads_tokens = fusion_info(cfg.fusion["name"]).reads == "tokens"
    method = cfg.train.standardise
    assert method != "off"
    return Standardise.from_moments(
        pooled, tokens if reads_tokens else None, encoder.kind in RAW_KINDS, method
    )


def _moments(rows: Tensor) -> Moments:
    """Measure rows (N, D); those that are not finite are left out, and training reports them."""
    return Moments.of(rows[rows.isfinite().all(1)])


def _share(trainer: Trainer, samples: PairedDataset, *, by_length: bool) -> list[list[int]]:
    """Return the batches of this process: as many as every other's, the last one maybe empty."""
    world, size = trainer.world, trainer.cfg.train.batch_size
    rows = samples.present[:, 0].nonzero()[:, 0]
    if len(rows) > MAX_SAMPLES:
        draws = torch.Generator().manual_seed(seed_of("standardise"))
        rows = rows[torch.randperm(len(rows), generator=draws)[:MAX_SAMPLES].sort().values]
    if by_length:
        order = torch.tensor(samples.by_length())
        rows = order[torch.isin(order, rows)]
    return [batch[world.rank :: world.size].tolist() for batch in rows.split(size * world.size)]
