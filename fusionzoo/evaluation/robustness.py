"""Corruptions in five severities, and Shapley values over all subsets of modalities."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fusionzoo.datasets import PairedDataset
from fusionzoo.encoders.augment import make_typo
from fusionzoo.errors import FusionZooError, check_known
from fusionzoo.ground.cells import Cell, is_number
from fusionzoo.ground.plugins import definition_of
from fusionzoo.structures import KINDS, Audio, Sample, seed_of

Cells = Mapping[str, Cell]
SEVERITIES = (1, 2, 3, 4, 5)
Random = np.random.Generator
Corruption = Callable[[Any, int, Random], Any]
C = TypeVar("C", bound=Corruption)

CORRUPTIONS: dict[str, dict[str, Corruption]] = {kind: {} for kind in KINDS}  # by kind and name


def corruption(*kinds: str) -> Callable[[C], C]:
    """Add the decorated function to the corruptions of these kinds of values, under its name.

    It takes a decoded value, a severity from 1 to 5 and a generator, from which alone it draws, and
    returns a new value of the same type and size. A benchmark tries it on every modality of the
    kind.
    """

    def decorate(function: C) -> C:
        name = function.__name__
        for kind in kinds:
            problem = f"corruption {name!r}: {kind!r} is no kind of value"
            check_known(kind, CORRUPTIONS, problem, "There are")
            known = CORRUPTIONS[kind].get(name)
            if known is not None and definition_of(known) != definition_of(function):
                both = f"{definition_of(known)} and {definition_of(function)}"
                raise FusionZooError(
                    f"corruption {name!r} of {kind} is defined twice: {both}; name one of them anew"
                )
            CORRUPTIONS[kind][name] = function
        return function

    return decorate


# ---- columns of a table


@corruption("tabular")
def inexact_numbers(cells: Cells, severity: int, draw: np.random.Generator) -> dict[str, Cell]:
    """Scale each number by a log-normal factor, of 10 to 150 %; text stays."""
    level = (0.1, 0.25, 0.5, 1.0, 1.5)[severity - 1]
    factors = np.exp(level * draw.standard_normal(len(cells)))
    return {
        name: float(cell) * float(factor) if cell is not None and is_number(cell) else cell
        for (name, cell), factor in zip(cells.items(), factors, strict=True)
    }


@corruption("tabular")
def empty_cells(cells: Cells, severity: int, draw: np.random.Generator) -> dict[str, Cell]:
    """Empty 10 to 90 % of the cells, but never the last one."""
    filled = [name for name, cell in cells.items() if cell is not None]
    draws = draw.random(len(filled))
    lost = draws < (0.1, 0.3, 0.5, 0.7, 0.9)[severity - 1]
    if lost.all():
        lost[draws.argmax()] = False
    emptied = {name for name, is_lost in zip(filled, lost, strict=True) if is_lost}
    return {name: None if name in emptied else cell for name, cell in cells.items()}


# ---- images: uint8 (3, H, W)


@corruption("image")
def blur(image: Tensor, severity: int, draw: Random) -> Tensor:
    """Gaussian blur, sigma 0.5 to 8 % of the shorter side."""
    from PIL import ImageFilter
    from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

    sigma = (0.005, 0.01, 0.02, 0.04, 0.08)[severity - 1] * min(image.shape[1:])
    return pil_to_tensor(to_pil_image(image).filter(ImageFilter.GaussianBlur(sigma)))


@corruption("image")
def noise(image: Tensor, severity: int, draw: Random) -> Tensor:
    """White noise, 4 to 40 % of full scale."""
    level = (0.04, 0.08, 0.14, 0.24, 0.4)[severity - 1] * 255
    added = level * draw.standard_normal(tuple(image.shape), dtype=np.float32)
    return (image + torch.from_numpy(added)).clamp(0, 255).to(torch.uint8)


@corruption("image")
def jpeg(image: Tensor, severity: int, draw: Random) -> Tensor:
    """JPEG compression, quality 40 down to 3."""
    from PIL import Image
    from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

    stored = io.BytesIO()
    to_pil_image(image).save(stored, "JPEG", quality=(40, 25, 15, 7, 3)[severity - 1])
    return pil_to_tensor(Image.open(stored).convert("RGB"))


@corruption("image")
def occlusion(image: Tensor, severity: int, draw: Random) -> Tensor:
    """Cover 10 to 70 % of the area by a grey rectangle."""
    share = (0.1, 0.2, 0.35, 0.5, 0.7)[severity - 1]
    _, height, width = image.shape
    tall, wide = round(height * share**0.5), round(width * share**0.5)
    top, left = (int(draw.integers(n + 1)) for n in (height - tall, width - wide))
    out = image.clone()
    out[:, top : top + tall, left : left + wide] = 128
    return out


@corruption("image")
def contrast(image: Tensor, severity: int, draw: Random) -> Tensor:
    """Reduce contrast to 60 down to 5 %, around the mean."""
    share = (0.6, 0.4, 0.25, 0.12, 0.05)[severity - 1]
    mean = image.float().mean()
    return ((image - mean) * share + mean).round().clamp(0, 255).to(torch.uint8)


# ---- text


@corruption("text")
def typos(text: str, severity: int, draw: Random) -> str:
    """Swap, drop, double or replace 3 to 40 % of the letters."""
    share = (0.03, 0.08, 0.15, 0.25, 0.4)[severity - 1]
    letters = list(text)
    for place in np.flatnonzero(draw.random(len(letters)) < share).tolist():
        kind = int(draw.integers(4))
        make_typo(letters, place, kind, lambda: chr(ord("a") + int(draw.integers(26))))
    return "".join(letters)


@corruption("text")
def word_drop(text: str, severity: int, draw: Random) -> str:
    """Drop 10 to 90 % of the words."""
    words = text.split()
    keep_mask = draw.random(len(words)) >= (0.1, 0.25, 0.45, 0.7, 0.9)[severity - 1]
    return " ".join(word for word, keep in zip(words, keep_mask, strict=True) if keep)


@corruption("text")
def truncation(text: str, severity: int, draw: Random) -> str:
    """Keep the first 80 down to 10 % of the letters."""
    return text[: int(len(text) * (0.8, 0.6, 0.4, 0.25, 0.1)[severity - 1])]


@corruption("text")
def empty(text: str, severity: int, draw: Random) -> str:
    """Empty 20 to 100 % of the texts."""
    return "" if draw.random() < severity / 5 else text


# ---- audio: Audio(samples (n,) in [-1, 1], rate in Hz)


@corruption("audio")
def background(clip: Audio, severity: int, draw: Random) -> Audio:
    """White noise at a signal-to-noise ratio of 20 down to -5 dB."""
    ratio = (20.0, 12.0, 6.0, 0.0, -5.0)[severity - 1]
    power = float(clip.samples.square().mean()) if len(clip.samples) else 0.0
    level = (power / 10 ** (ratio / 10)) ** 0.5
    added = level * draw.standard_normal(len(clip.samples), dtype=np.float32)
    return _clip(clip.samples + torch.from_numpy(added), clip.rate)


@corruption("audio")
def clipping(clip: Audio, severity: int, draw: Random) -> Audio:
    """Clip at 50 down to 2 % of the peak, then rescale to the original peak."""
    peak = float(clip.samples.abs().max()) if len(clip.samples) else 0.0
    limit = peak * (0.5, 0.25, 0.1, 0.05, 0.02)[severity - 1]
    return _clip(clip.samples.clamp(-limit, limit) * (peak / limit if limit else 1.0), clip.rate)


@corruption("audio")
def low_pass(clip: Audio, severity: int, draw: Random) -> Audio:
    """Low-pass filter at 4,000 down to 250 Hz."""
    highest = (4000, 2000, 1000, 500, 250)[severity - 1]
    if not len(clip.samples):
        return clip
    spectrum = torch.fft.rfft(clip.samples)
    spectrum[torch.fft.rfftfreq(len(clip.samples), 1 / clip.rate) > highest] = 0
    return _clip(torch.fft.irfft(spectrum, len(clip.samples)), clip.rate)


@corruption("audio")
def gain(clip: Audio, severity: int, draw: Random) -> Audio:
    """Attenuate by 10 to 50 dB."""
    return _clip(clip.samples * 10 ** (-severity / 2), clip.rate)


@corruption("audio")
def silence(clip: Audio, severity: int, draw: Random) -> Audio:
    """Silence a segment of 15 to 95 % of the clip."""
    count = len(clip.samples)
    length = int(count * (0.15, 0.35, 0.55, 0.75, 0.95)[severity - 1])
    start = int(draw.integers(count - length + 1))
    samples = clip.samples.clone()
    samples[start : start + length] = 0
    return _clip(samples, clip.rate)


def _clip(samples: Tensor, rate: int) -> Audio:
    return Audio(samples.clamp(-1, 1).float(), rate)


# ---- feature vectors and sequences: float (D,) or (T, D)


@corruption("vector", "sequence")
def jitter(values: Tensor, severity: int, draw: Random) -> Tensor:
    """White noise of 0.2 to 3 times the vector's standard deviation."""
    level = (0.2, 0.5, 1.0, 2.0, 3.0)[severity - 1] * float(values.std(correction=0))
    added = level * draw.standard_normal(tuple(values.shape), dtype=np.float32)
    return values + torch.from_numpy(added)


