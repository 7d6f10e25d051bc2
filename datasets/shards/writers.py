"""Write one shard: Parquet with a row group per block, or a tar file in WebDataset's layout."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from fusionzoo.errors import FusionZooError
from fusionzoo.ground.resampling import resampler

from ..media.audio import Segment, is_video
from ..media.decode import decode, each_item
from ..media.encode import media_bytes
from ..media.ranges import is_deep
from ..tables.provenance import with_kinds
from .storage import STORED

SIDE = 256  # pixels of the shorter side of a prepared image
QUALITY = 95  # of JPEG
RATE = 16_000  # Hz of prepared audio
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
MAX_ROWS = 1024  # of a block
FOOTER_END = 8  # bytes of a Parquet file behind its metadata: their length, and a magic word
PADDING = 512  # bytes to which members of a tar are padded


def stored_value(kind: str, value: Any, prepare: bool) -> Any:
    """Return the bytes of an image, a clip or each in a list; float32 of other kinds."""
    if kind in ("vector", "sequence"):
        return decode(kind, value).numpy()
    if isinstance(value, list):
        return list(each_item(value, lambda item: stored_value(kind, item, prepare)))
    if kind == "image" and is_video(value) and (prepare or isinstance(value, Segment)):
        raise FusionZooError("shards hold whole videos, not parts or frames of them")
    data = media_bytes(kind, value)
    if not prepare:
        return data
    # An SVG is known by the ending of its file.
    source = value if isinstance(value, Path) else data
    return _smaller_image(source, data) if kind == "image" else _smaller_clip(data)


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


def _smaller_image(source: Path | bytes, data: bytes) -> bytes:
    """Return an image whose shorter side is at most 256: photos as JPEG, the rest as PNG; one of
    more than 8 bits is kept."""
    from PIL import Image

    if is_deep(data):
        return data
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
    if rate == RATE and data.startswith(b"fLaC"):
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if (file.subtype, file.channels) == ("PCM_16", 1):
                return data
    if rate != RATE:
        samples = resampler(rate, RATE)(torch.as_tensor(samples))
    buffer = io.BytesIO()
    soundfile.write(buffer, samples.clamp(-1, 1).numpy(), RATE, format="FLAC", subtype="PCM_16")
    return buffer.getvalue()


class ParquetShard:
    """A Parquet file of light columns, and of bytes, or of lists of them for those in `lists`."""

    def __init__(
        self, path: Path, light: pa.Schema, kinds: Mapping[str, str], lists: Collection[str]
    ) -> None:
        stored = {name: _arrow_type(kind) for name, kind in kinds.items() if kind in STORED}
        stored |= {name: pa.list_(pa.binary()) for name in lists}
        self.schema = with_kinds(
            pa.schema([*light.remove_metadata(), *(pa.field(*item) for item in stored.items())]),
            kinds,
        )
        self.stored = list(stored)
        self.blocks: list[int] = []
        media = [name for name in stored if kinds[name] in ("image", "audio")]
        # Files are compressed already, and none is like another.
        columns = [self.schema.field(i).name for i in range(len(self.schema))]
        options: dict[str, Any] = {
            "compression": {name: "none" if name in media else "zstd" for name in columns},
            "write_page_checksum": True,
            "use_dictionary": [x for x in light.names if pa.types.is_string(light.field(x).type)],
        }
        self.path, self.ranges = path, [[0, 0]]
        self.file = pq.ParquetWriter(path, self.schema, **options)

    def write(self, rows: pa.Table, values: Mapping[str, Sequence[Any]]) -> dict[str, list[int]]:
        """Write a block; return nothing of where members are: row groups are read whole."""
        columns = {name: rows.column(name) for name in rows.column_names}
        for name in self.stored:
            columns[name] = _arrow_values(values[name], self.schema.field(name).type)
        table = pa.table(columns, schema=self.schema)
        self.file.write_table(table, row_group_size=max(1, len(table)))
        self.blocks.append(len(table))
        return {name: [-1] * len(rows) for name in self.stored}

    def close(self) -> None:
        """Write the footer; `ranges` has its bytes, row groups are found by it."""
        self.file.close()
        size = self.path.stat().st_size
        self.ranges = [[size - FOOTER_END - pq.read_metadata(self.path).serialized_size, size]]


class TarShard:
    """A tar file with members `<key>.jpg`, `<key>.image.0.jpg`, `<key>.json` for light columns."""

    def __init__(self, path: Path, kinds: Mapping[str, str], first: int) -> None:
        self.kinds, self.number = dict(kinds), first
        self.blocks: list[int] = []
        self.ranges: list[list[int]] = []
        self.tar = tarfile.open(path, "w", format=tarfile.GNU_FORMAT)  # noqa: SIM115

    def write(self, rows: pa.Table, values: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Write a block; return the first byte of each value or item by modality, else -1."""
        start = self.tar.offset
        offsets: dict[str, list[Any]] = {name: [] for name in values}
        for position, row in enumerate(rows.to_pylist()):
            key = f"{self.number:08d}"
            self.number += 1
            for name, cells in values.items():
                value, kind = cells[position], self.kinds[name]
                if value is None:
                    offsets[name].append(-1)
                    continue
                if isinstance(value, list):
                    names = [f"{key}.{name}.{n}{suffix_of(kind, x)}" for n, x in enumerate(value)]
                    offsets[name].append(list(map(self._add, names, value)))
                    continue
                data = value if isinstance(value, bytes) else npy_bytes(value)
                is_plain = name == kind and kind in ("image", "audio")  # 7.jpg, not 7.scan.jpg
                ending = f"{'' if is_plain else f'.{name}'}{suffix_of(kind, value)}"
                offsets[name].append(self._add(key + ending, data))
            fields = {x: y for x, y in row.items() if y is not None and not self._is_text(x)}
            text = json.dumps(fields, ensure_ascii=False, default=str)
            self._add(f"{key}.json", text.encode())
            for name in rows.column_names:
                if self._is_text(name) and row[name] is not None:
                    ending = ".txt" if name == "text" else f".{name}.txt"
                    self._add(f"{key}{ending}", row[name].encode())
        self.blocks.append(len(rows))
        self.ranges.append([start, self.tar.offset])
        return offsets

    def _is_text(self, name: str) -> bool:
        return self.kinds.get(name) == "text"

    def _add(self, name: str, data: bytes) -> int:
        """Add a member; return the first byte of its data."""
        member = tarfile.TarInfo(name)
        member.size = len(data)
        self.tar.addfile(member, io.BytesIO(data))
        padded = -(-len(data) // PADDING) * PADDING
        return int(self.tar.offset) - padded

    def close(self) -> None:
        """Write the end of the archive."""
        self.tar.close()


def member_size(value: Any, format: str) -> int:
    """Return the bytes of a value, or of all items of a list."""
    if format == "webdataset" and isinstance(value, np.ndarray):
        return len(npy_bytes(value))
    return value_size(value)


def member_sizes(values: Sequence[Any], format: str) -> list[Any]:
    """Return the bytes of each value, or of each item of a list, as `samples.arrow` lists them."""
    return [
        [len(item) for item in value]
        if isinstance(value, list)
        else (None if value is None else member_size(value, format))
        for value in values
    ]


def _arrow_type(kind: str) -> pa.DataType:
    if kind in ("image", "audio"):
        return pa.binary()
    return pa.list_(pa.float32()) if kind == "vector" else pa.list_(pa.list_(pa.float32()))


def _arrow_values(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return bytes or arrays as an Arrow array; arrays are not turned into Python numbers."""
    if pa.types.is_binary(kind) or pa.types.is_binary(kind.value_type):
        return pa.array(values, kind)
    missing = np.array([value is None for value in values])
    arrays = [np.zeros(0, np.float32) if value is None else value for value in values]
    is_vector = not pa.types.is_list(kind.value_type)
    flat = np.concatenate([array.reshape(-1) for array in arrays])
    numbers = pa.array(flat, pa.float32())
    if not is_vector:
        widths = [array.shape[-1] for array in arrays if array.ndim > 1 for _ in range(len(array))]
        numbers = pa.ListArray.from_arrays(_offsets(widths), numbers)
    lengths = [len(array) for array in arrays]
    return pa.ListArray.from_arrays(_offsets(lengths), numbers, mask=pa.array(missing))


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32))
