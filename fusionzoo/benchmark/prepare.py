"""Encode the data once: the cached features that every candidate trains on."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusionzoo.config import BenchmarkConfig, split_name
from fusionzoo.datasets import PairedDataset
from fusionzoo.encoders import Encoder, create_encoder, shared_checkpoints
from fusionzoo.encoders.augment import set_augmentation
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.metrics import row_mean
from fusionzoo.evaluation.robustness import CORRUPTIONS, corrupted
from fusionzoo.features.cache import feature_cache
from fusionzoo.features.encode import Compute, describe, encode, fingerprint, key_of
from fusionzoo.files import cache_root, make_cache_folder
from fusionzoo.fusion import create_fusion
from fusionzoo.ground.plugins import code_digest
from fusionzoo.ground.progress import progress_bar
from fusionzoo.machine.devices import seed_everything
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.structures import seed_of
from fusionzoo.training import run_folder
from fusionzoo.training.build import choose_encoders

from .bench import (
    GOES_ON,
    Bench,
    Condition,
    DamagedSamples,
    Description,
    conditions,
    damaged_rows,
    dataset_of,
    target_spec,
    tasks_of,
)
from .executors import check_time, map_unordered
from .feeds import BatchFeed, device_of, loader_workers
from .train import ModelInput, SingleTrainer, fit

Encoders = dict[str, Encoder]  # modality -> encoder
Piece = tuple[int, Condition, DamagedSamples]  # a fold's number, how samples are damaged, which
_frozen_cache: dict[str, tuple[PairedDataset, Encoders]] = {}  # of this process; one entry
BATCH = 64  # samples that are encoded at once


class TrainedAlone(NamedTuple):
    """How the encoder of one fold was trained."""

    samples: int
    score: float  # on the fold's validation samples


def freeze(
    bench: Bench, dataset: PairedDataset, fold_number: int, encoder: Encoder, progress: bool = True
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
        checkpoint = run_folder.read(path)
        frozen.load_state_dict(checkpoint["weights"])
        score = checkpoint["score"]
    else:
        total, desc = cfg.encoder_epochs, f"train {name} alone"
        bar = progress_bar(total=total, desc=desc, unit="epoch", disable=not progress)
        score = pretrain(bench, dataset, frozen, train, val, bar)
        bar.close()
        run_folder.write({"weights": frozen.state_dict(), "score": score}, path, goes_on=GOES_ON)
    frozen.freeze()
    return frozen, TrainedAlone(len(train), score)


def trained_alone_note(bench: Bench, encoder: Encoder, folds: Sequence[TrainedAlone]) -> str:
    """Return what the report says of an encoder that was trained on each of the folds."""
    metric = bench.metric
    where = f"in each of {len(folds)} {bench.fold_word}s " if bench.cross_validated else ""
    samples = _extent([f"{fold.samples:,}" for fold in sorted(folds)])
    scores = _extent([f"{x:.3f}" for x in sorted(metric.shown(fold.score) for fold in folds)])
    return (
        f"{encoder.modality}: {encoder.spec['name']} has no pretrained weights; {where}it was"
        f" trained alone on {samples} training samples ({bench.cfg.encoder_epochs} epochs, the best"
        f" kept by validation {bench.cfg.metric or 'loss'}, {metric.title} there {scores}), then"
        " frozen."
    )


def _extent(ordered: Sequence[str]) -> str:
    first, last = ordered[0], ordered[-1]
    return first if first == last else f"{first} to {last}"


def _path(bench: Bench, dataset: PairedDataset, fold_number: int, encoder: Encoder) -> Path:
    cfg = bench.cfg
    train, val = _rows(bench, fold_number, encoder.modality)
    key = describe(encoder, dataset, trained_on=train.tolist(), judged_on=val.tolist())
    key |= {"epochs": cfg.encoder_epochs, "batch_size": cfg.batch_size, "seed": pretrain_seed(cfg)}
    key |= {"optim": asdict(cfg.optim), "objective": [cfg.objective, cfg.targets]}
    key |= {part: bench.identity.get(part) for part in ("targets", "classes")}
    key |= {"metric": cfg.metric} if cfg.metric else {}  # it chooses the epoch
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
    if not any(map(is_untrained, augmented)):
        raise FusionZooError(
            "--data.augment: the encoders are frozen and their features cached once: --mode"
            " finetune trains the encoders"
        )
    return [f"Augmented were the samples on which encoders without weights were trained: {done}."]


def pretrain_seed(cfg: BenchmarkConfig) -> int:
    """Return a seed that no job uses.

    An encoder's features fit the head that it was trained under. A candidate whose head started
    from the same weights would know the labels before it sees any, even shuffled ones.
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
    tasks, weights = tasks.to(device_of(cfg)), bench.weights_of(train)
    trainer = SingleTrainer(model, cfg, targets[train], tasks=tasks, weights=weights)
    weights = bench.weights_of(val)
    (best,) = fit(trainer, feed_with_progress, targets, train, val, [cfg.seed], weights)
    model.load_state_dict(best.weights)
    model.eval()
    chunks = val.split(256)
    with torch.no_grad():
        logits = torch.cat([model(batch).logits.float().cpu() for batch in feed(chunks, -1)])
    return float(row_mean(tasks.cpu().scores(logits, bench.targets[val], weights), weights))


