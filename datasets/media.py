"""Decode pictures, clips, texts and vectors, from paths, bytes or objects, without system packages.

What cannot be read is one `FusionZooError` that names the file.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError, one_line

from .drawing import render
from .sound import decode_audio

T = TypeVar("T")
PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".svg"}
CLIPS = {".wav", ".flac", ".ogg", ".oga", ".mp3"}
TEXTS = {".txt"}
ARRAYS = {".npy"}
MOST_PIXELS = 89_478_485  # 270 MB as RGB, where Pillow begins to warn too
SUFFIXES = {"image": PICTURES, "audio": CLIPS, "text": TEXTS, "vector": ARRAYS, "sequence": ARRAYS}


def decode(kind: str, value: Any) -> Any:
    """Decode one value of a kind (image, text, audio, vector, sequence), as `Sample` says."""
    decoders = {"image": decode_image, "audio": decode_audio, "text": decode_text}
    if kind in decoders:
        return decoders[kind](value)
    return decode_array(value, 1 if kind == "vector" else 2)


def decode_image(source: Any) -> Tensor:
    """Return RGB, uint8 (3, H, W), from a path, bytes, a PIL picture, or an array.

    Transparency is composed on white; 16-bit, palette and CMYK pictures are converted; the camera's
    orientation is applied; of an animation the first picture counts. Arrays are uint8 (H, W),
    (H, W, 3) or (3, H, W).
    """
    if isinstance(source, np.ndarray | Tensor):
        return _image_from_array(torch.as_tensor(source))
    if not isinstance(source, str | Path | bytes):
        return _to_rgb(_load(_open(source, "the picture"), "the picture"))
    path, data = _read(source)
    if _is_svg(path, data):
        data = render(data, path)
    picture = _open(data, path)  # reads the header, so that what is too large is not decoded
    return _decode_plain(data, path) if _is_plain(data) else _to_rgb(_load(picture, path))


def _is_plain(data: bytes) -> bool:
    """Say whether torchvision decodes it just as Pillow would: it is up to twice as fast."""
    if data.startswith(b"\xff\xd8\xff"):  # JPEG
        return True
    eight_bit = data[24:26] in (b"\x08\x00", b"\x08\x02")  # grey, RGB
    head = data[: max(data.find(b"IDAT"), 0)]
    return data.startswith(b"\x89PNG") and eight_bit and b"tRNS" not in head


def _decode_plain(data: bytes, path: str) -> Tensor:
    from torchvision.io import ImageReadMode
    from torchvision.io import decode_image as decode_by_torchvision

    held = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        return decode_by_torchvision(held, ImageReadMode.RGB, apply_exif_orientation=True)
    except RuntimeError as error:
        raise FusionZooError(f"{path} is no picture that can be read: {error}") from error


def _open(source: Any, path: str) -> Any:
    """Read a picture's header, and refuse more pixels than memory should be spent on."""
    from PIL import Image

    if not isinstance(source, bytes | Image.Image):
        raise FusionZooError(
            f"a {type(source).__name__} is no picture:"
            " give a path, bytes, a PIL picture or an array"
        )
    try:
        picture = Image.open(io.BytesIO(source)) if isinstance(source, bytes) else source
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(path, one_line(error)) from error
    except Exception as error:
        raise FusionZooError(f"{path} is no picture that can be read: {one_line(error)}") from error
    if picture.width * picture.height > MOST_PIXELS:
        raise _too_large(path, f"{picture.width} x {picture.height} pixels")
    return picture


def _too_large(path: str, size: str) -> FusionZooError:
    return FusionZooError(
        f"{path} is too large to decode: {size}; at most {MOST_PIXELS:,} pixels: store it smaller"
    )


def _load(picture: Any, path: str) -> Any:
    """Decode a picture, and turn it as the camera was held."""
    from PIL import ImageOps

    try:
        picture.load()
        return ImageOps.exif_transpose(picture)
    except Exception as error:
        raise FusionZooError(f"{path} is no picture that can be read: {one_line(error)}") from error


def _is_svg(path: str, data: bytes) -> bool:
    return path.lower().endswith(".svg") or data.lstrip()[:5] in (b"<svg ", b"<?xml")


def _to_rgb(picture: Any) -> Tensor:
    """Compose on white and convert."""
    from PIL import Image

    if picture.mode.startswith(("I", "F")):  # 16 bits and more: Pillow would clip, not scale
        wide = np.asarray(picture).astype(np.float64)
        # 32 bits have no range of their own: the smallest usual one that holds them.
        tops = (65535,) if picture.mode.startswith("I;16") else (1, 255, 65535)
        top = next((top for top in tops if wide.max() <= top), wide.max())
        picture = Image.fromarray((wide * (255 / top)).clip(0, 255).astype(np.uint8))
    if "A" in picture.getbands() or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture)
    rgb = np.array(picture.convert("RGB"))
    return torch.from_numpy(rgb).permute(2, 0, 1).contiguous()


def _image_from_array(array: Tensor) -> Tensor:
    if array.dtype != torch.uint8:
        raise FusionZooError(f"a picture given as an array must be uint8, found {array.dtype}")
    if array.ndim == 2:
        return array.expand(3, -1, -1).contiguous()
    if array.ndim == 3 and array.shape[0] == 3:
        return array
    if array.ndim == 3 and array.shape[-1] == 3:
        return array.permute(2, 0, 1).contiguous()
    raise FusionZooError(
        f"an array of shape {tuple(array.shape)} is no picture: (H, W[, 3]), (3, H, W)"
    )


def decode_text(source: Any) -> str:
    """Return the text itself, or that of a .txt file given as a `Path`."""
    if isinstance(source, Path):
        path, data = _read(source)
        try:
            return data.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise FusionZooError(f"{path} is not UTF-8 text: {error}") from error
    if not isinstance(source, str):
        raise FusionZooError(f"a {type(source).__name__} is no text")
    return source


def decode_array(source: Any, ndim: int) -> Tensor:
    """Return float32 of `ndim` dimensions, from a .npy file, a list, an array or a tensor."""
    name = str(source) if isinstance(source, str | Path) else f"a {type(source).__name__}"
    try:
        loaded = np.load(source, allow_pickle=False) if isinstance(source, str | Path) else source
        array = np.asarray(loaded, dtype=np.float32)
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise FusionZooError(f"{name} is no array that can be read: {error}") from error
    if array.ndim != ndim:
        raise FusionZooError(f"{name} has shape {array.shape}; expected {ndim} dimensions")
    if not np.isfinite(array).all():
        raise FusionZooError(f"{name} holds values that are no finite numbers")
    return torch.as_tensor(array)


def _read(source: str | Path | bytes) -> tuple[str, bytes]:
    """Return a name for messages and the contents."""
    if isinstance(source, bytes):
        return "<bytes>", source
    try:
        data = Path(source).read_bytes()
    except OSError as error:
        raise FusionZooError(f"{source} cannot be opened: {error.strerror}") from error
    if not data:
        raise FusionZooError(f"{source} is empty")
    return str(source), data
