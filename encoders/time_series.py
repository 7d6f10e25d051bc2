"""Hugging Face's models of time series as encoders of sequences.

Shapes: `B` batch, `T` steps, `C` channels, `N` patches, `D` width of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, check_number
from fusionzoo.structures import Features, masked_mean

from .base import ENCODERS, Encoder, Item, Processor, mean_pooled
from .hf import aligned, find_source, load_auto, load_model
from .vector import SequenceProcessor

OBSERVED = {"patchtst": "past_observed_mask", "patchtsmixer": "observed_mask"}  # of fixed length
TIMESFM = ("timesfm", "timesfm2_5")  # one channel, of any length
DATED = ("autoformer", "informer", "time_series_transformer")


class SeriesProcessor(SequenceProcessor):
    """Cut a series to its last steps, or pad it in front to a multiple of `step`.

    Items have `values` (T, C) and `observed`, whether each of the T steps is real.
    """

    def __init__(self, in_dim: int, max_length: int, step: int) -> None:
        super().__init__(in_dim, max_length)
        self.step = step

    def __call__(self, value: Tensor, generator: torch.Generator | None = None) -> Item:
        self.check(value)
        values = value[-self.max_length :].float()
        length = -(-len(values) // self.step) * self.step
        observed = torch.ones(len(values), dtype=torch.bool)
        return {"values": _lengthen(values, length), "observed": _lengthen(observed, length)}

    def blank(self) -> Item:
        return self(torch.zeros(1, self.in_dim))

    def collate(self, items: Sequence[Item]) -> Item:
        length = max(len(item["observed"]) for item in items)
        return {
            name: torch.stack([_lengthen(item[name], length) for item in items])
            for name in ("values", "observed")
        }


def _lengthen(x: Tensor, length: int) -> Tensor:
    """Put zeros in front of a tensor."""
    return torch.cat([x.new_zeros(length - x.shape[0], *x.shape[1:]), x])


@ENCODERS.register("hf-sequence", family="sequence", takes_model=True)
class HFSequence(Encoder):
    """Encode series with PatchTST, PatchTSMixer, TimesFM or TimesFM 2.5 of transformers.

    Tokens are patches; the pooled vector is their mean, or the class token if the model has one,
    which then comes first. Of a longer series the last steps are read. A shorter one is padded in
    front: patches without a real step are masked. PatchTST and PatchTSMixer attend to these all the
    same, as they take no mask of patches; there padding is the mean of the series' own steps where
    the model standardises by mean and deviation, and 0 otherwise. TimesFM masks them; it reads each
    channel by itself.

    Settings:
        pretrained: load the model's weights; otherwise its configuration with random weights
        in_dim: number of channels; data sets fill it in. That of PatchTST and PatchTSMixer is fixed
        channels: `concat` joins the vectors of a patch's channels, which keeps apart what each says
            and makes tokens `in_dim` times as wide; `mean` averages them
        max_length: steps kept of a series, the last ones; unless set, as many as the model takes
        frequency: of TimesFM 1: 0 for steps of up to a day, 1 for weeks and months, 2 for longer
        assets: folder that `save_assets` wrote; set when a saved model is loaded

    Shapes: inputs["values"] (B, T, C), inputs["observed"] bool (B, T) -> Features of (B, N, C D),
        (B, N), (B, C D), or of width D for `mean`
    """

    kind = "sequence"
    cut_by = "max_length"

    def __init__(
        self,
        model: str,
        *,
        pretrained: bool = True,
        in_dim: int = 0,
        channels: Literal["concat", "mean"] = "concat",
        max_length: int | None = None,
        frequency: int = 0,
        assets: Path | None = None,
    ) -> None:
        super().__init__()
        source = find_source(model, assets)
        config = load_auto("AutoConfig", source)
        _check(config, model, in_dim, frequency)
        self.net = aligned(load_model(source, pretrained))
        self.family, self.in_dim, self.channels = config.model_type, in_dim, channels
        self.frequency, self.has_class = frequency, getattr(config, "use_cls_token", False)
        if self.family == "patchtst":  # a pretraining checkpoint hides patches at random
            self.net.do_mask_input = self.net.config.do_mask_input = False
            self.net.masking = nn.Identity()
        self.max_length = min(max_length or config.context_length, config.context_length)
        check_number("max_length", self.max_length, 1)
        # True means the mean to PatchTST, and the deviation to PatchTSMixer.
        by_std = ("std",) if self.family == "patchtst" else ("std", True)
        self.scales_by_std = getattr(config, "scaling", None) in by_std
        self.dim = config.hidden_size * (in_dim if channels == "concat" else 1)

    def processor(self, train: bool) -> Processor:
        config = self.net.config
        step = config.patch_length if self.family in TIMESFM else config.context_length
        return SeriesProcessor(self.in_dim, self.max_length, step)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        values, observed = inputs["values"], inputs["observed"]
        run = self._run_by_channel if self.family in TIMESFM else self._run_window
        hidden = run(values, observed)  # (B, C, N, D)
        pattern = "b c n d -> b n (c d)"
        tokens = hidden.mean(1) if self.channels == "mean" else rearrange(hidden, pattern)
        mask = self._real_patches(observed, tokens.shape[1] - self.has_class)
        if not self.has_class:
            return mean_pooled(tokens, mask)
        return Features(tokens, torch.cat([torch.ones_like(mask[:, :1]), mask], 1), tokens[:, 0])

    def _real_patches(self, observed: Tensor, count: int) -> Tensor:
        """Return which patches hold a real step: as padding is in front, their last one."""
        config = self.net.config
        step = config.patch_length if self.family in TIMESFM else config.patch_stride
        last = observed.shape[1] - 1
        return observed[:, last - step * (count - 1) :: step]

    def _run_window(self, values: Tensor, observed: Tensor) -> Tensor:
        """Run a model that takes a fixed number of steps of all channels."""
        real = observed[..., None].expand_as(values)
        padding = torch.zeros_like(values[:, :1])
        if self.scales_by_std:
            padding = masked_mean(values, observed)[:, None]
        values = torch.where(real, values, padding)
        mask = {OBSERVED[self.family]: real.to(values.dtype)}
        hidden: Tensor = self.net(past_values=values, **mask).last_hidden_state
        return hidden

    def _run_by_channel(self, values: Tensor, observed: Tensor) -> Tensor:
        """Run TimesFM, whose rows are single channels."""
        if torch.compiler.is_exporting():
            raise FusionZooError(
                "TimesFM reads whole patches, and a graph cannot ask that of its lengths"
            )
        rows = rearrange(values.masked_fill(~observed[..., None], 0), "b t c -> (b c) t")
        padding = repeat(~observed, "b t -> (b c) t", c=self.in_dim).to(values.dtype)
        options = {}
        if self.family == "timesfm":
            options["freq"] = padding.new_full((rows.shape[0], 1), self.frequency, dtype=torch.long)
        output = self.net(past_values=rows, past_values_padding=padding, **options)
        return rearrange(output.last_hidden_state, "(b c) n d -> b c n d", c=self.in_dim)

    def save_assets(self, folder: Path) -> None:
        self.net.config.save_pretrained(folder)


def _check(config: Any, model: str, in_dim: int, frequency: int) -> None:
    """Refuse a model that does not read a series alone, or not one of these channels."""
    family = config.model_type
    if family in DATED:
        raise FusionZooError(
            f"hf/{model} is a {family}, which reads the dates of the steps beside their values;"
            " PatchTST, PatchTSMixer and TimesFM read values alone"
        )
    if family not in OBSERVED and family not in TIMESFM:
        raise FusionZooError(
            f"hf/{model} is a {family}, which reads no series: hf/ takes PatchTST, PatchTSMixer,"
            " TimesFM and TimesFM 2.5 for sequences"
        )
    if in_dim < 1:
        raise FusionZooError("in_dim is missing: the number of channels of the series")
    if family in OBSERVED and config.num_input_channels != in_dim:
        raise FusionZooError(
            f"hf/{model} was made for {config.num_input_channels} channels"
            f" (num_input_channels), and the series have {in_dim}: give it the channels that it was"
            " trained on, or take TimesFM, which reads any number"
        )
    if family == "timesfm" and not 0 <= frequency < config.freq_size:
        raise FusionZooError(f"frequency={frequency}: hf/{model} knows 0 to {config.freq_size - 1}")
