"""Encode the data once: the cached features that every strategy trains on."""

from __future__ import annotations

import copy
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

from ..bench import (
    Bench,
    Condition,
    Damaged,
    Description,
    conditions,
    damaged_rows,
    dataset_of,
)
from ..clock import Clock
from ..executors import map_unordered
from .feeds import device_of, loader_workers
from .pretrain import freeze, is_cached, is_untrained

Encoders = dict[str, Encoder]  # modality -> encoder
_frozen_cache: dict[str, tuple[PairedDataset, Encoders]] = {}  # of this process; one entry


def build_encoders(
    cfg: BenchmarkConfig, dataset: PairedDataset, only: str | None = None
) -> Encoders:
    """Build the encoders of the data set, or those of the settings: all, or that of one modality.

    Each has the same initial weights in both cases.
    """
    encoders = {}
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
    return {name: encoders[name] for name in dataset.modalities if name in encoders}


def prepare(
    bench: Bench, dataset: PairedDataset, tokens: bool, clock: Clock | None = None
) -> Bench:
    """Return the bench with feature widths and, in probe mode, cached features of every fold.

    `tokens`: whether any strategy reads tokens, not pooled vectors only.
    """
    clock = clock or Clock()
    encoders = build_encoders(bench.cfg, dataset)
    bench = replace(bench, dims={name: encoder.dim for name, encoder in encoders.items()})
    clock.lap("data and encoders")
    if bench.cfg.mode == "finetune":
        bench = _prepare_finetune(bench, dataset, encoders)
        clock.lap("features")
        return bench
    pieces = [
        (fold, name, tokens)
        for name, encoder in encoders.items()
        if is_untrained(encoder)
        for fold in range(len(bench.folds))
        if not is_cached(bench, dataset, fold, encoder)
    ]
    for _ in map_unordered(bench.cfg, bench, pieces, train_alone, "train encoders alone"):
        pass
    clock.lap("encoders without weights")
    notes, features, corrupted = list(bench.notes), [], []
    for number in range(len(bench.folds)):
        frozen, fold_notes = freeze_all(bench, dataset, number, encoders)
        notes += fold_notes
        descriptions = _store_all(bench, dataset, frozen, tokens)
        features.append({name: {**d, "view": 0} for name, d in descriptions.items()})
        corrupted.append(_describe_corrupted(bench, dataset, number, frozen, descriptions))
    bench = replace(bench, notes=tuple(notes), features=tuple(features), corrupted=tuple(corrupted))
    clock.lap("features")
    encode_all_corrupted(bench)
    clock.lap("damaged features")
    return bench


def train_alone(bench: Bench, piece: tuple[int, str, bool]) -> None:
    """Train one encoder alone on a fold, and encode the data by it."""
    fold_number, name, tokens = piece
    dataset = dataset_of(bench)
    encoder = build_encoders(bench.cfg, dataset, name)[name]
    frozen, _ = freeze(bench, dataset, fold_number, encoder, progress=False)
    _store_all(bench, dataset, {name: frozen}, tokens, progress=False)


def _prepare_finetune(bench: Bench, dataset: PairedDataset, encoders: Encoders) -> Bench:
    """Cache what the linear baseline reads: vectors as they are, and pretrained features."""
    readable = {
        name: create_encoder(name, "vector/identity", kind="vector", in_dim=width)
        for name, width in dataset_widths(dataset).items()
    }
    readable |= {
        name: encoder
        for name, encoder in encoders.items()
        if name not in readable and not is_untrained(encoder)
    }
    notes = ["Encoders were trained end to end, anew for every strategy and seed."]
    if len(readable) < len(encoders):
        lacking = ", ".join(name for name in encoders if name not in readable)
        notes.append(f"No linear baseline: the encoder of {lacking} has no pretrained weights.")
        return replace(bench, notes=(*bench.notes, *notes))
    frozen = {name: copy.deepcopy(readable[name]) for name in encoders}
    for encoder in frozen.values():
        encoder.freeze()
    descriptions = _store_all(bench, dataset, frozen, tokens=False)
    features = {name: {**d, "view": 0} for name, d in descriptions.items()}
    notes = [*bench.notes, *notes]
    return replace(bench, notes=tuple(notes), features=(features,) * len(bench.folds))


def dataset_widths(dataset: PairedDataset) -> dict[str, int]:
    """Return the width of each modality that is a vector."""
    return {
        name: int(encoder["in_dim"])
        for name, encoder in dataset.default_encoders.items()
        if name in dataset.modalities and dataset.modalities[name] == "vector"
    }


def _store_all(
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
    """Encode the damaged samples of every fold that are not in the cache."""
    missing: dict[str, tuple[int, Condition]] = {}
    for number, conditions_of_fold in enumerate(bench.corrupted):
        for condition, damaged in conditions_of_fold.items():
            if not feature_cache().has(damaged.description):
                missing.setdefault(key_of(damaged.description), (number, condition))
    pieces = list(missing.values())
    for _ in map_unordered(bench.cfg, bench, pieces, encode_corrupted, "encode damaged"):
        pass
    _frozen_cache.clear()


def encode_corrupted(bench: Bench, piece: tuple[int, Condition]) -> None:
    """Encode the damaged samples of a fold, one modality damaged in one way."""
    fold_number, condition = piece
    dataset, encoders = _open_frozen(bench, fold_number)
    damaged = bench.corrupted[fold_number][condition]
    samples = Corrupted(dataset.subset(damaged.rows), *condition)
    store_features(bench, samples, encoders[condition[0]], damaged.description, progress=False)


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
    frozen: Encoders,
    descriptions: dict[str, Description],
) -> dict[Condition, Damaged]:
    """Describe the damaged samples of a fold: those of all folds, where they share an encoder."""
    own = damaged_rows(bench, bench.folds[fold_number])
    shared = torch.cat([damaged_rows(bench, fold) for fold in bench.folds]).unique()
    if not conditions(bench):
        return {}
    rows = {name: own if is_untrained(encoder) else shared for name, encoder in frozen.items()}
    samples = {name: fingerprint(dataset.subset(rows[name]), name) for name in frozen}
    damaged = {}
    for condition in conditions(bench):
        name = condition[0]
        changed = {"samples": samples[name], "corruption": condition[1:]}
        damaged[condition] = Damaged({**descriptions[name], **changed}, rows[name])
    return damaged


def _open_frozen(bench: Bench, fold_number: int) -> tuple[PairedDataset, Encoders]:
    """Return data set and frozen encoders, built once per process; weights come from the cache."""
    key = key_of([asdict(bench.cfg), fold_number, bench.features[fold_number]])
    if key not in _frozen_cache:
        dataset = dataset_of(bench)
        encoders = build_encoders(bench.cfg, dataset)
        _frozen_cache.clear()
        _frozen_cache[key] = dataset, freeze_all(bench, dataset, fold_number, encoders)[0]
    return _frozen_cache[key]