def build_encoders(
    cfg: BenchmarkConfig, dataset: PairedDataset, only: str | None = None
) -> Encoders:
    """Build the encoders of the data set, or those of the settings: all, or that of one modality.

    Each has the same initial weights in both cases.
    """
    encoders: Encoders = {}
    with shared_checkpoints():
        for modality, component in choose_encoders(dataset, cfg.encoders).items():
            if modality not in dataset.modalities:
                dataset.select(modality)  # raises an error that lists the modalities there are
            if only not in (None, modality):
                continue
            seed_everything(cfg.seed)
            name, settings = split_name(component, f"encoders.{modality}")
            settings = {"kind": dataset.modalities[modality], **settings}
            encoders[modality] = create_encoder(modality, name, **settings)
            if device_of(cfg).type == "cpu":  # convolutions are a third faster in this format
                encoders[modality].set_channels_last()
        set_augmentation(encoders.items(), cfg.data.get("augment"), dataset.modalities)
    return {name: encoders[name] for name in dataset.modalities if name in encoders}


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
    bench: Bench,
    dataset: PairedDataset,
    frozen: Encoders,
    tokens: bool,
    progress: bool = True,
) -> dict[str, Description]:
    """Encode what is not in the cache; return the entries."""
    # Where no candidate reads tokens, one per sample tells which samples have the modality.
    most = {name: bench.cfg.max_tokens.get(name) if tokens else 1 for name in frozen}
    descriptions = {
        name: describe(encoder, dataset, max_tokens=most[name], view=0)
        for name, encoder in frozen.items()
    }
    for name, encoder in frozen.items():
        store_features(bench, dataset, encoder, descriptions[name], progress)
    return descriptions


def store_features(
    bench: Bench,
    dataset: PairedDataset,
    encoder: Encoder,
    description: Description,
    progress: bool = True,
) -> None:
    """Encode a data set, unless its features are in the cache.

    After an OutOfTimeError the next call goes on after the last batch.
    """
    workers, device = loader_workers(bench.cfg), device_of(bench.cfg)
    feature_cache().get(
        description,
        lambda parts: encode(
            encoder,
            dataset,
            Compute(num_workers=workers, device=device, progress=progress),
            max_tokens=description["max_tokens"],
            after_batch=lambda _: check_time(),
            parts=parts,
        ),
    )


def describe_corrupted(
    bench: Bench,
    dataset: PairedDataset,
    fold_number: int,
    frozen: Encoders,
    descriptions: dict[str, Description],
) -> dict[Condition, DamagedSamples]:
    """Describe the damaged samples of a fold: those of all folds, where they share an encoder."""
    if not conditions(bench):
        return {}
    of_fold = damaged_rows(bench, bench.folds[fold_number])
    shared = torch.cat([damaged_rows(bench, fold) for fold in bench.folds]).unique()
    rows = {name: of_fold if is_untrained(encoder) else shared for name, encoder in frozen.items()}
    samples = {name: fingerprint(dataset.subset(rows[name]), name) for name in frozen}
    damaged = {}
    for condition in conditions(bench):
        name = condition[0]
        damaged[condition] = _entry(bench, descriptions[name], samples[name], rows[name], condition)
    return damaged


def _entry(
    bench: Bench, description: Description, samples: str, rows: Tensor, condition: Condition
) -> DamagedSamples:
    """Return the cache entry of these rows, whose fingerprint is `samples`, damaged in one way."""
    modality, *how = condition
    code = code_digest(CORRUPTIONS[bench.modalities[modality]][condition[1]])
    corruption = tuple(how if code is None else (*how, code))  # of a plug-in, its file's digest
    return DamagedSamples({**description, "samples": samples, "corruption": corruption}, rows)


