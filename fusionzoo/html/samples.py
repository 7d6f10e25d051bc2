"""How pages show the values of samples: thumbnails, waveforms, players, beginnings of texts."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fusionzoo.datasets import PairedDataset
from fusionzoo.errors import FusionZooError, one_line
from fusionzoo.ground.cells import whole_dates
from fusionzoo.structures import Clip

SIDE = 160  # pixels of a thumbnail's longer side
POINTS = 120  # of a waveform
MAX_CHARACTERS = 400  # of a text
MAX_READ = 30  # seconds of a clip that are drawn
PLAYED = 20  # seconds of a clip that a page can play


@dataclass(frozen=True)
class Preview:
    """One value as it is shown; the fields that do not apply are empty."""

    modality: str
    image: Any = None  # PIL image
    wave: NDArray[np.float32] | None = None  # lowest and highest sample per point, (POINTS, 2)
    player: str = ""  # the beginning of a clip as a data URI
    text: str = ""
    caption: str = ""
    problem: str = ""  # why it cannot be decoded

    @property
    def uri(self) -> str:
        """The thumbnail as a data URI."""
        buffer = io.BytesIO()
        self.image.save(buffer, "PNG" if max(self.image.size) <= 32 else "JPEG", quality=80)
        kind = "png" if max(self.image.size) <= 32 else "jpeg"
        return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"

    @property
    def path(self) -> str:
        """The waveform as an SVG path in a box of POINTS x 40, its middle at 20."""
        assert self.wave is not None
        top = max(float(np.abs(self.wave).max()), 1e-9)
        scale = 19 / max(top, 0.05)  # a quiet clip stays small
        upper = [f"{x},{20 - scale * high:.1f}" for x, (_, high) in enumerate(self.wave)]
        lower = [f"{x},{20 - scale * low:.1f}" for x, (low, _) in enumerate(self.wave)]
        return f"M{' L'.join([*upper, *reversed(lower)])} Z"


def show_sample(
    dataset: PairedDataset, row: int, modalities: list[str] | None = None, *, plays: bool = False
) -> list[Preview]:
    """Return the previews of a sample's values, of those in `modalities` that it has.

    With `plays` clips have players.
    """
    names = [name for name in dataset.modalities if modalities is None or name in modalities]
    previews = (_show(dataset, name, row, plays) for name in names)
    return [preview for preview in previews if preview is not None]


def _show(dataset: PairedDataset, name: str, row: int, plays: bool) -> Preview | None:
    reference = dataset.reference(name, row)
    if reference is None:
        return None
    kind = dataset.modalities[name]
    try:
        value = dataset.decode(name, reference)
        count = len(value) if isinstance(value, list) and kind in ("image", "audio") else 1
        first = value[0] if count > 1 else value
        more = f", the first of {count}" if count > 1 else ""
        if kind == "image":
            return show_image(name, first, more)
        if kind == "audio":
            return show_clip(name, first, more, plays=plays)
    except (FusionZooError, OSError, ValueError, RuntimeError) as error:
        return Preview(name, problem=one_line(error))
    if kind == "text":
        text = value if len(value) <= MAX_CHARACTERS else value[:MAX_CHARACTERS] + " ..."
        words = len(value.split())
        return Preview(name, text=text, caption=f"{words:,} word{'' if words == 1 else 's'}")
    if isinstance(value, dict):
        whole = whole_dates(value)
        cells = ", ".join(f"{column} {cell_text(cell)}" for column, cell in whole.items())
        return Preview(name, text=cells[:MAX_CHARACTERS], caption=f"{len(whole)} columns")
    array = np.asarray(value)
    if not array.ndim or array.dtype.kind not in "fiub":
        return Preview(name, text=str(value)[:MAX_CHARACTERS], caption=kind)
    shown = ", ".join(f"{x:.3g}" for x in array.ravel()[:8]) + ", ..." * (array.size > 8)
    return Preview(name, text=shown, caption=f"{kind} {' x '.join(map(str, array.shape))}")


def show_image(name: str, image: torch.Tensor, more: str = "") -> Preview:
    """Show uint8 (3, H, W)."""
    from PIL import Image

    pixels = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    pixels.thumbnail((SIDE, SIDE))
    return Preview(name, image=pixels, caption=f"{image.shape[2]} x {image.shape[1]} pixels{more}")


def cell_text(cell: Any) -> str:
    """Return a cell of a table as it is shown: numbers with four digits, `missing`."""
    if cell is None:
        return "missing"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def show_clip(name: str, clip: Clip, more: str = "", *, plays: bool = False) -> Preview:
    """Show the first seconds of a clip, with a player if it `plays`."""
    count = min(clip.frames, MAX_READ * clip.rate)
    samples = clip.read(0, count).numpy()
    edges = np.linspace(0, len(samples), min(POINTS, len(samples)) + 1).astype(int)
    wave = np.stack(
        [np.minimum.reduceat(samples, edges[:-1]), np.maximum.reduceat(samples, edges[:-1])], axis=1
    )
    seconds = f"{clip.frames / clip.rate:.2f} s, {clip.rate:,} Hz"
    start = clip.read(0, min(clip.frames, PLAYED * clip.rate)) if plays else None
    player = "" if start is None else audio_uri(start, clip.rate)
    caption = f"{seconds}, peak {np.abs(samples).max():.3f}{more}"
    return Preview(name, wave=wave, player=player, caption=caption)


def audio_uri(samples: Any, rate: int) -> str:
    """Return a mono clip as a data URI that browsers play: OGG, or WAV at rates that it lacks."""
    import soundfile

    for kind, subtype in (("OGG", "VORBIS"), ("WAV", "PCM_16")):
        buffer = io.BytesIO()
        try:
            soundfile.write(buffer, samples.numpy(), rate, format=kind, subtype=subtype)
        except (soundfile.LibsndfileError, RuntimeError):
            continue
        data = base64.b64encode(buffer.getvalue()).decode()
        return f"data:audio/{kind.lower()};base64,{data}"
    return ""
