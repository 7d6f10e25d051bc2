"""Clips: encoders that read all images of a sample together, as the frames of one clip.

Shapes: `B` batch, `F` frames, `T` tokens, `D` width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, did_you_mean, explained
from fusionzoo.structures import Features

from .base import ENCODERS, Item, unmasked
from .hf import aligned, find_file, find_source, load_auto, load_model
from .hf_image import VIDEO_TYPES, difference, read_preparation, size_options, smooth_image
from .image import (
    FROZEN_PIXELS,
    ImageEncoder,
    ImageProcessor,
    Preparation,
    build_torchvision,
    torchvision_models,
)

MOST_FRAMES = 1024
VIDEO_PROCESSOR = "video_preprocessor_config.json"
# Frames of a clip in the evaluation that torchvision reports of its weights; 16 of all others.
TORCHVISION_FRAMES = {"s3d": 128, "swin3d_t": 32, "swin3d_s": 32, "swin3d_b": 32}


class ClipProcessor(ImageProcessor):
    """Prepare the images of a sample as one clip, uint8 (F, 3, H, W).

    Of more images than the model has frames, those in the middles of equal parts are taken; fewer
    are repeated in order, and a single one is a clip that stands still. What augmentation draws
    holds for all frames.
    """

    reads_together = True

    def __init__(
        self,
        preparation: Preparation,
        num_frames: int,
        augment: str = "none",
        antialias: bool = True,
    ) -> None:
        super().__init__(preparation, augment, antialias)
        self.num_frames = num_frames

    def __call__(self, value: Any, generator: torch.Generator | None = None) -> Item:
        images = value if isinstance(value, list) else [value]
        places = frame_places(len(images), self.num_frames)
        prepared = {
            place: super(ClipProcessor, self).__call__(
                images[place], None if generator is None else generator.clone_state()
            )["pixels"]
            for place in set(places)
        }
        return {"pixels": torch.stack([prepared[place] for place in places])}

    def items(self, value: Any, generator: torch.Generator | None = None) -> list[Item]:
        return [self(value, generator)]

    def blank(self) -> Item:
        pixels = super().blank()["pixels"]
        return {"pixels": pixels.expand(self.num_frames, -1, -1, -1)}


def frame_places(count: int, num_frames: int) -> list[int]:
    """Return which of `count` images are the frames of a clip.

    >>> frame_places(8, 4), frame_places(2, 4)
    ([1, 3, 5, 7], [0, 0, 1, 1])
    """
    return [(2 * frame + 1) * count // (2 * num_frames) for frame in range(num_frames)]


class ClipEncoder(ImageEncoder):
    """Base of the encoders of clips: uint8 pixels in, normalised on the model's device."""

    net: Any
    num_frames: int
    antialias = True  # of the pixels, when a frame is made smaller

    def set_clips(self, preparation: Preparation, num_frames: int, augment: str) -> None:
        """Set how many frames a clip has, how they are prepared, and augmented in training."""
        if not 1 <= num_frames <= MOST_FRAMES:
            raise FusionZooError(f"num_frames={num_frames}: it must be from 1 to {MOST_FRAMES}")
        self.set_processing(preparation, augment)
        self.num_frames = num_frames
        height, width = preparation.size
        self.frozen_rows = max(1, round(FROZEN_PIXELS / (num_frames * height * width)))

    def processor(self, train: bool) -> ClipProcessor:
        augment = self.augment if train else "none"
        return ClipProcessor(self.preparation, self.num_frames, augment, self.antialias)

    def measure(self) -> None:
        """Set `dim` by running a blank clip; a model that cannot run it fails here."""
        clip = "clips of {} frames of {} x {}".format(self.num_frames, *self.preparation.size)
        with explained(f"{type(self.net).__name__} cannot encode {clip}"):
            super().measure()


