"""Decode audio: channels are averaged, and of a long file only the part in use is read."""

from __future__ import annotations

import io
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError, explained, one_line, warn_of_file
from fusionzoo.structures import Audio

from .arrays import ArrayItem
from .budgets import BUDGETS, check_budget, file_size
from .formats import BRANDS, VIDEOS, how_to_convert, is_audio

# Lengths that programs write into a pipe, where they do not know the real one, besides 0: SoX (AIFF
# and WAV), arecord, FFmpeg. Some count the header, others round to whole blocks.
PLACEHOLDERS = (0x7F000000, 0x7FFFF000, 0x80000000, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1)
ROUNDED = 4096  # bytes by which a length may differ from a placeholder
HEAD = 512  # bytes, which contain the header of most files
XING = 64  # bytes of an MP3's first frame that contain a header with the length, if any
PAGE = 65_307  # bytes of the longest OGG page
NUM_SAMPLES = (1 << 36) - 1  # bits of a FLAC's header
COUNTS = (0, 192, *(576 << n for n in range(4)), 0, 0, *(256 << n for n in range(8)))
RATE_BYTES = {12: 1, 13: 2, 14: 2}  # by code of the rate
FRAME = 1 << 17  # bytes at the end of a FLAC that contain its last frame
MOST_TRIES = 4  # frames of a FLAC whose checksum is computed, which takes 50 ms
FRAMES = 8  # images taken of a video
SLACK = 0.5  # s by which a segment may exceed its file, as lengths are often rounded
# Samples up to which all of a clip is read at once: 10 s at 48 kHz, as opening twice costs more. A
# format in which one can seek opens faster: from 2.5 s at 16 kHz only the part in use is read.
MAX_READ_AT_ONCE = 480_000
MAX_READ_IF_SEEKABLE = 40_000
# Values of all channels read at a time, so that only the averaged channel is kept whole.
BLOCK = 1 << 17
# Recordings exceed full scale slightly (lossy codecs, resampling), never by 12 dB. Integers stored
# as floats do, and would be clipped in almost every sample.
MAX_PEAK = 4.0


@cache
def _reader() -> Any:
    """Return the class of open files."""
    import soundfile

    class Reader(soundfile.SoundFile):  # type: ignore[misc]  # it has no type hints
        """A file in which soundfile does not seek after each read, which decodes a block again."""

        @cached_property
        def is_seekable(self) -> bool:
            """Whether a part read after `seek` is exact: lossy formats carry state along."""
            return self.format in ("FLAC", "WAV", "WAVEX") and self.subtype.startswith(
                ("PCM_", "FLOAT")
            )

        def seekable(self) -> bool:
            return not self.is_seekable and super().seekable()  # asked by `read`, not by `seek`

    return Reader


class _View(mmap.mmap):
    """A private copy of a file; as in a file, a position may be sought behind its end."""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> None:
        start = (0, self.tell(), len(self))[whence]
        super().seek(min(start + offset, len(self)))


@dataclass(frozen=True)
class ChunkLayout:
    """How a format of chunks (name, length, contents) stores samples."""

    form: str = "<I"  # of a length, as `struct` has it
    first: int = 12  # position of the first chunk
    name_bytes: int = 4
    samples: bytes = b"data"  # the name of the samples' chunk
    extra: int = 0  # bytes of that chunk before the samples
    counts_header: bool = False  # whether the length includes name and length
    multiple: int = 2  # bytes to which a chunk is padded

    @property
    def header(self) -> int:
        return self.name_bytes + struct.calcsize(self.form)

    def padded(self, end: int) -> int:
        return end + -end % self.multiple


WAVE64 = ChunkLayout("<Q", 40, 16, bytes.fromhex("64617461f3acd3118cd100c04f8edb8a"), 0, True, 8)
LAYOUTS = {
    **dict.fromkeys((b"RIFF", b"RF64", b"BW64"), ChunkLayout()),
    b"RIFX": ChunkLayout(">I"),
    b"FORM": ChunkLayout(">I", samples=b"SSND", extra=8),  # AIFF
    b"riff": WAVE64,
}


