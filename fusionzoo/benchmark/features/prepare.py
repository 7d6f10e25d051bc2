"""Encode the data once: the cached features that every strategy trains on."""

from __future__ import annotations

import copy
from dataclasses import replace

from fusionzoo.datasets import PairedDataset
from fusionzoo.encoders import create_encoder

from ..bench import Bench, dataset_of
from ..clock import Clock
from ..executors import map_unordered
from .damaged import describe_corrupted, describe_damaged_train, encode_all_damaged
from .encoders import Encoders, build_encoders, freeze_all, store_all
from .pretrain import (
    TrainedAlone,
    augmentation_notes,
    freeze,
    is_cached,
    is_untrained,
    trained_alone_note,
)
from .speed import choose_workers


def prepare(
    bench: Bench, dataset: PairedDataset, tokens: bool, clock: Clock | None = None
) -> Bench:
    """Return the bench with feature widths and, in probe mode, cached features of every fold.

    `tokens`: whether any strategy reads tokens, not pooled vectors only.
    """
    clock = clock or Clock()
    encoders = build_encoders(bench.cfg, dataset)
    bench = replace(
        bench,
        dims={name: encoder.dim for name, encoder in encoders.items()},
        notes=(*bench.notes, *augmentation_notes(bench.cfg, encoders)),
    )
    bench = choose_workers(bench, dataset, encoders)
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
    trained: dict[str, list[TrainedAlone]] = {}
    features, corrupted, damaged_train = [], [], []
    for number in range(len(bench.folds)):
        frozen, trained_here = freeze_all(bench, dataset, number, encoders)
        for name, how in trained_here.items():
            trained.setdefault(name, []).append(how)
        descriptions = store_all(bench, dataset, frozen, tokens)
        features.append({name: {**d, "view": 0} for name, d in descriptions.items()})
        fold_of_encoders = bench, dataset, number, frozen, descriptions
        corrupted.append(describe_corrupted(*fold_of_encoders))
        damaged_train.append(describe_damaged_train(*fold_of_encoders))
    bench = replace(
        bench,
        notes=(
            *bench.notes,
            *(trained_alone_note(bench, encoders[name], folds) for name, folds in trained.items()),
        ),
        features=tuple(features),
        trained_alone=tuple(trained),
        corrupted=tuple(corrupted),
        damaged_train=tuple(damaged_train),
    )
    clock.lap("features")
    encode_all_damaged(bench)
    clock.lap("damaged features")
    return bench


def train_alone(bench: Bench, piece: tuple[int, str, bool]) -> None:
    """Train one encoder alone on a fold, and encode the data by it."""
    fold_number, name, tokens = piece
    dataset = dataset_of(bench)
    encoder = build_encoders(bench.cfg, dataset, name)[name]
    frozen, _ = freeze(bench, dataset, fold_number, encoder, progress=False)
    store_all(bench, dataset, {name: frozen}, tokens, progress=False)


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
    descriptions = store_all(bench, dataset, frozen, tokens=False)
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
