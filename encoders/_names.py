"""Suggest the prefix that the name of an encoder lacks: `timm/resnet18` for `resnet18`."""

from __future__ import annotations

import re
from pathlib import Path

from ._torchaudio import torchaudio_or_none
from .image import without

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def suggest_prefix(name: str, kind: str) -> str:
    """Return ` Did you mean 'timm/resnet18'?` where a library or folder has what `name` says.

    >>> suggest_prefix("resnet18", "image")
    " Did you mean 'timm/resnet18'?"
    """
    prefix = ""
    if kind in ("image", "text", "audio") and (Path(name).expanduser() / "config.json").is_file():
        prefix = "hf"
    elif kind == "image":
        prefix = _image_library(name)
    elif kind == "audio" and _in_timm(name):
        prefix = "mel"
    elif kind == "audio" and _is_bundle(name):
        prefix = "torchaudio"
    return f" Did you mean '{prefix}/{name}'?" if prefix else ""


def suggest_hub(name: str, kind: str) -> str:
    """Return ` Did you mean 'hf/...'?` for what may be a model on Hugging Face's hub.

    >>> suggest_hub("bert-base-uncased", "text"), suggest_hub("resnt18", "image")
    (" Did you mean 'hf/bert-base-uncased'?", '')
    """
    owned = kind in ("image", "audio") and "/" in name  # <owner>/<model>
    is_hub_name = HUB_NAME.fullmatch(name) is not None and (owned or kind == "text")
    return f" Did you mean 'hf/{name}'?" if is_hub_name else ""


def _image_library(name: str) -> str:
    import torchvision.models as zoo

    if _in_timm(name):
        return "timm"
    return "torchvision" if name in zoo.list_models(module=zoo) else ""


def _in_timm(name: str) -> bool:
    with without("wandb"):
        import timm

    return bool(timm.is_model(name.partition(".")[0]))


def _is_bundle(name: str) -> bool:
    torchaudio = torchaudio_or_none()
    return torchaudio is not None and hasattr(torchaudio.pipelines, name) and name.isupper()