@dataclass(frozen=True)
class Extent:
    """Where a header says that the samples are."""

    start: int
    end: int
    field: int  # position of the length in the header
    form: str  # of the length, as `struct` has it
    counted: int = 0  # bytes before the samples that the length includes
    layout: ChunkLayout | None = None


@dataclass(frozen=True)
class Repair:
    """The length that replaces the one in a file's header."""

    field: int
    length: bytes


def check_length(source: Path | bytes, name: str) -> Repair | None:
    """Compare the length in a header with the file; return what opening it needs to replace.

    A file that was cut off is an error. All is read of one that was written into a pipe, and has
    a placeholder or 0 as its length: that is said, and so are bytes that the header leaves out.
    """
    size = _size(source, name)
    with io.BytesIO(source) if isinstance(source, bytes) else io.FileIO(source) as file:
        head = file.read(HEAD)
        if head[:4] == b"fLaC":
            return _check_flac(file, head, size, name)
        if head[:4] == b"OggS":
            _check_whole(_missing_in_ogg(file, size), name)
        if head[:3] == b"ID3" or head[:1] == b"\xff":
            return _check_mp3(file, size, name)
        extent = _find_extent(file, head, size)
        if extent is None:  # another format, or no samples: left to the audio library
            return None
        is_empty = extent.end <= extent.start
        end = extent.start if is_empty else extent.end
        if end == size or (end < size and _are_chunks(file, extent.layout, end, size)):
            return None
    length = end - extent.start + extent.counted
    is_placeholder = any(abs(length - known) <= ROUNDED for known in PLACEHOLDERS)
    if not is_empty and not (end > size and is_placeholder):
        _check_whole(max(0, end - size), name)
        warn_of_file(name, "bytes behind its samples are left out by its header, and not read")
        return None
    warn_of_file(name, "its header has no length, as that of a stream; all that it holds is read")
    if extent.form.endswith("I") and not is_empty:
        return None  # the audio library then reads to the end
    return Repair(extent.field, struct.pack(extent.form, size - extent.start + extent.counted))


def _find_extent(file: BinaryIO, head: bytes, size: int) -> Extent | None:
    """Return where the header says that the samples are; None where it does not."""
    if head[:4] in (b".snd", b"dns.") and len(head) >= 24:
        form = ">I" if head[:1] == b"." else "<I"
        (start,), (length,) = struct.unpack(form, head[4:8]), struct.unpack(form, head[8:12])
        return Extent(start, start + length, 8, form)
    layout = LAYOUTS.get(head[:4])
    if layout is None:
        return None
    long_field = long_length = 0  # of RF64: 64 bits, in a chunk of their own
    for position, name, length in _chunks(file, head, layout, layout.first, size):
        start = position + layout.header + layout.extra
        if name == b"ds64":
            long_field = start + 8
            file.seek(long_field)
            long_length = int.from_bytes(file.read(8), "little")
        elif name == layout.samples and long_field:
            return Extent(start, start + long_length, long_field, "<Q", 0, layout)
        elif name == layout.samples:
            field = position + layout.name_bytes
            counted = layout.extra + layout.header * layout.counts_header
            return Extent(start, start + length - counted, field, layout.form, counted, layout)
    return None


def _chunks(
    file: BinaryIO, head: bytes, layout: ChunkLayout, position: int, size: int
) -> Iterator[tuple[int, bytes, int]]:
    """Yield position, name and length of each chunk, whose length may exceed the file."""
    while position + layout.header <= size:
        start = head[position : position + layout.header]
        if len(start) < layout.header:
            file.seek(position)
            start = file.read(layout.header)
        (length,) = struct.unpack(layout.form, start[layout.name_bytes :])
        yield position, start[: layout.name_bytes], length
        contents = max(0, length - layout.header) if layout.counts_header else length
        position = layout.padded(position + layout.header + contents)


def _are_chunks(file: BinaryIO, layout: ChunkLayout | None, end: int, size: int) -> bool:
    """Return whether what follows the samples, to the file's end, are chunks and no samples."""
    if layout is None:
        return False
    end = layout.padded(end)
    for position, name, length in _chunks(file, b"", layout, end, size):
        if not (name[:4].isascii() and name[:4].decode().isprintable()):
            return False
        end = position + length + (0 if layout.counts_header else layout.header)
    return size <= layout.padded(end) and end <= layout.padded(size)


