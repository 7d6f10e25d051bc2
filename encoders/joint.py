"""Encoders of images, texts and audio by the towers of one joint model: CLIP, SigLIP, CLAP.

Two modalities that name one checkpoint, `hf-clip/<name or folder>`, get its two towers, read from
disk once, and their pooled vectors lie in one space.

Shapes: `B` batch, `T` tokens, `D` width.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features, masked_mean

from .base import ENCODERS, Encoder, Processor
from .hf import Tower, find_source, load_auto, load_tokenizer, load_tower
from .hf_audio import FeatureProcessor, Layout, clap_inputs, longest_clip
from .hf_image import CheckpointImage, size_options, split_tokens
from .text import TokenizerProcessor


@ENCODERS.register("hf-clip-image", family="image", takes_model=True)
class JointImage(CheckpointImage):
    """Encode images with the vision tower of a joint model: CLIP, MetaCLIP 2 or SigLIP.

    The pooled vector is that of transformers' `get_image_features`; tokens are projected too. Of a
    text or audio tower of the same checkpoint only the space is shared, no weights.

    Settings:
        pretrained: load the model's weights; otherwise its configuration with random weights
        projection: project into the space that the towers share; SigLIP's vision tower has no
            separate projection, so this changes nothing there
        size: side of the square input in pixels, instead of the checkpoint's
        fit: instead of the checkpoint's, `crop` the centre after resizing the shorter side, `pad`
            to a square with white, or `squash` to a square
        augment: in training only, a random `crop` of 60 to 100 % of the area; `crop_flip` also
            mirrors half of the images
        assets: folder that `save_assets` wrote; set when a saved model is loaded

    Shapes: inputs["pixels"] uint8 (B, 3, H, W) -> (B, T, D), (B, T), (B, D) with T patches and
        D = config.projection_dim, or the tower's width without projection
    """

    def __init__(
        self,
        model: str,
        *,
        pretrained: bool = True,
        projection: bool = True,
        size: int | None = None,
        fit: Literal["crop", "pad", "squash"] | None = None,
        augment: Literal["none", "crop", "crop_flip"] = "none",
        assets: Path | None = None,
    ) -> None:
        super().__init__()
        source = find_source(model, assets)
        self.net: Tower = load_tower(source, "image", pretrained, projection)
        self.config = self.net.joint_config
        self.set_checkpoint_processing(
            source, verify=assets is None, augment=augment, size=size, fit=fit
        )
        self.options = size_options(self.net.model, self.preparation.size)
        self.measure()

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        pixels = self.normalise(inputs["pixels"])
        tokens, pooled = self.net(pixel_values=pixels, **self.options)
        _, tokens = split_tokens(self.net.model.config, tokens, pixels)
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        return Features(tokens, mask, masked_mean(tokens, mask) if pooled is None else pooled)


@ENCODERS.register("hf-clip-text", family="text", takes_model=True)
class JointText(Encoder):
    """Encode text with the text tower of a joint model: CLIP, MetaCLIP 2, SigLIP or CLAP.

    The pooled vector is that of transformers' `get_text_features`; tokens are projected too. SigLIP
    reads texts padded to the tower's length, as it was trained.

    Settings:
        pretrained: load the model's weights; otherwise its configuration with random weights
        projection: project into the space that the towers share
        max_length: tokens kept of a text, at most as many as the tower can take; null: as many
        assets: folder that `save_assets` wrote; set when a saved model is loaded

    Shapes: inputs["input_ids"] (B, T), inputs["attention_mask"] bool (B, T) -> Features of
        (B, T, D), (B, T), (B, D) with D = config.projection_dim, or the tower's width
    """

    kind = "text"

    def __init__(
        self,
        model: str,
        *,
        pretrained: bool = True,
        projection: bool = True,
        max_length: int | None = None,
        assets: Path | None = None,
    ) -> None:
        super().__init__()
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the data loader forks
        source = find_source(model, assets)
        self.net: Tower = load_tower(source, "text", pretrained, projection)
        self.tokenizer: Any = load_tokenizer(source)
        config = self.net.model.config
        offset = 2 if self.net.family == "clap" else 0  # RoBERTa's positions start after padding
        self.positions = config.max_position_embeddings - offset
        self.max_length = min(max_length or self.positions, self.positions)
        prepare = self.processor(False)
        if self.net.family in ("clip", "metaclip_2"):
            self._check_end(source, prepare.blank()["input_ids"], config.eos_token_id)
        self.eval()
        with torch.no_grad():
            self.dim = self.encode(prepare.collate([prepare.blank()])).pooled.shape[1]
        self.train()

    @staticmethod
    def _check_end(source: str, blank: Tensor, end: int) -> None:
        """Require the token whose output CLIP pools; 2 is what old checkpoints say of any."""
        if end != 2 and not bool((blank == end).any()):
            raise FusionZooError(
                f"{source}: its tokenizer does not end a text with the token {end}, which the model"
                " pools (eos_token_id of text_config in config.json)"
            )

    def processor(self, train: bool) -> Processor:
        return TokenizerProcessor(self.tokenizer, self.max_length)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        if self.net.family == "siglip":  # trained without attention mask, on texts of equal length
            pad_id = self.tokenizer.pad_token_id or 0
            missing = self.positions - ids.shape[1]
            padded = F.pad(ids.masked_fill(~mask, pad_id), (0, missing), value=pad_id)
            tokens, pooled = self.net(input_ids=padded)
            return Features(tokens[:, : ids.shape[1]], mask, pooled)
        tokens, pooled = self.net(input_ids=ids, attention_mask=mask.long())
        return Features(tokens, mask, pooled)

    def save_assets(self, folder: Path) -> None:
        self.net.joint_config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


@ENCODERS.register("hf-clip-audio", family="audio", takes_model=True)
class JointAudio(Encoder):
    """Encode audio with the audio tower of a joint model: CLAP.

    The pooled vector is that of transformers' `get_audio_features`; tokens are projected too. Clips
    are repeated to fill the model's window, or cropped to it.

    Settings:
        pretrained: load the model's weights; otherwise its configuration with random weights
        projection: project into the space that the towers share
        longest: length in s beyond which a clip is cropped, at most the model's window
        windows: in evaluation, windows of that length taken evenly from a longer clip, whose tokens
            stand one after another and whose pooled vectors are averaged; 1 takes the middle
        assets: folder that `save_assets` wrote; set when a saved model is loaded

    Shapes: inputs["features"] float (B, C, frames, bands), inputs["lengths"] (B,) -> (B, T, D),
        (B, T), (B, D) with D = config.projection_dim, or the tower's width
    """

    kind = "audio"

    def __init__(
        self,
        model: str,
        *,
        pretrained: bool = True,
        projection: bool = True,
        longest: float = 20.0,
        windows: int = 1,
        assets: Path | None = None,
    ) -> None:
        super().__init__()
        source = find_source(model, assets)
        self.net: Tower = load_tower(source, "audio", pretrained, projection)
        self.extractor: Any = load_auto("AutoFeatureExtractor", source)
        self.rate = self.extractor.sampling_rate
        self.longest, self.windows = longest_clip(self.extractor, longest), windows
        config = self.net.joint_config
        self.dim = config.projection_dim if projection else self.net.model.config.hidden_size

    def processor(self, train: bool) -> Processor:
        extractor, windows = self.extractor, self.windows
        return FeatureProcessor(extractor, self.rate, self.longest, Layout(), num_windows=windows)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        tokens, pooled = self.net(**clap_inputs(self.net.model, inputs["features"]))
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        return Features(tokens, mask, pooled)

    def save_assets(self, folder: Path) -> None:
        self.net.joint_config.save_pretrained(folder)
        self.extractor.save_pretrained(folder)
