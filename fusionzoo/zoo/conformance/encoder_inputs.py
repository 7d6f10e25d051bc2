"""Helpers of the checks of encoders: raw values of each kind, batches, comparison of rows.

Shapes: `B` batch, `T` tokens, `D` width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusionzoo.encoders import ENCODERS, Encoder, create_encoder
from fusionzoo.structures import Audio, Features

Maker = Callable[..., Encoder]  # (freeze=, assets=) -> Encoder
Inputs = dict[str, Tensor]
WIDTH = 5  # of vectors, and of the steps of sequences
PICTURES = ((40, 60), (70, 50), (64, 64))  # height, width
TEXTS = (("a cat", "a much longer line of text about cats", ""), ("to do", "quite another", "x"))
CLIPS = ((16_000, 9_000), (22_050, 20_000), (16_000, 100))  # Hz, samples
STEPS = (3, 6, 1)
COLUMNS: tuple[dict[str, Any], ...] = (  # of an encoder of a table's columns
    {"name": "age", "mean": 40.0, "std": 12.0},
    {"name": "colour", "values": ["blue", "red", "yellow"]},
    {"name": "weight", "mean": 70.0, "std": 9.0},
    {"name": "place", "values": ["hall", "yard"]},
)


def build(make: Maker, **options: Any) -> Encoder:
    """Build an encoder, every parameter away from its initial value."""
    torch.manual_seed(0)
    encoder = make(**options)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return encoder.eval()


def raw_values(encoder: Encoder, seed: int = 0) -> list[Any]:
    """Make three values of different sizes, as the data set decodes them; the sizes are fixed."""
    draw = torch.Generator().manual_seed(seed)
    if encoder.kind == "image":
        return [
            torch.randint(0, 256, (3, height, width), generator=draw, dtype=torch.uint8)
            for height, width in PICTURES
        ]
    if encoder.kind == "text":
        return list(TEXTS[seed % len(TEXTS)])
    if encoder.kind == "audio":
        return [Audio(0.1 * torch.randn(n, generator=draw), rate) for rate, n in CLIPS]
    if encoder.kind == "tabular":
        columns = encoder.spec.get("columns", COLUMNS)
        return [_cells(columns, number, draw) for number in range(3)]
    width = int(getattr(encoder, "in_dim", WIDTH))
    shapes = [(width,)] * 3 if encoder.kind == "vector" else [(steps, width) for steps in STEPS]
    return [torch.randn(shape, generator=draw) for shape in shapes]


def _cells(
    columns: Sequence[Mapping[str, Any]], number: int, draw: torch.Generator
) -> dict[str, Any]:
    """Make the cells of sample 0, 1 or 2: each column is empty in sample 1 or 2; sample 2 has
    categories that no encoder knows."""
    cells: dict[str, Any] = {}
    for place, column in enumerate(columns):
        drawn = float(torch.randn(1, generator=draw))
        if number and (number + place) % 2:
            cells[column["name"]] = None
        elif "mean" in column:
            cells[column["name"]] = column["mean"] + column["std"] * drawn
        elif number < 2 and column["values"]:
            values = column["values"]
            cells[column["name"]] = values[int(1e6 * abs(drawn)) % len(values)]
        else:
            cells[column["name"]] = "something new"
    return cells


def describe(value: Any) -> str:
    """Name a raw value in a message."""
    if isinstance(value, Mapping):
        return f"the cells {dict(value)}"
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, Audio):
        return f"a clip of {value.frames} samples at {value.rate} Hz"
    return f"a value of shape {tuple(value.shape)}"


def batch_of(encoder: Encoder, values: Sequence[Any]) -> Inputs:
    """Prepare and collate raw values; None stands for the blank sample."""
    prepare = encoder.processor(False)
    return prepare.collate([prepare.blank() if v is None else prepare(v) for v in values])


@torch.no_grad()
def features_of(encoder: Encoder, values: Sequence[Any]) -> Features:
    """Encode raw values."""
    features: Features = encoder(batch_of(encoder, values))
    return features


def poisoned(inputs: Mapping[str, Tensor]) -> Inputs:
    """Overwrite what a mask among the inputs, bool (B, T), marks as padding; else change nothing.

    Floats become NaN; integers, which may be indices, become the largest in the batch.
    """
    masks = [x for x in inputs.values() if x.dtype == torch.bool and x.ndim == 2]
    changed = dict(inputs)
    for name, x in inputs.items():
        for mask in masks:
            if x.dtype != torch.bool and x.shape[:2] == mask.shape:
                padding = ~mask.reshape(*mask.shape, *[1] * (x.ndim - 2))
                value = float("nan") if x.is_floating_point() else int(x.max())
                changed[name] = x.masked_fill(padding, value)
    return changed


def assert_equal(
    features: Features, expected: Features, row: int, other: int, why: str, tolerance: float
) -> None:
    """Require that row `row` of `features` equals row `other` of `expected`, padding aside."""
    tokens, wanted = features.tokens[row][features.mask[row]], expected.tokens[other]
    wanted = wanted[expected.mask[other]]
    assert len(tokens) == len(wanted), f"{why}: {len(wanted)} real tokens became {len(tokens)}"
    pairs = {"pooled": (features.pooled[row], expected.pooled[other]), "tokens": (tokens, wanted)}
    for name, (x, y) in pairs.items():
        if not torch.allclose(x, y, rtol=tolerance, atol=tolerance):
            off = (x - y).abs().max().item()
            raise AssertionError(f"{why}: {name} differs by {off:.2g}")


def maker(target: str, settings: Mapping[str, Any] | None = None) -> Maker:
    """Return what builds the encoder of a name, `module:Class` or `file.py:Class`.

    An encoder of vectors or sequences is built for width 5, one of columns for four of them, unless
    `settings` say otherwise.
    """
    chosen = dict(settings or {})
    prefix = target.partition("/")[0]  # of `timm/resnet18`
    entry = next((ENCODERS[name] for name in (target, prefix) if name in ENCODERS), None)
    kind = chosen.pop("kind", entry.family if entry else "")
    if entry and "in_dim" in entry.parameters:
        chosen.setdefault("in_dim", WIDTH)
    if entry and entry.family == "tabular" and "columns" in entry.parameters:
        chosen.setdefault("columns", [dict(column) for column in COLUMNS])
    return partial(create_encoder, kind, target, **chosen)
