"""Hugging Face's audio encoders: models on waveforms, and models on spectrograms.

Shapes: `B` batch, `N` samples of a wave, `T` tokens, `D` width. Rates in Hz, durations in s.
Padding never changes an output: a model sees a window of fixed length, or unpadded rows of equal
length.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from fusionzoo.errors import FusionZooError, explained, one_line
from fusionzoo.structures import Audio, Clip, Features

from .audio import LEAST, PEAK, WaveProcessor
from .base import ENCODERS, Encoder, Item, Processor, mean_pooled, run_by_length, unmasked
from .hf import (
    aligned,
    build_model,
    find_source,
    load_auto,
    load_model,
    load_tower,
    read_json,
    with_one_tower,
)

WAYS = ("window", "masked window", "padded", "by length")
LEASTS = (LEAST, 0.2, 0.3, 0.4)  # s; tried in turn, for models that refuse shorter clips
LAYOUT = "audio_layout.json"  # beside the configuration of a saved model
TOLERANCE = 1e-4  # of features in a batch, times max(1, the largest value)


@dataclass(frozen=True, kw_only=True)
class LengthHandling:
    """How a model runs clips of several lengths, as measured when its encoder was built.

    way: `window` of fixed length, `masked window`, rows `padded` with a mask, or `by length`
    least: shorter clips are padded with silence to it, in s
    time_axis: axis of the extractor's features that grows with the clip
    inner: whether the model's `encoder` runs alone, as of codecs
    packed: whether the model returns the tokens of all rows in one
    transposed: whether it returns (B, D, T)
    """

    way: Literal["window", "masked window", "padded", "by length"] = "window"
    least: float = LEAST
    time_axis: int = 0
    inner: bool = False
    packed: bool = False
    transposed: bool = False
    dim: int = 0

    @property
    def is_window(self) -> bool:
        return "window" in self.way


class FeatureProcessor(Processor):
    """Resample, then compute what a Hugging Face feature extractor makes of a clip.

    Features of a window have `lengths` in samples. Others have their time axis first, padded with
    zeros in a batch, and `lengths` in frames; `frames` is the extractor's mask, if it has one.
    """

    def __init__(
        self,
        extractor: Any,
        rate: int,
        longest: float,
        layout: LengthHandling,
        *,
        num_windows: int = 1,
    ) -> None:
        # Extractors refuse a clip that is shorter than their analysis window.
        self.extractor, self.layout = extractor, layout
        self.wave = WaveProcessor(rate, longest, layout.least, num_windows=num_windows)
        can_mask = "return_attention_mask" in inspect.signature(extractor.__call__).parameters
        self.options = {"return_attention_mask": True} if can_mask and self.masks else {}

    @property
    def masks(self) -> bool:
        return self.layout.way != "window"

    def __call__(self, value: Clip, generator: torch.Generator | None = None) -> Item:
        return self._extract(self.wave(value, generator))

    def windows(self, value: Clip, generator: torch.Generator | None = None) -> list[Item]:
        return [self._extract(item) for item in self.wave.windows(value, generator)]

    def cuts(self, value: Clip) -> bool:
        return self.wave.cuts(value)

    def _extract(self, item: Item) -> Item:
        wave = (item["wave"] / PEAK).numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            extracted = self.extractor(
                wave, sampling_rate=self.wave.rate, return_tensors="pt", **self.options
            )
        name = next(key for key in extracted if key in ("input_features", "input_values"))
        # Of silence, extractors that divide by the deviation make nan.
        features = extracted[name][0].nan_to_num()
        if self.layout.is_window:
            item_of_model = {"features": features, "lengths": item["lengths"]}
        else:
            features = features.movedim(self.layout.time_axis, 0)
            item_of_model = {"features": features, "lengths": torch.tensor(len(features))}
        masks = [x[0].bool() for key, x in extracted.items() if key.endswith("mask")]
        if self.masks and masks and masks[0].ndim == 1:
            item_of_model["frames"] = masks[0]
        return item_of_model

    def varies(self, value: Clip) -> bool:
        return self.wave.varies(value)

    def blank(self) -> Item:
        return self(Audio(torch.zeros(1), self.wave.rate))


def longest_clip(extractor: Any, longest: float) -> float:
    """Return the seconds kept of a clip: CLAP's extractor crops longer ones at random."""
    return min(longest, getattr(extractor, "max_length_s", longest))


