"""torchaudio's audio encoders: its pretrained self-supervised models, and its Conformer.

Shapes: `B` batch, `N` samples of a wave, `T` tokens, `D` width. Rates in Hz, durations in s.
Padding never changes an output: rows of equal length are run together, unpadded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.structures import Features

from ._torchaudio import require_torchaudio
from ._wave import PEAK, STEP, LogMel, WaveProcessor, mean_pooled
from .base import ENCODERS, Encoder, Processor, run_by_length
from .weights import PYTORCH_HUB, from_hub


@ENCODERS.register("torchaudio", family="audio", takes_model=True)
class TorchaudioBundle(Encoder):
    """Encode speech with a model of `torchaudio.pipelines`: WAV2VEC2_BASE, HUBERT_BASE, ...

    Tokens are the last layer's frames, pooled is their mean. Some of these models normalise over
    time, so rows of equal length are run together; clips are padded with silence to a multiple of
    0.1 s.

    Settings:
        pretrained: load the weights that torchaudio publishes
        longest: length in s beyond which a clip is cropped
        windows: in evaluation, windows of `longest` s taken evenly from a longer clip, whose tokens
            stand one after another and whose pooled vectors are averaged; 1 takes the middle

    Shapes: inputs["wave"] int16 (B, N), inputs["lengths"] (B,) -> (B, T, D), (B, T), (B, D)
    """

    kind = "audio"

    def __init__(
        self, model: str, *, pretrained: bool = True, longest: float = 20.0, windows: int = 1
    ) -> None:
        super().__init__()
        self.windows = windows
        torchaudio = require_torchaudio()
        bundles = [
            name
            for name in dir(torchaudio.pipelines)
            if hasattr(_bundle(name), "_params") and hasattr(_bundle(name), "get_model")
        ]
        if model not in bundles:
            raise FusionZooError(
                f"torchaudio has no bundle {model!r}.{did_you_mean(model, [*bundles, 'conformer'])}"
                f" There are: {', '.join(bundles)}."
            )
        bundle = _bundle(model)
        if pretrained:
            self.net = from_hub(f"torchaudio/{model}", bundle.get_model, PYTORCH_HUB)
        else:
            build = getattr(torchaudio.models, f"{bundle._model_type.lower()}_model")
            self.net = build(**{**bundle._params, "aux_num_out": None})
        self.normalise = pretrained is False and bundle._normalize_waveform
        self.rate, self.longest = int(bundle.sample_rate), longest
        self.dim = bundle._params["encoder_embed_dim"]

    def processor(self, train: bool) -> Processor:
        return WaveProcessor(self.rate, self.longest, STEP, num_windows=self.windows)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        return mean_pooled(*run_by_length(inputs["lengths"], inputs["wave"], self._run))

    def _run(self, wave: Tensor) -> Tensor:
        scaled = (wave / PEAK).to(next(self.net.parameters()).dtype)
        if self.normalise:
            scaled = F.layer_norm(scaled, scaled.shape[-1:])
        layers, _ = self.net.extract_features(scaled)
        return layers[-1]


def _bundle(name: str) -> Any:
    return getattr(require_torchaudio().pipelines, name)


@ENCODERS.register("torchaudio/conformer", family="audio")
class Conformer(Encoder):
    """Encode log-mel frames with torchaudio's Conformer, trained from scratch.

    Gulati et al. 2020, arXiv:2005.08100. Its convolutions would read padded frames, so rows of
    equal length are run together; clips are padded with silence to a multiple of 0.1 s. There are
    25 tokens a second.

    Settings:
        rate: sampling rate in Hz that clips are resampled to
        num_mels: mel bands of a frame; frames of 25 ms, every 10 ms
        dim: width of tokens and pooled vector, divisible by `num_heads`
        num_layers: Conformer blocks
        num_heads: attention heads
        kernel_size: of the depthwise convolution in tokens, odd
        dropout: in feed-forward, attention and convolution, 0 to 1
        longest: length in s beyond which a clip is cropped
        windows: in evaluation, windows of `longest` s taken evenly from a longer clip, whose tokens
            stand one after another and whose pooled vectors are averaged; 1 takes the middle

    Shapes: inputs["wave"] int16 (B, N), inputs["lengths"] (B,) -> (B, T, dim), (B, T), (B, dim)
    """

    kind = "audio"

    def __init__(
        self,
        *,
        rate: int = 16_000,
        num_mels: int = 64,
        dim: int = 144,
        num_layers: int = 4,
        num_heads: int = 4,
        kernel_size: int = 15,
        dropout: float = 0.1,
        longest: float = 20.0,
        windows: int = 1,
    ) -> None:
        super().__init__()
        self.windows = windows
        torchaudio = require_torchaudio()
        if dim % num_heads:
            raise FusionZooError(f"num_heads={num_heads} does not divide dim={dim}")
        self.rate, self.dim, self.longest = rate, dim, longest
        self.mel = LogMel(rate, num_mels, 0.025, 0.010)
        # Four frames of 10 ms become one token.
        self.project = nn.Conv1d(num_mels, dim, kernel_size=4, stride=4)
        self.conformer = torchaudio.models.Conformer(
            dim, num_heads, 4 * dim, num_layers, kernel_size, dropout, use_group_norm=True
        )

    def processor(self, train: bool) -> Processor:
        return WaveProcessor(self.rate, self.longest, STEP, num_windows=self.windows)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        return mean_pooled(*run_by_length(inputs["lengths"], inputs["wave"], self._run))

    def _run(self, wave: Tensor) -> Tensor:
        frames = rearrange(self.project(self.mel(wave / PEAK)), "b d t -> b t d")
        lengths = torch.full((len(frames),), frames.shape[1], device=frames.device)
        tokens: Tensor = self.conformer(frames, lengths)[0]
        return tokens
