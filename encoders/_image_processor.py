"""Prepare pictures for image encoders: crop, pad or resize, and augment.

Shapes: `H` x `W` pixels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .base import Item, Processor

LONGEST = 16  # times the aspect of what is cropped; of a longer picture only the middle is resized
LARGEST_SQUARE = 1 << 26  # pixels (200 MB) of a picture after padding; larger ones shrink before


class ImageProcessor(Processor):
    """Resize uint8 (3, H, W) to uint8 (3, size, size); normalising is left to the model's device.

    `fit`: `crop` the centre after resizing the shorter side (as timm and torchvision evaluate),
    `pad` to a square with white, or `squash`. `augment` in training: a random crop of 60 to 100 %
    of the area, and a horizontal flip.
    """

    def __init__(
        self, size: tuple[int, int], crop_pct: float, interpolation: str, fit: str, augment: str
    ) -> None:
        self.size, self.crop_pct, self.interpolation = size, crop_pct, interpolation
        self.fit, self.augment = fit, augment

    def __call__(self, value: Tensor, generator: torch.Generator | None = None) -> Item:
        if self.fit == "pad":
            value = _pad_to_square(self._small_enough(value), self.size)
        if generator is not None and self.augment != "none":
            value = self._augment(value, generator)
            return {"pixels": self._resize(value, self.size)}
        if self.fit == "crop":
            value = self._middle(value)
            value = self._resize(value, self._before_crop(value.shape[-2:]))
            return {"pixels": _center_crop(value, self.size)}
        return {"pixels": self._resize(value, self.size)}

    def blank(self) -> Item:
        return {"pixels": torch.zeros(3, *self.size, dtype=torch.uint8)}

    def _before_crop(self, shape: torch.Size) -> tuple[int, int]:
        """Return the size at which the crop covers `crop_pct` of the shorter side."""
        scale = self._scale(shape)
        height, width = (max(w, round(s * scale)) for w, s in zip(self.size, shape, strict=True))
        return height, width

    def _scale(self, shape: torch.Size) -> float:
        return max(
            wanted / self.crop_pct / own for wanted, own in zip(self.size, shape, strict=True)
        )

    def _middle(self, image: Tensor) -> Tensor:
        """Cut off most of what the crop leaves out anyway; resized, it might fill the memory."""
        height, width = self._before_crop(image.shape[-2:])
        if height * width <= LONGEST * self.size[0] * self.size[1] / self.crop_pct**2:
            return image
        scale = self._scale(image.shape[-2:])
        sides = []
        for wanted, side in zip(self.size, image.shape[-2:], strict=True):
            # Twice the crop, and more for the filter; as much from one end as from the other.
            enough = math.ceil(2 * wanted / self.crop_pct / scale) + 8
            sides.append(side if enough >= side else enough + (side - enough) % 2)
        return _center_crop(image, (sides[0], sides[1]))

    def _small_enough(self, image: Tensor) -> Tensor:
        """Shrink a picture whose padded square would be larger than any picture should be."""
        height, width = image.shape[-2:]
        padded_height, padded_width = _padded(image.shape[-2:], self.size)
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


def _padded(shape: torch.Size, size: tuple[int, int]) -> tuple[int, int]:
    """Return height and width after padding to the aspect of `size`."""
    scale = max(side / wanted for side, wanted in zip(shape, size, strict=True))
    height, width = (max(s, round(w * scale)) for s, w in zip(shape, size, strict=True))
    return height, width


def _pad_to_square(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Put the picture in the middle of a white square (or of the wanted aspect)."""
    height, width = image.shape[-2:]
    h, w = _padded(image.shape[-2:], size)
    out = image.new_full((3, h, w), 255)
    top, left = (h - height) // 2, (w - width) // 2
    out[:, top : top + height, left : left + width] = image
    return out


def _center_crop(image: Tensor, size: tuple[int, int]) -> Tensor:
    top, left = (image.shape[-2] - size[0]) // 2, (image.shape[-1] - size[1]) // 2
    return image[:, top : top + size[0], left : left + size[1]]