def _check_mp3(file: BinaryIO, size: int, name: str) -> Repair | None:
    """Compare the bytes that an MP3 may announce, of which the audio library would warn unnamed."""
    file.seek(0)
    tag = file.read(10)  # of ID3: its length is stored in 7 bits of each byte
    shifted = zip(tag[6:], (21, 14, 7, 0), strict=False)
    start = 10 + sum(byte << shift for byte, shift in shifted) if tag[:3] == b"ID3" else 0
    file.seek(start)
    frame = file.read(XING)
    header = max(frame.find(b"Xing"), frame.find(b"Info"))
    if header < 0 or len(frame) < XING or not frame[header + 7] & 2:
        return None
    field = header + (12 if frame[header + 7] & 1 else 8)
    announced, real = int.from_bytes(frame[field : field + 4]), size - start
    if not announced or abs(announced - real) * 100 <= real:
        return None
    warn_of_file(name, "its header announces another number of bytes than it holds")
    return Repair(start + field, struct.pack(">I", min(real, 0xFFFFFFFF)))


def _check_flac(file: BinaryIO, head: bytes, size: int, name: str) -> Repair | None:
    """Compare the number of samples that a FLAC announces with the last frame, if that is whole.

    Of one that was cut off it is not, and the audio library raises an error.
    """
    block, longest = int.from_bytes(head[8:10]), int.from_bytes(head[15:18])
    mark = b"\xff\xf8" if head[8:10] == head[10:12] else b"\xff\xf9"  # blocks of one length or any
    announced = int.from_bytes(head[21:26]) & NUM_SAMPLES
    if not announced:  # `_count_frames` counts
        return None
    file.seek(max(0, size - min(longest or FRAME, FRAME)))
    tail = file.read()
    position, tries = len(tail), 0
    while tries < MOST_TRIES and (position := tail.rfind(mark, 0, position)) >= 0:
        end, header_bytes = _end_of_flac_frame(tail[position : position + 16], block)
        if end == announced:
            return None
        frame = tail[position:]
        # Such bytes also occur in samples. Of data and the checksum behind them, the checksum is 0.
        if end > NUM_SAMPLES or _crc(frame[:header_bytes], 0x107) != 0:
            continue
        if _crc(frame, 0x18005) == 0:
            warn_of_file(name, "its header announces another number of samples than it holds")
            return Repair(21, ((head[21] & 0xF0) << 32 | end).to_bytes(5))
        tries += 1
    return None


def _end_of_flac_frame(header: bytes, block: int) -> tuple[int, int]:
    """Return the sample behind a frame, and the bytes of its header with the checksum."""
    header = header.ljust(16, b"\0")
    ones = 8 - (header[4] ^ 0xFF).bit_length()  # as in UTF-8, they are the number's bytes
    after = 4 + max(ones, 1)
    number = header[4] & 0x7F >> ones
    for byte in header[5:after]:
        number = number << 6 | byte & 0x3F
    code, rate_code = header[2] >> 4, header[2] & 15
    num_bytes = code - 5 if code in (6, 7) else 0  # of the number of samples
    count = int.from_bytes(header[after : after + num_bytes]) + 1 if num_bytes else COUNTS[code]
    start = number if header[1] & 1 else number * block
    return start + count, after + num_bytes + RATE_BYTES.get(rate_code, 0) + 1


def _crc(data: bytes, polynomial: int) -> int:
    """Return a cyclic redundancy check."""
    value, bits = 0, polynomial.bit_length() - 1
    for byte in data:
        value ^= byte << bits - 8
        for _ in range(8):
            value <<= 1
            if value >> bits:
                value ^= polynomial
    return value


def _missing_in_ogg(file: BinaryIO, size: int) -> int:
    """Compare the length of the last page (not all programs flag it) with the end of the file."""
    start = max(0, size - 2 * PAGE)
    file.seek(start)
    tail = file.read()
    page = tail.rfind(b"OggS\0")
    if page < 0:
        return 0
    header = tail[page : page + 27]
    if len(header) < 27:
        return 27 - len(header)
    table = tail[page + 27 : page + 27 + header[26]]
    missing = header[26] - len(table)
    return missing or max(0, 27 + len(table) + sum(table) - (len(tail) - page))