@corruption("vector", "sequence")
def dropout(values: Tensor, severity: int, draw: Random) -> Tensor:
    """Zero 10 to 90 % of the entries."""
    lost = draw.random(tuple(values.shape)) < (0.1, 0.3, 0.5, 0.7, 0.9)[severity - 1]
    return values.masked_fill(torch.from_numpy(lost), 0)


def corrupt(value: Any, kind: str, name: str, severity: int, seed: int = 0) -> Any:
    """Corrupt one decoded value: `corrupt(image, "image", "blur", 3)`.

    Of several images or clips each is corrupted, by a draw of its own.
    """
    if isinstance(value, list):
        seeds = [seed, *(seed_of(seed, number) for number in range(1, len(value)))]
        return [corrupt(x, kind, name, severity, s) for x, s in zip(value, seeds, strict=True)]
    check_known(name, CORRUPTIONS[kind], f"no corruption {name!r} of {kind}", "There are")
    if severity not in SEVERITIES:
        raise FusionZooError(f"severity {severity}; it is 1 to 5")
    if kind == "audio":
        value = Audio(value.samples, value.rate)  # read the whole file, once
    return CORRUPTIONS[kind][name](value, severity, np.random.default_rng(seed))


def corrupted(dataset: PairedDataset, modality: str, name: str, severity: int) -> PairedDataset:
    """Return a data set with one modality corrupted, each sample always in the same way."""
    kind = dataset.modalities[modality]
    return dataset.edited(
        partial(corrupt_sample, modality=modality, kind=kind, name=name, severity=severity)
    )


def corrupt_sample(
    sample: Sample, modality: str, kind: str, name: str, severity: int
) -> Sample | None:
    """Corrupt one modality of a sample, unless it lacks it; the draw depends on the sample's id."""
    if sample.values[modality] is None:
        return sample
    seed = seed_of(sample.id, name, severity)
    try:
        value = corrupt(sample.values[modality], kind, name, severity, seed)
    except FusionZooError as error:  # a long clip is read only here
        return sample.without(modality, error)
    return sample._replace(values={**sample.values, modality: value})
