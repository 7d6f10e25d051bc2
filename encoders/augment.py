"""Augmentation, `--data.augment.image.strength 0.5`: random changes of training samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.errors import FusionZooError, check_known, check_number
from fusionzoo.structures import Clip, seed_of

from .base import Encoder, Item, Processor

IMAGE_OPERATIONS = ("crop", "flip", "rotate", "colour", "erase")
ON_REQUEST = ("flip",)  # mirror images do not mean the same everywhere: digits, letters, signs

AREA = 0.6  # the largest share of the area that a crop cuts off
ASPECT = 0.3  # the largest change of the aspect ratio, as a logarithm
DEGREES = 20.0  # the largest rotation
COLOUR = 0.4  # the largest change of brightness, contrast and saturation
HUE = 0.05  # the largest change of the hue, in turns
ERASED = 0.5  # the probability of erasing a part
ERASED_AREA = (0.02, 0.2)  # its share of the area
AUDIO_OPERATIONS = ("gain", "noise", "shift", "mask")
GAIN = 10.0  # dB, the largest change of the level
CLEAN, NOISIEST = 50.0, 10.0  # dB, signal-to-noise ratios between which the noise is drawn
SHIFT = 0.1  # the largest shift, as a share of the clip
MASKS_PER_AXIS = 2  # over mel bands, and as many over time
BANDS, SPAN = 0.3, 0.2  # the widest mask, as a share of the bands and of the clip
TEXT_OPERATIONS = ("drop", "swap", "typos")
DROP, SWAP, TYPO = 0.2, 0.1, 0.1  # probability per word at strength 1
OPERATIONS: dict[str, tuple[str, ...]] = {
    "image": IMAGE_OPERATIONS,
    "audio": AUDIO_OPERATIONS,
    "text": TEXT_OPERATIONS,
}
MASKS = "masks"  # the input of an encoder that masks its spectrogram


def uniform(low: float, high: float, generator: torch.Generator) -> float:
    """Draw a number between `low` and `high`."""
    return low + (high - low) * torch.rand((), generator=generator).item()


def rectangle(
    image: Tensor, area: float, stretch: float, generator: torch.Generator
) -> tuple[int, int, int, int]:
    """Draw a rectangle of a share of the area: top, left, height, width; `stretch` > 1: wide."""
    height, width = image.shape[-2:]
    h = min(height, max(1, round(height * math.sqrt(area / stretch))))
    w = min(width, max(1, round(width * math.sqrt(area * stretch))))
    top = round(uniform(0, height - h, generator))
    return top, round(uniform(0, width - w, generator)), h, w


def crop(image: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Cut out a random rectangle of 1 - 0.6 x strength to 1 of the area."""
    area = uniform(1 - AREA * strength, 1, generator)
    stretch = math.exp(uniform(-ASPECT, ASPECT, generator) * strength)
    top, left, h, w = rectangle(image, area, stretch, generator)
    return image[..., top : top + h, left : left + w]


def change_pixels(
    image: Tensor, strength: float, operations: Collection[str], generator: torch.Generator
) -> Tensor:
    """Mirror, rotate, change colours and erase, as far as `operations` names them."""
    if "flip" in operations and uniform(0, 1, generator) < 0.5:
        image = image.flip(-1)
    for name, change in (("rotate", rotate), ("colour", change_colours), ("erase", erase)):
        if name in operations:
            image = change(image, strength, generator)
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
    """Cover 2 to 20 % of the image by its mean colour, with probability 0.5 x strength."""
    from torchvision.transforms.v2 import functional

    if uniform(0, 1, generator) >= ERASED * strength:
        return image
    area = uniform(*ERASED_AREA, generator)
    stretch = math.exp(uniform(-math.log(2), math.log(2), generator))
    mean = image.float().mean((-2, -1), keepdim=True).round().to(image.dtype)
    return functional.erase(image, *rectangle(image, area, stretch, generator), mean)


@dataclass(frozen=True)
class ChangedClip:
    """A clip whose samples are changed as they are read; nothing else of a file is read."""

    clip: Clip
    gain: float  # factor
    noise: float  # level of white noise, relative to that of the samples read
    shift: int  # samples; what moves in is silence
    seed: int  # of the noise

    @property
    def rate(self) -> int:
        """Samples per second."""
        return self.clip.rate

    @property
    def frames(self) -> int:
        """The number of samples."""
        return self.clip.frames

    @property
    def samples(self) -> Tensor:
        """All of it."""
        return self.read(0, self.frames)

    def read(self, start: int, count: int) -> Tensor:
        """Return samples `start` to `start + count`; fewer at the end."""
        stop = min(start + count, self.frames)
        first, last = (min(max(x - self.shift, 0), self.frames) for x in (start, stop))
        wave = self.clip.read(first, last - first)
        before = min(max(0, self.shift - start), max(0, stop - start))
        wave = F.pad(wave, (before, max(0, stop - start - before - len(wave))))
        if self.noise and len(wave):
            generator = torch.Generator().manual_seed(seed_of(self.seed, start))
            level = self.noise * wave.square().mean().sqrt()
            wave = wave + level * torch.randn(len(wave), generator=generator)
        return (wave * self.gain).clamp(-1, 1)


