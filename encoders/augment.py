"""Augmentation of a run, `--data.augment.image.strength 0.5`: random changes of training samples.

What changes is drawn from the sample's seed and the modality's name, so it is the same for any
number of loader processes and ranks, and after `--resume`. Evaluation, embedding and the cache of
frozen features never see it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusionzoo.checks import check_number
from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.rng import seed_of

from . import _augment_audio, _augment_image, _augment_text
from ._augment_audio import change_clip, draw_masks, no_masks
from ._augment_image import ON_REQUEST, change_pixels, crop
from ._augment_text import change_text
from .base import Encoder, Item, Processor

OPERATIONS: dict[str, tuple[str, ...]] = {
    "image": _augment_image.OPERATIONS,
    "audio": _augment_audio.OPERATIONS,
    "text": _augment_text.OPERATIONS,
}
MASKS = "masks"  # the input of an encoder that masks its spectrogram


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

    def __call__(self, value: Any, generator: torch.Generator | None = None) -> Item:
        if generator is None:
            return self._with_masks(self.processor(value), None)
        seed = seed_of(generator.initial_seed(), "augment", self.augmentation.modality)
        draws = torch.Generator().manual_seed(seed)
        item = self.processor(self._changed(value, draws), generator)
        if self.augmentation.kind == "image" and _is_picture(item.get("pixels")):
            settings = self.augmentation
            pixels = change_pixels(item["pixels"], settings.strength, settings.operations, draws)
            return {**item, "pixels": pixels}
        return self._with_masks(item, draws)

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

    def _changed(self, value: Any, draws: torch.Generator) -> Any:
        """Change one value, or each of several (a sample with more than one picture or clip)."""
        if isinstance(value, list):
            return [self._changed(part, draws) for part in value]
        kind, strength = self.augmentation.kind, self.augmentation.strength
        operations = self.augmentation.operations
        if kind == "text":
            return change_text(value, strength, operations, draws)
        if kind == "audio":
            return change_clip(value, strength, operations, draws)
        if "crop" in operations:
            value = crop(value, strength, draws)
        if _is_picture(self.processor.blank().get("pixels")):
            return value  # the rest is cheaper once the picture has its final size
        return change_pixels(value, strength, operations, draws)

    def _with_masks(self, item: Item, draws: torch.Generator | None) -> Item:
        if not self.masks:
            return item
        drawn = no_masks() if draws is None else draw_masks(self.augmentation.strength, draws)
        return {**item, MASKS: drawn}


def _is_picture(pixels: Tensor | None) -> bool:
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

    `settings`: a strength for all pictures, clips and texts, or a mapping from modality to its
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
    for name in tree:
        if name not in encoders and name not in left_out:
            raise FusionZooError(
                f"--data.augment.{name}: the data has no modality {name!r}."
                f"{did_you_mean(name, encoders)} It has: {', '.join(encoders)}."
            )
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
        _check_switches(name, encoder.kind, switches)
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


def _check_switches(name: str, kind: str, switches: Mapping[str, Any]) -> None:
    for key, value in switches.items():
        if key not in OPERATIONS[kind]:
            known = ("strength", *OPERATIONS[kind])
            raise FusionZooError(
                f"--data.augment.{name}.{key}: no such setting.{did_you_mean(key, known)}"
                f" {kind} has: {', '.join(known)}"
            )
        if not isinstance(value, bool):
            raise FusionZooError(f"--data.augment.{name}.{key} {value!r}: it must be true or false")


def _operations(
    encoder: Encoder, switches: Mapping[str, bool]
) -> tuple[tuple[str, ...], list[str]]:
    """Return the operations that an encoder's samples get, and what to say of those left out."""
    names = [
        name for name in OPERATIONS[encoder.kind] if switches.get(name, name not in ON_REQUEST)
    ]
    notes = []
    own = str(getattr(encoder.processor(True), "augment", "none"))
    repeated = [name for name in own.split("_") if name in names]
    if repeated:
        names = [name for name in names if name not in repeated]
        notes.append(
            f"{encoder.modality}: {' and '.join(repeated)} are those of"
            f" --encoders.{encoder.modality}.augment {own}"
        )
    if "mask" in names and not encoder.masks_spectrogram:
        names.remove("mask")
        if switches.get("mask"):
            raise FusionZooError(
                f"--data.augment.{encoder.modality}.mask true: encoder {encoder.spec.get('name')}"
                " does not mask its spectrogram; mel/* do"
            )
    return tuple(names), notes