@dataclass(frozen=True)
class Segment:
    """A recording from `start` to `end`, in seconds; `frames` is how many images are taken."""

    source: Any  # a path, bytes or, of audio, what `decode_audio` reads
    start: float = 0.0
    end: float | None = None  # None: the recording's end
    frames: int = FRAMES

    def __str__(self) -> str:
        name = "<bytes>" if isinstance(self.source, bytes) else str(self.source)
        if not self.start and self.end is None:
            return name
        return f"{name} from {self.start:g} s to {'its end' if self.end is None else self.end}"

    def bounds(self, seconds: float, name: str) -> tuple[float, float]:
        """Return start and end of the part, in a recording of that length."""
        if self.start >= seconds > 0 or (self.end or 0) > seconds + SLACK:
            edge, time = ("starts", self.start) if self.start >= seconds else ("ends", self.end)
            raise FusionZooError(f"the segment {edge} at {time:g} s, {name} is {seconds:.6g} s")
        return self.start, seconds if self.end is None else min(self.end, seconds)

    def samples(self, total: int, rate: int, name: str) -> tuple[int, int]:
        """Return the first sample of the part and the number of its samples."""
        start, end = self.bounds(total / rate, name)
        first = min(round(start * rate), max(0, total - 1))
        stop = total if self.end is None else min(total, round(end * rate))
        return first, max(min(1, total), stop - first)


def container_of(head: bytes) -> str:
    """Return FFmpeg's name for the container of a video, from a file's first bytes, or nothing.

    FFmpeg is given this name rather than left to guess, as some formats (playlists) open other
    files.

    >>> container_of(b"\\0\\0\\0\\x18ftypisom"), container_of(b"#EXTM3U")
    ('mov', '')
    """
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "" if head[4:12] in BRANDS else "mov"
    if head[:4] == b"RIFF":
        return "avi" if head[8:12] == b"AVI " else ""
    names = {b"\x1a\x45\xdf\xa3": "matroska", b"\x00\x00\x01\xba": "mpeg", b"OggS": "ogg"}
    return names.get(head[:4], "")


def is_video(value: Any) -> bool:
    """Whether a value is a video: a path by its ending, bytes by their beginning."""
    value = value.source if isinstance(value, Segment) else value
    if isinstance(value, bytes):
        return not value.startswith(b"OggS") and container_of(value[:16]) != ""
    return isinstance(value, str | Path) and os.path.splitext(value)[1].lower() in VIDEOS


def cut(kind: str, value: Any, start: float | None, end: float | None, frames: int | None) -> Any:
    """Return the part of an undecoded value, or of each in a list, that a sample uses."""
    if isinstance(value, list):
        return [cut(kind, item, start, end, frames) for item in value]
    if value is None or isinstance(value, Segment):
        return value
    frames = frames if kind == "image" else None
    if (start, end, frames) == (None, None, None) or (kind == "image" and not is_video(value)):
        return value
    return Segment(value, start or 0.0, end, frames or FRAMES)


