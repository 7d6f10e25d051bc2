"""Encoders: `create_encoder("image", "timm/resnet18")` turns a batch into features.

| kind | names |
| --- | --- |
| image | `timm/<..>`, `torchvision/<..>`, `hf/<..>`, `hf-clip/<..>`, `open_clip/<..>` |
| image, as clips | `hf-video/<name or folder>`, `torchvision-video/<model>` |
| text | `hf/<name or folder>`, `hf-clip/<joint model>`, `open_clip/<..>`, `chars` |
| audio | `mel/<..>`, `mel/stats`, `whisper/<..>`, `torchaudio/<..>`, `hf/<..>`, `hf-clip/<..>` |
| vector | `vector/mlp`, `vector/identity` |
| sequence | `sequence/transformer`, `hf/<..>` |
| tabular | `tabular/mlp`, `tabular/ft-transformer` |
"""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.ground.registry import import_siblings

from ._torchaudio import torchaudio_or_none
from .base import ENCODERS, Encoder, EncoderEntry, Item, Processor, initialise, norms, varies
from .hf import read_json, shared_checkpoints
from .image import TIMM_CONFIG, in_timm, timm_library, torchvision_models
from .open_clip import CONFIG as OPEN_CLIP_CONFIG
from .open_clip import library as open_clip_library
from .weights import WeightsReport, add_lora, load_weights, origin_of
from .wrapped import WRAPPED, adopt, wrap_encoder

__all__ = [
    "ENCODERS",
    "WRAPPED",
    "Encoder",
    "EncoderEntry",
    "Item",
    "Processor",
    "WeightsReport",
    "adopt",
    "create_encoder",
    "entry_of",
    "initialise",
    "list_encoders",
    "load_weights",
    "origin_of",
    "shared_checkpoints",
    "torchaudio_or_none",
    "varies",
    "wrap_encoder",
]

import_siblings(__path__, __name__)  # what registers encoders
_log = logging.getLogger("fusionzoo")
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


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
        kind: image, text, audio, vector, sequence or tabular, unless that is the modality's name
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
    if ENCODERS[entry].name != entry:  # an old name
        name = ENCODERS[entry].pattern.replace("*", model)
    parameters = ENCODERS[entry].parameters
    if assets is not None and "pretrained" in parameters:
        settings["pretrained"] = False  # the weights come from the model folder
    folder = {"assets": assets} if "assets" in parameters else {}
    encoder = ENCODERS.create(entry, *([model] if model else []), **settings, **folder)
    initialise(encoder, init)
    encoder.modality = modality
    if not hasattr(encoder, "kind"):
        encoder.kind = ENCODERS[entry].family
    if weights is not None:
        report = load_weights(encoder, weights, match=match, prefix=prefix)
        is_partial = report.missing or report.other_shape
        _log.log(logging.WARNING if is_partial else logging.INFO, "%s: %s", modality, report)
    if lora is not None:
        settings["lora"] = _adapt(encoder, lora, freeze, is_new=assets is None)
    encoder.freeze(freeze)
    spec = {"name": name, "kind": encoder.kind, "freeze": freeze, "weights": weights}
    spec |= {"match": match, "prefix": prefix, "init": init, **settings}
    if "pretrained" in parameters:
        spec.setdefault("pretrained", parameters["pretrained"].default)
    encoder.spec = spec
    return encoder


def _adapt(
    encoder: Encoder, lora: Mapping[str, Any], freeze: str, *, is_new: bool
) -> dict[str, Any]:
    """Add adapters to an encoder; return their settings."""
    if freeze != "none":
        raise FusionZooError(
            f"encoders.{encoder.modality}: lora freezes the encoder itself;"
            f" leave freeze={freeze!r} out"
        )
    settings = add_lora(encoder, lora, f"encoders.{encoder.modality}.lora", is_new=is_new)
    encoder.eval_modules = norms(encoder)
    _log.info("%s: adapters beside %s", encoder.modality, ", ".join(settings["targets"]))
    return settings


def entry_of(name: str, kind: str | None) -> EncoderEntry | None:
    """Return what is registered for a name, also `timm/...`, or `hf/...` of a kind, if anything."""
    prefix = name.partition("/")[0]
    names = (name, f"{prefix}-{kind}", prefix)
    return next((ENCODERS[x] for x in names if x in ENCODERS), None)


def list_encoders(pattern: str | None = None, /, *, kind: str | None = None) -> list[str]:
    """Return the names of all encoders, or of those that match, sorted; `timm/*` is one name.

    `pattern` is a shell pattern, or a kind: image, text, audio, vector, sequence or tabular. One of
    a library's models, such as `timm/vit*`, returns these (timm, mel, torchvision, open_clip).

    >>> list_encoders("v*", kind="vector"), list_encoders("timm/resnet10t*")
    (['vector/identity', 'vector/mlp'], ['timm/resnet10t'])
    """
    names = ENCODERS.names(pattern, kind)
    prefix, _, model = (pattern or "").partition("/")
    if names or f"{prefix}/*" not in ENCODERS.names(None, kind):
        return names
    return [f"{prefix}/{name}" for name in fnmatch.filter(sorted(_models_of(prefix)), model)]


