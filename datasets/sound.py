"""Decode audio: channels are averaged, and of a long file only the part in use is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError, one_line
from fusionzoo.structures import Audio

from .budgets import check_budget, file_size
from .conversion import how_to_convert, is_sound
from .sound_handles import is_kept, is_seekable, keep_handle, open_handle, take_handle
from .stretch import Stretch
from .truncated import missing_bytes

# Samples up to which all of a clip is read at once: 10 s at 48 kHz, as opening twice costs more. A
# file that stays open, see `sound_handles`, is sought in from 2.5 s at 16 kHz.
MAX_READ_AT_ONCE = 480_000
MAX_READ_IF_SEEKABLE = 40_000
# Values of all channels read at a time, so that only the averaged channel is kept whole.
BLOCK = 1 << 17
# Recordings exceed full scale slightly (lossy codecs, resampling), never by 12 dB. Integers stored
# as floats do, and would be clipped in almost every sample.
MAX_PEAK = 4.0


@dataclass(frozen=True)
class AudioFile:
    """A mono clip in a file; `read` decodes a part of it, `samples` all of it."""

    source: Path | bytes
    rate: int  # Hz
    frames: int
    offset: int = 0  # samples of the file before the clip

    def read(self, start: int, count: int) -> Tensor:
        """Return samples `start` to `start + count`, float32 (count,); fewer at the end."""
        count = min(count, self.frames - start)
        with _open(self.source, take_handle(self.source)) as file:
            file.seek(self.offset + start)
            samples = _read_mono(file, count)
        if len(samples) < count:
            announced = self.offset + self.frames
            raise _damaged(_name(self.source), announced, self.offset + start + len(samples))
        return torch.from_numpy(checked_samples(samples, _name(self.source)))

    @property
    def samples(self) -> Tensor:
        """The whole clip, float32 (frames,)."""
        check_budget("samples", self.frames, _name(self.source))
        return self.read(0, self.frames)


def decode_audio(source: Any) -> Audio | AudioFile:
    """Return a mono clip at its own rate, from a path, bytes, `Audio`, or `(samples, rate)`.

    WAV, FLAC, OGG and MP3; channels are averaged. Of a `Stretch` only that part is read. More than
    `MAX_READ_AT_ONCE` samples of a file are returned unread, as an `AudioFile`. Integer samples are
    scaled by the full range of their type, unsigned ones around its middle; floats are in [-1, 1].
    """
    part = source if isinstance(source, Stretch) else Stretch(source)
    source = part.source
    if isinstance(source, tuple) and len(source) == 2:
        clip = _from_array(*source)
        first, count = part.samples(clip.frames, clip.rate, "the clip")
        return Audio(clip.samples[first : first + count], clip.rate)
    if hasattr(source, "frames") and hasattr(source, "read"):  # a clip in a file, or in a video
        first, count = part.samples(source.frames, source.rate, _name(source.source))
        clip_in_file: Any = source
        return replace(clip_in_file, frames=count, offset=source.offset + first)
    if not isinstance(source, str | Path | bytes):
        raise FusionZooError(
            f"a {type(source).__name__} is not audio: give a path, bytes or (samples, rate)"
        )
    source = Path(source) if isinstance(source, str) else source
    name = _name(source)
    with _open(source) as file:
        rate, frames = file.samplerate, file.frames
        check_budget("rate", rate, name)
        if file.format != "FLAC":  # libsndfile raises an error for one that was cut off
            _check_whole(source, name)
        if frames > 2**48:  # libsndfile's value for a stream without a length in its header
            raise FusionZooError(f"{name} has no length in its header: store it as WAV or FLAC")
        first, count = part.samples(frames, rate, name)
        seekable = MAX_READ_IF_SEEKABLE if is_seekable(file) else MAX_READ_AT_ONCE
        if count > min(seekable, MAX_READ_AT_ONCE):
            keep_handle(source, file)
            return AudioFile(source, rate, count, first)
        if first:
            file.seek(first)
        samples = _read_mono(file, count)
    if not len(samples):
        raise FusionZooError(f"{name} contains no audio: 0 samples")
    if len(samples) < count:
        raise _damaged(name, frames, first + len(samples))
    return Audio(torch.from_numpy(checked_samples(samples, name)), rate)


def _damaged(name: str, announced: int, readable: int) -> FusionZooError:
    return FusionZooError(
        f"{name} is damaged: its header announces {announced} samples, and none can be read after"
        f" {readable}"
    )


def _check_whole(source: Path | bytes, name: str) -> None:
    missing = missing_bytes(source)
    if missing:
        raise FusionZooError(
            f"{name} is cut off: its header announces {missing:,} bytes more than the file holds"
        )


def _from_array(samples: Any, rate: Any) -> Audio:
    if isinstance(samples, Tensor):
        samples = samples.detach().cpu()
        samples = samples.float() if samples.is_floating_point() else samples
    try:
        wave = np.asarray(samples)
    except (TypeError, ValueError) as error:
        raise FusionZooError(f"samples that are not numbers: {one_line(error)}") from error
    if wave.ndim != 1:
        raise FusionZooError(f"a clip of shape {wave.shape}; expected mono, (n,)")
    if wave.dtype.kind in "iu":
        wave = _scaled(wave)
    elif wave.dtype.kind != "f":
        raise FusionZooError(f"samples of type {wave.dtype} are not audio: give int16 or float32")
    check_budget("samples", len(wave), "the clip")
    if not isinstance(rate, int | float | np.number) or not 1 <= float(rate) < float("inf"):
        raise FusionZooError(f"a clip of rate {rate}; expected samples per second, such as 16000")
    check_budget("rate", float(rate), "the clip")
    wave = wave.astype(np.float32, copy=False)
    return Audio(torch.as_tensor(checked_samples(wave, "the clip")), int(rate))


def _scaled(wave: np.ndarray) -> np.ndarray:
    """Scale integers to [-1, 1) by the full range of their type."""
    if wave.dtype.itemsize == 8:
        raise FusionZooError(
            f"samples of type {wave.dtype}, whose full scale is unknown: give them as int16 or"
            " int32, as they were recorded, or as floats in [-1, 1]"
        )
    full = 2.0 ** (8 * wave.dtype.itemsize - 1)
    middle = full if wave.dtype.kind == "u" else 0.0
    return (wave.astype(np.float64) - middle) / full


def checked_samples(samples: np.ndarray, name: str) -> np.ndarray:
    """Return samples that are finite and about in [-1, 1]; raise an error for others."""
    peak = float(max(samples.max(), -samples.min())) if len(samples) else 0.0
    if not np.isfinite(peak):
        raise FusionZooError(f"{name} contains samples that are not finite")
    if peak > MAX_PEAK:
        raise FusionZooError(
            f"{name} peaks at {peak:.5g}, and floats are in [-1, 1]: divide by the full scale"
            " (32768 for 16 bits), or give the integers as they are"
        )
    return samples


def _read_mono(file: Any, count: int) -> np.ndarray:
    """Read `count` frames and average their channels, a block at a time."""
    samples = np.empty(count, np.float32)
    if file.channels == 1:
        mono: np.ndarray = file.read(out=samples)
        return mono
    frames = max(1, BLOCK // file.channels)
    buffer = np.empty((min(frames, count), file.channels), np.float32)
    done = 0
    while done < count:
        block = file.read(out=buffer[: count - done])
        if not len(block):
            break
        # Summing columns: numpy's mean over a short last axis takes 20 times as long.
        mono = samples[done : done + len(block)]
        np.add(block[:, 0], block[:, 1], out=mono)
        for channel in range(2, block.shape[1]):
            mono += block[:, channel]
        mono /= block.shape[1]
        done += len(block)
    return samples[:done]


@contextmanager
def _open(source: Path | bytes, kept: Any = None) -> Iterator[Any]:
    """Open a clip, if it is not `kept` open; an error of the audio library names the file.

    It is closed after use unless `keep_handle` was called.
    """
    import soundfile

    name = _name(source)
    if kept is None and not (
        len(source) if isinstance(source, bytes) else file_size(source, "sound file")
    ):
        raise FusionZooError(f"{name} is empty")
    file = kept
    try:
        file = open_handle(source) if kept is None else kept
        yield file
    except (soundfile.LibsndfileError, RuntimeError, TypeError) as error:
        hint = _conversion_hint(source)
        reason = hint or f": {one_line(error)}"
        raise FusionZooError(f"{name} cannot be read as audio{reason}") from error
    finally:
        if file is not None and not is_kept(source, file):
            file.close()


def _name(source: Path | bytes) -> str:
    return "<bytes>" if isinstance(source, bytes) else str(source)


def _conversion_hint(source: Path | bytes) -> str:
    """Say how to convert a file that is of none of the formats that are read; else nothing."""
    if isinstance(source, bytes):
        start = source[:32]
    else:
        with source.open("rb") as file:
            start = file.read(32)
    return "" if is_sound(start) else how_to_convert("audio", _name(source), start)
