"""Write an image or a clip as the bytes of a file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from fusionzoo.errors import explained

from .decode import decode
from .ranges import is_deep


def media_bytes(kind: str, value: Any) -> bytes:
    """Return an image or clip as bytes; what is no file yet as PNG, TIFF if it
    has more than 8 bits, or WAV of 32-bit floats."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, Path):
        with explained(f"{value} cannot be opened", OSError):
            return value.read_bytes()
    buffer = io.BytesIO()
    if kind == "image":
        from PIL import Image

        if is_deep(value):  # whose range is another's to say
            value.save(buffer, format="tiff")
            return buffer.getvalue()
        pixels = np.ascontiguousarray(decode(kind, value).permute(1, 2, 0).numpy())
        Image.fromarray(pixels).save(buffer, format="png", compress_level=1)
    else:
        import soundfile

        clip = decode(kind, value)
        samples = clip.samples.numpy()
        soundfile.write(buffer, samples, clip.rate, format="WAV", subtype="FLOAT")
    return buffer.getvalue()
