"""Audio encoders: log-mel spectrograms for any timm model, and torchaudio's own models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, check_heads, check_known, check_number, one_line
from fusionzoo.ground.resampling import resampler
from fusionzoo.structures import Clip, Features

from ._torchaudio import require_torchaudio
from .augment import mask_spectrogram
from .base import ENCODERS, Encoder, Item, Processor, mean_pooled, one_token, run_by_length
from .image import build_timm, channels_last, remove_unused_head, timm_tokens
from .weights import PYTORCH_HUB, from_hub

LEAST = 0.1  # s; shorter clips are padded with silence, for models that refuse them
SILENCE = 1e-5  # added to mel power before the logarithm
PEAK = 32767  # full scale of int16
PATCHES = (1, 16, 32)  # a spectrogram's sides are padded to a multiple of the first that fits


class WaveProcessor(Processor):
    """Resample clips to `rate` Hz and store them as int16, half the size of float32.

    A clip longer than `longest` seconds is cropped, at random in training and else to its middle;
    the rest is neither read from a long file nor resampled. With `num_windows` above 1, evaluation
    takes that many windows of `longest` seconds instead, evenly spaced from start to end. A clip
    shorter than `least` seconds is padded with silence to it.
    """

    def __init__(
        self, rate: int, longest: float, least: float = 0.0, *, num_windows: int = 1
    ) -> None:
        if longest * rate < 1:
            raise FusionZooError(f"a clip of at most {longest:g} s is shorter than one sample")
        check_number("windows", num_windows, 1)
        self.rate, self.longest, self.least = rate, longest, least
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
        wave = F.pad(wave, (0, max(0, round(self.least * self.rate) - len(wave))))
        stored = wave.clamp(-1, 1).mul_(PEAK).round_().to(torch.int16)
        return {"wave": stored, "lengths": torch.tensor(len(stored))}

    def varies(self, value: Clip) -> bool:
        return self._surplus(value) > 0

    def cuts(self, value: Clip) -> bool:
        return self.num_windows == 1 and self._surplus(value) > 0

    def _surplus(self, clip: Clip) -> int:
        """Return how many samples of a clip, at `rate`, do not fit."""
        return max(0, -(-clip.frames * self.rate // clip.rate) - round(self.longest * self.rate))

    def blank(self) -> Item:
        samples = max(1, round(self.least * self.rate))
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
        return (self.power(wave) + SILENCE).log() / 5 + 1

    def power(self, wave: Tensor) -> Tensor:
        """Compute the bands' power in float32, also under autocast: half precision overflows."""
        with torch.autocast(wave.device.type, enabled=False):
            spectrum = torch.stft(
                wave.float(),
                self.n_fft,
                self.hop,
                self.win_length,
                self.window,
                return_complex=True,
            )
            return (spectrum.abs().pow(2).mT @ self.filters).mT

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LogMel:
        """Move with the model, but keep the constants' precision."""
        exact = {name: getattr(self, name) for name in ("window", "filters")}
        super()._apply(fn, recurse)
        for name, tensor in exact.items():
            setattr(self, name, tensor.to(getattr(self, name).device))
        return self


