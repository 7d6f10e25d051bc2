"""Random changes of sound: gain, noise and shift of the wave, masks on the log-mel spectrogram.

Shapes: `B` batch, `F` mel bands, `T` frames.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.rng import seed_of
from fusionzoo.structures import Clip

from ._augment_image import uniform

OPERATIONS = ("gain", "noise", "shift", "mask")

GAIN = 10.0  # dB, the largest change of the level
CLEAN, NOISIEST = 50.0, 10.0  # dB, signal-to-noise ratios between which the noise is drawn
SHIFT = 0.1  # the largest shift, as a share of the clip
MASKS = 2  # over mel bands, and as many over time
BANDS, SPAN = 0.3, 0.2  # the widest mask, as a share of the bands and of the clip


@dataclass(frozen=True)
class ChangedClip:
    """A clip whose samples are changed as they are read; nothing else of a file is read."""

    clip: Clip
    gain: float  # factor
    noise: float  # level of white noise, relative to that of the samples read
    shift: int  # samples; what moves in is silence
    seed: int  # of the noise

    @property
    def rate(self) -> int:
        """Samples per second."""
        return self.clip.rate

    @property
    def frames(self) -> int:
        """The number of samples."""
        return self.clip.frames

    @property
    def samples(self) -> Tensor:
        """All of it."""
        return self.read(0, self.frames)

    def read(self, start: int, count: int) -> Tensor:
        """Return samples `start` to `start + count`; fewer at the end."""
        stop = min(start + count, self.frames)
        first, last = (min(max(x - self.shift, 0), self.frames) for x in (start, stop))
        wave = self.clip.read(first, last - first)
        before = min(max(0, self.shift - start), max(0, stop - start))
        wave = F.pad(wave, (before, max(0, stop - start - before - len(wave))))
        if self.noise and len(wave):
            generator = torch.Generator().manual_seed(seed_of(self.seed, start))
            level = self.noise * wave.square().mean().sqrt()
            wave = wave + level * torch.randn(len(wave), generator=generator)
        return (wave * self.gain).clamp(-1, 1)


def change_clip(
    clip: Clip, strength: float, operations: Collection[str], generator: torch.Generator
) -> Clip:
    """Change level, noise and place of a clip, as far as `operations` names them."""
    decibels = uniform(-GAIN, GAIN, generator) * strength
    ratio = uniform(CLEAN - (CLEAN - NOISIEST) * strength, CLEAN, generator)
    share = uniform(-SHIFT, SHIFT, generator) * strength
    seed = int(torch.randint(1 << 62, (), generator=generator))
    return ChangedClip(
        clip,
        10 ** (decibels / 20) if "gain" in operations else 1.0,
        10 ** (-ratio / 20) if "noise" in operations else 0.0,
        round(share * clip.frames) if "shift" in operations else 0,
        seed,
    )


def draw_masks(strength: float, generator: torch.Generator) -> Tensor:
    """Draw SpecAugment's masks, (2 x MASKS, 2): start and width as shares of bands, then of time.

    Park et al. 2019, arXiv:1904.08779. Drawn with the sample, applied on the model's device.
    """
    draws = torch.rand(2 * MASKS, 2, generator=generator)
    widest = torch.tensor([BANDS] * MASKS + [SPAN] * MASKS) * strength
    width = draws[:, 1] * widest
    return torch.stack([draws[:, 0] * (1 - width), width], dim=1)


def no_masks() -> Tensor:
    """Return masks of no width."""
    return torch.zeros(2 * MASKS, 2)


def mask_spectrogram(bands: Tensor, masks: Tensor, length: Tensor) -> Tensor:
    """Replace masked bands and times by the clip's mean: (B, F, T), (B, 2 x MASKS, 2) -> (B, F, T).

    `length` (B,) is the clip's share of the T frames: the rest is padding.
    """
    edges = torch.stack([masks[..., 0], masks.sum(-1)], dim=-1)  # (B, masks, 2): start, end
    of_bands, of_time = edges[:, :MASKS], edges[:, MASKS:] * length[:, None, None]
    hidden_bands = _covered(of_bands, bands.shape[1])[:, :, None]  # (B, F, 1)
    hidden_times = _covered(of_time, bands.shape[2])[:, None]  # (B, 1, T)
    frames = torch.arange(bands.shape[2], device=bands.device)
    real = (frames < (length * bands.shape[2]).clamp(min=1)[:, None])[:, None]  # (B, 1, T)
    total = bands.masked_fill(~real, 0).sum((1, 2), keepdim=True)
    mean = total / (real.sum((1, 2), keepdim=True) * bands.shape[1])
    return torch.where(hidden_bands | hidden_times, mean, bands)


def _covered(edges: Tensor, size: int) -> Tensor:
    """Return which of `size` cells lie within any interval: (B, masks, 2) -> (B, size)."""
    centres = (torch.arange(size, device=edges.device) + 0.5) / size
    return ((edges[..., :1] <= centres) & (centres < edges[..., 1:])).any(1)
