"""Image preprocessing: resize, crop or pad, and augment; `H` x `W` are pixels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .base import Item, Processor

MAX_ASPECT = 16  # relative to the crop's; of a longer image only the middle is resized
LARGEST_SQUARE = 1 << 26  # pixels (200 MB) of an image after padding; larger ones shrink before


class ImageProcessor(Processor):
    """Resize images, uint8 (3, H, W), to uint8 (3, *size); the encoder normalises them.

    `fit`: `crop` the centre after resizing the shorter side (as timm and torchvision evaluate),
    `pad` to the target's aspect with white, or `squash` to it. `augment`, in training only: `none`,
    a random `crop` of 60 to 100 % of the area, or `crop_flip`, which also mirrors half of them.
    """

    squash_to: tuple[int, int] | None = None  # of `squash`: a larger size, whose centre is cropped

    def __init__(
        self, size: tuple[int, int], crop_pct: float, interpolation: str, fit: str, augment: str
    ) -> None:
        self.size, self.crop_pct, self.interpolation = size, crop_pct, interpolation
        self.fit, self.augment = fit, augment

    def __call__(self, value: Tensor, generator: torch.Generator | None = None) -> Item:
        if self.fit == "pad":
            value = _pad_to_aspect(self._shrink_if_huge(value), self.size)
        if generator is not None and self.augment != "none":
            value = self._augment(value, generator)
            return {"pixels": self._resize(value, self.size)}
        if self.fit == "crop":
            value = self._crop_long_side(value)
            value = self._resize(value, self._size_before_crop(value.shape[-2:]))
            return {"pixels": _center_crop(value, self.size)}
        if self.squash_to is not None:
            return {"pixels": _center_crop(self._resize(value, self.squash_to), self.size)}
        return {"pixels": self._resize(value, self.size)}

    def varies(self, value: Tensor) -> bool:
        return self.augment != "none"

    def blank(self) -> Item:
        return {"pixels": torch.zeros(3, *self.size, dtype=torch.uint8)}

    def _size_before_crop(self, shape: torch.Size) -> tuple[int, int]:
        """Return the size at which the crop covers `crop_pct` of the shorter side."""
        scale = self._scale(shape)
        height, width = (max(t, round(s * scale)) for t, s in zip(self.size, shape, strict=True))
        return height, width

    def _scale(self, shape: torch.Size) -> float:
        return max(
            target / self.crop_pct / side for target, side in zip(self.size, shape, strict=True)
        )

    def _crop_long_side(self, image: Tensor) -> Tensor:
        """Crop a very long image around its middle, as resizing all of it could exhaust memory."""
        height, width = self._size_before_crop(image.shape[-2:])
        if height * width <= MAX_ASPECT * self.size[0] * self.size[1] / self.crop_pct**2:
            return image
        scale = self._scale(image.shape[-2:])
        sides = []
        for target, side in zip(self.size, image.shape[-2:], strict=True):
            # Twice the final crop plus the filter's margin; an even cut keeps the middle in place.
            enough = math.ceil(2 * target / self.crop_pct / scale) + 8
            sides.append(side if enough >= side else enough + (side - enough) % 2)
        return _center_crop(image, (sides[0], sides[1]))

    def _shrink_if_huge(self, image: Tensor) -> Tensor:
        """Shrink an image that would have more than `LARGEST_SQUARE` pixels once padded."""
        height, width = image.shape[-2:]
        padded_height, padded_width = _padded_size(image.shape[-2:], self.size)
        factor = (LARGEST_SQUARE / (padded_height * padded_width)) ** 0.5
        if factor >= 1:
            return image
        return self._resize(image, (max(1, int(height * factor)), max(1, int(width * factor))))

    def _augment(self, image: Tensor, generator: torch.Generator) -> Tensor:
        area, across, down, flip = torch.rand(4, generator=generator).tolist()
        side = (0.6 + 0.4 * area) ** 0.5
        height, width = image.shape[-2:]
        h, w = max(1, round(side * height)), max(1, round(side * width))
        top, left = round(down * (height - h)), round(across * (width - w))
        image = image[:, top : top + h, left : left + w]
        return image.flip(-1) if self.augment == "crop_flip" and flip < 0.5 else image

    def _resize(self, image: Tensor, size: tuple[int, int]) -> Tensor:
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2.functional import resize

        mode = InterpolationMode(self.interpolation)
        return resize(image, list(size), interpolation=mode, antialias=True)


def _padded_size(shape: torch.Size, size: tuple[int, int]) -> tuple[int, int]:
    """Return height and width after padding to the aspect of `size`."""
    scale = max(side / target for side, target in zip(shape, size, strict=True))
    height, width = (max(s, round(t * scale)) for s, t in zip(shape, size, strict=True))
    return height, width


def _pad_to_aspect(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Centre the image on a white canvas with the aspect of `size`."""
    height, width = image.shape[-2:]
    h, w = _padded_size(image.shape[-2:], size)
    canvas = image.new_full((3, h, w), 255)
    top, left = (h - height) // 2, (w - width) // 2
    canvas[:, top : top + height, left : left + width] = image
    return canvas


def _center_crop(image: Tensor, size: tuple[int, int]) -> Tensor:
    top, left = (image.shape[-2] - size[0]) // 2, (image.shape[-1] - size[1]) // 2
    return image[:, top : top + size[0], left : left + size[1]]
