"""Decode videos by PyAV (FFmpeg's libraries): frames at uniformly spaced times, and the audio."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError, explained
from fusionzoo.structures import Audio

from .audio import (
    MAX_READ_AT_ONCE,
    AudioFile,
    Segment,
    checked_samples,
    container_of,
    name_of,
)
from .budgets import check_budget, check_image, file_size

JUMP = 5.0  # s; what lies nearer is decoded through, what lies farther is sought
PREROLL = 0.2  # s of audio decoded before the part in use, as lossy codecs overlap
EARLY = 1e-3  # s by which a frame's time may be rounded up in the file
MOST_MISSING = 1.0  # s that may be missing at the end: headers are not exact


@dataclass(frozen=True)
class Soundtrack(AudioFile):
    """The mono audio of a video, or a part of it."""

    def read(self, start: int, count: int) -> Tensor:
        count = min(count, self.frames - start)
        with _open(self.source) as container:
            stream = _stream(container, "audio", name_of(self.source))
            samples = _read_audio(container, stream, self.offset + start, count)
        _check_end(name_of(self.source), count - len(samples), self.rate)
        return torch.from_numpy(checked_samples(samples, name_of(self.source)))


def decode_video(kind: str, value: Any) -> Any:
    """Return a video's frames, uint8 (3, H, W), or a single one; of kind `audio` its audio."""
    part = value if isinstance(value, Segment) else Segment(value)
    if kind == "audio":
        return read_soundtrack(part)
    frames = read_frames(part)
    return frames[0] if len(frames) == 1 else frames


def read_frames(part: Segment) -> list[Tensor]:
    """Return the frames in the middles of equal parts of a video; of a short one, all of them."""
    name = name_of(part.source)
    with _open(part.source) as container:
        stream = _stream(container, "video", name)
        width, height = stream.codec_context.width, stream.codec_context.height
        check_image(width, height, name)
        check_budget("items", part.frames, f"{name}: the number of frames")
        check_budget("pixels of all images", part.frames * width * height, name)
        start, end = part.bounds(_seconds(container, stream, name), name)
        times = [start + (i + 0.5) * (end - start) / part.frames for i in range(part.frames)]
        return [_tensor(frame, name) for frame in _frames_at(container, stream, times, name)]


def read_soundtrack(part: Segment) -> Audio | Soundtrack:
    """Return a video's audio, its channels averaged; that of a long one is returned unread."""
    name = name_of(part.source)
    with _open(part.source) as container:
        stream = _stream(container, "audio", name)
        rate = int(stream.codec_context.sample_rate)
        check_budget("rate", rate, name)
        total = round(_seconds(container, stream, name) * rate)
        first, count = part.samples(total, rate, name)
        if count > MAX_READ_AT_ONCE:
            return Soundtrack(_source(part.source), rate, count, first)
        is_whole = part.end is None and not first
        samples = _read_audio(container, stream, first, None if is_whole else count)
    if not len(samples):
        raise FusionZooError(f"{name} contains no audio: 0 samples")
    _check_end(name, count - len(samples), rate)
    return Audio(torch.from_numpy(checked_samples(samples, name)), rate)


def _frames_at(container: Any, stream: Any, times: Sequence[float], name: str) -> list[Any]:
    """Return the frames that are shown at some times, in ascending order; each once."""
    origin, base = _origin(container), float(stream.time_base)
    frames = container.decode(stream)
    chosen: list[Any] = []
    shown, following = None, next(frames, None)
    for time in times:
        if following is not None and time - _begin(following, origin) > JUMP:
            container.seek(int((time + origin) / base), stream=stream)
            frames = container.decode(stream)
            shown, following = None, next(frames, None)
        while following is not None and _begin(following, origin) <= time + EARLY:
            shown, following = following, next(frames, None)
        frame = following if shown is None else shown
        if frame is None:
            raise FusionZooError(f"{name} has no frame that can be decoded")
        if following is None:
            length = max((frame.duration or 0) * base, 1 / float(stream.average_rate or 1))
            _check_end(name, time - _begin(frame, origin) - length, 1)
        if not chosen or frame.pts != chosen[-1].pts:
            chosen.append(frame)
    return chosen


def _begin(frame: Any, origin: float) -> float:
    return float(frame.time or 0.0) - origin


