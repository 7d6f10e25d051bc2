"""Encoders: `create_encoder("image", "timm/resnet18")` turns a batch into features.

| kind | names |
| --- | --- |
| image | `timm/<model>`, `torchvision/<model>` |
| text | `hf/<name or folder>`, `chars` |
| audio | `mel/<timm model>`, `mel/stats`, `torchaudio/<bundle or conformer>`, `hf/<name>` |
| vector | `vector/mlp`, `vector/identity` |
| sequence | `sequence/transformer` |
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fusionzoo.errors import FusionZooError, did_you_mean

from . import (  # noqa: F401
    audio_hugging_face,
    audio_mel,
    audio_torchaudio,
    image,
    text,
    vector,
)
from .base import ENCODERS, Encoder, Processor
from .init import initialise
from .lora import add_lora
from .weights import WeightsReport, load_weights

__all__ = [
    "ENCODERS",
    "Encoder",
    "Processor",
    "WeightsReport",
    "create_encoder",
    "initialise",
    "list_encoders",
    "load_weights",
    "pattern",
]

_log = logging.getLogger("fusionzoo")


def create_encoder(
    modality: str,
    name: str,
    *,
    kind: str | None = None,
    freeze: str = "none",
    lora: Mapping[str, Any] | None = None,
    weights: str | None = None,
    match: Literal["name", "position"] = "name",
    prefix: str = "",
    init: str = "default",
    assets: Path | None = None,
    **settings: Any,
) -> Encoder:
    """Build the encoder `name` for `modality`; further settings are those of its class.

    Settings:
        kind: image, text, audio, vector or sequence, if the modality's name is none of them
        freeze: part that is not trained: `none`, `all`, `all_but_last_<n>` (layers) or `norm`
        lora: train adapters in attention and freeze the rest; a mapping with rank `r`, `alpha`
            (scale is alpha / r), `dropout` and `targets`, the names of the layers to adapt
        weights: checkpoint to load, a file or `pkg:<distribution>/<path>`
        match: how the checkpoint's tensors are paired with the encoder's, by `name` or `position`
        prefix: stripped from the names in the checkpoint
        init: scheme that initialises all weights, such as `xavier_uniform`, before `weights` load;
            `default` is each layer's own
        assets: folder that `Encoder.save_assets` wrote; set when a saved model is loaded
    """
    entry, model = _find(name, kind or modality)
    parameters = ENCODERS[entry].parameters
    if assets is not None and "pretrained" in parameters:
        settings["pretrained"] = False  # the weights come from the model folder
    folder = {"assets": assets} if "assets" in parameters else {}
    encoder = ENCODERS.create(entry, *([model] if model else []), **settings, **folder)
    initialise(encoder, init)
    encoder.modality = modality
    if weights is not None:
        _log.info("%s: %s", modality, load_weights(encoder, weights, match=match, prefix=prefix))
    if lora is not None:
        _adapt(encoder, lora, freeze)
        settings |= {"lora": dict(lora)}
    encoder.freeze(freeze)
    spec = {"name": name, "kind": encoder.kind, "freeze": freeze, "weights": weights}
    spec |= {"match": match, "prefix": prefix, "init": init, **settings}
    if "pretrained" in parameters:
        spec.setdefault("pretrained", parameters["pretrained"].default)
    encoder.spec = spec
    return encoder


def _adapt(encoder: Encoder, lora: Mapping[str, Any], freeze: str) -> None:
    if freeze != "none":
        raise FusionZooError(
            f"encoders.{encoder.modality}: lora freezes the encoder itself;"
            f" leave freeze={freeze!r} out"
        )
    encoder.eval_modules = add_lora(encoder, lora, f"encoders.{encoder.modality}.lora")


def list_encoders(kind: str | None = None) -> list[str]:
    """Return the names of all encoders, or of one kind; `*` stands for a model's name."""
    return sorted({pattern(n) for n in ENCODERS if kind in (None, ENCODERS[n].family)})


def pattern(entry: str) -> str:
    """Return the name that users write: `hf-text` -> `hf/*`, any model; `vector/mlp` as it is."""
    fixed = entry == "chars" or "/" in entry
    return entry if fixed else f"{entry.partition('-')[0]}/*"


def _find(name: str, kind: str) -> tuple[str, str]:
    """Return the registry entry and the model within its family."""
    if name in ENCODERS and pattern(name) == name:
        return name, ""
    family, slash, model = name.partition("/")
    entry = f"hf-{kind}" if family == "hf" else family
    if family == "hf" and entry not in ENCODERS:
        raise FusionZooError(f"encoder {name!r} reads text or audio: set kind=, found {kind!r}")
    if not slash or not model or entry not in ENCODERS:
        families = list_encoders()
        near = did_you_mean(name, [f.replace("*", model or "*") for f in families])
        raise FusionZooError(f"unknown encoder {name!r}.{near} There are: {', '.join(families)}.")
    return entry, model
