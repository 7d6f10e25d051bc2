"""Audio encoders: log-mel and any timm model, torchaudio's bundles and conformer, Hugging Face.

Shapes: `B` batch, `N` samples of a wave, `F` mel bands, `T` tokens, `D` width. Rates in Hz,
durations in s. Padding never changes an output: a model either sees a window of fixed length, or
rows of one length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.structures import Audio, Clip, Features, masked_mean

from ._hugging_face import find_source, load_auto, load_model
from .base import ENCODERS, Encoder, Item, Processor, run_by_length
from .image import build_timm, channels_last, timm_tokens
from .weights import from_hub

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


@ENCODERS.register("torchaudio", family="audio")
class TorchaudioBundle(Encoder):
    """A self-supervised model of `torchaudio.pipelines`: WAV2VEC2_BASE, HUBERT_BASE, WAVLM_BASE,
    ...

    Tokens are the last layer's frames, pooled is their mean. Some of these models normalise over
    time, so rows are run in groups of equal length; clips are rounded up to 0.1 s with silence.

    Shapes: inputs["wave"] int16 (B, N), inputs["lengths"] (B,) -> (B, T, D), (B, T), (B, D)
    """

    kind = "audio"

    def __init__(self, model: str, *, pretrained: bool = True, longest: float = 20.0) -> None:
        super().__init__()
        import torchaudio

        bundles = [name for name in dir(torchaudio.pipelines) if hasattr(_bundle(name), "_params")]
        bundles = [name for name in bundles if hasattr(_bundle(name), "get_model")]
        if model not in bundles:
            raise FusionZooError(
                f"torchaudio has no bundle {model!r}.{did_you_mean(model, [*bundles, 'conformer'])}"
                f" There are: {', '.join(bundles)}."
            )
        bundle = _bundle(model)
        hub = "https://download.pytorch.org"
        if pretrained:
            self.net = from_hub(f"torchaudio/{model}", bundle.get_model, hub)
        else:
            build = getattr(torchaudio.models, f"{bundle._model_type.lower()}_model")
            self.net = build(**{**bundle._params, "aux_num_out": None})
        self.normalise = pretrained is False and bundle._normalize_waveform
        self.rate, self.longest = int(bundle.sample_rate), longest
        self.dim = bundle._params["encoder_embed_dim"]

    def processor(self, train: bool) -> Processor:
        return WaveProcessor(self.rate, self.longest, STEP)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        return pool(*run_by_length(inputs["lengths"], inputs["wave"], self._run))

    def _run(self, wave: Tensor) -> Tensor:
        scaled = (wave / PEAK).to(next(self.net.parameters()).dtype)
        if self.normalise:
            scaled = F.layer_norm(scaled, scaled.shape[-1:])
        layers, _ = self.net.extract_features(scaled)
        return layers[-1]


def _bundle(name: str) -> Any:
    import torchaudio

    return getattr(torchaudio.pipelines, name)


@ENCODERS.register("torchaudio/conformer", family="audio")
class Conformer(Encoder):
    """Log-mel frames through torchaudio's Conformer (Gulati et al. 2020, arXiv:2005.08100).

    Trained from scratch. Its convolutions would read padded frames, so rows are run in groups of
    equal length; clips are rounded up to 0.1 s with silence.

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
    ) -> None:
        super().__init__()
        import torchaudio

        if dim % num_heads:
            raise FusionZooError(f"num_heads={num_heads} does not divide dim={dim}")
        self.rate, self.dim, self.longest = rate, dim, longest
        self.mel = LogMel(rate, num_mels, 0.025, 0.010)
        # Four frames at a time: 25 tokens a second.
        self.project = nn.Conv1d(num_mels, dim, kernel_size=4, stride=4)
        self.conformer = torchaudio.models.Conformer(
            dim, num_heads, 4 * dim, num_layers, kernel_size, dropout, use_group_norm=True
        )

    def processor(self, train: bool) -> Processor:
        return WaveProcessor(self.rate, self.longest, STEP)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        return pool(*run_by_length(inputs["lengths"], inputs["wave"], self._run))

    def _run(self, wave: Tensor) -> Tensor:
        frames = rearrange(self.project(self.mel(wave / PEAK)), "b d t -> b t d")
        lengths = torch.full((len(frames),), frames.shape[1], device=frames.device)
        out: Tensor = self.conformer(frames, lengths)[0]
        return out


