"""Read a request's sample: JSON or multipart, within limits of bytes, pixels, seconds and text.

Nothing in a request is ever a path or an address: pictures and sounds are bytes, and all else is
JSON. A picture or a sound is measured by its header before it is decoded.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from typing import Any, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, FormParser
from starlette.requests import ClientDisconnect, Request

from fusionzoo.datasets.media.budgets import check_image
from fusionzoo.datasets.media.decode import FORMATS
from fusionzoo.errors import FusionZooError, did_you_mean, one_line
from fusionzoo.files import strict_json

RATES = (  # Hz; the filter that resamples an odd rate takes much memory
    *(8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000),
    *(64_000, 88_200, 96_000, 176_400, 192_000),
)
USUAL_RATE = 48_000  # Hz; a second at twice this rate counts twice
SAMPLE_FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")
LARGEST = 3.4e38  # of float32
MOST_CHANNELS = 8
MOST_PARTS = 64  # of a multipart body
MEDIA = ("image", "audio")


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What one request may hold, and how long it may take."""

    bytes: int  # of the body
    pixels: int  # of all pictures
    seconds: float  # of all sounds
    characters: int  # of a text
    items: int  # pictures or sounds of one modality
    timeout: float  # s for the body to arrive, and again for its answer


class RefusedRequest(Exception):
    """An answer with an error status, and a sentence that says what to change."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers


class Contents(NamedTuple):
    """The bytes of a body, and what stands between its parts; None: they are JSON."""

    data: bytes
    boundary: str | None


class BodyBudget:
    """The bytes of all bodies that are being read or decoded, so that many large ones wait."""

    def __init__(self, limit: int) -> None:
        self.left = limit

    def take(self, count: int) -> None:
        """Reserve bytes, or refuse the request for now."""
        if count > self.left:
            raise RefusedRequest(503, "too many large requests at once: try again", Retry_After="1")
        self.left -= count

    def give_back(self, count: int) -> None:
        """Release reserved bytes."""
        self.left += count


class Body:
    """A request's body, read within the limits; `release` it when the sample is decoded."""

    def __init__(self, request: Request, limits: RequestLimits, budget: BodyBudget) -> None:
        self.request, self.limits, self.budget, self.size = request, limits, budget, 0

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body; refuse it as soon as it is longer than allowed."""
        announced = self.request.headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > self.limits.bytes:
            raise self._too_long()
        async for chunk in self.request.stream():
            if self.size + len(chunk) > self.limits.bytes:
                raise self._too_long()
            self.budget.take(len(chunk))
            self.size += len(chunk)
            yield chunk

    def _too_long(self) -> RefusedRequest:
        return RefusedRequest(413, f"the body is longer than {self.limits.bytes:,} bytes")

    def release(self) -> None:
        """Give the bytes back to the budget."""
        self.budget.give_back(self.size)
        self.size = 0

    async def read(self) -> Contents:
        """Return the whole body; what it holds is read later, in a thread."""
        content_type = Message()
        content_type["content-type"] = self.request.headers.get("content-type", "")
        kind, charset = content_type.get_content_type(), content_type.get_content_charset("utf-8")
        if kind not in ("application/json", "multipart/form-data"):
            raise RefusedRequest(
                415, f"content type {kind!r:.60}: application/json or multipart/form-data"
            )
        if charset not in ("utf-8", "utf8"):  # other codecs may take minutes for a megabyte
            raise RefusedRequest(415, f"charset {charset!r:.60}: only utf-8 is read")
        try:
            async with asyncio.timeout(self.limits.timeout):
                data = b"".join([chunk async for chunk in self.chunks()])
        except TimeoutError:
            raise RefusedRequest(
                408, f"the body took longer than {self.limits.timeout:g} s"
            ) from None
        except ClientDisconnect:
            raise RefusedRequest(400, "the client left") from None
        return Contents(data, None if kind == "application/json" else content_type.get_boundary(""))


def raw_sample(body: Contents, kinds: Mapping[str, str], limits: RequestLimits) -> dict[str, Any]:
    """Return the values of a body by modality, as `FusionModel.sample` takes them.

    `kinds` are the model's modalities. Runs in a thread: it may take a while.
    """
    is_json = body.boundary is None
    values = _of_json(body.data) if is_json else _of_parts(read_parts(body), kinds)
    sample, pixels, seconds = {}, 0, 0.0
    for name, value in values.items():
        if name not in kinds:
            raise RefusedRequest(
                422,
                f"the model has no modality {name!r:.60}.{did_you_mean(name[:60], kinds)} It reads:"
                f" {', '.join(kinds)}",
            )
        if value is None:
            continue
        try:
            sample[name] = _of_kind(kinds[name], value, limits)
            for data in sample[name] if kinds[name] in MEDIA else ():
                if kinds[name] == "image":
                    pixels += _pixels(data)
                else:
                    seconds += _seconds(data)
                if pixels > limits.pixels:
                    raise RefusedRequest(413, f"more than {limits.pixels:,} pixels")
                if seconds > limits.seconds:
                    raise RefusedRequest(413, f"more than {limits.seconds:g} s of sound")
        except RefusedRequest as refusal:
            raise RefusedRequest(refusal.status, f"{name}: {refusal.message}") from None
        except FusionZooError as error:
            raise RefusedRequest(422, f"{name}: {error}") from None
    return {
        name: value[0] if kinds[name] in MEDIA and len(value) == 1 else value
        for name, value in sample.items()
    }


def _of_json(body: bytes) -> dict[str, Any]:
    try:
        values = strict_json(body.decode())
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(
            400, f"the body cannot be read as JSON: {one_line(error):.200}"
        ) from None
    if not isinstance(values, dict):
        raise RefusedRequest(422, "the body must be a JSON object: a value for each modality")
    return values


def read_parts(body: Contents) -> list[tuple[str, bytes]]:
    """Return the parts of a multipart body by name, in order; refuse one that was cut off."""
    parts: list[tuple[str, bytes]] = []
    is_whole = False

    def add(part: Any) -> None:
        if len(parts) == MOST_PARTS:
            raise ValueError(f"more than {MOST_PARTS} parts")
        name = (part.field_name or b"").decode()
        if isinstance(part, Field):
            parts.append((name, part.value or b""))
        else:
            part.file_object.seek(0)
            parts.append((name, part.file_object.read()))
            part.close()

    def end() -> None:
        nonlocal is_whole
        is_whole = True

    try:
        parser = FormParser(
            "multipart/form-data",
            *(add, add, end),
            boundary=body.boundary,
            config={"MAX_MEMORY_FILE_SIZE": 2 * len(body.data)},
        )
        parser.write(body.data)
        parser.finalize()
    except (FormParserError, KeyError, ValueError) as error:
        raise RefusedRequest(
            400, f"the multipart body cannot be read: {one_line(error):.200}"
        ) from None
    if not is_whole:
        raise RefusedRequest(400, "the multipart body is cut off: its last boundary is missing")
    return parts


def _of_parts(parts: Sequence[tuple[str, bytes]], kinds: Mapping[str, str]) -> dict[str, Any]:
    """Collect the parts of each name; all but text, pictures and sounds is JSON."""
    values: dict[str, Any] = {}
    for name, part in parts:
        kind = kinds.get(name, "text")
        if kind in MEDIA:
            values.setdefault(name, []).append(part)
            continue
        if name in values:
            raise RefusedRequest(422, f"{name!r:.60} occurs twice")
        try:
            values[name] = part.decode() if kind == "text" else strict_json(part.decode())
        except (ValueError, RecursionError) as error:
            raise RefusedRequest(
                422, f"{name!r:.60} cannot be read: {one_line(error):.200}"
            ) from None
    return values


def _of_kind(kind: str, value: Any, limits: RequestLimits) -> Any:
    """Check a value's type; of pictures and sounds return a list of their bytes."""
    if kind in MEDIA:
        items = value if isinstance(value, list) else [value]
        if not 1 <= len(items) <= limits.items:
            raise RefusedRequest(413, f"{len(items)} items; 1 to {limits.items} are read")
        return [_bytes_of(item, kind) for item in items]
    if kind == "text":
        if not isinstance(value, str):
            raise RefusedRequest(422, "expected text")
        if len(value) > limits.characters:
            raise RefusedRequest(413, f"more than {limits.characters:,} characters")
    elif kind == "tabular":
        is_cell = (str, int, float, bool, type(None))
        if not isinstance(value, dict) or not all(isinstance(x, is_cell) for x in value.values()):
            raise RefusedRequest(422, "expected an object of cells by column, such as {'age': 31}")
    elif not _is_array(value, 1 if kind == "vector" else 2):
        raise RefusedRequest(
            422, f"expected a {'list' if kind == 'vector' else 'list of lists'} of numbers"
        )
    return value


