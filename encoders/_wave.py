"""Shared parts of audio encoders: resampling processor, log-mel spectrogram, mean pooling.

Shapes: `B` batch, `N` samples of a wave, `F` mel bands, `T` tokens, `D` width. Rates in Hz,
durations in s.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Clip, Features, masked_mean

from .base import Item, Processor

STEP = 0.1  # s; clip lengths are rounded up to a multiple of it, for encoders that group by length
SILENCE = 1e-5  # added to mel power before the logarithm
PEAK = 32767  # full scale of int16
MAX_FILTER = 1 << 25  # coefficients of a resampling filter, 270 MB while it is computed


class WaveProcessor(Processor):
    """Resample clips to `rate` Hz and store them as int16, half the size of float32.

    A clip longer than `longest` seconds is cropped, at random in training and else to its middle;
    the rest is neither read from a long file nor resampled. With `num_windows` above 1, evaluation
    takes that many windows of `longest` seconds instead, evenly spaced from start to end. With
    `step` (s), a clip is padded with silence to a multiple of it, so that many clips of a batch
    have the same length.
    """

    def __init__(
        self, rate: int, longest: float, step: float = 0.0, *, num_windows: int = 1
    ) -> None:
        if longest * rate < 1:
            raise FusionZooError(f"a clip of at most {longest:g} s is shorter than one sample")
        if num_windows < 1:
            raise FusionZooError(f"windows={num_windows}; at least 1 is needed")
        self.rate, self.longest, self.step = rate, longest, step
        self.num_windows = num_windows

    def __call__(self, value: Clip, generator: torch.Generator | None = None) -> Item:
        surplus = self._surplus(value)
        start = surplus // 2
        if surplus and generator is not None:
            start = int(torch.randint(surplus + 1, (1,), generator=generator))
        return self._window(value, start)

    def windows(self, value: Clip, generator: torch.Generator | None = None) -> list[Item]:
        surplus = self._surplus(value)
        if generator is not None or self.num_windows == 1 or not surplus:
            return [self(value, generator)]
        last = self.num_windows - 1
        return [self._window(value, number * surplus // last) for number in range(last + 1)]

    def _window(self, clip: Clip, start: int) -> Item:
        """Read the part of a clip from sample `start`, at `rate`."""
        wave = read_at_rate(clip, self.rate, start, round(self.longest * self.rate))
        if self.step:
            step = round(self.step * self.rate)
            wave = F.pad(wave, (0, max(step, -(-len(wave) // step) * step) - len(wave)))
        stored = wave.clamp(-1, 1).mul_(PEAK).round_().to(torch.int16)
        return {"wave": stored, "lengths": torch.tensor(len(stored))}

    def varies(self, value: Clip) -> bool:
        return self._surplus(value) > 0

    def _surplus(self, clip: Clip) -> int:
        """Return how many samples of a clip, at `rate`, do not fit."""
        return max(0, -(-clip.frames * self.rate // clip.rate) - round(self.longest * self.rate))

    def blank(self) -> Item:
        samples = max(1, round(self.step * self.rate))
        return {"wave": torch.zeros(samples, dtype=torch.int16), "lengths": torch.tensor(samples)}

    def collate(self, items: Any) -> Item:
        lengths = torch.stack([item["lengths"] for item in items])
        return {**super().collate([{"wave": item["wave"]} for item in items]), "lengths": lengths}


@lru_cache(maxsize=16)
def _resampler(source_rate: int, rate: int) -> Any:
    from torchaudio.transforms import Resample

    # One filter for each sample of a period: odd rates such as 44101 Hz have periods of a second.
    divisor = math.gcd(source_rate, rate)
    if source_rate // divisor * (rate // divisor) > MAX_FILTER:
        raise FusionZooError(
            f"a clip of {source_rate} Hz cannot be resampled to {rate} Hz: the ratio needs a filter"
            f" of more than {MAX_FILTER:,} coefficients; is the rate right? Convert it: ffmpeg -i"
            f" input -ar {rate} output.flac"
        )
    return Resample(source_rate, rate)


def read_at_rate(clip: Clip, rate: int, start: int, count: int) -> Tensor:
    """Return samples `start` to `start + count` of a clip at `rate` Hz; fewer at its end.

    Equals a slice of the whole clip resampled, but reads only these samples and, on both sides, as
    many as the resampling filter needs.
    """
    if clip.rate == rate or not clip.frames:
        return clip.read(start, count)
    resample = _resampler(clip.rate, rate)
    # The filter turns every `before` samples into `after`, and reads `width` more on both sides.
    before, after = clip.rate // resample.gcd, rate // resample.gcd
    margin = -(-resample.width // before)
    first = max(0, start // after - margin)
    last = -(-(start + count) // after) + margin
    wave: Tensor = resample(clip.read(first * before, (last - first) * before))
    return wave[start - first * after :][:count]


class LogMel(nn.Module):
    """Compute log-mel power, scaled to about unit range: (B, N) in [-1, 1] -> (B, F, frames).

    `window` and `hop` are in seconds.
    """

    def __init__(self, rate: int, num_mels: int, window: float, hop: float) -> None:
        super().__init__()
        from torchaudio.transforms import MelSpectrogram

        self.hop = round(hop * rate)
        samples = round(window * rate)
        n_fft = 2 ** math.ceil(math.log2(samples))
        if n_fft // 2 + 1 < 2 * num_mels:
            n_fft = 2 ** math.ceil(math.log2(4 * num_mels))  # every mel band needs a frequency bin
        self.mel = MelSpectrogram(rate, n_fft, samples, self.hop, n_mels=num_mels)
        # torch's window is a view of a longer tensor, which safetensors refuses to store.
        spectrogram: Any = self.mel.spectrogram
        spectrogram.window = spectrogram.window.clone()

    def forward(self, wave: Tensor) -> Tensor:
        with torch.autocast(wave.device.type, enabled=False):  # power overflows in half precision
            return (self.mel(wave.float()) + SILENCE).log() / 5 + 1


def mean_pooled(tokens: Tensor, mask: Tensor) -> Features:
    """Return features whose pooled vector is the mean of the real tokens."""
    return Features(tokens, mask, masked_mean(tokens, mask))