class FeatureProcessor(Processor):
    """Resample, then compute a Hugging Face feature extractor's fixed window of features."""

    def __init__(self, extractor: Any, rate: int, longest: float) -> None:
        # No extractor takes a clip that is shorter than its own window.
        self.extractor, self.wave = extractor, WaveProcessor(rate, longest, STEP)

    def __call__(self, value: Clip, generator: torch.Generator | None = None) -> Item:
        item = self.wave(value, generator)
        wave = (item["wave"] / PEAK).numpy()
        made = self.extractor(wave, sampling_rate=self.wave.rate, return_tensors="pt")
        name = next(key for key in made if key in ("input_features", "input_values"))
        return {"features": made[name][0], "lengths": item["lengths"]}

    def blank(self) -> Item:
        return self(Audio(torch.zeros(self.wave.rate // 10), self.wave.rate))

    def collate(self, items: Any) -> Item:
        return {name: torch.stack([item[name] for item in items]) for name in items[0]}


@ENCODERS.register("hf-audio", family="audio")
class HFAudio(Encoder):
    """Any Hugging Face audio encoder: wav2vec 2.0, HuBERT, WavLM, AST, the encoder of Whisper,
    CLAP.

    Models of waves run rows of equal length together, rounded up to 0.1 s with silence. Models of
    spectrograms see their own fixed window; tokens and pooled vector count its real part, in the
    order of time where the model's tokens have one (Whisper), else all of them.

    Shapes: a wave int16 (B, N) or the model's own features, lengths (B,) -> (B, T, D), (B, T), (B,
    D)
    """

    kind = "audio"

    def __init__(
        self,
        model: str,
        *,
        pretrained: bool = True,
        longest: float = 20.0,
        assets: Path | None = None,
    ) -> None:
        super().__init__()
        source = find_source(model, assets)
        self.net = load_model(source, pretrained)
        self.extractor: Any = load_auto("AutoFeatureExtractor", source)
        self.config = self.net.config
        self.net = self._encoder_half(self.net)
        config = self.net.config
        self.dim = getattr(config, "hidden_size", None) or config.d_model
        self.rate, self.longest = self.extractor.sampling_rate, longest
        # Its masking of spans refuses short clips, and is no part of a features' contract.
        if hasattr(config, "apply_spec_augment"):
            config.apply_spec_augment = False
        self.of_waves = hasattr(self.net, "_get_feat_extract_output_lengths") and hasattr(
            self.net, "feature_extractor"
        )
        self.chunk = getattr(self.extractor, "chunk_length", None)  # s; Whisper's window

    @staticmethod
    def _encoder_half(net: Any) -> Any:
        if net.config.model_type == "clap":
            return net.audio_model
        return net.get_encoder() if net.config.is_encoder_decoder else net

    def processor(self, train: bool) -> Processor:
        if self.of_waves:
            return WaveProcessor(self.rate, self.longest, STEP)
        return FeatureProcessor(self.extractor, self.rate, self.chunk or self.longest)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        if self.of_waves:
            return pool(*run_by_length(inputs["lengths"], inputs["wave"], self._run))
        tokens = self.net(inputs["features"])[0]
        if tokens.ndim == 4:  # CLAP's Swin map
            tokens = rearrange(tokens, "b d f t -> b (f t) d")
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        if self.chunk:
            begins = torch.arange(tokens.shape[1], device=tokens.device) / tokens.shape[1]
            mask = begins * self.chunk * self.rate < inputs["lengths"].clamp(min=1)[:, None]
        return pool(tokens, mask)

    def _run(self, wave: Tensor) -> Tensor:
        scaled = (wave / PEAK).to(next(self.net.parameters()).dtype)
        if getattr(self.extractor, "do_normalize", False):
            spread = scaled.var(1, keepdim=True, unbiased=False)
            scaled = (scaled - scaled.mean(1, keepdim=True)) / (spread + 1e-7).sqrt()
        tokens: Tensor = self.net(scaled)[0]
        return tokens

    def save_assets(self, folder: Path) -> None:
        self.config.save_pretrained(folder)
        self.extractor.save_pretrained(folder)


def pool(tokens: Tensor, mask: Tensor) -> Features:
    """Add the mean of the real tokens."""
    return Features(tokens, mask, masked_mean(tokens, mask))
