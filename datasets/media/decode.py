"""Decode images, drawings, text and vectors from paths, bytes or objects."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from fusionzoo.errors import FusionZooError, explained, located, one_line, warn_of_file
from fusionzoo.ground.cells import composed, read_cells
from fusionzoo.ground.compiler import compiler_later
from fusionzoo.targets import decimal_hint

from .arrays import HDF5, ZIP, ArrayItem, find_item
from .audio import Segment, decode_audio, is_video
from .budgets import check_budget, check_image, check_shape, file_size
from .formats import how_to_convert
from .ranges import DEEP, Range, scaled_to_bytes
from .video import decode_video

SVG_SIDE = 512  # pixels of the rendered drawing's longer side
MAX_MEMORY = 2 << 30  # bytes
MAX_SECONDS = 10  # of CPU time

# What is neither a data URL (with a comma before any "#") nor a name in the drawing, the library
# opens as a file, wherever it is: such drawings are refused. Its working folder is empty, so that
# no relative path leads anywhere.
# Patterns, masks and filter regions may be huge, whatever the drawing's size: the Rust library then
# fails to allocate memory and aborts its process. The limits make that happen early.
RENDER = r"""
import sys
side, memory, seconds = map(int, sys.argv[1:])
try:
    import resource
except ImportError:  # Windows has no such limits
    pass
else:
    for kind, limit in (("AS", memory), ("CPU", seconds), ("CORE", 0)):
        kind = getattr(resource, "RLIMIT_" + kind)
        hard = resource.getrlimit(kind)[1]
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(kind, (limit, hard))
import re
import resvg_py
from xml.etree import ElementTree
try:
    text = sys.stdin.buffer.read().decode()
    for element in ElementTree.fromstring(text).iter():
        for name, value in element.attrib.items():
            link = value.strip(" \t\r\n")  # as the library does; strip() removes more
            is_inside = re.fullmatch(r"(?s:data:[^,#]*,.*)|#[^/\\]*|", link)
            if name.rpartition("}")[2] == "href" and not is_inside:
                if element.tag.rpartition("}")[2] != "a":  # where a click would lead
                    raise ValueError(f"it refers to the file {link[:80]!r}: embed it instead")
    # Without a resolution a size in mm, pt or in is read as 0; 96 is that of CSS.
    image = bytes(resvg_py.svg_to_bytes(svg_string=text, width=side, height=side, dpi=96))
except BaseException as error:  # a panic in Rust is not an Exception
    sys.exit(" ".join(str(error).split()))
