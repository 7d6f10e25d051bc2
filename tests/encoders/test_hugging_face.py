"""Folders of Hugging Face files: no code of theirs runs, and what they lack is named."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import fusionzoo
from fusionzoo.encoders import Encoder, create_encoder
from fusionzoo.encoders.hf import load_tokenizer
from fusionzoo.errors import FusionZooError
from fusionzoo.model.fusion_model import create_model
from fusionzoo.structures import Audio, Features, Sample
from fusionzoo.testing.encoders import features_of
from helpers import tiny_models as tiny

TINY = {**tiny.SMALL, "vocab_size": 64}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "cat"]


def text_folder(folder: Path) -> Path:
    """Write a tiny BERT with its tokenizer."""
    from transformers import BertConfig, BertModel, BertTokenizer

    BertModel(BertConfig(**TINY)).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def audio_folder(folder: Path) -> Path:
    """Write a tiny audio spectrogram transformer with its feature extractor."""
    from transformers import ASTConfig, ASTFeatureExtractor, ASTModel

    ASTModel(ASTConfig(**TINY, max_length=128)).save_pretrained(folder)
    ASTFeatureExtractor(max_length=128).save_pretrained(folder)
    return folder


def plant(folder: Path, file: str, changes: dict[str, Any]) -> Path:
    """Let a folder's JSON file ask for a module of the folder; return the mark that it leaves."""
    marker = folder.parent / "the-planted-code-ran"
    (folder / "planted.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Planted: ...\n")
    about = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(about | changes))
    return marker


def auto_map(*names: str) -> dict[str, Any]:
    return {"auto_map": {name: "planted.Planted" for name in names}}


UNKNOWN_MODEL = {"model_type": "planted", **auto_map("AutoConfig", "AutoModel")}
UNKNOWN_TOKENIZER = {
    "tokenizer_class": "Planted",
    "auto_map": {"AutoTokenizer": ["planted.Planted", "planted.Planted"]},
}
UNKNOWN_EXTRACTOR = {"feature_extractor_type": "Planted", **auto_map("AutoFeatureExtractor")}


@pytest.mark.parametrize("pretrained", [True, False])
@pytest.mark.parametrize(
    ("kind", "file", "changes"),
    [
        ("text", "config.json", UNKNOWN_MODEL),
        ("audio", "config.json", UNKNOWN_MODEL),
        ("audio", "preprocessor_config.json", UNKNOWN_EXTRACTOR),
    ],
)
def test_code_in_a_folder_never_runs_even_if_standard_input_agrees(
    kind: str,
    file: str,
    changes: dict[str, Any],
    pretrained: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = {"text": text_folder, "audio": audio_folder}[kind](tmp_path / "model")
    marker = plant(folder, file, changes)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(FusionZooError) as caught:
        create_encoder(kind, f"hf/{folder}", pretrained=pretrained)
    assert not marker.exists()
    assert "\n" not in str(caught.value)
    assert "custom code" in str(caught.value) and "trust_remote_code=True" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", auto_map("AutoConfig", "AutoModel", "AutoTokenizer")),
        ("tokenizer_config.json", UNKNOWN_TOKENIZER),
    ],
)
def test_code_beside_files_that_transformers_knows_never_runs_either(
    file: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = text_folder(tmp_path / "model")
    plain = create_encoder("text", f"hf/{folder}").tokenizer("a red cat")["input_ids"]
    marker = plant(folder, file, changes)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    assert create_encoder("text", f"hf/{folder}").tokenizer("a red cat")["input_ids"] == plain
    assert not marker.exists()


def test_an_architecture_that_code_of_the_folder_extends_is_refused(tmp_path: Path) -> None:
    """Transformers would load it without the extension, whose weights would stay random."""
    from safetensors.torch import load_file, save_file

    folder = text_folder(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    name = "encoder.layer.0.attention.self.query.weight"
    save_file({f"{key}_b" if key == name else key: x for key, x in weights.items()},
              folder / "model.safetensors", {"format": "pt"})  # fmt: skip
    marker = plant(folder, "config.json", auto_map("AutoModel"))
    with pytest.raises(FusionZooError, match="custom code") as caught:
        create_encoder("text", f"hf/{folder}")
    assert name in str(caught.value) and "\n" not in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["text", "audio"])
def test_loading_a_model_folder_runs_no_code_of_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {"text": text_folder, "audio": audio_folder}[kind](tmp_path / "source")
    saved = create_model("concat", {kind: f"hf/{source}"}, 2).save(tmp_path / "saved")
    (saved / "digests.json").unlink()
    marker = plant(saved / kind, "config.json", UNKNOWN_MODEL)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(FusionZooError, match="custom code"):
        fusionzoo.load(saved)
    assert not list(tmp_path.rglob(marker.name))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """Transformers makes one without words of it, for which every text is the same."""
    folder = text_folder(tmp_path / "model")
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(FusionZooError) as caught:
        create_encoder("text", f"hf/{folder}")
    assert str(folder) in str(caught.value) and "tokenizer" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["t5", "roberta", "mpnet", "gpt2", "clip_text_model"])
def test_no_architecture_gets_a_tokenizer_without_words(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(FusionZooError, match="token"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_of_single_bytes_needs_no_file(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer, T5Config

    T5Config(vocab_size=384).save_pretrained(tmp_path)
    ByT5Tokenizer().save_pretrained(tmp_path)
    assert len(load_tokenizer(str(tmp_path))("ab")["input_ids"]) == 3


# ---- models of audio


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
