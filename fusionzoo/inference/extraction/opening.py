"""Open the model and the data of an extraction: a model folder, or encoders without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fusionzoo.config import EmbedConfig, merge, read_yaml
from fusionzoo.datasets import DATASETS, PairedDataset
from fusionzoo.distributed.process_group import World
from fusionzoo.encoders.augment import refuse_augmentation
from fusionzoo.errors import FusionZooError
from fusionzoo.loading import load
from fusionzoo.model import FusionModel
from fusionzoo.plugins import load_plugins
from fusionzoo.training.build import open_dataset

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
    dataset, settings = _open_data(cfg, targets, dataset)
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


def _open_data(
    cfg: EmbedConfig, targets: dict[str, str] | None, dataset: PairedDataset | None
) -> tuple[PairedDataset, dict[str, Any]]:
    """Open the data set of the command line, else that of the run."""
    refuse_augmentation(cfg.data)
    recipe = Path(cfg.model) / "config.yaml"
    settings = dict(cfg.data)
    if not settings.get("name"):
        if not cfg.model or not recipe.is_file():
            subject = f"{cfg.model} is no run folder" if cfg.model else "there is no run folder"
            raise FusionZooError(f"{subject}, so --data.name must say what to embed")
        run = read_yaml(recipe)
        settings = merge(run["data"], settings)
        if run.get("plugins") and settings["name"] not in DATASETS:
            raise FusionZooError(
                f"unknown data set {settings['name']!r}: the run was trained with --plugins"
                f" {run['plugins']}, which is not imported unless it is given here too"
            )
    return open_dataset(settings, targets, dataset), settings
