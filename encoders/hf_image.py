"""Hugging Face's image encoders: ViT, DINOv2, SigLIP's vision tower, Swin, ConvNeXt, ..."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, check_choice, explained, one_line
from fusionzoo.structures import Features

from .base import ENCODERS, unmasked
from .hf import aligned, find_source, load_auto, load_model, load_tower
from .image import ImageEncoder, Preparation
from .own_processor import OwnProcessor

OWN = "own_processor.json"  # beside the configuration of a model that `OwnProcessor` feeds
MOST_PIXELS = 4096  # of a side
LARGE_CONVNEXT = 384  # from this size on, ConvNeXt's processor squashes images instead of cropping
NEAR = 0.02  # mean difference of two preparations of one image, of pixels in [0, 1]
_log = logging.getLogger("fusionzoo")
INTERPOLATIONS = {0: "nearest", 1: "bicubic", 2: "bilinear", 3: "bicubic"}  # 1 is Lanczos, in PIL


class VideoType(NamedTuple):
    """Facts about one of transformers' types of video models."""

    frames: str = "num_frames"  # the setting of its configuration with the number of frames
    has_class_token: bool = False
    takes_any_frames: bool = False  # TimeSformer does not refuse others, and mixes up its patches
    takes_any_size: bool = False  # V-JEPA 2 does not refuse others, and miscounts rows


VIDEO_TYPES = {
    "timesformer": VideoType(has_class_token=True),
    "videomae": VideoType(),
    "videoprism_vision_model": VideoType(takes_any_size=True),
    "vivit": VideoType(has_class_token=True),
    "vjepa2": VideoType("frames_per_clip", takes_any_frames=True),
}


class CheckpointImage(ImageEncoder):
    """Base of the image encoders of Hugging Face checkpoints, with their own image processors."""

    net: Any
    config: Any  # from which the network is built again
    extractor: Any
    own: OwnProcessor | None = None  # prepares images where no `preparation` does the same
    reason = ""  # why it does

    def set_checkpoint_processing(
        self,
        source: str,
        forward: Callable[..., Any],
        *,
        assets: Path | None,
        augment: str,
        size: int | None = None,
        **settings: Any,
    ) -> None:
        """Read how the checkpoint in `source` prepares images; of `mean`, `std`, `interpolation`
        and `fit`, those that are set replace it.

        Where an image prepared so does not look like that of the checkpoint's own processor, and
        no such setting is there, that processor prepares all images for `forward`.
        """
        self.extractor = load_auto("AutoImageProcessor", source)
        if assets is not None and (assets / OWN).is_file():
            return self._use_own_processor(source, forward, augment, f"{assets / OWN} says so")
        chosen = {name: value for name, value in settings.items() if value}
        if chosen.get("fit") == "squash":
            chosen["resized"] = None
        is_set = bool(size or chosen)
        try:
            of_checkpoint = read_preparation(self.extractor, source, size)
            self.set_processing(replace(of_checkpoint, **chosen), augment)
            self.checkpoint_settings = asdict(of_checkpoint)
            if assets is None and not is_set:
                self._verify(source)
        except FusionZooError as error:
            if is_set:
                raise
            self._use_own_processor(source, forward, augment, str(error))

    def _use_own_processor(
        self, source: str, forward: Callable[..., Any], augment: str, reason: str
    ) -> None:
        """Let the checkpoint's own image processor prepare all images, for the reason given."""
        self.own = OwnProcessor(self.extractor, forward, source, augment)
        self.reason = reason
        self.augment, self.frozen_rows = augment, None
        self.checkpoint_settings = {"processor": type(self.extractor).__name__}
        _log.info("its own processor prepares images: %s", reason)

    def processor(self, train: bool) -> Any:  # ImageProcessor, or `own`
        if self.own is None:
            return super().processor(train)
        return self.own if train else self.own.without_augmentation()

    @torch.no_grad()
    def measure(self) -> None:
        """Set `dim` by running one image twice; its features must be equal.

        With a processor of its own the image stands beside one of another shape.
        """
        name = type(self.net).__name__
        self.eval()
        if self.own is None:
            height, width = self.preparation.size
            problem = f"{name} cannot encode images of {height} x {width}"
            pixels = _picture(height, width)
            run = partial(self.encode, {"pixels": torch.stack([pixels, pixels])})
        else:
            name, side = getattr(self.net, "family", name), self.own.side  # of a tower, its type
            problem = f"{self.reason}; as it prepares them, a {name} cannot encode them"
            square, wide = _picture(side, side), _picture(side, 2 * side)
            prepared = [self.own(picture) for picture in (square, wide, square)]
            run = partial(self.encode, self.own.collate(prepared))
        with explained(problem):
            tokens = run().tokens
        self.train()
        if not torch.allclose(tokens[0], tokens[-1], atol=1e-3):
            raise FusionZooError(f"{name} drops patches at random, also in evaluation")
        self.dim = tokens.shape[-1]

    def save_assets(self, folder: Path) -> None:
        self.config.save_pretrained(folder)
        self.extractor.save_pretrained(folder)
        if self.own is not None:
            (folder / OWN).write_text(json.dumps(self.checkpoint_settings) + "\n")

    def _verify(self, source: str) -> None:
        """Compare an image of smooth colours with what the checkpoint's own processor makes."""
        image = smooth_image(255)
        with explained(f"{source}: its image processor fails"):
            expected = self.extractor(image, return_tensors="pt")["pixel_values"][0]
        prepared = self.normalise(self.processor(False)(image)["pixels"])
        if problem := difference(expected, prepared, self.scale):
            raise FusionZooError(
                f"{source}: {type(self.extractor).__name__} {problem}, which no crop, pad or squash"
                " does; size=, mean=, std= or fit= prepare images without it"
            )


