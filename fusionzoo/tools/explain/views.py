"""What a page shows of a value and its parts: heat over a picture, coloured words, bars."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusionzoo.errors import one_line
from fusionzoo.html.samples import MAX_READ, cell_text, show_clip

from .parts import PartEffect

SIDE = 320  # pixels of a picture's longer side
SHOWN = 12  # parts in a list of bars


def bar(name: str, value: float, top: float) -> dict[str, Any]:
    """Return a bar from the middle of its box, to the right if the value is above 0."""
    width = 50 * abs(value) / top
    left = 50 if value > 0 else 50 - width
    return {"name": name, "value": value, "left": left, "width": width, "sign": _sign(value)}


def _sign(value: float) -> str:
    return "for" if value > 0 else "against"


def view(modality: str, kind: str, value: Any, parts: Sequence[PartEffect]) -> dict[str, Any]:
    """Return how a value is shown: a picture, coloured words, a player with bars, or bars."""
    top = max((abs(part.value) for part in parts), default=0) or 1
    shown: dict[str, Any] = {"modality": modality, "kind": kind, "parts": len(parts)}
    if isinstance(value, list) or kind not in ("image", "text", "audio"):
        chosen = sorted(parts, key=lambda part: -abs(part.value))[:SHOWN]
        cells = value if isinstance(value, dict) else {}
        shown |= {"kind": "bars", "more": len(parts) - len(chosen)}
        shown["bars"] = [
            bar(x.name, x.value, top) | {"cell": cell_text(cells.get(x.name)), "error": x.error}
            for x in chosen
        ]
    elif kind == "text":
        shown["words"] = words(value, parts, top)
    elif kind == "image":
        shown |= picture(value, parts, top)
    else:
        shown |= sound(modality, value, parts, top)
    return shown


def words(text: str, parts: Sequence[PartEffect], top: float) -> list[dict[str, Any]]:
    """Return the text in pieces, each with its share of the strongest colour."""
    pieces, end = [], 0
    for part in parts:
        start, stop = map(int, part.span)
        pieces.append({"text": text[end:start], "value": 0.0, "share": 0.0, "sign": ""})
        shade = {"share": abs(part.value) / top, "sign": _sign(part.value)}
        pieces.append({"text": text[start:stop], "value": part.value, **shade})
        end = stop
    return [*pieces, {"text": text[end:], "value": 0.0, "share": 0.0, "sign": ""}]


def picture(image: Tensor, parts: Sequence[PartEffect], top: float) -> dict[str, Any]:
    """Return a picture uint8 (3, H, W) as a data URI, and its cells in percent of the sides."""
    from PIL import Image

    _, height, width = image.shape
    pixels = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    scale = SIDE / max(height, width)
    smooth = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST
    pixels = pixels.resize((max(1, round(width * scale)), max(1, round(height * scale))), smooth)
    buffer = io.BytesIO()
    pixels.save(buffer, "JPEG", quality=85)
    cells = []
    for part in parts:
        y, x, bottom, right = part.span
        place = {"x": x / width, "y": y / height}
        place |= {"w": (right - x) / width, "h": (bottom - y) / height}
        cells.append(
            {name: 100 * number for name, number in place.items()}
            | {"name": part.name, "value": part.value, "share": abs(part.value) / top}
            | {"sign": _sign(part.value)}
        )
    uri = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"uri": uri, "width": pixels.width, "height": pixels.height, "cells": cells}


def sound(modality: str, clip: Any, parts: Sequence[PartEffect], top: float) -> dict[str, Any]:
    """Return a waveform, a player of the first seconds, and a bar per stretch."""
    try:
        preview = show_clip(modality, clip, plays=True)
    except (OSError, RuntimeError) as error:
        return {"problem": one_line(error), "stretches": []}
    duration = max(clip.frames / clip.rate, 1e-9)
    stretches = [
        {
            "name": part.name,
            "value": part.value,
            "x": 100 * part.span[0] / duration,
            "w": 100 * (part.span[1] - part.span[0]) / duration,
            "h": 50 * abs(part.value) / top,
            "y": 50 - 50 * max(part.value, 0) / top,
            "sign": _sign(part.value),
        }
        for part in parts
    ]
    has_wave = duration <= MAX_READ  # else it shows the beginning, and the bars all of the clip
    shown = {"preview": preview, "has_wave": has_wave, "player": preview.player}
    return {**shown, "stretches": stretches, "problem": ""}