def mel_filters(rate: int, num_mels: int, n_fft: int) -> Tensor:
    """Return the weight of each frequency bin in each mel band, (n_fft / 2 + 1, F)."""
    bins = torch.linspace(0, rate // 2, n_fft // 2 + 1)[:, None]
    highest = 2595 * math.log10(1 + (rate // 2) / 700)
    corners = 700 * (10 ** (torch.linspace(0, highest, num_mels + 2) / 2595) - 1)
    rising = (bins - corners[:-2]) / (corners[1:-1] - corners[:-2])
    falling = (corners[2:] - bins) / (corners[2:] - corners[1:-1])
    return torch.minimum(rising, falling).clamp(min=0)


class WaveEncoder(Encoder):
    """Base of the encoders of waves: clips at `rate` Hz, in windows of at most `longest` s."""

    kind = "audio"
    cut_by = "longest"
    least = 0.0  # s; shorter clips are padded with silence

    def __init__(self, rate: int, longest: float, windows: int) -> None:
        super().__init__()
        self.rate, self.longest, self.windows = rate, longest, windows

    def processor(self, train: bool) -> Processor:
        return WaveProcessor(self.rate, self.longest, self.least, num_windows=self.windows)


@ENCODERS.register("mel", family="audio", takes_model=True)
class MelTimm(WaveEncoder):
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

    cut_by = "duration"
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
        super().__init__(rate, duration, windows)
        self.samples = round(duration * rate)
        self.mel = LogMel(rate, num_mels, window, hop)
        self.size = num_mels, 1 + self.samples // self.mel.hop  # bands and frames
        self.padded = self.size  # with silence, to what the model takes
        self._build(model, pretrained, model_settings)
        self.train()

    def _build(self, model: str, pretrained: bool, settings: Mapping[str, Any]) -> None:
        """Build the model for the spectrogram's size, or one somewhat larger, and try it."""
        problems = []
        for step in PATCHES:
            height, width = (-(-side // step) * step for side in self.size)
            self.padded = height, width
            try:
                self.net = _build_for(model, pretrained, self.padded, settings)
                self.dim = self.net.num_features
                remove_unused_head(self.net, self._run_silence)
                return
            except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
                cause = error.__cause__ or error
                problems.append(one_line(cause) or type(cause).__name__)
        raise FusionZooError(
            f"mel/{model} cannot read a spectrogram of {self.size[0]} bands and {self.size[1]}"
            f" frames, nor of the next multiples of {' or '.join(map(str, PATCHES[1:]))}"
            f" ({problems[0]}): num_mels= and duration= (frames of {self.mel.hop / self.rate:g} s)"
            " set other numbers"
        )

    def _run_silence(self) -> None:
        """Encode one silent clip; a model that cannot run it fails here."""
        wave = torch.zeros(1, self.samples, dtype=torch.int16)
        features = self.encode({"wave": wave, "lengths": torch.tensor([self.samples])})
        if features.tokens.shape[1:] != (features.mask.shape[1], self.dim):
            raise ValueError(f"tokens of shape {tuple(features.tokens.shape[1:])}")

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        wave = inputs["wave"]
        wave = F.pad(wave / PEAK, (0, self.samples - wave.shape[1]))  # ONNX Runtime pads no int16
        bands = self.mel(wave)
        if "masks" in inputs:
            bands = mask_spectrogram(bands, inputs["masks"], inputs["lengths"] / self.samples)
        if self.padded != self.size:
            (height, width), (real_height, real_width) = self.padded, self.size
            silence = math.log(SILENCE) / 5 + 1
            bands = F.pad(bands, (0, width - real_width, 0, height - real_height), value=silence)
        feature_map = self.net.forward_features(rearrange(bands, "b f t -> b 1 f t"))
        if feature_map.ndim == 4:
            first = 1 if channels_last(self.net) else 2
            height, width = feature_map.shape[first : first + 2]  # bands and time
        else:
            height, width = self.net.patch_embed.grid_size
        # A column is real if it starts before the clip ends; the first one always is.
        samples = self.samples * self.padded[1] / self.size[1]  # that the map's columns span
        starts = torch.arange(width, device=wave.device) * (samples / width)
        is_real = starts < inputs["lengths"].clamp(min=1)[:, None]
        mask = repeat(is_real, "b t -> b (f t)", f=height)  # tokens: by band, then by time
        return mean_pooled(timm_tokens(self.net, feature_map), mask)


def _build_for(
    model: str, pretrained: bool, size: tuple[int, int], settings: Mapping[str, Any]
) -> Any:
    """Build a timm model of one channel, for this size where it takes only one."""
    if "img_size" not in settings:
        try:
            return build_timm(model, pretrained, in_chans=1, img_size=size, **settings)
        except FusionZooError as error:
            if not isinstance(error.__cause__, TypeError):  # else it takes images of any size
                raise
    return build_timm(model, pretrained, in_chans=1, **settings)


@ENCODERS.register("mel/stats", family="audio")
class MelStats(WaveEncoder):
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
        super().__init__(rate, longest, windows)
        self.dim = 2 * num_mels
        self.mel = LogMel(rate, num_mels, window, hop)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        # The transform reflects the wave at its ends, so it refuses a very short one.
        shortest, length = 2 * self.mel.n_fft, inputs["wave"].shape[1]
        # A graph for any length always pads; frames of padding are masked below.
        padding = shortest if torch.compiler.is_exporting() else max(0, shortest - length)
        wave = F.pad(inputs["wave"] / PEAK, (0, padding))
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
        return one_token(pooled.to(self.like.dtype))


@ENCODERS.register("torchaudio", family="audio", takes_model=True)
class TorchaudioBundle(WaveEncoder):
    """Encode speech with a model of `torchaudio.pipelines`: WAV2VEC2_BASE, HUBERT_BASE, ...

    Tokens are the last layer's frames, pooled is their mean. Some of these models normalise over
    time, so rows of equal length are run together; clips shorter than 0.1 s are padded with
    silence.

    Settings:
        pretrained: load the weights that torchaudio publishes
        longest: length in s beyond which a clip is cropped
        windows: in evaluation, windows of `longest` s taken evenly from a longer clip, whose tokens
            stand one after another and whose pooled vectors are averaged; 1 takes the middle

    Shapes: inputs["wave"] int16 (B, N), inputs["lengths"] (B,) -> (B, T, D), (B, T), (B, D)
    """

    least = LEAST
    one_length = True

    def __init__(
        self, model: str, *, pretrained: bool = True, longest: float = 20.0, windows: int = 1
    ) -> None:
        torchaudio = require_torchaudio()
        bundles = {
            name: bundle
            for name, bundle in vars(torchaudio.pipelines).items()
            if hasattr(bundle, "_params") and hasattr(bundle, "get_model")
        }
        known = sorted([*bundles, "conformer"])  # which has a class of its own, below
        check_known(model, known, f"torchaudio has no bundle {model!r}", "There are")
        bundle: Any = bundles[model]
        super().__init__(int(bundle.sample_rate), longest, windows)
        if pretrained:
            self.net = from_hub(f"torchaudio/{model}", bundle.get_model, PYTORCH_HUB)
        else:
            build = getattr(torchaudio.models, f"{bundle._model_type.lower()}_model")
            self.net = build(**{**bundle._params, "aux_num_out": None})
        self.normalise = pretrained is False and bundle._normalize_waveform
        self.dim = bundle._params["encoder_embed_dim"]

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        return mean_pooled(*run_by_length(inputs["lengths"], self._run, inputs["wave"]))

    def _run(self, wave: Tensor) -> Tensor:
        scaled = (wave / PEAK).to(next(self.net.parameters()).dtype)
        if self.normalise:
            scaled = F.layer_norm(scaled, scaled.shape[-1:])
        layers, _ = self.net.extract_features(scaled)
        return layers[-1]


@ENCODERS.register("torchaudio/conformer", family="audio")
class Conformer(WaveEncoder):
    """Encode log-mel frames with torchaudio's Conformer, trained from scratch.

    Gulati et al. 2020, arXiv:2005.08100. Its convolutions would read padded frames, so rows of
    equal length are run together; clips shorter than 0.1 s are padded with silence. There are
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

    least = LEAST

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
        super().__init__(rate, longest, windows)
        torchaudio = require_torchaudio()
        check_heads(dim, num_heads)
        self.dim = dim
        self.mel = LogMel(rate, num_mels, 0.025, 0.010)
        # Four frames of 10 ms become one token.
        self.project = nn.Conv1d(num_mels, dim, kernel_size=4, stride=4)
        self.conformer = torchaudio.models.Conformer(
            dim, num_heads, 4 * dim, num_layers, kernel_size, dropout, use_group_norm=True
        )

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        return mean_pooled(*run_by_length(inputs["lengths"], self._run, inputs["wave"]))

    def _run(self, wave: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            raise FusionZooError("torchaudio's Conformer reads its lengths, which no graph knows")
        frames = rearrange(self.project(self.mel(wave / PEAK)), "b d t -> b t d")
        lengths = torch.full((frames.shape[0],), frames.shape[1], device=frames.device)
        tokens: Tensor = self.conformer(frames, lengths)[0]
        return tokens
