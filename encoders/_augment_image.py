"""Random changes of pictures: crop, mirror, rotate, change colours, erase a part.

Every function draws from a generator, never from a global one. `strength` is 0 to 1.

Shapes: `H` x `W` are pixels; pictures are uint8 (3, H, W).
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

OPERATIONS = ("crop", "flip", "rotate", "colour", "erase")
ON_REQUEST = ("flip",)  # mirror images do not mean the same everywhere: digits, letters, signs

AREA = 0.6  # the largest share of the area that a crop cuts off
ASPECT = 0.3  # the largest change of the aspect ratio, as a logarithm
DEGREES = 20.0  # the largest rotation
COLOUR = 0.4  # the largest change of brightness, contrast and saturation
HUE = 0.05  # the largest change of the hue, in turns
ERASED = 0.5  # the probability of erasing a part
ERASED_AREA = (0.02, 0.2)  # its share of the area


def uniform(low: float, high: float, generator: torch.Generator) -> float:
    """Draw a number between `low` and `high`."""
    return low + (high - low) * torch.rand((), generator=generator).item()


def crop(image: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Cut out a random rectangle of 1 - 0.6 x strength to 1 of the area."""
    height, width = image.shape[-2:]
    area = uniform(1 - AREA * strength, 1, generator)
    stretch = math.exp(uniform(-ASPECT, ASPECT, generator) * strength)
    h = min(height, max(1, round(height * math.sqrt(area / stretch))))
    w = min(width, max(1, round(width * math.sqrt(area * stretch))))
    top = round(uniform(0, height - h, generator))
    left = round(uniform(0, width - w, generator))
    return image[..., top : top + h, left : left + w]


def change_pixels(
    image: Tensor, strength: float, operations: Collection[str], generator: torch.Generator
) -> Tensor:
    """Mirror, rotate, change colours and erase, as far as `operations` names them."""
    if "flip" in operations and uniform(0, 1, generator) < 0.5:
        image = image.flip(-1)
    if "rotate" in operations:
        image = rotate(image, strength, generator)
    if "colour" in operations:
        image = change_colours(image, strength, generator)
    if "erase" in operations:
        image = erase(image, strength, generator)
    return image


def rotate(image: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Rotate by up to 20 degrees x strength; corners get the mean colour of the border."""
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional

    angle = uniform(-DEGREES, DEGREES, generator) * strength
    border = torch.cat(
        [image[..., 0, :], image[..., -1, :], image[..., :, 0], image[..., :, -1]], -1
    )
    fill = border.float().mean(-1)[..., None, None]
    # Relative to the filling colour: torchvision's own `fill` leaves a dark seam.
    turned = functional.rotate(
        image.float() - fill, angle, interpolation=InterpolationMode.BILINEAR
    )
    return (turned + fill).round().clamp(0, 255).to(torch.uint8)


def change_colours(image: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Change brightness, contrast, saturation (by up to 40 % x strength) and hue."""
    from torchvision.transforms.v2 import functional

    spread = COLOUR * strength
    brightness, contrast, saturation = (
        uniform(1 - spread, 1 + spread, generator) for _ in range(3)
    )
    image = functional.adjust_brightness(image, brightness)
    image = functional.adjust_contrast(image, contrast)
    image = functional.adjust_saturation(image, saturation)
    return functional.adjust_hue(image, uniform(-HUE, HUE, generator) * strength)


def erase(image: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Cover 2 to 20 % of the picture by its mean colour, with probability 0.5 x strength."""
    height, width = image.shape[-2:]
    covers = uniform(0, 1, generator) < ERASED * strength
    area = uniform(*ERASED_AREA, generator)
    stretch = math.exp(uniform(-math.log(2), math.log(2), generator))
    h = min(height, max(1, round(height * math.sqrt(area * stretch))))
    w = min(width, max(1, round(width * math.sqrt(area / stretch))))
    top = round(uniform(0, height - h, generator))
    left = round(uniform(0, width - w, generator))
    if not covers:
        return image
    erased = image.clone()
    mean = image.float().mean((-2, -1), keepdim=True).round().to(image.dtype)
    erased[..., top : top + h, left : left + w] = mean
    return erased
