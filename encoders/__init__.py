"""Encoders: `create_encoder("image", "timm/resnet18")` makes tokens, mask and pooled vector.

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
    """Build the encoder `name` for `modality`.

    `kind` (image, text, audio, vector, sequence) is the modality's name where that is one of these,
    else what the encoder is for. `weights` is a checkpoint, loaded by name or by position, `prefix`
    stripped; `init` a scheme for what is trained from scratch; `assets` a folder that
    `Encoder.save_assets` wrote. `freeze` is none, all, all_but_last_<n> (layers) or norm; `lora`
    (r, alpha, dropout, targets) trains adapters in attention and freezes the rest. Further settings
    are the family's, see `fusionzoo zoo`.
    """
    entry, model = _find(name, kind or modality)
    if "assets" in ENCODERS[entry].parameters:
        settings |= {"assets": assets}
    if assets is not None and "pretrained" in ENCODERS[entry].parameters:
        settings["pretrained"] = False  # the weights come from the model folder
    encoder = ENCODERS.create(entry, *([model] if model else []), **settings)
    settings.pop("assets", None)
    initialise(encoder, init)
    encoder.modality = modality
    if weights is not None:
        report = load_weights(encoder, weights, match=match, prefix=prefix)
        _log.info("%s: %s", modality, report)
    if lora is not None:
        if freeze != "none":
            raise FusionZooError(
                f"encoders.{modality}: lora freezes the encoder itself; leave freeze={freeze!r} out"
            )
        encoder.still = add_lora(encoder, lora, f"encoders.{modality}.lora")
        settings |= {"lora": dict(lora)}
    encoder.freeze(freeze)
    given = {"kind": encoder.kind, "freeze": freeze, "weights": weights, "match": match}
    given |= {"prefix": prefix, "init": init, **settings}
    if "pretrained" in ENCODERS[entry].parameters:
        given.setdefault("pretrained", ENCODERS[entry].parameters["pretrained"].default)
    encoder.spec = {"name": name, **given}
    return encoder


def list_encoders(kind: str | None = None) -> list[str]:
    """Return the names of all encoders, or of one kind; `*` stands for a model's name."""
    return sorted({pattern(n) for n in ENCODERS if kind in (None, ENCODERS[n].family)})


def pattern(entry: str) -> str:
    """`hf-text` -> `hf/*`, for families take a model's name; `vector/mlp` stays."""
    fixed = entry == "chars" or "/" in entry
    return entry if fixed else f"{entry.partition('-')[0]}/*"


def _find(name: str, kind: str) -> tuple[str, str]:
    """Return the registry entry and the model within its family."""
    if name in ENCODERS and pattern(name) == name:
        return name, ""
    family, slash, model = name.partition("/")
    entry = f"hf-{kind}" if family == "hf" else family
    if family == "hf" and entry not in ENCODERS:
        raise FusionZooError(f"encoder {name!r} reads text or audio: say kind=, found {kind!r}")
    if not slash or not model or entry not in ENCODERS:
        families = list_encoders()
        near = did_you_mean(name, [f.replace("*", model or "*") for f in families])
        raise FusionZooError(f"unknown encoder {name!r}.{near} There are: {', '.join(families)}.")
    return entry, model