def encode_all_damaged(bench: Bench) -> None:
    """Encode the damaged test samples of every fold that are not in the cache."""
    missing: dict[str, Piece] = {}
    for number, by_condition in enumerate(bench.corrupted):
        for condition, damaged in by_condition.items():
            if feature_cache().load(damaged.description) is None:
                missing.setdefault(key_of(damaged.description), (number, condition, damaged))
    label, listed = "encode damaged", list(missing.values())
    for _ in map_unordered(bench.cfg, bench, listed, encode_damaged, label):
        pass
    _frozen_cache.clear()


def encode_damaged(bench: Bench, piece: Piece) -> None:
    """Encode samples of which one modality is damaged in one way."""
    fold_number, condition, damaged = piece
    dataset, encoders = _open_frozen(bench, fold_number)
    samples = corrupted(dataset.subset(damaged.rows), *condition)
    store_features(bench, samples, encoders[condition[0]], damaged.description, progress=False)


def _open_frozen(bench: Bench, fold_number: int) -> tuple[PairedDataset, Encoders]:
    """Return data set and frozen encoders, built once per process; weights come from the cache."""
    key = key_of([asdict(bench.cfg), fold_number, bench.features[fold_number]])
    if key not in _frozen_cache:
        dataset = dataset_of(bench)
        encoders = build_encoders(bench.cfg, dataset)
        _frozen_cache.clear()
        _frozen_cache[key] = dataset, freeze_all(bench, dataset, fold_number, encoders)[0]
    return _frozen_cache[key]


def prepare(bench: Bench, dataset: PairedDataset, tokens: bool) -> Bench:
    """Return the bench with feature widths and, in probe mode, cached features of every fold.

    `tokens`: whether any candidate reads tokens, not pooled vectors only. After an OutOfTimeError
    what was encoded by then is in the cache.
    """
    encoders = build_encoders(bench.cfg, dataset)
    bench = replace(
        bench,
        dims={name: encoder.dim for name, encoder in encoders.items()},
        notes=(*bench.notes, *augmentation_notes(bench.cfg, encoders)),
    )
    if bench.cfg.mode == "finetune":
        return _prepare_finetune(bench, dataset, encoders)
    pieces = [
        (fold, name, tokens)
        for name, encoder in encoders.items()
        if is_untrained(encoder)
        for fold in range(len(bench.folds))
        if not _path(bench, dataset, fold, encoder).is_file()
    ]
    for _ in map_unordered(bench.cfg, bench, pieces, train_alone, "train encoders alone"):
        pass
    return _encode_folds(bench, dataset, encoders, tokens)


def _encode_folds(bench: Bench, dataset: PairedDataset, encoders: Encoders, tokens: bool) -> Bench:
    """Return the bench with the cached features of every fold, clean and corrupted."""
    trained: dict[str, list[TrainedAlone]] = {}
    features, corrupted = [], []
    for number in range(len(bench.folds)):
        check_time()
        frozen, trained_here = freeze_all(bench, dataset, number, encoders)
        for name, how in trained_here.items():
            trained.setdefault(name, []).append(how)
        descriptions = store_all(bench, dataset, frozen, tokens)
        features.append(descriptions)
        corrupted.append(describe_corrupted(bench, dataset, number, frozen, descriptions))
    notes = [trained_alone_note(bench, encoders[name], folds) for name, folds in trained.items()]
    return replace(
        bench,
        notes=(*bench.notes, *notes),
        features=tuple(features),
        corrupted=tuple(corrupted),
    )


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
        name: create_encoder(name, "vector/identity", kind=kind, in_dim=int(default["in_dim"]))
        for name, kind in dataset.modalities.items()
        if kind == "vector" and (default := dataset.default_encoders.get(name))
    }
    readable |= {
        name: encoder
        for name, encoder in encoders.items()
        if name not in readable and not is_untrained(encoder)
    }
    notes = ["Encoders were trained end to end, anew for every candidate and seed."]
    if len(readable) < len(encoders):
        lacking = ", ".join(name for name in encoders if name not in readable)
        notes.append(f"No linear baseline: the encoder of {lacking} has no pretrained weights.")
        return replace(bench, notes=(*bench.notes, *notes))
    frozen = {name: copy.deepcopy(readable[name]) for name in encoders}
    for encoder in frozen.values():
        encoder.freeze()
    descriptions = store_all(bench, dataset, frozen, tokens=False)
    notes = [*bench.notes, *notes]
    return replace(bench, notes=tuple(notes), features=(descriptions,) * len(bench.folds))
