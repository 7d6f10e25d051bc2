"""Encode the data once: the cached features that every strategy trains on."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache

import torch

from fusionzoo.config import BenchmarkConfig, from_tree, split_name
from fusionzoo.datasets import PairedDataset
from fusionzoo.distributed.process_group import seed_everything
from fusionzoo.encoders import Encoder, create_encoder
from fusionzoo.evaluation.robustness import Corrupted
from fusionzoo.training.build import choose_encoders

from ..bench import Bench, Condition, Description, conditions, open_bench
from ..executors import work
from .cache import feature_cache
from .encode import describe, encode, fingerprint
from .feeds import device, workers
from .pretrain import freeze


def build_encoders(cfg: BenchmarkConfig, dataset: PairedDataset) -> dict[str, Encoder]:
    """Build the encoders of the data set or of the recipe."""
    seed_everything(cfg.seed)
    built = {}
    for modality, given in choose_encoders(dataset, cfg.encoders).items():
        if modality not in dataset.modalities:
            dataset.select(modality)  # names what there is
        name, settings = split_name(given, f"encoders.{modality}")
        built[modality] = create_encoder(
            modality, name, **{"kind": dataset.modalities[modality], **settings}
        )
    return {name: built[name] for name in dataset.modalities}


def prepare(bench: Bench, dataset: PairedDataset, tokens: bool) -> None:
    """Fill in widths and, in probe mode, the features of every fold."""
    encoders = build_encoders(bench.cfg, dataset)
    bench.dims.update({name: encoder.dim for name, encoder in encoders.items()})
    if bench.cfg.mode == "finetune":
        bench.notes.append("Encoders were trained end to end, anew for every strategy and seed.")
        return
    for number, fold in enumerate(bench.folds):
        frozen = {name: freeze(bench, dataset, number, one) for name, one in encoders.items()}
        whole = {name: about(bench, dataset, one, tokens) for name, one in frozen.items()}
        test = dataset.subset(fold.test)
        part = {n: {**one, "samples": fingerprint(test, n)} for n, one in whole.items()}
        for name, encoder in frozen.items():
            for view in range(bench.cfg.views):
                store(bench, dataset, encoder, {**whole[name], "view": view}, progress=True)
        bench.features.append({name: {**one, "view": 0} for name, one in whole.items()})
        bench.corrupted.append(
            {
                one: {**part[one[0]], "corruption": one[1:], "fold": number}
                for one in conditions(bench)
            }
        )
    todo = [
        (number, condition)
        for number, found in enumerate(bench.corrupted)
        for condition, described in found.items()
        if not feature_cache().has(described)
    ]
    for _ in work(bench.cfg, bench, todo, encode_damage, "encode damage"):
        pass


def encode_damage(bench: Bench, piece: tuple[int, Condition]) -> None:
    """Encode the test samples of a fold, one modality damaged."""
    number, condition = piece
    dataset, frozen = _frozen(json.dumps(asdict(bench.cfg)), number)
    test = Corrupted(dataset.subset(bench.folds[number].test), *condition)
    store(bench, test, frozen[condition[0]], bench.corrupted[number][condition], progress=False)


@lru_cache(maxsize=1)
def _frozen(settings: str, fold: int) -> tuple[PairedDataset, dict[str, Encoder]]:
    """Build data and encoders once for each process; what was trained alone is on disk by now."""
    bench, dataset = open_bench(from_tree(BenchmarkConfig, json.loads(settings)))
    encoders = build_encoders(bench.cfg, dataset)
    frozen = {name: freeze(bench, dataset, fold, one) for name, one in encoders.items()}
    return dataset, frozen


def about(bench: Bench, dataset: PairedDataset, encoder: Encoder, tokens: bool) -> Description:
    """Describe an encoder's features of a data set."""
    # Where no strategy reads tokens, one per sample says that the modality is there.
    most = bench.cfg.max_tokens.get(encoder.modality) if tokens else 1
    return describe(encoder, dataset, max_tokens=most, precision=bench.cfg.precision)


def store(
    bench: Bench, dataset: PairedDataset, encoder: Encoder, described: Description, progress: bool
) -> None:
    """Make sure that features are in the cache."""
    feature_cache().get(
        described,
        lambda: encode(
            encoder,
            dataset,
            num_workers=workers(bench.cfg),
            max_tokens=described["max_tokens"],
            dtype=torch.bfloat16 if bench.cfg.precision == "bf16" else torch.float32,
            view=described.get("view", 0),
            device=device(bench.cfg),
            progress=progress,
        ),
    )
