"""Resampling of audio by a windowed sinc, in plain torch: the definition of torchaudio's default.

Shapes: `N` samples of a wave, `K` taps of a filter. Rates in Hz.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.errors import FusionZooError

ZERO_CROSSINGS = 6  # of the sinc, on either side of its middle
ROLL_OFF = 0.99  # cutoff, as a share of the lower rate's Nyquist frequency
MAX_FILTER = 1 << 25  # coefficients of a resampling filter, 270 MB while it is computed


class Resampler:
    """Turn every `before` samples at `source_rate` into `after` samples at `rate`.

    Output j of a period stands at time j / after, input i at i / before, and with the cutoff
    c = 0.99 min(before, after) its weight is c / before * sinc(c t) * cos(pi c t / 12)^2 for
    t = i / before - j / after and |c t| <= 6, else 0. `margin` is how many samples a filter
    reads before the first and behind the last of a period.
    """

    def __init__(self, source_rate: int, rate: int) -> None:
        divisor = math.gcd(source_rate, rate)
        self.before, self.after = source_rate // divisor, rate // divisor
        # One filter for each sample of a period: odd rates such as 44101 Hz have periods of 1 s.
        if self.before * self.after > MAX_FILTER:
            raise FusionZooError(
                f"a clip of {source_rate} Hz cannot be resampled to {rate} Hz: the ratio needs a"
                f" filter of more than {MAX_FILTER:,} coefficients; is the rate right? Convert it:"
                f" ffmpeg -i input -ar {rate} output.flac"
            )
        cutoff = ROLL_OFF * min(self.before, self.after)
        self.margin = math.ceil(ZERO_CROSSINGS * self.before / cutoff)
        inputs = torch.arange(-self.margin, self.margin + self.before, dtype=torch.float64)
        # Single precision is torchaudio's: double would move samples by up to 1e-4 at odd rates.
        outputs = torch.arange(self.after)[:, None] / self.after
        crossings = (inputs / self.before - outputs) * cutoff
        crossings = crossings.clamp(-ZERO_CROSSINGS, ZERO_CROSSINGS)
        window = torch.cos(crossings * math.pi / ZERO_CROSSINGS / 2) ** 2
        filters = torch.sinc(crossings) * window * (cutoff / self.before)
        self.filters = filters.float()[:, None]  # (after, 1, K)

    def __call__(self, wave: Tensor) -> Tensor:
        """Resample (N,), zero beyond its ends, to (ceil(N after / before),)."""
        padded = F.pad(wave[None, None], (self.margin, self.margin + self.before))
        periods = F.conv1d(padded, self.filters, stride=self.before)  # (1, after, periods)
        return periods[0].T.flatten()[: -(-len(wave) * self.after // self.before)]


@lru_cache(maxsize=16)
def resampler(source_rate: int, rate: int) -> Resampler:
    """Return the resampler of two rates; its filters are computed once."""
    return Resampler(source_rate, rate)
