"""Build and freeze the encoders of a benchmark, and store their features in the cache."""

from __future__ import annotations

import torch

from fusionzoo.config import BenchmarkConfig, split_name
from fusionzoo.datasets import PairedDataset
from fusionzoo.distributed.process_group import seed_everything
from fusionzoo.encoders import Encoder, create_encoder, shared_checkpoints
from fusionzoo.encoders.augment import set_augmentation
from fusionzoo.features.cache import feature_cache
from fusionzoo.features.encode import describe, encode
from fusionzoo.training.build import choose_encoders

from ..bench import Bench, Description
from .feeds import device_of, loader_workers
from .pretrain import TrainedAlone, freeze

Encoders = dict[str, Encoder]  # modality -> encoder


def build_encoders(
    cfg: BenchmarkConfig, dataset: PairedDataset, only: str | None = None
) -> Encoders:
    """Build the encoders of the data set, or those of the settings: all, or that of one modality.

    Each has the same initial weights in both cases.
    """
    with shared_checkpoints():
        encoders = _build_each(cfg, dataset, only)
    return {name: encoders[name] for name in dataset.modalities if name in encoders}


def _build_each(cfg: BenchmarkConfig, dataset: PairedDataset, only: str | None) -> Encoders:
    """Build the encoders in the order of the settings."""
    encoders: Encoders = {}
    for modality, component in choose_encoders(dataset, cfg.encoders).items():
        if modality not in dataset.modalities:
            dataset.select(modality)  # raises an error that lists the modalities there are
        if only not in (None, modality):
            continue
        seed_everything(cfg.seed)
        name, settings = split_name(component, f"encoders.{modality}")
        encoder = create_encoder(
            modality, name, **{"kind": dataset.modalities[modality], **settings}
        )
        if device_of(cfg).type == "cpu":  # convolutions are a third faster in this format
            encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        encoders[modality] = encoder
    set_augmentation(encoders.items(), cfg.data.get("augment"), dataset.modalities)
    return encoders


def freeze_all(
    bench: Bench, dataset: PairedDataset, fold_number: int, encoders: Encoders
) -> tuple[Encoders, dict[str, TrainedAlone]]:
    """Return the frozen encoders of a fold, and how those were trained that had to be."""
    results = {
        name: freeze(bench, dataset, fold_number, encoder) for name, encoder in encoders.items()
    }
    trained = {name: how for name, (_, how) in results.items() if how is not None}
    return {name: encoder for name, (encoder, _) in results.items()}, trained


def store_all(
    bench: Bench, dataset: PairedDataset, frozen: Encoders, tokens: bool, progress: bool = True
) -> dict[str, Description]:
    """Encode what is not in the cache, every view of it; return the entries, but for the view."""
    descriptions = {
        name: describe_features(bench, dataset, encoder, tokens) for name, encoder in frozen.items()
    }
    views = 1 if bench.cfg.mode == "finetune" else bench.cfg.views
    for name, encoder in frozen.items():
        for view in range(views):
            description = {**descriptions[name], "view": view}
            store_features(bench, dataset, encoder, description, progress)
    return descriptions


def describe_features(
    bench: Bench, dataset: PairedDataset, encoder: Encoder, tokens: bool
) -> Description:
    """Describe an encoder's features of a data set, but for the view."""
    # Where no strategy reads tokens, one per sample tells which samples have the modality.
    max_tokens = bench.cfg.max_tokens.get(encoder.modality) if tokens else 1
    return describe(encoder, dataset, max_tokens=max_tokens, precision=bench.cfg.precision)


def store_features(
    bench: Bench,
    dataset: PairedDataset,
    encoder: Encoder,
    description: Description,
    progress: bool = True,
) -> None:
    """Encode a data set, unless its features are in the cache."""
    feature_cache().get(
        description,
        lambda: encode(
            encoder,
            dataset,
            num_workers=loader_workers(bench.cfg),
            max_tokens=description["max_tokens"],
            dtype=torch.bfloat16 if bench.cfg.precision == "bf16" else torch.float32,
            view=description.get("view", 0),
            device=device_of(bench.cfg),
            progress=progress,
        ),
    )
