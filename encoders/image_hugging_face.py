"""Hugging Face's image encoders: ViT, DINOv2, SigLIP's vision tower, Swin, ConvNeXt, ...

Shapes: `B` batch, `H` x `W` pixels, `T` cells of the final feature map or patches, `D` width.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features, masked_mean

from ._hugging_face import aligned, find_source, load_auto, load_model
from ._pictures import CheckpointImage, size_options, split_tokens
from ._towers import load_tower
from .base import ENCODERS


@ENCODERS.register("hf-image", family="image", takes_model=True)
class HFImage(CheckpointImage):
    """Encode images with a Hugging Face vision model: ViT, DINOv2, SigLIP, Swin, ConvNeXt, ...

    Pictures are prepared as the checkpoint's own image processor does, by its size, mean, std,
    resizing and crop. Of CLIP and SigLIP the vision tower is used, before the projection.

    Settings:
        pretrained: load the model's weights; otherwise its configuration with random weights
        size: side of the square input in pixels, instead of the checkpoint's
        mean: of pixels in [0, 1], per channel, for normalising, instead of the checkpoint's
        std: of pixels in [0, 1], per channel, for normalising, instead of the checkpoint's
        interpolation: for resizing, such as `bilinear` or `bicubic`, instead of the checkpoint's
        fit: instead of the checkpoint's, `crop` the centre after resizing the shorter side, `pad`
            to a square with white, or `squash` to a square
        augment: in training only, a random `crop` of 60 to 100 % of the area; `crop_flip` also
            mirrors half of the images
        pooling: `auto` is the model's own pooled vector, but the class token where that passes a
            tanh layer, which few checkpoints hold; `cls` the class token; `mean` of the tokens
        assets: folder that `save_assets` wrote; set when a saved model is loaded

    Shapes: (T = patches without class and register tokens, or cells; D = config.hidden_size)
        inputs["pixels"]: uint8 (B, 3, H, W)
        returns: Features of (B, T, D), (B, T), (B, D)
    """

    def __init__(
        self,
        model: str,
        *,
        pretrained: bool = True,
        size: int | None = None,
        mean: tuple[float, float, float] | None = None,
        std: tuple[float, float, float] | None = None,
        interpolation: str | None = None,
        fit: Literal["crop", "pad", "squash"] | None = None,
        augment: Literal["none", "crop", "crop_flip"] = "none",
        pooling: Literal["auto", "cls", "mean"] = "auto",
        assets: Path | None = None,
    ) -> None:
        super().__init__()
        if pooling not in ("auto", "cls", "mean"):
            raise FusionZooError(f"pooling={pooling!r} is none of auto, cls, mean")
        self.pooling = pooling
        source = find_source(model, assets)
        config = load_auto("AutoConfig", source)
        if hasattr(config, "vision_config"):
            tower = load_tower(source, "image", pretrained, projects=False)
            self.net, self.config = tower.model, tower.joint_config
        else:
            self.net = aligned(load_model(source, pretrained))
            self.config = self.net.config
        if isinstance(getattr(getattr(self.net, "pooler", None), "dense", None), nn.Linear):
            self.net.pooler = None
        self.set_checkpoint_processing(
            source,
            verify=assets is None,
            augment=augment,
            size=size,
            mean=mean,
            std=std,
            interpolation=interpolation,
            fit=fit,
        )
        self.options = size_options(self.net, self.settings[0])
        self.measure()

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        pixels = self.normalise(inputs["pixels"])
        output = self.net(pixel_values=pixels, **self.options)
        cls, tokens = split_tokens(self.net.config, output.last_hidden_state, pixels)
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        pooled = getattr(output, "pooler_output", None) if self.pooling == "auto" else None
        if pooled is not None and pooled.flatten(1).shape[1] == tokens.shape[2]:
            return Features(tokens, mask, pooled.flatten(1))
        if cls is None or self.pooling == "mean":
            return Features(tokens, mask, masked_mean(tokens, mask))
        return Features(tokens, mask, cls)