def clap_inputs(net: Any, features: Tensor) -> dict[str, Tensor]:
    """Return the arguments of CLAP's audio tower; no clip is longer than its window."""
    if not net.config.enable_fusion:
        return {"input_features": features}
    is_longer = torch.zeros(features.shape[0], 1, dtype=torch.bool, device=features.device)
    return {"input_features": features, "is_longer": is_longer}


def audio_part(net: Any, source: str) -> Any:
    """Return the part of a model that encodes audio: of one that writes text, its encoder."""
    for name in ("audio_tower", "audio_encoder", "speech_encoder"):
        if getattr(net, name, None) is not None:
            return getattr(net, name)
    if hasattr(net.config, "text_config"):
        raise FusionZooError(f"{source}: a {net.config.model_type} has no part that hears alone")
    return net.get_encoder() if net.config.is_encoder_decoder else net


def hidden_states(output: Any) -> Tensor | None:
    """Return the hidden states in a model's output; codecs call theirs latents."""
    if isinstance(output, Tensor):
        return output
    return output.get("last_hidden_state", output.get("latents"))


@ENCODERS.register("hf-audio", family="audio", takes_model=True)
class HFAudio(Encoder):
    """Encode audio with a Hugging Face model: wav2vec 2.0, AST, Whisper, Parakeet, ...

    Clips shorter than 0.1 s (of some models 0.2 to 0.4 s) are padded with silence. How clips of
    several lengths run together is measured when the encoder is built: a model with a window of
    fixed length sees that window, and where its tokens are ordered by time (Whisper), those after
    the clip's end are masked.
    Features as long as the clip are padded, with the model's own mask, if that changes no row;
    otherwise, and for waves, rows of equal length run together. Of codecs (EnCodec, DAC) the
    encoder is used, before the codes.

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
    cut_by = "longest"

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
        config = load_auto("AutoConfig", source)
        self.is_clap = config.model_type == "clap"
        if self.is_clap:
            tower = load_tower(source, "audio", pretrained, projects=False)
            self.net, self.config = tower.model, tower.joint_config
        else:
            if pretrained:
                net = load_model(source, True)
            else:
                net = build_model(source, with_one_tower(config, "audio"))
            self.net, self.config = aligned(audio_part(net, source)), config
        self.extractor: Any = load_auto("AutoFeatureExtractor", source)
        self.rate, self.windows = self.extractor.sampling_rate, windows
        self.longest = longest_clip(self.extractor, longest)
        # SpecAugment refuses short clips, and features must not depend on chance.
        if hasattr(self.net.config, "mask_time_prob"):
            self.net.config.apply_spec_augment = False
        self.chunk = getattr(self.extractor, "chunk_length", None)  # s, of Whisper
        self.is_on_waves = hasattr(self.net, "_get_feat_extract_output_lengths") and hasattr(
            self.net, "feature_extractor"
        )
        self.layout = LengthHandling()
        if assets is not None or self.is_on_waves:
            self._read_layout(assets)
        else:
            self._measure(source)
        self.dim = self.layout.dim
        self.one_length = self.is_on_waves or self.layout.way == "by length"

    def processor(self, train: bool) -> Processor:
        if self.is_on_waves:
            return WaveProcessor(self.rate, self.longest, LEAST, num_windows=self.windows)
        return FeatureProcessor(
            self.extractor,
            self.rate,
            self.chunk or self.longest,
            self.layout,
            num_windows=self.windows,
        )

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        if self.is_on_waves:
            return mean_pooled(*run_by_length(inputs["lengths"], self._run_waves, inputs["wave"]))
        features, frames = inputs["features"], inputs.get("frames")
        if self.layout.way == "by length":
            rows = (features,) if frames is None else (features, frames)
            return mean_pooled(*run_by_length(inputs["lengths"], self._run_rows, *rows))
        tokens, mask = self._run(features, frames)
        if self.layout.way == "padded":
            return mean_pooled(tokens, self._token_mask(tokens, mask, frames))
        if not self.chunk:
            return unmasked(tokens)
        starts = torch.arange(tokens.shape[1], device=tokens.device) / tokens.shape[1]
        real = starts * self.chunk * self.rate < inputs["lengths"].clamp(min=1)[:, None]
        return mean_pooled(tokens, real)

    def _run_waves(self, wave: Tensor) -> Tensor:
        scaled = (wave / PEAK).to(next(self.net.parameters()).dtype)
        if getattr(self.extractor, "do_normalize", False):
            variance = scaled.var(1, keepdim=True, unbiased=False)
            scaled = (scaled - scaled.mean(1, keepdim=True)) / (variance + 1e-7).sqrt()
        tokens: Tensor = self.net(scaled)[0]
        return tokens

    def _run_rows(self, *rows: Tensor) -> Tensor | list[Tensor]:
        """Run features of equal length, with the extractor's mask if there is one."""
        if self.layout.packed:
            alone = zip(*(x.split(1) for x in rows), strict=True)
            return [self._run(*row)[0] for row in alone]
        return self._run(*rows)[0]

    @staticmethod
    def _token_mask(tokens: Tensor, mask: Tensor | None, frames: Tensor | None) -> Tensor:
        """Return the model's own mask of tokens, or that of the frames, if each is a token."""
        mask = frames if mask is None else mask.bool()
        if mask is None or mask.shape != tokens.shape[:2]:
            raise ValueError("it does not say which tokens are padding")
        return mask

    def _run(self, features: Tensor, frames: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return tokens (B, T, D), packed (T, D), and their mask, if the model has one."""
        output = self._call(features, frames)
        tokens, mask = hidden_states(output), None
        if not isinstance(output, Tensor):
            mask = output.get("attention_mask")
        assert tokens is not None
        if tokens.ndim == 4:  # CLAP's Swin transformer
            tokens = rearrange(tokens, "b d f t -> b (f t) d")
        return tokens.mT if self.layout.transposed else tokens, mask

    def _call(self, features: Tensor, frames: Tensor | None) -> Any:
        if self.is_clap:
            return self.net(**clap_inputs(self.net, features))
        if not self.layout.is_window:
            features = features.movedim(1, 1 + self.layout.time_axis)
        parameters = inspect.signature(self.net.forward).parameters
        masks = [x for x in parameters if x.endswith("_mask") and not x.startswith("output")]
        options: dict[str, Any] = {}
        if frames is not None and masks:
            options[masks[0]] = frames.long()
        if "output_attention_mask" in parameters:
            options["output_attention_mask"] = True
        return self.net(features.to(next(self.net.parameters()).dtype), **options)

    @torch.no_grad()
    def _measure(self, source: str) -> None:
        """Find how clips of several lengths run: of the ways, the first that changes no row."""
        draw = torch.Generator().manual_seed(0)
        waves = [0.1 * torch.randn(round(x * self.rate), generator=draw) for x in (0.5, 0.87, 0.5)]
        clips = [Audio(wave, self.rate) for wave in waves]
        extractor = type(self.extractor).__name__
        with explained(f"{source}: {extractor} cannot prepare a clip of sound"):
            layouts = self._possible_layouts(clips)
        self.eval()
        problem = ""
        for layout in layouts:
            self.layout = replace(layout, inner=self.layout.inner)
            try:
                if self._is_steady(clips):
                    self.train()
                    return
                problem = "a clip's features change with the others of its batch"
            except Exception as error:
                problem = one_line(error) or type(error).__name__
        raise FusionZooError(
            f"{source}: {type(self.net).__name__} cannot encode clips of several lengths, neither"
            f" padded nor by themselves: {problem}"
        )

    def _possible_layouts(self, clips: Sequence[Audio]) -> list[LengthHandling]:
        """Return what to try, the fastest first, by the shapes of the extractor's features."""
        prepare = FeatureProcessor(self.extractor, self.rate, self.longest, LengthHandling())
        short, long = (prepare(clip)["features"].shape for clip in clips[:2])
        axes = [axis for axis, size in enumerate(short) if size != long[axis]]
        if len(axes) > 1:
            raise ValueError(f"it makes {tuple(short)} of one and {tuple(long)} of a longer one")
        if axes:
            return [
                LengthHandling(way=way, least=least, time_axis=axes[0])
                for least in LEASTS
                for way in ("padded", "by length")
            ]
        windows = [LengthHandling(way="window"), LengthHandling(way="masked window")]
        return [*windows, LengthHandling(way="by length", time_axis=len(short) - 1)]

    def _is_steady(self, clips: Sequence[Audio]) -> bool:
        """Return whether clips in a batch get the features that each gets alone."""
        prepare = self.processor(False)
        items = [prepare.blank(), *map(prepare, clips)]
        if self.layout.is_window:  # which is of one length, and may be long
            _, _, dim = self.encode(prepare.collate(items[:1])).tokens.shape
            self.layout = replace(self.layout, dim=dim)
            return True
        self._read_output([prepare.collate([item]) for item in items[1:3]])
        together = self.encode(prepare.collate(items))
        self.layout = replace(self.layout, dim=together.tokens.shape[2])
        for row, item in enumerate(items):
            alone = self.encode(prepare.collate([item]))
            expected = alone.tokens[alone.mask]
            tokens = together.tokens[row][together.mask[row]]
            scale = max(1.0, expected.abs().max().item())
            if tokens.shape != expected.shape or not torch.allclose(
                tokens, expected, rtol=0, atol=TOLERANCE * scale
            ):
                return False
        return True

    def _read_output(self, batches: Sequence[Item]) -> None:
        """Add what the model answers to a clip and a longer one to the layout."""
        output = self._call(batches[0]["features"], batches[0].get("frames"))
        if hidden_states(output) is None:
            if not hasattr(self.net, "encoder"):
                raise ValueError(f"it gives {', '.join(output)}, but no hidden states")
            self.net = self.net.encoder  # of a codec, or of a model that scores letters
            self.layout = replace(self.layout, inner=True)
        short, long = (self._run(x["features"], x.get("frames"))[0].shape for x in batches)
        packed = len(short) == 2
        transposed = not packed and short[1] == long[1] and short[2] != long[2]
        self.layout = replace(self.layout, packed=packed, transposed=transposed)

    def _read_layout(self, assets: Path | None) -> None:
        """Read what was measured of a saved model; earlier versions only had windows and waves."""
        file = None if assets is None else assets / LAYOUT
        if file is None or not file.is_file():
            config = self.net.config
            self.layout = LengthHandling(dim=getattr(config, "hidden_size", None) or config.d_model)
            return
        with explained(str(file), TypeError):
            facts = read_json(file)
            if "step" in facts:  # of models saved before padding had an end
                facts["least"] = facts.pop("step")
            self.layout = LengthHandling(**facts)
        if self.layout.way not in WAYS or self.layout.least not in LEASTS:
            raise FusionZooError(f"{file}: way is none of {', '.join(WAYS)}, or least too long")
        if self.layout.inner:
            self.net = self.net.encoder

    def save_assets(self, folder: Path) -> None:
        self.config.save_pretrained(folder)
        self.extractor.save_pretrained(folder)
        if not self.is_on_waves:
            (folder / LAYOUT).write_text(json.dumps(asdict(self.layout), indent=1) + "\n")