sys.stdout.buffer.write(image)
"""
ORIENTATION = 0x0112  # in EXIF
TURNS: dict[Any, tuple[bool, tuple[int, ...]]] = {  # transposed or not, then flipped dimensions
    **{2: (False, (2,)), 3: (False, (1, 2)), 4: (False, (1,))},
    **{5: (True, ()), 6: (True, (2,)), 7: (True, (1, 2)), 8: (True, (1,))},
}
ARRAY_FILES = (".npy", *ZIP, *HDF5)
T = TypeVar("T")
# Of Pillow's formats; some others run a program (EPS runs Ghostscript).
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "DIB", "TIFF", "WEBP")
SVG_STARTS = (b"<svg ", b"<?xml", b"<!DOCTYPE svg")
SAMPLE_FORMAT, SIGNED, BITS = 339, 2, 258  # of TIFF
PNG = b"\x89PNG\r\n\x1a\n"
JPEG = b"\xff\xd8\xff"
FRAMES = (0xC0, 0xC1, 0xC2)  # of JPEG: they hold the size
PLAIN = {0xC4, 0xDB, 0xDD, 0xE0, *range(0xE2, 0xF0), 0xFE}  # all but APP1, of EXIF and XMP


def render(data: bytes, path: str) -> bytes:
    """Render an SVG as a PNG whose longer side is `SVG_SIDE`."""
    if find_spec("resvg_py") is None:
        raise FusionZooError(f"{path}: drawings need an extra: pip install 'fusionzoo[svg]'")
    limits = [str(x) for x in (SVG_SIDE, MAX_MEMORY, MAX_SECONDS)]
    command = [sys.executable, "-P", "-c", RENDER, *limits]
    try:
        with TemporaryDirectory() as empty:
            done = subprocess.run(
                command,
                input=data,
                capture_output=True,
                timeout=30 * MAX_SECONDS,
                check=False,
                cwd=empty,
            )
    except subprocess.TimeoutExpired:
        raise _too_costly(path, f"{30 * MAX_SECONDS} s") from None
    if done.returncode == 0:
        return done.stdout
    if done.returncode == -getattr(signal, "SIGXCPU", 0):
        raise _too_costly(path, f"{MAX_SECONDS} s of CPU time")
    if done.returncode < 0:
        raise _too_costly(path, f"{MAX_MEMORY >> 30} GiB of memory")
    reason = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    raise FusionZooError(f"{path} cannot be read as a drawing: {' '.join(reason)}")


def _too_costly(path: str, limit: str) -> FusionZooError:
    return FusionZooError(f"{path} takes more than {limit} to render: store it as a PNG")


def decode_array(source: Any, ndim: int, name: str = "") -> Tensor:
    """Return float32 of `ndim` dimensions, from a list or array that messages call `name`."""
    if isinstance(source, str | Path):
        raise FusionZooError(f"{source} is no file of arrays: {', '.join(ARRAY_FILES)}")
    name = name or f"a {type(source).__name__}"
    if isinstance(source, np.ndarray | Tensor):
        check_shape(source.shape, name)
    try:
        array = np.asarray(source, dtype=np.float32)
    except (OverflowError, ValueError, TypeError) as error:
        number = re.search(r"to float: '(.*)'", str(error))  # text in a list
        hint = decimal_hint(number[1]) if number else ""
        raise FusionZooError(f"{name} is no array of numbers: {one_line(error)}{hint}") from error
    if array.ndim != ndim:
        raise FusionZooError(f"{name} has shape {array.shape}; expected {ndim} dimensions")
    if not np.isfinite(array).all():
        raise FusionZooError(f"{name} contains values that are not finite")
    return torch.as_tensor(array)


def decode(kind: str, value: Any, image_range: Range | None = None) -> Any:
    """Decode a value of one of `KINDS`, as `Sample` describes; a list has several items.

    `image_range` is that of images of more than 8 bits, see `decode_image`.
    """
    if kind in ("image", "audio") and isinstance(value, list):
        return decode_items(value, partial(decode, kind, image_range=image_range))
    if kind in ("image", "audio") and is_video(value):
        return decode_video(kind, value)
    if kind in ("text", "tabular"):
        return decode_text(value) if kind == "text" else read_cells(value)
    if isinstance(value, str | Path):
        value = find_item(str(value)) or value
    part = value if isinstance(value, Segment) else Segment(value)
    if isinstance(part.source, ArrayItem):
        return _decode_item(kind, part)
    if kind == "image":
        return decode_image(value, image_range)
    if kind == "audio":
        return decode_audio(value)
    return decode_array(value, 1 if kind == "vector" else 2)


def decode_items(values: Sequence[Any], decode_one: Callable[[Any], Any]) -> Any:
    """Decode each item of a list, videos as several images; a single item gives the item itself."""
    decoded: list[Any] = []
    for item in each_item(values, decode_one):
        decoded += item if isinstance(item, list) else [item]
        pixels = sum(x[0].numel() for x in decoded if isinstance(x, Tensor))
        check_budget("pixels of all images", pixels, "the list")
    if not decoded:
        raise FusionZooError("the list is empty")
    return decoded[0] if len(decoded) == 1 else decoded


def each_item(values: Sequence[Any], read: Callable[[Any], T]) -> Iterator[T]:
    """Read the items of a list in turn; an error names the item."""
    check_budget("items", len(values), "the list")
    for number, value in enumerate(values, start=1):
        with located(f"item {number} of {len(values)}"):
            item = read(value)
        yield item


def _decode_item(kind: str, part: Segment) -> Any:
    """Decode a value in an array; errors name its file, key and row."""
    item: ArrayItem = part.source
    array = item.read()
    if kind in ("vector", "sequence"):
        return decode_array(array, 1 if kind == "vector" else 2, str(item))
    if kind == "audio" and item.rate is None:
        raise FusionZooError(f"{item}: samples have no rate: --data.sample_rate 16000 (Hz)")
    with located(str(item)):
        if kind == "audio":
            return decode_audio(replace(part, source=(array, item.rate)))
        return decode_image(array)


def decode_image(source: Any, image_range: Range | None = None) -> Tensor:
    """Return RGB, uint8 (3, H, W), from a path, bytes, a PIL image, or an array.

    Transparent pixels are blended with white; palette and CMYK images are converted; the EXIF
    orientation is applied; an animation gives its first frame. Of more than 8 bits, the values of
    `image_range` become 0 to 255, what lies outside is cut off; without it those of 16 bits are 0
    to 65535, and an image of 32 bits is an error. Arrays are uint8 (H, W), (H, W, 3) or (3, H, W).
    """
    if isinstance(source, np.ndarray | Tensor):
        image = _image_from_array(torch.as_tensor(source))
        check_image(image.shape[2], image.shape[1], "the image")
        return image
    if not isinstance(source, str | Path | bytes):
        return _load(_open(source, "the image"), "the image", image_range)
    path, data = _read(source, "image file")
    is_drawing = path.lower().endswith(".svg") or data.lstrip().startswith(SVG_STARTS)
    data = render(data, path) if is_drawing else data
    if size := _plain_jpeg_size(data):
        check_image(*size, path)
        return _decode_jpeg(data, path)
    with _pillow_warnings_named(path):
        image = _open(data, path)  # its header; the pixels of a JPEG torchvision decodes faster
        if not data.startswith(JPEG):
            return _load(image, path, image_range)
        orientation = _orientation(image, path)
    return _turned(_decode_jpeg(data, path), orientation)


@contextmanager
def _pillow_warnings_named(path: str) -> Iterator[None]:
    """Name the file in Pillow's warnings in a loader's worker; elsewhere threads warn, too."""
    if get_worker_info() is None:
        yield
        return
    try:
        with warnings.catch_warnings(record=True) as caught:
            yield
    finally:
        for warning in caught:
            if "PIL" in Path(warning.filename).parts:
                warn_of_file(path, " ".join(str(warning.message).split()))
            else:
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )


@contextmanager
def _stderr_named(path: str) -> Iterator[None]:
    """Name the file in libjpeg's and libtiff's line on stderr, in a loader's worker on Linux."""
    if get_worker_info() is None or not hasattr(os, "memfd_create"):
        yield
        return
    lines, stderr = _memory_file(os.getpid()), os.dup(2)
    os.dup2(lines, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        if size := os.lseek(lines, 0, os.SEEK_CUR):
            text = os.pread(lines, size, 0).decode(errors="replace")
            os.lseek(lines, 0, os.SEEK_SET)
            warn_of_file(path, text.strip().partition("\n")[0])


@cache
def _memory_file(process: int) -> int:
    """Return a file in memory, for each process its own: after a fork they share positions."""
    return os.memfd_create("stderr")


def _plain_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return width and height of a JPEG without EXIF or XMP; None leaves the header to Pillow.

    Pillow takes 60 us to read a header, a tenth of the time of decoding 256 x 256 pixels.
    """
    position = 2 if data.startswith(JPEG) else len(data)
    while position + 9 <= len(data) and data[position] == 0xFF:
        marker, segment = data[position + 1], data[position + 2 : position + 9]
        if marker in FRAMES:  # length, bits, height, width
            return int.from_bytes(segment[5:7]), int.from_bytes(segment[3:5])
        if marker not in PLAIN:
            return None
        position += 2 + int.from_bytes(segment[:2])
    return None


def _decode_jpeg(data: bytes, path: str) -> Tensor:
    """Decode by torchvision: exactly like Pillow, and faster. It misses some orientations."""
    with compiler_later("torchvision"):
        from torchvision.io import ImageReadMode

    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    decode: Any = torch.ops.image.decode_jpeg  # `torchvision.io.decode_jpeg` warns at each call
    with explained(f"{path} cannot be read as an image", RuntimeError), _stderr_named(path):
        return decode(buffer, mode=ImageReadMode.RGB.value)


def _check_png(data: bytes, path: str) -> None:
    """Raise an error for a PNG that is cut off, or whose pixels' checksum is wrong.

    Pillow does not compare it. (torchvision 0.29 does, and a damaged PNG then ends the process.)
    """
    position, view = len(PNG), memoryview(data)
    while position + 12 <= len(data):
        name = data[position + 4 : position + 8]
        end = position + 8 + int.from_bytes(data[position : position + 4])
        if name == b"IEND":
            return
        is_whole = name == b"IDAT" and end + 4 <= len(data)
        if is_whole and zlib.crc32(view[position + 4 : end]) != int.from_bytes(data[end : end + 4]):
            raise FusionZooError(f"{path} is damaged: the checksum of its pixels does not match")
        position = end + 4
    raise FusionZooError(f"{path} is cut off: its last chunk, IEND, is missing")


def _open(source: Any, path: str) -> Any:
    """Read an image's header; too many pixels and formats that are not read are an error."""
    from PIL import Image, UnidentifiedImageError

    if not isinstance(source, bytes | Image.Image):
        raise FusionZooError(f"a {type(source).__name__} is not an image")
    is_file = isinstance(source, bytes)
    contents = source if isinstance(source, bytes) else b""
    with explained(f"{path} cannot be read as an image"):
        try:
            image: Any = Image.open(io.BytesIO(contents), formats=FORMATS) if is_file else source
        except UnidentifiedImageError as error:
            hint = how_to_convert("image", path, contents[:32])
            raise FusionZooError(f"{path} cannot be read as an image{hint}") from error
    check_image(image.width, image.height, path)
    if contents.startswith(PNG):
        _check_png(contents, path)
    tags = getattr(image, "tag_v2", {})
    if tags.get(SAMPLE_FORMAT, (1,))[0] == SIGNED and tags.get(BITS, (1,))[0] == 8:
        raise FusionZooError(f"{path} has signed values of 8 bits: store unsigned ones")
    return image


def _load(image: Any, path: str, image_range: Range | None) -> Tensor:
    """Decode an image to RGB and apply its EXIF orientation."""
    named = _stderr_named(path) if image.format == "TIFF" else nullcontext()
    with explained(f"{path} cannot be read as an image"), named:
        image.load()
    return _turned(_to_rgb(image, path, image_range), _orientation(image, path))


def _orientation(image: Any, path: str) -> Any:
    """Return the orientation that Pillow finds in EXIF or XMP; 1 is upright."""
    try:
        return image.getexif().get(ORIENTATION, 1)
    except Exception:  # of many kinds, as the metadata may be anything
        warn_of_file(path, "its EXIF cannot be read, and so the image is not turned")
        return 1


def _turned(image: Tensor, orientation: Any) -> Tensor:
    """Return an image (3, H, W) upright; what is no orientation counts as upright."""
    if orientation not in TURNS:
        return image
    is_transposed, flipped = TURNS[orientation]
    return (image.mT if is_transposed else image).flip(flipped)


def _to_rgb(image: Any, path: str, image_range: Range | None) -> Tensor:
    """Blend with white where transparent, and convert to RGB."""
    from PIL import Image

    if image.mode.startswith(DEEP):  # which Pillow would clip, not scale
        image = Image.fromarray(scaled_to_bytes(image, path, image_range))
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    # Taking one band after the other is up to five times as fast as transposing.
    bands = bytearray().join([rgb.tobytes("raw", band) for band in "RGB"])
    return torch.frombuffer(bands, dtype=torch.uint8).reshape(3, rgb.height, rgb.width)


def _image_from_array(array: Tensor) -> Tensor:
    if array.dtype != torch.uint8:
        raise FusionZooError(f"an image given as an array must be uint8, found {array.dtype}")
    if array.ndim == 2:
        return array.expand(3, -1, -1).contiguous()
    if array.ndim == 3 and array.shape[0] == 3:
        return array
    if array.ndim == 3 and array.shape[-1] == 3:
        return array.permute(2, 0, 1).contiguous()
    raise FusionZooError(f"an array of shape {tuple(array.shape)} is not an image, (H, W, 3)")


def decode_text(source: Any) -> str:
    """Return text, or the contents of a file given as a `Path`, in Unicode's form NFC."""
    name = "the text"
    if isinstance(source, Path):
        name, data = _read(source, "text file")
        with explained(f"{name} is not UTF-8 text", UnicodeDecodeError):
            source = data.decode("utf-8-sig").strip()
    if not isinstance(source, str):
        raise FusionZooError(f"a {type(source).__name__} is not text")
    check_budget("characters", len(source), name)
    with explained(f"{name} is not Unicode", UnicodeEncodeError):
        source.encode()  # fails for halves of characters, which no tokenizer takes
    return composed(source)


def _read(source: str | Path | bytes, budget: str) -> tuple[str, bytes]:
    """Return the source's name for messages, and its contents."""
    if isinstance(source, bytes):
        check_budget(budget, len(source), "<bytes>")
        return "<bytes>", source
    file_size(source, budget)
    with explained(f"{source} cannot be opened", OSError), open(source, "rb") as file:
        data = file.read()
    if not data:
        raise FusionZooError(f"{source} is empty")
    return str(source), data


class MediaCells:
    """Undecoded values by row: objects in memory, or an entry of rows that are read on access."""

    def __init__(self, rows: Any, name: str | None = None) -> None:
        self.rows, self.name = rows, name

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        value = self.rows[row]
        return media_value(value if self.name is None else value.get(self.name), None)


def media_value(value: Any, root: Path | None) -> Any:
    """Return a value that `media.decode` reads.

    Of `{bytes, path}` the bytes, else the path; of `{array, sampling_rate}`, or of an audio decoder
    of torchcodec, `(samples, rate)`. Of a list, each of its values.
    """
    if isinstance(value, list) and value and not isinstance(value[0], str | float | int):
        return [media_value(item, root) for item in value]
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if hasattr(value, "get_all_samples"):
        clip = value.get_all_samples()
        return clip.data.mean(0), int(clip.sample_rate)
    if not isinstance(value, Mapping):
        return value
    if value.get("bytes") is not None:
        return bytes(value["bytes"])
    if value.get("path") is not None:
        return (root or Path()) / value["path"]
    if value.get("array") is not None and "sampling_rate" in value:
        return np.asarray(value["array"]), value["sampling_rate"]
    if value and not {"bytes", "path"} & set(value):
        raise FusionZooError(f"a mapping of {', '.join(map(str, value))} is no value")
    return None
