"""Shared parts of audio encoders: resampling processor, log-mel spectrogram, mean pooling.

Shapes: `B` batch, `N` samples of a wave, `F` mel bands, `T` tokens, `D` width. Rates in Hz,
durations in s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError
from fusionzoo.resampling import resampler
from fusionzoo.structures import Clip, Features, masked_mean

from .base import Item, Processor

STEP = 0.1  # s; clip lengths are rounded up to a multiple of it, for encoders that group by length
SILENCE = 1e-5  # added to mel power before the logarithm
PEAK = 32767  # full scale of int16


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


def read_at_rate(clip: Clip, rate: int, start: int, count: int) -> Tensor:
    """Return samples `start` to `start + count` of a clip at `rate` Hz; fewer at its end.

    Equals a slice of the whole clip resampled, but reads only these samples and, on both sides, as
    many as the resampling filter needs.
    """
    if clip.rate == rate or not clip.frames:
        return clip.read(start, count)
    resample = resampler(clip.rate, rate)
    before, after = resample.before, resample.after
    margin = -(-resample.margin // before)  # in periods
    first = max(0, start // after - margin)
    last = -(-(start + count) // after) + margin
    wave: Tensor = resample(clip.read(first * before, (last - first) * before))
    return wave[start - first * after :][:count]


class LogMel(nn.Module):
    """Compute log-mel power, scaled to about unit range: (B, N) in [-1, 1] -> (B, F, frames).

    `window` and `hop` are in seconds. The bands are triangles between equal steps of mel =
    2595 log10(1 + f / 700), from 0 to rate / 2, as in torchaudio. Windows and bands stay in single
    precision, and so does the computation, whatever the model is cast to; the output is cast.
    """

    window: Tensor
    filters: Tensor
    like: Tensor

    def __init__(self, rate: int, num_mels: int, window: float, hop: float) -> None:
        super().__init__()
        self.hop, self.win_length = round(hop * rate), round(window * rate)
        self.n_fft = 2 ** math.ceil(math.log2(self.win_length))
        if self.n_fft // 2 + 1 < 2 * num_mels:
            self.n_fft = 2 ** math.ceil(math.log2(4 * num_mels))  # every band needs a frequency bin
        hann = torch.hann_window(self.win_length).clone()  # else a view of a longer tensor
        self.register_buffer("window", hann, persistent=False)
        self.register_buffer("filters", mel_filters(rate, num_mels, self.n_fft), persistent=False)
        self.register_buffer("like", torch.empty(0), persistent=False)  # has the output's dtype

    def forward(self, wave: Tensor) -> Tensor:
        return self.in_single_precision(wave).to(self.like.dtype)

    def in_single_precision(self, wave: Tensor) -> Tensor:
        """Compute the bands in float32, also under autocast: power overflows in half precision."""
        with torch.autocast(wave.device.type, enabled=False):
            spectrum = torch.stft(
                wave.float(),
                self.n_fft,
                self.hop,
                self.win_length,
                self.window,
                return_complex=True,
            )
            power = (spectrum.abs().pow(2).mT @ self.filters).mT
            return (power + SILENCE).log() / 5 + 1

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LogMel:
        """Move with the model, but keep the constants' precision."""
        exact = {name: getattr(self, name) for name in ("window", "filters")}
        super()._apply(fn, recurse)
        for name, tensor in exact.items():
            setattr(self, name, tensor.to(getattr(self, name).device))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Skip the constants that earlier versions stored."""
        for name in ("mel.spectrogram.window", "mel.mel_scale.fb"):
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)


def mel_filters(rate: int, num_mels: int, n_fft: int) -> Tensor:
    """Return the weight of each frequency bin in each mel band, (n_fft / 2 + 1, F)."""
    bins = torch.linspace(0, rate // 2, n_fft // 2 + 1)[:, None]
    highest = 2595 * math.log10(1 + (rate // 2) / 700)
    corners = 700 * (10 ** (torch.linspace(0, highest, num_mels + 2) / 2595) - 1)
    rising = (bins - corners[:-2]) / (corners[1:-1] - corners[:-2])
    falling = (corners[2:] - bins) / (corners[2:] - corners[1:-1])
    return torch.minimum(rising, falling).clamp(min=0)


def mean_pooled(tokens: Tensor, mask: Tensor) -> Features:
    """Return features whose pooled vector is the mean of the real tokens."""
    return Features(tokens, mask, masked_mean(tokens, mask))
