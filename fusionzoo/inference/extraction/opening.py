"""Open the model and the data of an extraction: a model folder, or encoders without training."""

from __future__ import annotations

from typing import Any

from fusionzoo.config import EmbedConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.distributed.process_group import World
from fusionzoo.encoders.augment import refuse_augmentation
from fusionzoo.errors import FusionZooError
from fusionzoo.loading import load
from fusionzoo.model import FusionModel
from fusionzoo.plugins import load_plugins
from fusionzoo.training.build import open_dataset

from ..stored_data import data_settings_of
from .compose import compose


def open_model_and_data(
    cfg: EmbedConfig, world: World, model: FusionModel | None, dataset: PairedDataset | None
) -> tuple[FusionModel, PairedDataset, dict[str, Any]]:
    """Return the model on its device, the rows to embed, and the data set's settings.

    `model` and `dataset` replace those that `cfg` names.
    """
    load_plugins(cfg.plugins)
    is_composed = bool(cfg.encoders or cfg.fusion)
    if (cfg.model or model is not None) and is_composed:
        raise FusionZooError(
            "--encoders and --fusion compose a model without training: leave them out, or --model"
        )
    if not cfg.model and model is None and not is_composed:
        raise FusionZooError(
            "--model is missing: a model folder, or a run folder such as runs/a; or give --encoders"
            " and --fusion, to embed without training"
        )
    if model is None and cfg.model:
        model = load(cfg.model, world.device)
    # Labels are written as they stand, so only plain classes are read.
    targets: dict[str, str] | None = None if model is None or model.targets is None else {}
    refuse_augmentation(cfg.data)
    trained_on = None if model is None else model.trained_on
    settings = data_settings_of(cfg.data, cfg.model, trained_on)
    dataset = open_dataset(settings, targets, dataset)
    if model is None:
        model = compose(dataset, cfg.encoders, cfg.fusion)
    read = [name for name in dataset.modalities if name in model.modalities]
    if not read:
        raise FusionZooError(
            f"the model reads {', '.join(model.modalities)};"
            f" the data has {', '.join(dataset.modalities)}"
        )
    rows = dataset if cfg.split == "all" else dataset.split(cfg.split)
    if len(read) < len(dataset.modalities):
        rows = rows.only(read)  # the others need not be decoded
    return model.to(world.device), rows, settings