def _is_array(value: Any, ndim: int) -> bool:
    if not isinstance(value, list) or not value:
        return False
    if ndim == 1:
        return all(
            isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= LARGEST
            for x in value
        )
    return all(_is_array(row, 1) and len(row) == len(value[0]) for row in value)


def _bytes_of(item: Any, kind: str) -> bytes:
    if isinstance(item, bytes):
        data = item
    elif isinstance(item, dict) and isinstance(item.get("base64"), str) and len(item) == 1:
        try:
            data = base64.b64decode(item["base64"], validate=True)
        except (binascii.Error, ValueError):
            raise RefusedRequest(422, "it is no base64") from None
    else:
        raise RefusedRequest(
            422, f"expected the {kind}'s bytes: {{'base64': '...'}}, or a multipart file"
        )
    if not data:
        raise RefusedRequest(422, "it is empty")
    return data


def _pixels(data: bytes) -> int:
    """Return the pixels of a picture, by its header."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise RefusedRequest(413, "it has too many pixels") from None
    except Exception:
        raise RefusedRequest(422, "it is no PNG, JPEG, WEBP, GIF, BMP or TIFF") from None
    check_image(width, height, "the picture")
    return width * height


def _seconds(data: bytes) -> float:
    """Return the length of a sound, by its header."""
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.format not in SAMPLE_FORMATS:
                raise ValueError(file.format)
            rate, frames, channels = file.samplerate, file.frames, file.channels
    except Exception:
        raise RefusedRequest(422, "it is no WAV, FLAC, OGG or MP3") from None
    if rate not in RATES:
        raise RefusedRequest(422, f"{rate:,} Hz is none of {', '.join(map(str, RATES))}")
    if channels > MOST_CHANNELS:
        raise RefusedRequest(422, f"{channels} channels; at most {MOST_CHANNELS} are read")
    if frames < 0:
        raise RefusedRequest(422, "its header does not say how long it is")
    return float(frames * channels / min(rate, USUAL_RATE))