@ENCODERS.register("hf-video", family="image", takes_model=True)
class HFVideo(ClipEncoder):
    """Encode clips with VideoMAE, V-JEPA 2, ViViT, TimeSformer or VideoPrism of Hugging Face.

    All images of a sample are the frames of one clip, prepared as the checkpoint's own processor
    does. Pooled is the class token of ViViT and TimeSformer, else the tokens' mean. V-JEPA 2 is
    used without its predictor.

    Settings:
        pretrained: load the model's weights; otherwise its configuration with random weights
        num_frames: frames of a clip; V-JEPA 2 alone takes other numbers than the checkpoint's
        size: side of the square input in pixels, instead of the checkpoint's processor's;
            VideoPrism alone takes another size than it was trained on
        augment: in training only, a random `crop` of 60 to 100 % of the area, the same for all
            frames of a clip; `crop_flip` also mirrors half of the clips
        assets: folder that `save_assets` wrote; set when a saved model is loaded

    Shapes: (F = num_frames; T = patches of all frames; D = config.hidden_size)
        inputs["pixels"]: uint8 (B, F, 3, H, W)
        returns: Features of (B, T, D), (B, T), (B, D)
    """

    def __init__(
        self,
        model: str,
        *,
        pretrained: bool = True,
        num_frames: int | None = None,
        size: int | None = None,
        augment: Literal["none", "crop", "crop_flip"] = "none",
        assets: Path | None = None,
    ) -> None:
        super().__init__()
        source = find_source(model, assets)
        self.config = load_auto("AutoConfig", source)
        if self.config.model_type not in VIDEO_TYPES:
            raise FusionZooError(
                f"hf-video/{model} is a {self.config.model_type}; models of these types read the"
                f" frames of a clip together: {', '.join(VIDEO_TYPES)}. hf/ encodes pictures"
            )
        self.family = VIDEO_TYPES[self.config.model_type]
        net = load_model(source, pretrained)
        self.net = aligned(net.encoder if self.config.model_type == "vjepa2" else net)
        if hasattr(self.net, "pooler"):  # few checkpoints hold ViViT's
            self.net.pooler = None
        self.is_video = find_file(source, VIDEO_PROCESSOR) is not None
        loader = "AutoVideoProcessor" if self.is_video else "AutoImageProcessor"
        self.extractor = load_auto(loader, source)
        self._check_size(size)
        preparation = read_clip_preparation(self.extractor, source, size)
        self.set_clips(preparation, self._frames(num_frames), augment)
        self.checkpoint_settings = asdict(preparation)
        if assets is None and size is None:
            self._verify(source)
        self.options = size_options(self.config, self.net.forward, preparation.size)
        self.measure()

    def _frames(self, num_frames: int | None) -> int:
        """Return the number of frames: the checkpoint's, unless another is set and can be read."""
        usual = int(getattr(self.config, self.family.frames))
        if num_frames in (None, usual):
            return usual
        if not self.family.takes_any_frames:
            raise FusionZooError(
                f"num_frames={num_frames}: this {self.config.model_type} reads {usual} frames"
            )
        return int(num_frames)

    def _check_size(self, size: int | None) -> None:
        trained = getattr(self.config, "crop_size", None) or self.config.image_size
        sides = [trained, trained] if isinstance(trained, int) else list(trained)
        if size is not None and [size, size] != sides and not self.family.takes_any_size:
            raise FusionZooError(
                f"size={size}: this {self.config.model_type} reads frames of"
                f" {sides[0]} x {sides[1]}"
            )

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        hidden = self.net(self.normalise(inputs["pixels"]), **self.options).last_hidden_state
        tokens = hidden[:, 1:] if self.family.has_class_token else hidden
        return unmasked(tokens, hidden[:, 0] if self.family.has_class_token else None)

    def save_assets(self, folder: Path) -> None:
        self.config.save_pretrained(folder)
        self.extractor.save_pretrained(folder)

    def _verify(self, source: str) -> None:
        """Compare a clip of smooth colours with what the checkpoint's own processor makes."""
        image, shades = smooth_image(191), torch.linspace(0, 64, self.num_frames)
        frames = [image + shade for shade in shades.to(torch.uint8)]
        with explained(f"{source}: its processor fails"):
            if self.is_video:
                clip = torch.stack(frames)
                output = self.extractor([clip], do_sample_frames=False, return_tensors="pt")
            else:
                output = self.extractor(frames, return_tensors="pt")
            expected = next(iter(output.values()))[0]
        prepared = self.normalise(self.processor(False)(frames)["pixels"])
        if problem := difference(expected, prepared, self.scale):
            raise FusionZooError(
                f"{source}: {type(self.extractor).__name__} {problem} in a way that is not"
                " supported; size= prepares frames without this comparison"
            )


