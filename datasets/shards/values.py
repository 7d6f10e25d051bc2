"""What shards store of a value: the bytes of its file, or with `prepare` those of a smaller one."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fusionzoo.errors import FusionZooError
from fusionzoo.resampling import resampler

from ..export import media_bytes
from ..media import decode
from ..several import each_item
from ..stretch import Stretch, is_video

SIDE = 256  # pixels of the shorter side of a prepared picture
QUALITY = 95  # of JPEG
RATE = 16_000  # Hz of prepared sound
MAGIC = {
    b"\x89PNG": ".png",
    b"\xff\xd8\xff": ".jpg",
    b"GIF8": ".gif",
    b"BM": ".bmp",
    b"II*\0": ".tif",
    b"MM\0*": ".tif",
    b"fLaC": ".flac",
    b"OggS": ".ogg",
    b"ID3": ".mp3",
    b"\xff": ".mp3",
    b"<": ".svg",
}


def stored_value(kind: str, value: Any, prepare: bool) -> Any:
    """Return the bytes of a picture or clip, or float32 of a vector (D,) or sequence (T, D).

    Of a list, the bytes of each item.
    """
    if kind in ("vector", "sequence"):
        return decode(kind, value).numpy()
    if isinstance(value, list):
        return list(each_item(value, lambda item: stored_value(kind, item, prepare)))
    if kind == "image" and is_video(value) and (prepare or isinstance(value, Stretch)):
        raise FusionZooError(
            "shards hold whole videos, not parts or frames of them: convert without segments,"
            " --data.frames and --prepare"
        )
    data = media_bytes(kind, value)
    if not prepare:
        return data
    # An SVG is known by the ending of its file.
    source = value if isinstance(value, Path) else data
    return _smaller_picture(source, data) if kind == "image" else _smaller_clip(data)


def value_size(value: Any) -> int:
    """Return the bytes that a stored value takes, or all items of a list."""
    if isinstance(value, list):
        return sum(map(value_size, value))
    return len(value) if isinstance(value, bytes) else int(value.nbytes)


def npy_bytes(array: np.ndarray) -> bytes:
    """Return an array as a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def suffix_of(kind: str, value: Any) -> str:
    """Return the ending of the file that a stored value is.

    >>> suffix_of("image", b"\\x89PNG..."), suffix_of("audio", b"fLaC...")
    ('.png', '.flac')
    """
    if kind in ("vector", "sequence"):
        return ".npy"
    if value[:4] == b"RIFF":
        return ".webp" if kind == "image" else ".wav"
    known = (suffix for magic, suffix in MAGIC.items() if value.startswith(magic))
    return next(known, ".jpg" if kind == "image" else ".wav")


def _smaller_picture(source: Path | bytes, data: bytes) -> bytes:
    """Return a picture whose shorter side is at most 256: photos as JPEG, the rest as PNG."""
    from PIL import Image

    pixels = decode("image", source)  # (3, H, W)
    height, width = pixels.shape[1:]
    is_read_as_is = data.startswith((b"\xff\xd8\xff", b"\x89PNG"))
    if min(height, width) <= SIDE and is_read_as_is:
        return data
    scale = min(1.0, SIDE / min(height, width))
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    image = Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()))
    image = image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
    buffer = io.BytesIO()
    if data.startswith(b"\xff\xd8\xff") or suffix_of("image", data) == ".webp":
        image.save(buffer, format="jpeg", quality=QUALITY, subsampling=0)
    else:
        image.save(buffer, format="png")
    return buffer.getvalue()


def _smaller_clip(data: bytes) -> bytes:
    """Return a clip as FLAC, mono, 16 bits, 16 kHz; what exceeds full scale is clipped."""
    import soundfile

    clip = decode("audio", data)
    samples, rate = clip.samples, clip.rate
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        is_prepared = (file.format, file.subtype, file.channels) == ("FLAC", "PCM_16", 1)
    if is_prepared and rate == RATE:
        return data
    if rate != RATE:
        samples = resampler(rate, RATE)(torch.as_tensor(samples))
    buffer = io.BytesIO()
    soundfile.write(buffer, samples.clamp(-1, 1).numpy(), RATE, format="FLAC", subtype="PCM_16")
    return buffer.getvalue()