def _picture(height: int, width: int) -> Tensor:
    """Return an image (3, H, W) in which neighbouring pixels differ."""
    levels = torch.arange(3 * height * width).remainder(251).to(torch.uint8)
    return levels.reshape(3, height, width)


def smooth_image(brightest: int) -> Tensor:
    """Return an image, uint8 (3, 48, 64), in which neighbouring pixels are alike."""
    down, across = torch.linspace(0, brightest, 48), torch.linspace(0, brightest, 64)
    grid = torch.stack(torch.meshgrid(down, across, indexing="ij"))
    return torch.cat([grid, grid.mean(0, keepdim=True)]).to(torch.uint8)


def difference(expected: Any, prepared: Tensor, scale: Tensor) -> str:
    """Say how an image differs that a checkpoint's own processor prepares; nothing if it does not.

    `scale` is what pixels of 0 to 255 were multiplied with.
    """
    if not isinstance(expected, Tensor) or expected.shape != prepared.shape:
        return f"makes another shape than {tuple(prepared.shape)}"
    off = float(((expected - prepared) / (255 * scale)).abs().mean())
    return f"makes other pixels (by {off:.0%} on average)" if off > NEAR else ""


def read_preparation(extractor: Any, source: str, side: int | None) -> Preparation:
    """Translate the settings of an image processor; `side` replaces its size."""
    settings = extractor.to_dict()
    try:
        target, fit, resized = _geometry(settings, side)
        rescales = settings.get("do_rescale", True)
        unit = 255 * float(settings["rescale_factor"]) if rescales else 255.0
        normalises = settings.get("do_normalize", True)
        mean, std = (
            tuple(x / unit for x in _channels(settings[name] if normalises else default))
            for name, default in (("image_mean", 0.0), ("image_std", 1.0))
        )
        if target is None or not all(0 < x <= MOST_PIXELS for x in target) or not all(std):
            raise ValueError(f"size {settings.get('size')}, std {std}")
    except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        raise FusionZooError(
            f"{source}: {type(extractor).__name__} does not prepare images of one size and three"
            f" channels ({one_line(error)}); size= sets the side of a square"
        ) from None
    interpolation = INTERPOLATIONS.get(int(settings.get("resample") or 0), "bilinear")
    return Preparation(
        size=target,
        mean=mean,
        std=std,
        interpolation=interpolation,
        fit=fit,
        resized=resized,
        rounds_down=True,
    )


def _geometry(settings: Mapping[str, Any], side: int | None) -> tuple[Any, str, Any]:
    """Return size, fit, and the size before a crop; `side` replaces the size, in proportion."""
    size = dict(settings.get("size") or {})
    edge = size.get("shortest_edge") if "longest_edge" not in size else None
    crop = _sides(settings.get("crop_size")) if settings.get("do_center_crop") else None
    square = None if side is None else (side, side)
    crop_pct = settings.get("crop_pct")
    if edge is None:
        squashed = _sides(size)
        return square or crop or squashed, "squash", None if square or not crop else squashed
    if crop is not None:
        shorter = edge if side is None else side * edge // min(crop)
        return square or crop, "crop", (shorter, shorter)
    if crop_pct is not None:  # ConvNeXt
        target = side or edge
        if edge >= LARGE_CONVNEXT:
            return (target, target), "squash", None
        return (target, target), "crop", (int(target / crop_pct),) * 2
    return square, "crop", None


