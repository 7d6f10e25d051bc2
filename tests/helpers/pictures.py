"""Pictures of many sizes, and how far an encoder's pixels are from those of a library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusionzoo.encoders.image import ImageEncoder

SHAPES = [  # (H, W) of pictures: smaller and larger than the input, odd, even, narrow
    *((640, 427), (427, 640), (256, 256), (224, 224), (225, 301), (97, 61), (61, 98)),
    *((30, 41), (500, 333), (333, 501), (150, 900), (901, 150)),
]


def picture(height: int, width: int) -> Tensor:
    """Make an image, uint8 (3, H, W), of smooth colours with some noise."""
    draw = torch.Generator().manual_seed(height + width)
    coarse = torch.rand(1, 3, 7, 9, generator=draw)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")[0]
    noise = 8 * torch.randn(smooth.shape, generator=draw)
    return (255 * smooth + noise).clamp(0, 255).byte()


def off(encoder: Any, reference: Callable[[Tensor], Tensor], shape: tuple[int, int]) -> float:
    """Return the largest difference from the reference, of pixels in [0, 1]."""
    assert isinstance(encoder, ImageEncoder)
    image = picture(*shape)
    prepared = encoder.normalise(encoder.processor(False)(image)["pixels"])
    expected = reference(image)
    assert prepared.shape == expected.shape
    return float(((prepared - expected) / (255 * encoder.scale)).abs().max())