def _origin(container: Any) -> float:
    """Return the time at which the first stream begins, s."""
    return (container.start_time or 0) / 1e6


def _read_audio(container: Any, stream: Any, first: int, count: int | None) -> np.ndarray:
    """Decode samples `first` to `first + count`, or all, and average their channels."""
    import av

    rate, origin = int(stream.codec_context.sample_rate), _origin(container)
    if first > JUMP * rate:
        start = first / rate - PREROLL + origin
        container.seek(int(start / float(stream.time_base)), stream=stream)
    resampler = av.AudioResampler(format="fltp")
    blocks: list[np.ndarray] = []
    position: int | None = None  # of the next sample
    end = None if count is None else first + count
    for frame in container.decode(stream):
        if position is None:
            position = 0 if end is None else max(0, round(_begin(frame, origin) * rate))
        for part in resampler.resample(frame):
            mono = _mono(part.to_ndarray())
            blocks.append(mono[max(0, first - position) : None if end is None else end - position])
            position += len(mono)
            check_budget("samples", position - first, "the audio")
        if end is not None and position >= end:
            break
    return np.concatenate([np.zeros(0, np.float32), *blocks])


def _mono(channels: np.ndarray) -> np.ndarray:
    """Average channels, (C, n) -> (n,); in the order in which `audio` adds them up."""
    mono: np.ndarray = channels[0]
    for channel in channels[1:]:
        mono = mono + channel
    return mono if len(channels) == 1 else mono / len(channels)


def _tensor(frame: Any, name: str) -> Tensor:
    check_image(frame.width, frame.height, name)
    pixels = frame.to_ndarray(format="rgb24")
    pixels = np.rot90(pixels, round((frame.rotation or 0) / 90) % 4)
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def _check_end(name: str, missing: float, rate: int) -> None:
    """Raise an error if more than `MOST_MISSING` seconds could not be read; in units of `rate`."""
    if missing > MOST_MISSING * rate:
        raise FusionZooError(f"{name} is damaged or cut off: {missing / rate:.3g} s cannot be read")


def _seconds(container: Any, stream: Any, name: str) -> float:
    """Return the length of a stream in seconds, from its header."""
    if stream.duration:
        return float(stream.duration * stream.time_base)
    tag = stream.metadata.get("DURATION", "")  # of Matroska: 00:00:02.000000000
    try:
        hours, minutes, seconds = (float(part) for part in tag.split(":"))
        return 3600 * hours + 60 * minutes + seconds
    except ValueError:
        if container.duration:
            return float(container.duration / 1e6)
    raise FusionZooError(f"{name} has no length in its header: ffmpeg -i {name} -c copy new.mp4")


def _stream(container: Any, kind: str, name: str) -> Any:
    """Return the first stream of frames or of audio; it is decoded in a single thread."""
    from av.stream import Disposition

    streams = getattr(container.streams, kind)
    streams = [x for x in streams if not x.disposition & Disposition.attached_pic]  # covers
    if not streams:
        lacking = "no frames" if kind == "video" else "no audio"
        raise FusionZooError(f"{name} has {lacking}: leave its cell empty")
    streams[0].codec_context.thread_count = 1  # loaders have processes of their own
    return streams[0]


@contextmanager
def _open(source: Any) -> Iterator[Any]:
    """Open a video as the container that its first bytes tell; errors name the file."""
    name, source = name_of(source), _source(source)
    with explained(f"{name} needs PyAV, pip install 'fusionzoo[video]'", ImportError):
        import av
    if isinstance(source, bytes):
        check_budget("video file", len(source), name)
        head = source[:16]
        file: Any = io.BytesIO(source)
    else:
        file_size(source, "video file")
        with source.open("rb") as opened:
            head, file = opened.read(16), str(source.absolute())
    kind = container_of(head)
    if not kind:
        raise FusionZooError(f"{name} is no video that is read (MP4, MOV, MKV, WEBM, AVI, MPEG)")
    damages = (av.FFmpegError, UnicodeDecodeError, OverflowError)
    with (
        explained(f"{name} cannot be read as a video", *damages),
        av.open(file, format=kind, metadata_errors="replace") as container,
    ):
        yield container


def _source(source: Any) -> Path | bytes:
    return source if isinstance(source, bytes) else Path(source)