def change_clip(
    clip: Clip, strength: float, operations: Collection[str], generator: torch.Generator
) -> Clip:
    """Change level, noise and place of a clip, as far as `operations` names them."""
    decibels = uniform(-GAIN, GAIN, generator) * strength
    ratio = uniform(CLEAN - (CLEAN - NOISIEST) * strength, CLEAN, generator)
    share = uniform(-SHIFT, SHIFT, generator) * strength
    seed = int(torch.randint(1 << 62, (), generator=generator))
    return ChangedClip(
        clip,
        10 ** (decibels / 20) if "gain" in operations else 1.0,
        10 ** (-ratio / 20) if "noise" in operations else 0.0,
        round(share * clip.frames) if "shift" in operations else 0,
        seed,
    )


def draw_masks(strength: float, generator: torch.Generator) -> Tensor:
    """Draw SpecAugment's masks, (2 x MASKS, 2): start and width as shares of bands, then of time.

    Park et al. 2019, arXiv:1904.08779. Drawn with the sample, applied on the model's device.
    """
    draws = torch.rand(2 * MASKS_PER_AXIS, 2, generator=generator)
    widest = torch.tensor([BANDS] * MASKS_PER_AXIS + [SPAN] * MASKS_PER_AXIS) * strength
    width = draws[:, 1] * widest
    return torch.stack([draws[:, 0] * (1 - width), width], dim=1)


def no_masks() -> Tensor:
    """Return masks of no width."""
    return torch.zeros(2 * MASKS_PER_AXIS, 2)


def mask_spectrogram(bands: Tensor, masks: Tensor, length: Tensor) -> Tensor:
    """Replace masked bands and times by the clip's mean: (B, F, T), (B, 2 x MASKS, 2) -> (B, F, T).

    `length` (B,) is the clip's share of the T frames: the rest is padding.
    """
    edges = torch.stack([masks[..., 0], masks.sum(-1)], dim=-1)  # (B, masks, 2): start, end
    of_bands, of_time = edges[:, :MASKS_PER_AXIS], edges[:, MASKS_PER_AXIS:] * length[:, None, None]
    hidden_bands = _covered(of_bands, bands.shape[1])[:, :, None]  # (B, F, 1)
    hidden_times = _covered(of_time, bands.shape[2])[:, None]  # (B, 1, T)
    frames = torch.arange(bands.shape[2], device=bands.device)
    real = (frames < (length * bands.shape[2]).clamp(min=1)[:, None])[:, None]  # (B, 1, T)
    total = bands.masked_fill(~real, 0).sum((1, 2), keepdim=True)
    mean = total / (real.sum((1, 2), keepdim=True) * bands.shape[1])
    return torch.where(hidden_bands | hidden_times, mean, bands)


def _covered(edges: Tensor, size: int) -> Tensor:
    """Return which of `size` cells lie within any interval: (B, masks, 2) -> (B, size)."""
    centres = (torch.arange(size, device=edges.device) + 0.5) / size
    return ((edges[..., :1] <= centres) & (centres < edges[..., 1:])).any(1)


def change_text(
    text: str, strength: float, operations: Collection[str], generator: torch.Generator
) -> str:
    """Drop words (never all), swap neighbouring ones and misspell some.

    A text in which nothing is drawn stays as it is, its white space too. Words are what white space
    separates; a text without any is one word, which can only be misspelt.
    """
    words = text.split()
    if not words:
        return text
    drop, swap, typo, place = torch.rand(4, len(words), generator=generator).tolist()
    changed = words
    if "typos" in operations:
        changed = [
            misspell(word, place[i], generator) if typo[i] < TYPO * strength else word
            for i, word in enumerate(changed)
        ]
    if "drop" in operations:
        remaining = [word for i, word in enumerate(changed) if drop[i] >= DROP * strength]
        changed = remaining or [changed[int(place[0] * len(changed))]]
    if "swap" in operations:
        changed = swap_neighbours(changed, swap, SWAP * strength)
    return text if changed == words else " ".join(changed)


def swap_neighbours(words: list[str], draws: list[float], probability: float) -> list[str]:
    """Swap words i and i + 1 where draw i is below `probability`; each moves once."""
    swapped, i = list(words), 0
    while i < len(swapped) - 1:
        if draws[i] < probability:
            swapped[i], swapped[i + 1] = swapped[i + 1], swapped[i]
            i += 1
        i += 1
    return swapped