def spread(values: Sequence[Any], count: int | None) -> list[Any]:
    """Return `count` of the values, uniformly spaced; all of them if there are no more.

    >>> spread(range(10), 3)
    [1, 5, 8]
    """
    if count is None or len(values) <= count:
        return list(values)
    return [values[(2 * number + 1) * len(values) // (2 * count)] for number in range(count)]


def cost(value: Any) -> float:
    """Return a rough size of an undecoded value: bytes of a file, or of its part, or samples."""
    if value is None:
        return 0.0
    if isinstance(value, list):
        return sum(cost(item) for item in value)
    if isinstance(value, Segment):
        # 16 bits at 16 kHz
        return cost(value.source) if value.end is None else 32_000 * (value.end - value.start)
    if isinstance(value, ArrayItem):
        return value.cost
    if isinstance(value, Path):
        return float(value.stat().st_size) if value.is_file() else 0.0
    return float(len(value[0] if isinstance(value, tuple) else value))


@dataclass(frozen=True)
class AudioFile:
    """A mono clip in a file; `read` decodes a part of it, `samples` all of it."""

    source: Path | bytes
    rate: int  # Hz
    frames: int
    offset: int = 0  # samples of the file before the clip
    repair: Repair | None = None

    def read(self, start: int, count: int) -> Tensor:
        """Return samples `start` to `start + count`, float32 (count,); fewer at the end."""
        count = min(count, self.frames - start)
        _size(self.source, name_of(self.source))
        with _open(self.source, self.repair) as file:
            _go_to(file, self.offset + start)
            samples = _read_mono(file, count)
        if len(samples) < count:
            announced = self.offset + self.frames
            raise _damaged(name_of(self.source), announced, self.offset + start + len(samples))
        return torch.from_numpy(checked_samples(samples, name_of(self.source)))

    @property
    def samples(self) -> Tensor:
        """The whole clip, float32 (frames,)."""
        check_budget("samples", self.frames, name_of(self.source))
        return self.read(0, self.frames)


def decode_audio(source: Any) -> Audio | AudioFile:
    """Return a mono clip at its own rate, from a path, bytes, `Audio`, or `(samples, rate)`.

    WAV, FLAC, OGG and MP3; channels are averaged. Of a `Segment` only that part is read. More than
    `MAX_READ_AT_ONCE` samples of a file are returned unread, as an `AudioFile`. Integer samples are
    scaled by the full range of their type, unsigned ones around its middle; floats are in [-1, 1].
    """
    part = source if isinstance(source, Segment) else Segment(source)
    source = part.source
    if isinstance(source, tuple) and len(source) == 2:
        clip = _from_array(*source)
        first, count = part.samples(clip.frames, clip.rate, "the clip")
        return Audio(clip.samples[first : first + count], clip.rate)
    if isinstance(source, AudioFile):  # of a video, too
        first, count = part.samples(source.frames, source.rate, name_of(source.source))
        return replace(source, frames=count, offset=source.offset + first)
    if not isinstance(source, str | Path | bytes):
        raise FusionZooError(f"a {type(source).__name__} is not audio")
    source = Path(source) if isinstance(source, str) else source
    name = name_of(source)
    repair = check_length(source, name)
    with _open(source, repair) as file:
        rate, frames = file.samplerate, file.frames
        check_budget("rate", rate, name)
        if frames > 2**48:  # libsndfile's value for a FLAC without a length in its header
            frames = _count_frames(source, name)
        first, count = part.samples(frames, rate, name)
        if count > (MAX_READ_IF_SEEKABLE if file.is_seekable else MAX_READ_AT_ONCE):
            return AudioFile(source, rate, count, first, repair)
        if first:
            _go_to(file, first)
        samples = _read_mono(file, count)
    if not len(samples):
        raise FusionZooError(f"{name} contains no audio: 0 samples")
    if len(samples) < count:
        raise _damaged(name, frames, first + len(samples))
    return Audio(torch.from_numpy(checked_samples(samples, name)), rate)


def _damaged(name: str, announced: int, readable: int) -> FusionZooError:
    return FusionZooError(f"{name} is damaged: {readable} of {announced} samples can be read")


def _check_whole(missing: int, name: str) -> None:
    if missing:
        raise FusionZooError(f"{name} is cut off: its header announces {missing:,} bytes more")


def _from_array(samples: Any, rate: Any) -> Audio:
    if isinstance(samples, Tensor):
        samples = samples.detach().cpu()
        samples = samples.float() if samples.is_floating_point() else samples
    with explained("samples that are not numbers", TypeError, ValueError):
        wave = np.asarray(samples)
    if wave.ndim != 1:
        raise FusionZooError(f"a clip of shape {wave.shape}; expected mono, (n,)")
    if wave.dtype.kind in "iu":
        if wave.dtype.itemsize == 8:
            raise FusionZooError(f"samples of {wave.dtype}: give int16, int32 or floats")
        full = 2.0 ** (8 * wave.dtype.itemsize - 1)  # of the type's range
        wave = (wave.astype(np.float64) - (full if wave.dtype.kind == "u" else 0.0)) / full
    elif wave.dtype.kind != "f":
        raise FusionZooError(f"samples of type {wave.dtype} are not audio: give int16 or float32")
    check_budget("samples", len(wave), "the clip")
    if not isinstance(rate, int | float | np.number) or not 1 <= float(rate) < float("inf"):
        raise FusionZooError(f"a clip of rate {rate}; expected samples per second, such as 16000")
    check_budget("rate", float(rate), "the clip")
    wave = wave.astype(np.float32, copy=False)
    return Audio(torch.as_tensor(checked_samples(wave, "the clip")), int(rate))


def checked_samples(samples: np.ndarray, name: str) -> np.ndarray:
    """Return samples that are finite and about in [-1, 1]; raise an error for others."""
    peak = float(max(samples.max(), -samples.min())) if len(samples) else 0.0
    if not np.isfinite(peak):
        raise FusionZooError(f"{name} contains samples that are not finite")
    if peak > MAX_PEAK:
        raise FusionZooError(f"{name} peaks at {peak:.5g}: divide by the full scale")
    return samples


def _read_mono(file: Any, count: int) -> np.ndarray:
    """Read `count` frames and average their channels, a block at a time."""
    samples = np.empty(count, np.float32)
    if file.channels == 1:
        return samples[: file.buffer_read_into(samples, "float32")]
    done = 0
    for block in _blocks(file, count):
        # Summing columns: numpy's mean over a short last axis takes 20 times as long.
        mono = samples[done : done + len(block)]
        np.add(block[:, 0], block[:, 1], out=mono)
        for channel in range(2, block.shape[1]):
            mono += block[:, channel]
        mono /= block.shape[1]
        done += len(block)
    return samples[:done]


def _blocks(file: Any, count: int) -> Iterator[np.ndarray]:
    """Yield up to `count` frames (n, channels), a block at a time, in memory that is used again."""
    frames = max(1, BLOCK // file.channels)
    buffer = np.empty((min(frames, count), file.channels), np.float32)
    while count and len(block := file.read(out=buffer[:count])):
        yield block
        count -= len(block)


def _pass_over(file: Any, count: int) -> int:
    """Decode up to `count` frames and drop them; return how many there were."""
    return sum(len(block) for block in _blocks(file, count))


def _go_to(file: Any, frame: int) -> None:
    """Move a file to a frame; one that cannot seek has just been opened."""
    if file.is_seekable or file.seekable():
        file.seek(frame)
    else:
        _pass_over(file, frame)


def _count_frames(source: Path | bytes, name: str) -> int:
    """Return the frames of a file whose header does not tell, by decoding it."""
    with _open(source) as file:
        frames = _pass_over(file, BUDGETS["samples"].limit + 1)
    check_budget("samples", frames, name, "more samples than may be counted")
    warn_of_file(name, "its header has no length, as that of a stream; all that it holds is read")
    return frames


def _size(source: Path | bytes, name: str) -> int:
    """Return the bytes of a clip; one that is empty or too large is an error."""
    size = len(source) if isinstance(source, bytes) else file_size(source, "audio file")
    if not size:
        raise FusionZooError(f"{name} is empty")
    return size


@contextmanager
def _open(source: Path | bytes, repair: Repair | None = None) -> Iterator[Any]:
    """Open a clip, with another length in its header if need be; an error says what it is."""
    import soundfile

    file: Any = io.BytesIO(source) if isinstance(source, bytes) else source
    if repair is not None:
        if isinstance(source, Path):
            with source.open("rb") as opened:
                file = _View(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        file.seek(repair.field)
        file.write(repair.length)
        file.seek(0)
    try:
        with _reader()(file) as clip:
            yield clip
    except (soundfile.LibsndfileError, RuntimeError, TypeError) as error:
        reason = _conversion_hint(source) or f": {one_line(error)}"
        raise FusionZooError(f"{name_of(source)} cannot be read as audio{reason}") from error


def name_of(source: Path | bytes) -> str:
    return "<bytes>" if isinstance(source, bytes) else str(source)


def _conversion_hint(source: Path | bytes) -> str:
    """Say how to convert a file that is of none of the formats that are read; else nothing."""
    if isinstance(source, bytes):
        start = source[:32]
    else:
        with source.open("rb") as file:
            start = file.read(32)
    return "" if is_audio(start) else how_to_convert("audio", name_of(source), start)
