"""Audio encoders of log-mel pictures: any timm model, and plain statistics.

Shapes: `B` batch, `N` samples of a wave, `F` mel bands, `T` tokens, `D` width. Rates in Hz,
durations in s. Padding never changes an output: the timm model sees a window of fixed length, and
the statistics leave padding out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from fusionzoo.structures import Features, masked_mean

from ._timm import build_timm, channels_last, timm_tokens
from ._wave import PEAK, LogMel, WaveProcessor
from .base import ENCODERS, Encoder, Processor


@ENCODERS.register("mel", family="audio")
class MelTimm(Encoder):
    """Log-mel picture of a fixed window through any timm model.

    A clip is cut or filled with silence to `duration`, whatever stands beside it in the batch;
    tokens and pooled vector count the cells of real time only. The log-mel is computed in the
    batch, on the model's device. `window` and `hop` are in seconds; further settings go to
    `timm.create_model`. With `pretrained` timm adapts the first layer to one channel.

    Shapes (T = cells of the final feature map; D = model.num_features):
        inputs["wave"]: int16 (B, N) at `rate`, inputs["lengths"]: (B,)
        returns: Features of (B, T, D), (B, T), (B, D)
    """

    kind = "audio"

    def __init__(
        self,
        model: str,
        *,
        pretrained: bool = True,
        rate: int = 16_000,
        num_mels: int = 64,
        window: float = 0.025,
        hop: float = 0.010,
        duration: float = 4.0,
        **model_settings: Any,
    ) -> None:
        super().__init__()
        self.rate, self.samples = rate, round(duration * rate)
        self.mel = LogMel(rate, num_mels, window, hop)
        self.net = build_timm(model, pretrained, in_chans=1, **model_settings)
        self.dim = self.net.num_features
        self.duration = duration

    def processor(self, train: bool) -> Processor:
        return WaveProcessor(self.rate, self.duration)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        wave = inputs["wave"]
        wave = F.pad(wave, (0, self.samples - wave.shape[1])) / PEAK
        found = self.net.forward_features(rearrange(self.mel(wave), "b f t -> b 1 f t"))
        height, width = self._grid(found)
        # A column is real where it begins before the clip ends; the first always is.
        begins = torch.arange(width, device=wave.device) * (self.samples / width)
        real = begins < inputs["lengths"].clamp(min=1)[:, None]
        mask = real.repeat(1, height)  # cells run along time within a band
        tokens = timm_tokens(self.net, found)
        return Features(tokens, mask, masked_mean(tokens, mask))

    def _grid(self, found: Tensor) -> tuple[int, int]:
        """Return bands x columns of the feature map."""
        if found.ndim == 4:
            height, width = found.shape[1:3] if channels_last(self.net) else found.shape[2:4]
            return height, width
        height, width = self.net.patch_embed.grid_size
        return height, width


@ENCODERS.register("mel/stats", family="audio")
class MelStats(Encoder):
    """Mean and deviation of each log-mel band over time: no parameters, the honest baseline.

    One token. Clips are cut to `longest` seconds; frames of padding do not count. `window` and
    `hop` are in seconds.

    Shapes: inputs["wave"] int16 (B, N), inputs["lengths"] (B,) -> (B, 1, D), (B, 1), (B, D) with
        D = 2 num_mels
    """

    kind = "audio"

    def __init__(
        self,
        *,
        rate: int = 16_000,
        num_mels: int = 64,
        window: float = 0.025,
        hop: float = 0.010,
        longest: float = 10.0,
    ) -> None:
        super().__init__()
        self.rate, self.longest, self.dim = rate, longest, 2 * num_mels
        self.mel = LogMel(rate, num_mels, window, hop)

    def processor(self, train: bool) -> Processor:
        return WaveProcessor(self.rate, self.longest)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        # A wave shorter than the window's reflection at its ends cannot be analysed.
        spare = max(0, 2 * self.mel.mel.n_fft - inputs["wave"].shape[1])
        bands = self.mel(F.pad(inputs["wave"], (0, spare)) / PEAK)  # (B, F, frames)
        frames = torch.arange(bands.shape[-1], device=bands.device)
        # A frame counts where its window ends before the clip does; the first always does.
        last = (inputs["lengths"] - self.mel.mel.win_length // 2).clamp(min=0) // self.mel.hop
        real = (frames <= last[:, None])[:, None]  # (B, 1, frames)
        count = real.sum(-1)
        mean = bands.masked_fill(~real, 0).sum(-1) / count
        square = (bands - mean[..., None]).square().masked_fill(~real, 0).sum(-1) / count
        pooled = torch.cat([mean, (square + 1e-12).sqrt()], dim=-1)
        mask = torch.ones(len(pooled), 1, dtype=torch.bool, device=pooled.device)
        return Features(pooled[:, None], mask, pooled)
