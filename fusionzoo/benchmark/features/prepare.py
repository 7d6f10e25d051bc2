"""Encode the data once: the cached features that every strategy trains on."""

from __future__ import annotations

from dataclasses import asdict, replace

import torch

from fusionzoo.config import BenchmarkConfig, split_name
from fusionzoo.datasets import PairedDataset
from fusionzoo.distributed.process_group import seed_everything
from fusionzoo.encoders import Encoder, create_encoder
from fusionzoo.evaluation.robustness import Corrupted
from fusionzoo.features.cache import feature_cache
from fusionzoo.features.encode import describe, encode, fingerprint, key_of
from fusionzoo.training.build import choose_encoders

from ..bench import Bench, Condition, Description, Fold, conditions, dataset_of
from ..executors import map_unordered
from .feeds import device_of, loader_workers
from .pretrain import freeze

Encoders = dict[str, Encoder]  # modality -> encoder
_frozen_cache: dict[str, tuple[PairedDataset, Encoders]] = {}  # of this process; one entry


def build_encoders(cfg: BenchmarkConfig, dataset: PairedDataset) -> Encoders:
    """Build the encoders of the data set, or those of the settings."""
    seed_everything(cfg.seed)
    encoders = {}
    for modality, component in choose_encoders(dataset, cfg.encoders).items():
        if modality not in dataset.modalities:
            dataset.select(modality)  # raises an error that lists the modalities there are
        name, settings = split_name(component, f"encoders.{modality}")
        encoders[modality] = create_encoder(
            modality, name, **{"kind": dataset.modalities[modality], **settings}
        )
    return {name: encoders[name] for name in dataset.modalities}


def prepare(bench: Bench, dataset: PairedDataset, tokens: bool) -> Bench:
    """Return the bench with feature widths and, in probe mode, cached features of every fold.

    `tokens`: whether any strategy reads tokens, not pooled vectors only.
    """
    encoders = build_encoders(bench.cfg, dataset)
    bench = replace(bench, dims={name: encoder.dim for name, encoder in encoders.items()})
    if bench.cfg.mode == "finetune":
        note = "Encoders were trained end to end, anew for every strategy and seed."
        return replace(bench, notes=(*bench.notes, note))
    notes, features, corrupted = list(bench.notes), [], []
    for number, fold in enumerate(bench.folds):
        frozen, fold_notes = freeze_all(bench, dataset, number, encoders)
        notes += fold_notes
        descriptions = {
            name: describe_features(bench, dataset, encoder, tokens)
            for name, encoder in frozen.items()
        }
        for name, encoder in frozen.items():
            for view in range(bench.cfg.views):
                store_features(bench, dataset, encoder, {**descriptions[name], "view": view})
        features.append({name: {**d, "view": 0} for name, d in descriptions.items()})
        corrupted.append(_describe_corrupted(bench, dataset, number, fold, descriptions))
    bench = replace(bench, notes=tuple(notes), features=tuple(features), corrupted=tuple(corrupted))
    encode_all_corrupted(bench)
    return bench


def freeze_all(
    bench: Bench, dataset: PairedDataset, fold_number: int, encoders: Encoders
) -> tuple[Encoders, list[str]]:
    """Return the frozen encoders of a fold, and notes on those that had to be trained."""
    results = {
        name: freeze(bench, dataset, fold_number, encoder) for name, encoder in encoders.items()
    }
    notes = [note for _, note in results.values() if note is not None]
    return {name: encoder for name, (encoder, _) in results.items()}, notes


def encode_all_corrupted(bench: Bench) -> None:
    """Encode the corrupted test samples of every fold that are not in the cache."""
    missing = [
        (number, condition)
        for number, descriptions in enumerate(bench.corrupted)
        for condition, description in descriptions.items()
        if not feature_cache().has(description)
    ]
    for _ in map_unordered(bench.cfg, bench, missing, encode_corrupted, "encode corrupted"):
        pass
    _frozen_cache.clear()


def encode_corrupted(bench: Bench, piece: tuple[int, Condition]) -> None:
    """Encode the test samples of a fold with one modality corrupted."""
    fold_number, condition = piece
    dataset, encoders = _open_frozen(bench, fold_number)
    test = Corrupted(dataset.subset(bench.folds[fold_number].test), *condition)
    description = bench.corrupted[fold_number][condition]
    store_features(bench, test, encoders[condition[0]], description, progress=False)


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


def _describe_corrupted(
    bench: Bench,
    dataset: PairedDataset,
    fold_number: int,
    fold: Fold,
    descriptions: dict[str, Description],
) -> dict[Condition, Description]:
    test = dataset.subset(fold.test)
    test_descriptions = {
        name: {**description, "samples": fingerprint(test, name)}
        for name, description in descriptions.items()
    }
    return {
        (modality, corruption, severity): {
            **test_descriptions[modality],
            "corruption": (corruption, severity),
            "fold": fold_number,
        }
        for modality, corruption, severity in conditions(bench)
    }


def _open_frozen(bench: Bench, fold_number: int) -> tuple[PairedDataset, Encoders]:
    """Return data set and frozen encoders, built once per process; weights come from the cache."""
    key = key_of([asdict(bench.cfg), fold_number, bench.features[fold_number]])
    if key not in _frozen_cache:
        dataset = dataset_of(bench)
        encoders = build_encoders(bench.cfg, dataset)
        _frozen_cache.clear()
        _frozen_cache[key] = dataset, freeze_all(bench, dataset, fold_number, encoders)[0]
    return _frozen_cache[key]