def read_clip_preparation(extractor: Any, source: str, side: int | None) -> Preparation:
    """Translate the settings of a processor of clips; ViViT's subtracts 1 before it normalises."""
    preparation = read_preparation(extractor, source, side)
    if not getattr(extractor, "offset", type(extractor).__name__ == "VivitVideoProcessor"):
        return preparation
    unit = 255 * float(extractor.rescale_factor)
    return replace(preparation, mean=tuple(x + 1 / unit for x in preparation.mean))


@ENCODERS.register("torchvision-video", family="image", takes_model=True)
class TorchvisionVideo(ClipEncoder):
    """Encode clips with any video model of torchvision: R3D, R(2+1)D, S3D, MViT, Swin, ...

    All images of a sample are the frames of one clip, prepared as for the model's published
    weights. Tokens are the cells of the final feature map, in time and space; pooled is their mean,
    for an MViT the class token. Further settings go to `torchvision.models.get_model`.

    Settings:
        pretrained: load the weights that torchvision publishes (Kinetics-400)
        num_frames: frames of a clip; unless set, 16, of S3D 128 and of a Video Swin 32, as in the
            evaluation of the weights. An MViT reads 16 only
        augment: in training only, a random `crop` of 60 to 100 % of the area, the same for all
            frames of a clip; `crop_flip` also mirrors half of the clips

    Shapes: (F = num_frames; T = cells of the final feature map; D = its channels)
        inputs["pixels"]: uint8 (B, F, 3, H, W)
        returns: Features of (B, T, D), (B, T), (B, D)
    """

    antialias = False  # as torchvision prepares videos

    def __init__(
        self,
        model: str,
        *,
        pretrained: bool = True,
        num_frames: int | None = None,
        augment: Literal["none", "crop", "crop_flip"] = "none",
        **model_settings: Any,
    ) -> None:
        super().__init__()
        zoo = torchvision_models()
        if model not in zoo.list_models(module=zoo.video):
            near = did_you_mean(model, zoo.list_models(module=zoo.video))
            raise FusionZooError(f"torchvision has no video model {model!r}.{near}")
        weights = zoo.get_model_weights(model).DEFAULT
        net = build_torchvision(model, weights if pretrained else None, **model_settings)
        self.is_mvit = isinstance(net, zoo.video.MViT)
        if self.is_mvit:
            net.head = nn.Identity()
            self.net = net
        else:  # what precedes the pooling runs one after another
            parts = dict(net.named_children())
            places = list(parts)[: list(parts).index("avgpool")]
            self.net = nn.ModuleDict({name: parts[name] for name in places})
        transforms = weights.transforms()
        self.set_clips(
            torchvision_preparation(transforms),
            TORCHVISION_FRAMES.get(model, 16) if num_frames is None else num_frames,
            augment,
        )
        self.measure()

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        x = rearrange(self.normalise(inputs["pixels"]), "b f c h w -> b c f h w")
        if self.is_mvit:
            return unmasked(*self._encode_mvit(x))
        for part in self.net.values():
            x = part(x)
        layout = "b t h w d" if "norm" in self.net else "b d t h w"  # of Video Swin
        return unmasked(rearrange(x, f"{layout} -> b (t h w) d"))

    def _encode_mvit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        positions = self.net.pos_encoding
        x = positions(rearrange(self.net.conv_proj(x), "b d t h w -> b (t h w) d"))
        size = (positions.temporal_size, *positions.spatial_size)
        for block in self.net.blocks:
            x, size = block(x, size)
        x = self.net.norm(x)
        return x[:, 1:], x[:, 0]


def torchvision_preparation(transforms: Any) -> Preparation:
    """Translate torchvision's `VideoClassification`: a shorter side, or height and width."""
    sides = transforms.resize_size
    return Preparation(
        size=tuple(transforms.crop_size),
        mean=tuple(transforms.mean),
        std=tuple(transforms.std),
        interpolation=transforms.interpolation.value,
        fit="crop" if len(sides) == 1 else "squash",
        resized=(sides[0], sides[-1]),
    )