def misspell(word: str, place: float, generator: torch.Generator) -> str:
    """Misspell one letter, at a share of the word in [0, 1); a word of one letter stays.

    A replacing letter comes from the word itself, so it belongs to the script.
    """
    if len(word) < 2:
        return word
    letters = list(word)
    kind, other = (int(x) for x in torch.randint(1 << 30, (2,), generator=generator))
    make_typo(letters, int(place * len(word)), kind % 4, lambda: word[other % len(word)])
    return "".join(letters)


def make_typo(letters: list[str], at: int, kind: int, replacement: Callable[[], str]) -> None:
    """Swap a letter with the next one (kind 0), drop (1), double (2) or else replace it."""
    if kind == 0 and at + 1 < len(letters):
        letters[at : at + 2] = letters[at + 1], letters[at]
    elif kind == 1:
        letters[at] = ""
    elif kind == 2:
        letters[at] *= 2
    else:
        letters[at] = replacement()


@dataclass(frozen=True)
class Augmentation:
    """What is changed in training samples of one modality, and how much (above 0, up to 1)."""

    modality: str
    kind: str
    strength: float
    operations: tuple[str, ...]

    def __call__(self, processor: Processor) -> Processor:
        """Return a processor that changes values before, or pixels after, another prepares them."""
        return AugmentedProcessor(processor, self)

    @property
    def note(self) -> str:
        """What is done, in a few words: `image 0.5 (crop, rotate, colour, erase)`."""
        return f"{self.modality} {self.strength:g} ({', '.join(self.operations)})"


class AugmentedProcessor(Processor):
    """Change a value at random, then prepare it; without a generator only prepare it."""

    def __init__(self, processor: Processor, augmentation: Augmentation) -> None:
        self.processor, self.augmentation = processor, augmentation
        self.masks = augmentation.kind == "audio" and "mask" in augmentation.operations
        self.takes_batches = augmentation.kind == "text" and processor.takes_batches
        self.reads_together = processor.reads_together

    def __call__(self, value: Any, generator: torch.Generator | None = None) -> Item:
        if generator is None:
            return self._with_masks(self.processor(value), None)
        draws = self._draws(generator)
        item = self.processor(self._changed(value, draws), generator)
        if self.augmentation.kind == "image" and _is_image(item.get("pixels")):
            settings = self.augmentation
            pixels = change_pixels(item["pixels"], settings.strength, settings.operations, draws)
            return {**item, "pixels": pixels}
        return self._with_masks(item, draws)

    def items(self, value: Any, generator: torch.Generator | None = None) -> list[Item]:
        return [self(value, generator)] if self.reads_together else super().items(value, generator)

    def batch_items(
        self, values: Sequence[Any], generators: Sequence[torch.Generator | None]
    ) -> list[list[Item]]:
        def change(value: Any, generator: torch.Generator | None) -> Any:
            if isinstance(value, list):
                return [change(part, generator) for part in value]
            return value if generator is None else self._changed(value, self._draws(generator))

        changed = [change(*pair) for pair in zip(values, generators, strict=True)]
        return self.processor.batch_items(changed, generators)

    def varies(self, value: Any) -> bool:
        return True

    def blank(self) -> Item:
        return self._with_masks(self.processor.blank(), None)

    def collate(self, items: Sequence[Item]) -> Item:
        if not self.masks:
            return self.processor.collate(items)
        plain = [{name: x for name, x in item.items() if name != MASKS} for item in items]
        masks = torch.stack([item[MASKS] for item in items])
        return {**self.processor.collate(plain), MASKS: masks}

    def _draws(self, generator: torch.Generator) -> torch.Generator:
        """Return a generator of its own, so that an encoder's own augmentation draws as without."""
        seed = seed_of(generator.initial_seed(), "augment", self.augmentation.modality)
        return torch.Generator().manual_seed(seed)

    def _changed(self, value: Any, draws: torch.Generator) -> Any:
        """Change one value, or the frames of a clip, all in the same way."""
        if isinstance(value, list):
            copies = [draws, *(draws.clone_state() for _ in value[1:])]
            return [self._changed(*pair) for pair in zip(value, copies, strict=True)]
        kind, strength = self.augmentation.kind, self.augmentation.strength
        operations = self.augmentation.operations
        if kind == "text":
            return change_text(value, strength, operations, draws)
        if kind == "audio":
            return change_clip(value, strength, operations, draws)
        if "crop" in operations:
            value = crop(value, strength, draws)
        if _is_image(self.processor.blank().get("pixels")):
            return value  # the rest is cheaper once the image has its final size
        return change_pixels(value, strength, operations, draws)

    def _with_masks(self, item: Item, draws: torch.Generator | None) -> Item:
        if not self.masks:
            return item
        drawn = no_masks() if draws is None else draw_masks(self.augmentation.strength, draws)
        return {**item, MASKS: drawn}


