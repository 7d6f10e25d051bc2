"""What audio encoders share: clips at one rate, the log-mel picture, pooling.

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

STEP = 0.1  # s: what clips are rounded up to, with silence, where rows must be of one length
SILENCE = 1e-5  # added to mel power before the logarithm
PEAK = 32767


class WaveProcessor(Processor):
    """Resample to `rate` and store as int16: a quarter of float64, an eighth of what a copy costs.

    A clip longer than `longest` seconds is cut: at random in training, else to its middle; what
    is cut off is neither read from a long file nor resampled. With `step`, clips are rounded up to
    a multiple of it with silence, so that equal lengths meet.
    """

    def __init__(self, rate: int, longest: float, step: float = 0.0) -> None:
        if longest * rate < 1:
            raise FusionZooError(f"a clip of at most {longest:g} s is shorter than one sample")
        self.rate, self.longest, self.step = rate, longest, step

    def __call__(self, value: Clip, generator: torch.Generator | None = None) -> Item:
        room = round(self.longest * self.rate)
        spare = max(0, -(-value.frames * self.rate // value.rate) - room)
        start = spare // 2
        if spare and generator is not None:
            start = int(torch.randint(spare + 1, (1,), generator=generator))
        wave = read_at_rate(value, self.rate, start, room)
        if self.step:
            unit = round(self.step * self.rate)
            wave = F.pad(wave, (0, max(unit, -(-len(wave) // unit) * unit) - len(wave)))
        stored = (wave.clamp(-1, 1) * PEAK).round().to(torch.int16)
        return {"wave": stored, "lengths": torch.tensor(len(stored))}

    def blank(self) -> Item:
        samples = max(1, round(self.step * self.rate))
        return {"wave": torch.zeros(samples, dtype=torch.int16), "lengths": torch.tensor(samples)}

    def collate(self, items: Any) -> Item:
        lengths = torch.stack([item["lengths"] for item in items])
        return {**super().collate([{"wave": item["wave"]} for item in items]), "lengths": lengths}


@lru_cache(maxsize=16)
def _resampler(before: int, after: int) -> Any:
    from torchaudio.transforms import Resample

    return Resample(before, after)


def read_at_rate(clip: Clip, rate: int, start: int, count: int) -> Tensor:
    """Return samples `start` to `start + count` that the clip has at `rate`; fewer at its end.

    Equal to resampling the whole clip, yet only these samples and the filter's reach are read.
    """
    if clip.rate == rate or not clip.frames:
        return clip.read(start, count)
    resample = _resampler(clip.rate, rate)
    # The filter turns each `before` samples into `after`, and reads `width` more on both sides.
    before, after = clip.rate // resample.gcd, rate // resample.gcd
    reach = -(-resample.width // before)
    first = max(0, start // after - reach)
    last = -(-(start + count) // after) + reach
    wave: Tensor = resample(clip.read(first * before, (last - first) * before))
    return wave[start - first * after :][:count]


class LogMel(nn.Module):
    """Logarithm of mel power, scaled to about unit range: (B, N) in [-1, 1] -> (B, F, frames)."""

    def __init__(self, rate: int, num_mels: int, window: float, hop: float) -> None:
        super().__init__()
        from torchaudio.transforms import MelSpectrogram

        self.hop = round(hop * rate)
        samples = round(window * rate)
        n_fft = 2 ** math.ceil(math.log2(samples))
        if n_fft // 2 + 1 < 2 * num_mels:
            n_fft = 2 ** math.ceil(math.log2(4 * num_mels))  # no mel band without a bin
        self.mel = MelSpectrogram(rate, n_fft, samples, self.hop, n_mels=num_mels)
        # torch's window is a view into a longer one, which safetensors does not store.
        self.mel.spectrogram.window = self.mel.spectrogram.window.clone()

    def forward(self, wave: Tensor) -> Tensor:
        with torch.autocast(wave.device.type, enabled=False):  # powers overflow in half precision
            return (self.mel(wave.float()) + SILENCE).log() / 5 + 1


def pool(tokens: Tensor, mask: Tensor) -> Features:
    """Add the mean of the real tokens."""
    return Features(tokens, mask, masked_mean(tokens, mask))
