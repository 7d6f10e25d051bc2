"""Hugging Face's audio encoders: models on waveforms, and models on spectrograms.

Shapes: `B` batch, `N` samples of a wave, `T` tokens, `D` width. Rates in Hz, durations in s.
Padding never changes an output: a model sees a window of fixed length, or unpadded rows of equal
length.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from fusionzoo.structures import Audio, Clip, Features

from .audio import PEAK, STEP, WaveProcessor, mean_pooled
from .base import ENCODERS, Encoder, Item, Processor, run_by_length
from .hf import aligned, find_source, load_auto, load_model, load_tower


class FeatureProcessor(Processor):
    """Resample, then compute the fixed-length input of a Hugging Face feature extractor."""

    def __init__(self, extractor: Any, rate: int, longest: float, *, num_windows: int = 1) -> None:
        # Extractors refuse a clip that is shorter than their analysis window.
        self.extractor = extractor
        self.wave = WaveProcessor(rate, longest, STEP, num_windows=num_windows)

    def __call__(self, value: Clip, generator: torch.Generator | None = None) -> Item:
        return self._extract(self.wave(value, generator))

    def windows(self, value: Clip, generator: torch.Generator | None = None) -> list[Item]:
        return [self._extract(item) for item in self.wave.windows(value, generator)]

    def _extract(self, item: Item) -> Item:
        wave = (item["wave"] / PEAK).numpy()
        extracted = self.extractor(wave, sampling_rate=self.wave.rate, return_tensors="pt")
        name = next(key for key in extracted if key in ("input_features", "input_values"))
        return {"features": extracted[name][0], "lengths": item["lengths"]}

    def varies(self, value: Clip) -> bool:
        return self.wave.varies(value)

    def blank(self) -> Item:
        return self(Audio(torch.zeros(self.wave.rate // 10), self.wave.rate))

    def collate(self, items: Any) -> Item:
        return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def longest_clip(extractor: Any, longest: float) -> float:
    """Return the seconds kept of a clip: CLAP's extractor crops longer ones at random."""
    return min(longest, getattr(extractor, "max_length_s", longest))


def clap_inputs(net: Any, features: Tensor) -> dict[str, Tensor]:
    """Return the arguments of CLAP's audio tower; no clip is longer than its window."""
    if not net.config.enable_fusion:
        return {"input_features": features}
    is_longer = torch.zeros(features.shape[0], 1, dtype=torch.bool, device=features.device)
    return {"input_features": features, "is_longer": is_longer}


@ENCODERS.register("hf-audio", family="audio", takes_model=True)
class HFAudio(Encoder):
    """Encode audio with a Hugging Face model: wav2vec 2.0, HuBERT, WavLM, AST, Whisper, CLAP.

    Models on waveforms run rows of equal length together; clips are padded with silence to a
    multiple of 0.1 s. Models on spectrograms see a window of fixed length: where tokens are ordered
    by time (Whisper), those after the clip's end are masked, otherwise all of them count.

    Settings:
        pretrained: load the model's weights; otherwise its configuration with random weights
        longest: length in s beyond which a clip is cropped; Whisper's window replaces it
        windows: in evaluation, windows of that length taken evenly from a longer clip, whose tokens
            stand one after another and whose pooled vectors are averaged; 1 takes the middle
        assets: folder that `save_assets` wrote; set when a saved model is loaded

    Shapes: inputs["wave"] int16 (B, N) or inputs["features"], inputs["lengths"] (B,)
        -> (B, T, D), (B, T), (B, D)
    """

    kind = "audio"

    def __init__(
        self,
        model: str,
        *,
        pretrained: bool = True,
        longest: float = 20.0,
        windows: int = 1,
        assets: Path | None = None,
    ) -> None:
        super().__init__()
        source = find_source(model, assets)
        self.is_clap = hasattr(load_auto("AutoConfig", source), "audio_config")
        if self.is_clap:
            tower = load_tower(source, "audio", pretrained, projects=False)
            self.net, self.config = tower.model, tower.joint_config
        else:
            self.net = load_model(source, pretrained)
            self.config = self.net.config
            net = self.net.get_encoder() if self.config.is_encoder_decoder else self.net
            self.net = aligned(net)
        self.extractor: Any = load_auto("AutoFeatureExtractor", source)
        config = self.net.config
        self.dim = getattr(config, "hidden_size", None) or config.d_model
        self.rate, self.longest = (
            self.extractor.sampling_rate,
            longest_clip(self.extractor, longest),
        )
        self.windows = windows
        # SpecAugment refuses short clips, and features must not depend on chance.
        if hasattr(config, "apply_spec_augment"):
            config.apply_spec_augment = False
        self.is_on_waves = hasattr(self.net, "_get_feat_extract_output_lengths") and hasattr(
            self.net, "feature_extractor"
        )
        self.one_length = self.is_on_waves
        self.chunk = getattr(self.extractor, "chunk_length", None)  # s, of Whisper

    def processor(self, train: bool) -> Processor:
        if self.is_on_waves:
            return WaveProcessor(self.rate, self.longest, STEP, num_windows=self.windows)
        longest = self.chunk or self.longest
        return FeatureProcessor(self.extractor, self.rate, longest, num_windows=self.windows)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        if self.is_on_waves:
            return mean_pooled(*run_by_length(inputs["lengths"], inputs["wave"], self._run))
        features = inputs["features"]
        if self.is_clap:
            tokens = self.net(**clap_inputs(self.net, features))[0]
        else:
            tokens = self.net(features)[0]
        if tokens.ndim == 4:  # CLAP's Swin transformer
            tokens = rearrange(tokens, "b d f t -> b (f t) d")
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        if self.chunk:
            starts = torch.arange(tokens.shape[1], device=tokens.device) / tokens.shape[1]
            mask = starts * self.chunk * self.rate < inputs["lengths"].clamp(min=1)[:, None]
        return mean_pooled(tokens, mask)

    def _run(self, wave: Tensor) -> Tensor:
        scaled = (wave / PEAK).to(next(self.net.parameters()).dtype)
        if getattr(self.extractor, "do_normalize", False):
            variance = scaled.var(1, keepdim=True, unbiased=False)
            scaled = (scaled - scaled.mean(1, keepdim=True)) / (variance + 1e-7).sqrt()
        tokens: Tensor = self.net(scaled)[0]
        return tokens

    def save_assets(self, folder: Path) -> None:
        self.config.save_pretrained(folder)
        self.extractor.save_pretrained(folder)
