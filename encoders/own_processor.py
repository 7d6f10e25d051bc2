"""Images prepared by the processor of their checkpoint, where no crop, pad or squash does the same.

Such as patches of pictures that keep their shape (SigLIP 2 NaFlex, Qwen-VL, Pixtral), tiles of a
large picture, or another order of the channels (MobileViT).

Shapes: `B` batch, `T` tokens, `D` width.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.errors import FusionZooError, explained, one_line
from fusionzoo.structures import Features

from .base import Item, Processor, mean_pooled, unmasked
from .image import randomly_cropped

SHAPE = ".shape"  # of a tensor's name: the shape that it has in a row, before padding
SIDES = (64, 224)  # of a blank image, in pixels; some processors take no small one


class OwnProcessor(Processor):
    """Prepare images, uint8 (3, H, W), with an image processor of transformers.

    Tensors of different shapes are padded with zeros at their ends; each row keeps its shapes.
    `forward` is what takes them: of what the processor makes, its arguments alone are kept.
    """

    def __init__(
        self, extractor: Any, forward: Callable[..., Any], source: str, augment: str = "none"
    ) -> None:
        self.extractor, self.augment, self.source = extractor, augment, source
        self.names: tuple[str, ...] = tuple(inspect.signature(forward).parameters)
        for self.side in SIDES:
            try:
                single, pair = (self._tensors([self._black()] * count) for count in (1, 2))
            except Exception as error:
                problem = error
            else:
                break
        else:
            raise FusionZooError(f"{source}: its image processor fails: {one_line(problem)}")
        self.names = tuple(name for name in self.names if name in single)
        # Patches of all images one after another, as Qwen-VL's; else the first dimension is B.
        lengths = {name: (len(single[name]), len(pair[name])) for name in self.names}
        self.joined = {name for name, (one, two) in lengths.items() if one > 1 and two == 2 * one}
        if not all(x.isfinite().all() for x in single.values()):
            raise FusionZooError(
                f"{source}: {type(extractor).__name__} makes pixels that are not finite: look at"
                " mean and std in preprocessor_config.json"
            )
        if not any(single[name].is_floating_point() for name in self.names):
            raise FusionZooError(
                f"{source}: {type(extractor).__name__} makes {', '.join(single)}, and the model"
                " takes none of them as pixels"
            )

    def _black(self) -> Tensor:
        return torch.zeros(3, self.side, self.side, dtype=torch.uint8)

    def _tensors(self, images: list[Tensor]) -> dict[str, Tensor]:
        prepared = self.extractor(images, return_tensors="pt")
        return {name: x for name, x in prepared.items() if isinstance(x, Tensor)}

    def __call__(self, value: Tensor, generator: torch.Generator | None = None) -> Item:
        if generator is not None:
            value = randomly_cropped(value, self.augment, generator)
        size = f"{value.shape[2]} x {value.shape[1]}"
        with explained(f"the image processor of {self.source} does not take an image of {size}"):
            prepared = self._tensors([value])
            item = {x: prepared[x] if x in self.joined else prepared[x][0] for x in self.names}
        return item | {f"{name}{SHAPE}": torch.tensor(x.shape) for name, x in item.items()}

    def varies(self, value: Tensor) -> bool:
        return self.augment != "none"

    def without_augmentation(self) -> OwnProcessor:
        """Return the processor of evaluation."""
        processor = copy.copy(self)
        processor.augment = "none"
        return processor

    def blank(self) -> Item:
        return self(self._black())

    def collate(self, items: Sequence[Item]) -> Item:
        return {name: _padded([item[name] for item in items]) for name in items[0]}

    def encode(
        self,
        run: Callable[..., tuple[Tensor, Tensor | None]],
        inputs: Mapping[str, Tensor],
    ) -> Features:
        """Run rows of equal shapes and sizes together, without padding between them.

        `run` takes the number of rows and the tensors by name, and returns tokens (B, T, D) and
        the pooled vector (B, D), or None for the mean of the tokens.
        """
        facts = [inputs[f"{name}{SHAPE}"] for name in self.names]
        # Sizes of a picture and of its grid of patches or tiles, on which its tokens depend.
        facts += [x.flatten(1) for x in map(inputs.__getitem__, self.names) if _is_size(x)]
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, numbers in enumerate(torch.cat(facts, 1).tolist()):
            groups.setdefault(tuple(numbers), []).append(row)
        places = torch.tensor([row for rows in groups.values() for row in rows])
        parts = [
            self._encode_group(run, {name: x[rows] for name, x in inputs.items()})
            for rows in groups.values()
        ]
        tokens, mask = (_padded([row for part in parts for row in part[which]]) for which in (0, 1))
        back = places.argsort().to(tokens.device)
        pooled = torch.cat([part.pooled for part in parts])
        return Features(tokens[back], mask[back], pooled[back])

    def tensors(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the model takes of rows whose tensors have equal shapes, without padding."""
        tensors = {}
        for name in self.names:
            rows, shape = inputs[name], inputs[f"{name}{SHAPE}"][0].tolist()
            rows = rows[(slice(None), *map(slice, shape))]
            tensors[name] = rows.flatten(0, 1) if name in self.joined else rows
        return tensors

    def _encode_group(
        self, run: Callable[..., tuple[Tensor, Tensor | None]], inputs: Mapping[str, Tensor]
    ) -> Features:
        tensors = self.tensors(inputs)
        tokens, pooled = run(inputs[self.names[0]].shape[0], **tensors)
        masks = [x.bool() for name, x in tensors.items() if name.endswith("mask")]
        mask = next((x for x in masks if x.shape == tokens.shape[:2]), None)
        if mask is None:
            return unmasked(tokens, pooled)
        return mean_pooled(tokens, mask) if pooled is None else Features(tokens, mask, pooled)


def _is_size(x: Tensor) -> bool:
    return not x.is_floating_point() and x.dtype != torch.bool and x[0].numel() <= 4


def _padded(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors, each padded with zeros at the ends of its dimensions."""
    shape = [max(sizes) for sizes in zip(*(x.shape for x in tensors), strict=True)]
    return torch.stack([_lengthened(x, shape) for x in tensors])


def _lengthened(x: Tensor, shape: Sequence[int]) -> Tensor:
    missing = [size - n for size, n in zip(shape, x.shape, strict=True)]
    return F.pad(x, [n for size in reversed(missing) for n in (0, size)]) if any(missing) else x
