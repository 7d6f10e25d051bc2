"""Open a model and data, and encode batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from fusionzoo.config import EvaluateConfig, PredictConfig
from fusionzoo.datasets import PairedBatchSampler, PairedDataset, make_sampler
from fusionzoo.distributed.process_group import World, pick_device
from fusionzoo.encoders.augment import refuse_augmentation
from fusionzoo.errors import FusionZooError
from fusionzoo.eval_mode import quiet
from fusionzoo.loading import load
from fusionzoo.model import FusionModel
from fusionzoo.structures import Batch, Features
from fusionzoo.training.build import open_dataset
from fusionzoo.training.data import num_workers
from fusionzoo.training.runs.speed.inference import as_float32, choose_for_inference
from fusionzoo.worker_memory import ReusedMemory

from .stored_data import data_settings_of

Settings = EvaluateConfig | PredictConfig


def open_model(cfg: Settings, model: FusionModel | None) -> FusionModel:
    device = pick_device(cfg.device)
    if model is not None:
        return model.to(device)
    if not cfg.model:
        raise FusionZooError("--model is missing: a model folder, or a run folder such as runs/a")
    return load(cfg.model, device, plugins=cfg.plugins)


def open_data(cfg: Settings, model: FusionModel, dataset: PairedDataset | None) -> PairedDataset:
    """Open the data, to evaluate with the columns of labels that the model was trained on."""
    refuse_augmentation(cfg.data)
    settings = cfg.data
    if dataset is None:
        settings = data_settings_of(cfg.data, cfg.model, model.trained_on)
    measured = (model.targets or ()) if isinstance(cfg, EvaluateConfig) else ()
    dataset = open_dataset(settings, {target.name: target.kind for target in measured}, dataset)
    if not set(model.modalities) & set(dataset.modalities):
        raise FusionZooError(
            f"the model reads {', '.join(model.modalities)};"
            f" the data has {', '.join(dataset.modalities)}"
        )
    return dataset if cfg.split == "all" else dataset.split(cfg.split)


@torch.no_grad()
def encode_batches(
    model: FusionModel, dataset: PairedDataset, cfg: Settings, label: str, *, by_length: bool
) -> Iterator[tuple[Batch, dict[str, Features]]]:
    """Yield every batch and its features; shows progress. The caller too needs `torch.no_grad`.

    `by_length` puts samples of similar length together, which is faster; else the data's order.
    """
    speed = choose_for_inference(cfg, model, dataset, cfg.out)
    for note in speed.notes:
        print(note)
    sampler = make_sampler(dataset, shuffle=False, pad=False)
    lengths = dataset.lengths() if by_length else None
    loader: Any = DataLoader(
        dataset,
        batch_sampler=PairedBatchSampler(sampler, speed.batch_size, lengths=lengths),
        collate_fn=ReusedMemory(model.collate()),
        num_workers=num_workers(speed.num_workers, World()),
    )
    progress = tqdm(total=len(dataset), desc=label, unit="sample", dynamic_ncols=True)
    with progress, quiet(model):
        for batch in loader:
            batch = batch.to(model.device)
            with speed.autocast(model.device):
                features = model.encode(batch)
            yield batch, {name: as_float32(x) for name, x in features.items()}
            progress.update(len(batch.ids))
    failures = dataset.failures()
    if failures:
        sample_id, modality = failures[0]
        print(f"warning: {len(failures)} values could not be decoded: {sample_id} ({modality}) ...")
