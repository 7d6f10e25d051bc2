"""Audio encoders on log-mel spectrograms: any timm model, or per-band statistics.

Shapes: `B` batch, `N` samples of a wave, `F` mel bands, `T` tokens, `D` width. Rates in Hz,
durations in s. Padding never changes an output: the timm model sees a window of fixed length, and
the statistics exclude padded frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from fusionzoo.structures import Features, masked_mean

from ._augment_audio import mask_spectrogram
from ._timm import build_timm, channels_last, timm_tokens
from ._wave import PEAK, LogMel, WaveProcessor
from .base import ENCODERS, Encoder, Processor


@ENCODERS.register("mel", family="audio", takes_model=True)
class MelTimm(Encoder):
    """Encode the log-mel spectrogram of a fixed-length window with any timm model.

    A clip is cropped or padded with silence to `duration`; cells of the feature map that begin
    after the clip's end are masked and excluded from the pooled vector. The spectrogram is
    computed per batch on the model's device. Further settings go to `timm.create_model`.

    Settings:
        pretrained: load the weights that timm publishes; timm adapts the first layer to one channel
        rate: sampling rate in Hz that clips are resampled to
        num_mels: mel bands, the height of the spectrogram
        window: length of an analysis window in s
        hop: time between windows in s
        duration: length of the input in s
        windows: in evaluation, windows of `duration` s taken evenly from a longer clip, whose
            tokens stand one after another and whose pooled vectors are averaged; 1 takes the middle

    Shapes: (T = cells of the final feature map; D = model.num_features)
        inputs["wave"]: int16 (B, N) at `rate`, inputs["lengths"]: (B,)
        returns: Features of (B, T, D), (B, T), (B, D)
    """

    kind = "audio"
    masks_spectrogram = True

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
        windows: int = 1,
        **model_settings: Any,
    ) -> None:
        super().__init__()
        self.rate, self.samples = rate, round(duration * rate)
        self.mel = LogMel(rate, num_mels, window, hop)
        self.net = build_timm(model, pretrained, in_chans=1, **model_settings)
        self.dim = self.net.num_features
        self.duration, self.windows = duration, windows

    def processor(self, train: bool) -> Processor:
        return WaveProcessor(self.rate, self.duration, num_windows=self.windows)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        wave = inputs["wave"]
        wave = F.pad(wave, (0, self.samples - wave.shape[1])) / PEAK
        bands = self.mel(wave)
        if "masks" in inputs:
            bands = mask_spectrogram(bands, inputs["masks"], inputs["lengths"] / self.samples)
        feature_map = self.net.forward_features(rearrange(bands, "b f t -> b 1 f t"))
        height, width = self._grid(feature_map)
        # A column is real if it starts before the clip ends; the first one always is.
        starts = torch.arange(width, device=wave.device) * (self.samples / width)
        is_real = starts < inputs["lengths"].clamp(min=1)[:, None]
        mask = is_real.repeat(1, height)  # tokens are ordered by band, then by time
        tokens = timm_tokens(self.net, feature_map)
        return Features(tokens, mask, masked_mean(tokens, mask))

    def _grid(self, feature_map: Tensor) -> tuple[int, int]:
        """Return the height (bands) and width (time) of the feature map."""
        if feature_map.ndim == 4:
            is_last = channels_last(self.net)
            height, width = feature_map.shape[1:3] if is_last else feature_map.shape[2:4]
            return height, width
        height, width = self.net.patch_embed.grid_size
        return height, width


@ENCODERS.register("mel/stats", family="audio")
class MelStats(Encoder):
    """Compute mean and standard deviation over time of each log-mel band: a baseline to beat.

    It has no parameters and gives one token. Padded frames are excluded.

    Settings:
        rate: sampling rate in Hz that clips are resampled to
        num_mels: mel bands; the width is twice as many
        window: length of an analysis window in s
        hop: time between windows in s
        longest: length in s beyond which a clip is cropped
        windows: in evaluation, windows of `longest` s taken evenly from a longer clip, whose tokens
            stand one after another and whose pooled vectors are averaged; 1 takes the middle

    Shapes: inputs["wave"] int16 (B, N), inputs["lengths"] (B,) -> (B, 1, D), (B, 1), (B, D) with
        D = 2 num_mels
    """

    kind = "audio"
    masks_spectrogram = True

    def __init__(
        self,
        *,
        rate: int = 16_000,
        num_mels: int = 64,
        window: float = 0.025,
        hop: float = 0.010,
        longest: float = 10.0,
        windows: int = 1,
    ) -> None:
        super().__init__()
        self.windows = windows
        self.rate, self.longest, self.dim = rate, longest, 2 * num_mels
        self.mel = LogMel(rate, num_mels, window, hop)

    def processor(self, train: bool) -> Processor:
        return WaveProcessor(self.rate, self.longest, num_windows=self.windows)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        # The transform reflects the wave at its ends, so it refuses a very short one.
        padding = max(0, 2 * self.mel.n_fft - inputs["wave"].shape[1])
        wave = F.pad(inputs["wave"], (0, padding)) / PEAK
        bands = self.mel.in_single_precision(wave)  # (B, F, frames)
        if "masks" in inputs:
            bands = mask_spectrogram(bands, inputs["masks"], inputs["lengths"] / wave.shape[1])
        frames = torch.arange(bands.shape[-1], device=bands.device)
        # A frame is real if its window ends before the clip does; the first one always is.
        last = (inputs["lengths"] - self.mel.win_length // 2).clamp(min=0) // self.mel.hop
        is_real = (frames <= last[:, None])[:, None]  # (B, 1, frames)
        count = is_real.sum(-1)
        mean = bands.masked_fill(~is_real, 0).sum(-1) / count
        variance = (bands - mean[..., None]).square().masked_fill(~is_real, 0).sum(-1) / count
        pooled = torch.cat([mean, (variance + 1e-12).sqrt()], dim=-1)
        pooled = pooled.to(self.mel.like.dtype)
        mask = torch.ones(len(pooled), 1, dtype=torch.bool, device=pooled.device)
        return Features(pooled[:, None], mask, pooled)
