"""Encoders of images, texts and audio by the towers of one joint model: CLIP, SigLIP, CLAP, ...

Two modalities that name one checkpoint, `hf-clip/<name or folder>`, get its two towers, read from
disk once, and their pooled vectors lie in one space.

Shapes: `B` batch, `T` tokens, `D` width.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.errors import FusionZooError, explained
from fusionzoo.structures import Features

from .base import ENCODERS, Encoder, Processor, mean_pooled, unmasked
from .hf import (
    AnyTower,
    Tower,
    check_tower,
    find_source,
    load_auto,
    load_tokenizer,
    load_tower,
    model_class,
    read_json,
)
from .hf_audio import FeatureProcessor, LengthHandling, clap_inputs, longest_clip
from .hf_image import CheckpointImage, size_options, split_tokens
from .text import TokenizerProcessor

LONGEST_TEXT = 512  # tokens, of a tower that names no limit
PADDINGS = ("batch", "one", "full")  # of texts, the shortest first
PADDING = "text_padding.json"  # which of them, beside the configuration of a saved model


def tower_config(net: Tower | AnyTower, *names: str) -> Any:
    """Return the configuration of one tower."""
    if isinstance(net, Tower):
        return net.model.config
    config = net.joint_config
    return next((getattr(config, name) for name in names if hasattr(config, name)), config)


@ENCODERS.register("hf-clip-image", family="image", takes_model=True)
class JointImage(CheckpointImage):
    """Encode images with the vision tower of a joint model: CLIP, SigLIP, BLIP, AIMv2, ...

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
        config = load_auto("AutoConfig", source)
        check_tower(source, config, "image")
        takes = model_class(config).get_image_features
        self.set_checkpoint_processing(
            source, takes, assets=assets, augment=augment, size=size, fit=fit
        )
        self.net = load_tower(source, "image", pretrained, projection, self._sample())
        self.config = self.net.joint_config
        self.tower_config = tower_config(self.net, "vision_config", "image_config")
        forward = self.net.model.forward
        if isinstance(self.net, AnyTower):
            forward = self.net.model.get_image_features
        self.options = {}
        if self.own is None:
            self.options = size_options(self.tower_config, forward, self.preparation.size)
        self.measure()

    def _sample(self) -> dict[str, Tensor]:
        """Return a black image, as the tower takes it."""
        if self.own is None:
            return {"pixel_values": torch.zeros(1, 3, *self.preparation.size)}
        return self.own.tensors(self.own.collate([self.own.blank()]))

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        if self.own is not None:
            return self.own.encode(self.net, inputs)
        pixels = self.normalise(inputs["pixels"])
        tokens, pooled = self.net(pixel_values=pixels, **self.options)
        _, tokens = split_tokens(self.tower_config, tokens, pixels)
        return unmasked(tokens, pooled)


@ENCODERS.register("hf-clip-text", family="text", takes_model=True)
class JointText(Encoder):
    """Encode text with the text tower of a joint model: CLIP, SigLIP, CLAP, BLIP, ...

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
    cut_by = "max_length"

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
        check_tower(source, load_auto("AutoConfig", source), "text")
        self.tokenizer: Any = load_tokenizer(source)
        words = self.tokenizer("a", return_tensors="pt")
        sample = {name: words[name] for name in ("input_ids", "attention_mask")}
        self.net = load_tower(source, "text", pretrained, projection, sample)
        config = tower_config(self.net, "text_config")
        # RoBERTa's positions start after padding.
        offset = 2 if self.net.family in ("clap", "altclip") else 0
        positions = getattr(config, "max_position_embeddings", None) or LONGEST_TEXT
        self.positions = positions - offset
        self.max_length = min(max_length or self.positions, self.positions)
        if self.net.family in ("clip", "metaclip_2"):
            blank = self.processor(False).blank()
            self._check_end(source, blank["input_ids"], config.eos_token_id)
        self.eval()
        self.padding = "full" if self.net.family == "siglip" else "batch"
        if isinstance(self.net, AnyTower):
            self.max_length = min(self.max_length, self.positions - 1)
            self._read_padding(assets) if assets else self._find_padding(source)
        self.measure()

    @torch.no_grad()
    def _find_padding(self, source: str) -> None:
        """Find the padding with which a text gets the same vector alone and beside a longer one.

        Some need `one` padding token at least (AIMv2's causal mask is dropped without any), others
        the tower's `full` length, as SigLIP 2, which pools the last position.
        """
        prepare = self.processor(False)
        short = prepare("a")
        long = {"input_ids": short["input_ids"].repeat(3)[: self.max_length]}
        for self.padding in PADDINGS:
            alone = self.encode(prepare.collate([short])).pooled[0]
            beside = self.encode(prepare.collate([short, long])).pooled[0]
            if (alone - beside).abs().max() <= 1e-5 * max(1.0, float(alone.abs().max())):
                return
        raise FusionZooError(
            f"{source}: the text tower of a {self.net.family} answers otherwise beside longer texts"
        )

    def _read_padding(self, assets: Path) -> None:
        facts = read_json(assets / PADDING)
        self.padding = str(facts.get("padding")) if isinstance(facts, dict) else ""
        if self.padding not in PADDINGS:
            raise FusionZooError(f"{assets / PADDING}: padding is none of {', '.join(PADDINGS)}")

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
        if self.padding == "full":  # trained without attention mask, on texts of equal length
            pad_id = self.tokenizer.pad_token_id or 0
            missing = self.positions - ids.shape[1]
            padded = F.pad(ids.masked_fill(~mask, pad_id), (0, missing), value=pad_id)
            tokens, pooled = self.net(input_ids=padded)
            return Features(tokens[:, : ids.shape[1]], mask, pooled)
        extra = int(self.padding == "one")
        padded = F.pad(ids, (0, extra), value=self.tokenizer.pad_token_id or 0)
        tokens, pooled = self.net(
            input_ids=padded, attention_mask=F.pad(mask, (0, extra), value=False).long()
        )
        tokens = tokens[:, : ids.shape[1]]
        mask = mask if tokens.shape[1] == mask.shape[1] else mask[:, :1]  # one token, the pooled
        return mean_pooled(tokens, mask) if pooled is None else Features(tokens, mask, pooled)

    def save_assets(self, folder: Path) -> None:
        self.net.joint_config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        if isinstance(self.net, AnyTower):
            (folder / PADDING).write_text(json.dumps({"padding": self.padding}) + "\n")


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
        config = load_auto("AutoConfig", source)
        check_tower(source, config, "audio")
        if config.model_type != "clap":
            raise FusionZooError(
                f"{source} is a {config.model_type}, which answers sounds with text: hf/{model}"
                " takes the part that hears"
            )
        self.net = load_tower(source, "audio", pretrained, projection)
        self.extractor: Any = load_auto("AutoFeatureExtractor", source)
        self.rate = self.extractor.sampling_rate
        self.longest, self.windows = longest_clip(self.extractor, longest), windows
        with explained(f"{source}: its audio tower cannot encode a clip"):
            self.measure()

    def processor(self, train: bool) -> Processor:
        extractor, windows = self.extractor, self.windows
        return FeatureProcessor(
            extractor, self.rate, self.longest, LengthHandling(), num_windows=windows
        )

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        tokens, pooled = self.net(**clap_inputs(self.net.model, inputs["features"]))
        return unmasked(tokens, pooled)

    def save_assets(self, folder: Path) -> None:
        self.net.joint_config.save_pretrained(folder)
        self.extractor.save_pretrained(folder)
