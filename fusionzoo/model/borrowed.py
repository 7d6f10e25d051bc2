"""Encoders whose weights a model folder leaves with their source: a package, a hub.

config.json names each with the digest of its weights. `load` builds it from its settings, as
training did, and refuses other weights than those that the model was trained with.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusionzoo.encoders import Encoder, create_encoder, origin_of, shared_checkpoints
from fusionzoo.errors import FusionZooError, located

from .folder import FolderConfig

_log = logging.getLogger("fusionzoo")


@shared_checkpoints()
def find_borrowed(
    encoders: Mapping[str, Encoder], settings: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """Return modality -> digest of the encoders that `settings` give again, bit for bit."""
    borrowed, reasons = {}, []
    for name, encoder in encoders.items():
        try:
            built = _build(name, settings[name])
        except FusionZooError as error:
            reasons.append(f"{name}: {error}")
            continue
        if not origin_of(built)["source"]:
            reasons.append(f"{name}: trained from scratch")
        elif (digest := _digest(built)) != _digest(encoder):
            reasons.append(f"{name}: training changed its weights")
        else:
            borrowed[name] = digest
    if not borrowed:
        raise FusionZooError(f"borrow=True: no encoder can be left out ({'; '.join(reasons)})")
    for reason in reasons:
        _log.info("kept in the folder: %s", reason)
    return borrowed


@shared_checkpoints()
def read_borrowed(
    config: FolderConfig, folder: Path, replaced: Collection[str]
) -> dict[str, Encoder]:
    """Build the encoders that a folder borrows, but for those that are `replaced`."""
    encoders = {}
    for name in config.borrowed.keys() - {*replaced}:
        problem = f"{folder} borrows the weights of its encoder of {name!r}"
        with located(problem):
            encoders[name] = _build(name, config.encoders[name])
        if _digest(encoders[name]) != config.borrowed[name]:
            raise FusionZooError(
                f"{problem}; what {origin_of(encoders[name])['source']} holds today are others"
            )
    return encoders


def stored_part(model: nn.Module, borrowed: Collection[str]) -> nn.Module:
    """Return what a folder holds of a model: all but the encoders that it borrows."""
    if not borrowed:
        return model
    parts = dict(model.named_children())
    kept = {name: x for name, x in parts["encoders"].named_children() if name not in borrowed}
    return nn.ModuleDict({**parts, "encoders": nn.ModuleDict(kept)})


def _build(name: str, settings: Mapping[str, Any]) -> Encoder:
    source = settings.get("weights") or settings["name"].partition("/")[2]
    if source and Path(source).exists():
        raise FusionZooError(f"its weights are those of a file of this machine, {source}")
    with torch.random.fork_rng():  # first weights are drawn, then replaced
        return create_encoder(name, **settings)


def _digest(encoder: Encoder) -> str:
    """Return the SHA-256 of an encoder's weights and buffers, with their names and shapes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(encoder.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
