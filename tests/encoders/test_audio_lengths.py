"""Hugging Face's models of audio: a clip has the same features alone, in a batch, and loaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import fusionzoo
from fusionzoo.encoders import Encoder, create_encoder
from fusionzoo.errors import FusionZooError
from fusionzoo.model import create_model
from fusionzoo.structures import Audio, Features, Sample
from fusionzoo.testing.encoders import features_of
from helpers import tiny_models as tiny

DRAW = torch.Generator().manual_seed(0)
CLIPS = [Audio(0.1 * torch.randn(n, generator=DRAW), 16_000) for n in (8_000, 13_000, 8_000)]
WAYS = {
    "moonshine": "by length",
    "parakeet_encoder": "padded",
    "lasr_encoder": "padded",
    "wav2vec2-bert": "padded",
    "speech_to_text": "by length",
    "encodec": "by length",
    "qwen3_asr_encoder": "by length",
    "audioflamingo3_encoder": "masked window",
    "qwen2_audio": "window",
}


def features(encoder: Encoder, clips: list[Audio]) -> Features:
    return features_of(encoder.eval(), clips)


@pytest.mark.parametrize("family", WAYS)
def test_clips_of_several_lengths_do_not_change_one_another(family: str, tmp_path: Path) -> None:
    source = tiny.save_sound(tmp_path / "source", family)
    encoders: dict[str, Any] = {
        "audio": f"hf/{source}",
        "text": {"name": "chars", "dim": 8, "num_heads": 2},
    }
    model = create_model("concat", encoders, 2)
    encoder: Any = dict(model.named_encoders())["audio"]
    assert encoder.layout.way == WAYS[family]
    together = features(encoder, CLIPS)
    for row, clip in enumerate(CLIPS):
        alone = features(encoder, [clip])
        tokens = together.tokens[row][together.mask[row]]
        torch.testing.assert_close(tokens, alone.tokens[alone.mask], rtol=0, atol=1e-4)
        torch.testing.assert_close(together.pooled[row], alone.pooled[0], rtol=0, atol=1e-4)
    assert (together.pooled[0] - together.pooled[2]).abs().max() > 2e-4
    assert together.mask[1].sum() > together.mask[0].sum() > 1
    prepare = encoder.processor(True)
    silence = Audio(torch.zeros(100), 16_000)
    output = encoder.train()(prepare.collate([prepare(silence), prepare(CLIPS[1])]))
    output.pooled.sum().backward()
    assert output.pooled.shape == (2, encoder.dim) and torch.isfinite(output.pooled).all()

    saved = model.eval().save(tmp_path / "saved")
    shutil.rmtree(source)
    loaded = fusionzoo.load(saved).eval()
    values = [{"audio": clip, "text": "a"} for clip in CLIPS] + [{"audio": None, "text": "b"}]
    batch = model.collate()([Sample(str(n), "", None, x) for n, x in enumerate(values)])
    with torch.no_grad():
        expected, logits = model(batch).logits, loaded(batch).logits
    assert torch.isfinite(expected).all() and torch.equal(logits, expected)


@pytest.mark.parametrize(
    "family",
    [
        "parakeet_encoder",
        "lasr_encoder",
        "wav2vec2-bert",
        "speech_to_text",
        "wav2vec2",
        "moonshine",
    ],
)
def test_features_of_any_length_are_those_of_the_library(family: str, tmp_path: Path) -> None:
    """Alone and beside longer clips; tokens that the library adds for padding are masked."""
    from transformers import AutoFeatureExtractor, AutoModel

    source = tiny.save_sound(tmp_path, family)
    encoder = create_encoder("audio", f"hf/{source}")
    whole = AutoModel.from_pretrained(source).eval()
    net = whole.get_encoder() if whole.config.is_encoder_decoder else whole
    extractor = AutoFeatureExtractor.from_pretrained(source)
    seconds = (0.3, 0.73, 1.0, 2.0)
    clips = [Audio(0.1 * torch.randn(round(x * 16_000), generator=DRAW), 16_000) for x in seconds]
    together = features(encoder, clips)
    for row, clip in enumerate(clips):
        inputs = extractor(clip.samples.numpy(), sampling_rate=16_000, return_tensors="pt")
        with torch.no_grad():
            expected = net(**inputs).last_hidden_state[0]
        tokens = together.tokens[row][together.mask[row]]
        assert len(expected) - 1 <= len(tokens) <= len(expected)
        scale = float(expected.abs().max())
        torch.testing.assert_close(tokens, expected[: len(tokens)], rtol=0, atol=1e-3 * scale)


def test_a_model_that_cannot_read_the_extractors_features_is_refused(tmp_path: Path) -> None:
    source = tiny.save_sound(tmp_path, "speecht5")
    with pytest.raises(FusionZooError, match="cannot encode clips of several lengths") as caught:
        create_encoder("audio", f"hf/{source}")
    assert "\n" not in str(caught.value)
