"""What an extraction depends on: digests of model and data, and what a file says of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from fusionzoo.config import EmbedConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.features.encode import key_of, weights_hash
from fusionzoo.model import FusionModel
from fusionzoo.sources import code_digest
from fusionzoo.version import __version__

from .vectors import PROBABILITIES, WEIGHTS

FORMAT = 1  # of the parts; raised when the same settings give other data


def model_digest(model: FusionModel) -> str:
    """Return the hash of a model's weights, settings and, of a plugin's components, code."""
    parts = [*model.encoders.values(), model.fusion]
    code = [code_digest(type(part)) for part in parts]
    return key_of([weights_hash(model), json.dumps(model.spec, sort_keys=True, default=str), code])


def parts_key(
    about: Mapping[str, Any], data: Mapping[str, str], cfg: EmbedConfig, device: torch.device
) -> dict[str, str]:
    """Return what parts must share to make one file: model, data by part, and settings, hashed."""
    chosen = ("row_group", "batch_size", "dtype", "normalise", "matryoshka", "probabilities")
    settings = {
        name: getattr(cfg, name) for name in (*chosen, "weights", "amp", "compile", "split")
    }
    settings |= {"format": FORMAT, "device": device.type}
    settings |= {name: about[name] for name in ("fusionzoo", "torch")}
    return {
        "model": str(about["model_digest"]),
        **data,
        "settings": key_of(settings),
    }


def describe(
    cfg: EmbedConfig,
    settings: Mapping[str, Any],
    model: FusionModel,
    dataset: PairedDataset,
    data: Mapping[str, str],
    widths: Mapping[str, int],
) -> dict[str, Any]:
    """Return what a file says of itself, under the key `fusionzoo` of its metadata.

    `data` identifies the data set, see `features.identity`.
    """
    unit = {name for name in widths if cfg.normalise or name.startswith("aligned_")}
    vectors = {
        name: {"width": width, "normalised": name in unit}
        for name, width in widths.items()
        if name not in (PROBABILITIES, WEIGHTS)
    }
    about: dict[str, Any] = {
        "model": cfg.model,
        "data": dict(settings),
        "split": cfg.split,
        "rows": len(dataset),
        "fusionzoo": __version__,
        "torch": str(torch.__version__),
        "model_digest": model_digest(model),
        "data_fingerprint": key_of(data),
        "modalities": model.modalities,
        "encoders": {name: encoder.spec for name, encoder in model.named_encoders()},
        "fusion": model.spec["fusion"],
        "vectors": vectors,
        "dtype": cfg.dtype,
        "amp": cfg.amp,
    }
    if cfg.probabilities:
        about["classes"] = model.classes
    return json.loads(json.dumps(about, default=str))