def size_options(config: Any, forward: Any, size: tuple[int, int]) -> dict[str, bool]:
    """Return arguments of `forward` for images of another size than the model was trained on."""
    trained = _sides(getattr(config, "image_size", None))
    if trained in (None, size):
        return {}
    known = "interpolate_pos_encoding" in inspect.signature(forward).parameters
    return {"interpolate_pos_encoding": True} if known else {}


def split_tokens(config: Any, hidden: Tensor, pixels: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return the class token (B, D), if any, and the tokens (B, T, D) of patches or cells.

    Class, register and distillation tokens come before the patches.
    """
    if hidden.ndim == 4:
        return None, rearrange(hidden, "b d h w -> b (h w) d")
    patch = _sides(getattr(config, "patch_size", None))
    if patch is None:
        return None, hidden
    patches = (pixels.shape[-2] // patch[0]) * (pixels.shape[-1] // patch[1])
    others = hidden.shape[1] - patches
    if others <= 0:  # none, or Swin's merged patches
        return None, hidden
    return hidden[:, 0], hidden[:, others:]


def _sides(size: Any) -> tuple[int, int] | None:
    """Return (height, width) of a size of an image processor, if it fixes both."""
    if isinstance(size, int):
        return size, size
    if isinstance(size, list | tuple):
        return (int(size[0]), int(size[-1])) if size else None
    size = dict(size or {})
    return (size["height"], size["width"]) if {"height", "width"} <= size.keys() else None


def _channels(values: Any) -> tuple[float, ...]:
    """Return one number for each of three channels."""
    values = (values,) * 3 if isinstance(values, int | float) else tuple(values)
    if len(values) != 3:
        raise ValueError(f"{len(values)} channels")
    return tuple(float(x) for x in values)


@ENCODERS.register("hf-image", family="image", takes_model=True)
class HFImage(CheckpointImage):
    """Encode images with a Hugging Face vision model: ViT, DINOv2, SigLIP, Swin, ConvNeXt, ...

    Images are prepared as the checkpoint's own image processor does, by its size, mean, std,
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
        check_choice("pooling", pooling, ("auto", "cls", "mean"))
        self.pooling = pooling
        source = find_source(model, assets)
        config = load_auto("AutoConfig", source)
        if config.model_type in VIDEO_TYPES:
            raise FusionZooError(
                f"hf/{model} is a {config.model_type}, which reads the frames of a clip together:"
                f" hf-video/{model} does"
            )
        if hasattr(config, "vision_config") or hasattr(config, "image_config"):
            tower = load_tower(source, "image", pretrained, projects=False)
            self.net, self.config = tower.model, tower.joint_config
        else:
            self.net = aligned(load_model(source, pretrained))
            self.config = self.net.config
        if isinstance(getattr(getattr(self.net, "pooler", None), "dense", None), nn.Linear):
            self.net.pooler = None
        self.set_checkpoint_processing(
            source,
            self.net.forward,
            assets=assets,
            augment=augment,
            size=size,
            mean=mean,
            std=std,
            interpolation=interpolation,
            fit=fit,
        )
        self.options = {}
        if self.own is None:
            self.options = size_options(self.net.config, self.net.forward, self.preparation.size)
        self.measure()

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        if self.own is not None:
            return self.own.encode(self._run, inputs)
        pixels = self.normalise(inputs["pixels"])
        tokens, pooled = self._run(pixels.shape[0], pixel_values=pixels, **self.options)
        return unmasked(tokens, pooled)

    def _run(self, rows: int, **inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Return tokens (B, T, D) and the pooled vector (B, D), None for the mean of the tokens."""
        output, pixels = self.net(**inputs), inputs["pixel_values"]
        hidden, cls = output.last_hidden_state, None
        if pixels.ndim == 4 and hidden.shape[0] == pixels.shape[0] == rows:
            cls, tokens = split_tokens(self.net.config, hidden, pixels)
        else:
            tokens = hidden.reshape(rows, -1, hidden.shape[-1])
        pooled = getattr(output, "pooler_output", None) if self.pooling == "auto" else None
        if pooled is not None and pooled.numel() == rows * tokens.shape[2]:
            return tokens, pooled.reshape(rows, -1)
        return tokens, None if self.pooling == "mean" else cls