def _models_of(prefix: str) -> list[str]:
    """Return the models that a library lists; nothing lists those of `hf` and others."""
    zoo = torchvision_models()
    if prefix in ("timm", "mel"):
        return list(timm_library().list_models())
    if prefix == "open_clip":
        return list(open_clip_library().list_models())
    modules = {"torchvision": zoo, "torchvision-video": zoo.video}
    return zoo.list_models(module=modules[prefix]) if prefix in modules else []


def _find(name: str, kind: str) -> tuple[str, str]:
    """Return the registry entry and the name of the model that it takes, if any."""
    entry = _match(name, kind)
    if entry is None and name in ENCODERS and not ENCODERS[name].takes_model:
        entry = name, ""  # `my_module:MyEncoder`, or of an installed plugin, which `in` imports
    entry = entry or _match(name, kind)
    if entry is not None:
        return entry
    entries = [ENCODERS[key] for key in ENCODERS]
    prefix, _, model = name.partition("/")
    kinds = sorted({x.family for x in entries if x.takes_model and x.prefix == prefix})
    if model and kinds:
        raise FusionZooError(
            f"encoder {name!r} reads {' or '.join(kinds)}: set kind=, found {kind!r}"
        )
    near = _suggest_prefix(name, kind)
    if model and not did_you_mean(prefix, [x.prefix for x in entries]):
        near = near or _suggest_hub(name, kind)  # <owner>/<model>
    near = near or did_you_mean(name, [x.pattern.replace("*", model or "*") for x in entries])
    near = near or _suggest_hub(name, kind)
    raise FusionZooError(
        f"unknown encoder {name!r}.{near} There are: {', '.join(list_encoders())}."
    )


def _match(name: str, kind: str) -> tuple[str, str] | None:
    """Find a name among what is registered; `hf/<model>` is `hf-text`, `hf-audio`, ... by kind."""
    if ENCODERS.registered(name) and not ENCODERS[name].takes_model:
        return name, ""
    prefix, _, model = name.partition("/")
    for entry in (f"{prefix}-{kind}", prefix) if model else ():
        if ENCODERS.registered(entry) and ENCODERS[entry].takes_model:
            return entry, model
    return None


# ---- the prefix that a name lacks: `timm/resnet18` for `resnet18`


def _suggest_prefix(name: str, kind: str) -> str:
    """Return ` Did you mean 'timm/resnet18'?` where a library or folder has what `name` says.

    >>> _suggest_prefix("resnet18", "image"), _suggest_prefix("r3d_18", "image")
    (" Did you mean 'timm/resnet18'?", " Did you mean 'torchvision-video/r3d_18'?")
    """
    prefix = ""
    if kind in ("image", "text") and (Path(name).expanduser() / OPEN_CLIP_CONFIG).is_file():
        prefix = "open_clip"
    elif (
        kind in ("image", "text", "audio", "sequence")
        and (Path(name).expanduser() / "config.json").is_file()
    ):
        prefix = "timm" if kind == "image" and _is_saved_by_timm(name) else "hf"
    elif kind == "image":
        prefix = _image_library(name)
    elif kind == "audio" and in_timm(name):
        prefix = "mel"
    elif kind == "audio" and _is_bundle(name):
        prefix = "torchaudio"
    return f" Did you mean '{prefix}/{name}'?" if prefix else ""


def _suggest_hub(name: str, kind: str) -> str:
    """Return ` Did you mean 'hf/...'?` for what may be a model on Hugging Face's hub.

    >>> _suggest_hub("bert-base-uncased", "text"), _suggest_hub("resnt18", "image")
    (" Did you mean 'hf/bert-base-uncased'?", '')
    """
    owned = kind in ("image", "audio") and "/" in name  # <owner>/<model>
    is_hub_name = HUB_NAME.fullmatch(name) is not None and (owned or kind == "text")
    return f" Did you mean 'hf/{name}'?" if is_hub_name else ""


def _image_library(name: str) -> str:
    zoo = torchvision_models()
    if in_timm(name):
        return "timm"
    if name in zoo.list_models(module=zoo.video):
        return "torchvision-video"
    return "torchvision" if name in zoo.list_models(module=zoo) else ""


def _is_saved_by_timm(folder: str) -> bool:
    config = read_json(Path(folder).expanduser() / TIMM_CONFIG)
    return isinstance(config, dict) and "architecture" in config and "model_type" not in config


def _is_bundle(name: str) -> bool:
    torchaudio = torchaudio_or_none()
    return torchaudio is not None and hasattr(torchaudio.pipelines, name) and name.isupper()
