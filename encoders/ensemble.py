"""Ensemble: the encoders of one modality that were trained apart; `--train.seeds` joins them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features

from .base import ENCODERS, Encoder, Processor


@ENCODERS.register("ensemble", hidden=True)
class EnsembleEncoder(Encoder):
    """Encode with several encoders of one kind; their features stand side by side.

    Settings:
        members: encoders, or the settings of each: its name, kind and so on; they read the same
            inputs
        assets: folder of a saved model, which all members read

    Shapes (D_n of the members):
        inputs: those of the first member
        returns: Features of (B, T, sum D_n), (B, T), (B, sum D_n)
    """

    def __init__(
        self,
        *,
        members: Sequence[Encoder | Mapping[str, Any]] = (),
        assets: Path | None = None,
    ) -> None:
        super().__init__()
        if not members:
            raise FusionZooError("encoder 'ensemble' is made by training: --train.seeds 3")
        encoders = [x if isinstance(x, Encoder) else _build(x, assets) for x in members]
        first = encoders[0]
        self.members = nn.ModuleList(encoders)
        self.kind, self.modality = first.kind, first.modality
        self.dim = sum(encoder.dim for encoder in encoders)
        self.one_length, self.masks_spectrogram = first.one_length, first.masks_spectrogram
        self.checkpoint_settings = first.checkpoint_settings
        self.spec = {
            "name": "ensemble",
            "kind": first.kind,
            "members": [dict(encoder.spec) for encoder in encoders],
        }

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        encoded: list[Features] = [member(inputs) for member in self.members]
        return Features(
            torch.cat([x.tokens for x in encoded], dim=-1),
            encoded[0].mask,
            torch.cat([x.pooled for x in encoded], dim=-1),
        )

    def processor(self, train: bool) -> Processor:
        return self.reader.processor(train)

    def save_assets(self, folder: Path) -> None:
        self.reader.save_assets(folder)

    @property
    def reader(self) -> Encoder:
        """The first member: all prepare values alike."""
        first = self.members[0]
        assert isinstance(first, Encoder)
        return first


def _build(settings: Mapping[str, Any], assets: Path | None) -> Encoder:
    from . import create_encoder  # which imports this module

    rest = {key: value for key, value in settings.items() if key != "name"}
    return create_encoder(settings["kind"], settings["name"], **rest, assets=assets)