def _is_image(pixels: Tensor | None) -> bool:
    """Whether these are pixels as the image encoders of fusionzoo take them."""
    return pixels is not None and pixels.dtype == torch.uint8 and pixels.shape[-3] == 3


# ---- settings


def refuse_augmentation(settings: Mapping[str, Any]) -> None:
    """Raise on settings of augmentation where nothing is trained."""
    if "augment" in settings:
        raise FusionZooError("--data.augment: only training augments samples: leave it out")


def set_augmentation(
    encoders: Iterable[tuple[str, Encoder]], settings: Any, left_out: Collection[str] = ()
) -> list[str]:
    """Let the encoders' training processors augment, as `data.augment` says; return what to say.

    `settings`: a strength for all images, clips and texts, or a mapping from modality to its
    strength or settings, in which `strength` is that of all others. `left_out` are modalities of
    the data that the run does not use.
    """
    by_name = dict(encoders)
    chosen, notes = [], []
    for name, strength, switches in _by_modality(by_name, settings, left_out):
        encoder = by_name[name]
        operations, note = _operations(encoder, switches)
        encoder.augmentation = None
        if strength and operations:
            augmentation = Augmentation(name, encoder.kind, strength, operations)
            encoder.augmentation = augmentation
            chosen.append(augmentation.note)
            notes += note
    said = f"augmented in training: {'; '.join(chosen)} (--data.augment)"
    return [said, *notes] if chosen else []


def _by_modality(
    encoders: Mapping[str, Encoder], settings: Any, left_out: Collection[str]
) -> list[tuple[str, float, dict[str, bool]]]:
    """Return (modality, strength, switched operations) of each modality that can be augmented."""
    if settings is None:
        return []
    tree = dict(settings) if isinstance(settings, Mapping) else {"strength": settings}
    common = check_strength("strength", tree.pop("strength", 0.0))
    for name in tree.keys() - {*left_out}:
        check_known(name, encoders, f"--data.augment.{name}: the data has no modality {name!r}")
    resolved = []
    for name, encoder in encoders.items():
        branch = tree.get(name)
        if encoder.kind not in OPERATIONS:
            if branch is not None:
                raise FusionZooError(
                    f"--data.augment.{name}: modality {name!r} is of kind {encoder.kind}, and only"
                    f" {', '.join(OPERATIONS)} can be augmented: leave it out"
                )
            continue
        switches = dict(branch) if isinstance(branch, Mapping) else {}
        strength = branch if branch is not None and not isinstance(branch, Mapping) else common
        strength = check_strength(f"{name}.strength", switches.pop("strength", strength))
        for key, value in switches.items():
            flag, known = f"--data.augment.{name}.{key}", ("strength", *OPERATIONS[encoder.kind])
            check_known(key, known, f"{flag}: no such setting", f"{encoder.kind} has")
            if not isinstance(value, bool):
                raise FusionZooError(f"{flag} {value!r}: it must be true or false")
        resolved.append((name, strength, switches))
    if common and not resolved:
        kinds = ", ".join(sorted({encoder.kind for encoder in encoders.values()}))
        raise FusionZooError(
            f"--data.augment: only {', '.join(OPERATIONS)} can be augmented, and the modalities are"
            f" of kind {kinds}"
        )
    return resolved


def check_strength(key: str, strength: Any) -> float:
    """Return a strength from 0 to 1; anything else is an error."""
    check_number(f"--data.augment.{key}", strength, 0)
    if strength > 1:
        raise FusionZooError(f"--data.augment.{key} {strength:g}: it must be from 0 to 1")
    return float(strength)


def _operations(
    encoder: Encoder, switches: Mapping[str, bool]
) -> tuple[tuple[str, ...], list[str]]:
    """Return the operations that an encoder's samples get, and what to say of those left out."""
    names = [
        name for name in OPERATIONS[encoder.kind] if switches.get(name, name not in ON_REQUEST)
    ]
    notes = []
    of_encoder = str(getattr(encoder.processor(True), "augment", "none"))
    repeated = [name for name in of_encoder.split("_") if name in names]
    if repeated:
        names = [name for name in names if name not in repeated]
        notes.append(
            f"{encoder.modality}: {' and '.join(repeated)} are those of"
            f" --encoders.{encoder.modality}.augment {of_encoder}"
        )
    if "mask" in names and not encoder.masks_spectrogram:
        names.remove("mask")
        if switches.get("mask"):
            raise FusionZooError(
                f"--data.augment.{encoder.modality}.mask true: encoder {encoder.spec.get('name')}"
                " does not mask its spectrogram; mel/* do"
            )
    return tuple(names), notes
