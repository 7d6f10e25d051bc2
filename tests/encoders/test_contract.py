"""Every registered encoder keeps the contract; the checks are the public ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fusionzoo import FusionModel, create_model
from fusionzoo.encoders import ENCODERS
from fusionzoo.errors import FusionZooError
from fusionzoo.testing.encoders import CHECKS, maker
from fusionzoo.tools.export.graph import check, trace
from helpers import tiny_models as tiny

# What an entry is built with: a small model of its family, without weights from a hub.
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "chars": ("chars", {"dim": 16, "num_layers": 1, "num_heads": 2}),
    "hf-audio": ("hf/{waves}", {"kind": "audio"}),
    "hf-clip-audio": ("hf-clip/{clap}", {"kind": "audio"}),
    "hf-clip-image": ("hf-clip/{clip}", {"kind": "image"}),
    "hf-clip-text": ("hf-clip/{clip}", {"kind": "text"}),
    "hf-image": ("hf/{dinov2}", {"kind": "image"}),
    "hf-sequence": ("hf/{patchtst}", {"kind": "sequence", "in_dim": 5}),
    "hf-text": ("hf/{words}", {"kind": "text"}),
    "hf-video": ("hf-video/{videomae}", {"augment": "crop_flip"}),
    "open_clip-image": ("open_clip/{open_clip}", {"kind": "image"}),
    "open_clip-text": ("open_clip/{open_clip}", {"kind": "text"}),
    "mel": ("mel/resnet10t", {"pretrained": False, "duration": 0.6}),
    "mel/stats": ("mel/stats", {"rate": 8000, "num_mels": 20}),
    "timm": ("timm/resnet10t", {"pretrained": False, "size": 32}),
    "torchaudio": ("torchaudio/WAV2VEC2_BASE", {"pretrained": False}),
    "torchaudio/conformer": ("torchaudio/conformer", {"dim": 16, "num_layers": 1, "num_heads": 2}),
    "torchvision-video": ("torchvision-video/mc3_18", {"pretrained": False, "num_frames": 2}),
    "torchvision": ("torchvision/mobilenet_v3_small", {"pretrained": False}),
    "whisper": ("whisper/{whisper}", {}),
}
VIT = {"img_size": 32, "patch_size": 16, "embed_dim": 24, "depth": 1, "num_heads": 2}
COLUMNS = [
    {"name": "age", "mean": 40.0, "std": 12.0, "edges": [18, 30, 52, 90]},
    {"name": "colour", "values": ["blue", "red", "yellow"]},
]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: SMALL.get(name, (name, {})) for name in sorted(ENCODERS)},
    "hf-audio, spectrograms": ("hf/{spectrograms}", {"kind": "audio"}),
    "hf-audio, CLAP": ("hf/{clap}", {"kind": "audio"}),
    "hf-clip-text, CLAP": ("hf-clip/{clap}", {"kind": "text"}),
    "hf-clip-text, SigLIP": ("hf-clip/{siglip}", {"kind": "text"}),
    "hf-image, class token": ("hf/{vit}", {"kind": "image", "augment": "crop_flip"}),
    "hf-image, SigLIP": ("hf/{siglip}", {"kind": "image"}),
    "hf-sequence, TimesFM": ("hf/{timesfm}", {"kind": "sequence", "in_dim": 5}),
    "hf-sequence, TimesFM 2.5": ("hf/{timesfm2_5}", {"kind": "sequence", "in_dim": 5}),
    "hf-text, first token": ("hf/{words}", {"kind": "text", "pooling": "cls"}),
    "hf-text, sentence-transformers": ("hf/{sentences}", {"kind": "text"}),
    "hf-video, V-JEPA 2": ("hf-video/{vjepa2}", {}),
    "hf-video, ViViT": ("hf-video/{vivit}", {}),
    "hf-video, TimeSformer": ("hf-video/{timesformer}", {}),
    "hf-video, VideoPrism": ("hf-video/{videoprism_vision_model}", {}),
    "tabular/mlp, piecewise": ("tabular/mlp", {"numbers": "piecewise", "columns": COLUMNS}),
    "tabular/ft-transformer, periodic": ("tabular/ft-transformer", {"numbers": "periodic"}),
    "timm, patches": ("timm/vit_tiny_patch16_224", {"pretrained": False, **VIT}),
}
TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
TORCHAUDIO = [pytest.mark.torchaudio]
OPEN_CLIP = [pytest.mark.needs("open_clip", extra="open-clip")]
SLOW = [
    "torchaudio",  # no bundle is small
    "torchvision-video",  # no model is small
    "hf-audio, CLAP",
    "hf-clip-image",  # prepares images as hf-image does, and has the towers of hf-clip-text
    "hf-clip-text, CLAP",
    "hf-clip-text, SigLIP",
    "hf-image, class token",
    "hf-image, SigLIP",
    "hf-text, sentence-transformers",
    "hf-video, V-JEPA 2",
    "hf-video, ViViT",
    "hf-video, TimeSformer",
    "hf-video, VideoPrism",
]

NO_GRAPH = {
    **{f"hf-sequence, {x}": "TimesFM reads whole patches" for x in ("TimesFM", "TimesFM 2.5")},
    "torchaudio/conformer": "Conformer reads its lengths",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny Hugging Face models."""
    import transformers

    folders = {x: tmp_path_factory.mktemp(x) for x in ("words", "waves", "spectrograms")}
    for name in ("clap", "clip", "dinov2", "siglip", "vit", "sentences", "whisper"):
        folders[name] = getattr(tiny, f"save_{name}")(tmp_path_factory.mktemp(name))
    if find_spec("open_clip"):
        path = tmp_path_factory.mktemp("open_clip") / "siglip"
        folders["open_clip"] = tiny.save_open_clip(path, "siglip")
    for name in ("patchtst", "timesfm", "timesfm2_5"):
        folders[name] = tiny.save_series(tmp_path_factory.mktemp(name), name)
    for name in tiny.VIDEO:
        folders[name] = tiny.save_video(tmp_path_factory.mktemp(name), name)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "line", "to", "text"]
    vocabulary = folders["words"] / "vocab.txt"
    vocabulary.write_text("\n".join(words))
    config = transformers.BertConfig(**TINY, vocab_size=16)
    transformers.BertModel(config).save_pretrained(folders["words"])
    transformers.BertTokenizer(vocab=str(vocabulary)).save_pretrained(folders["words"])
    waves = {"conv_dim": [8] * 7, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = transformers.Wav2Vec2Config(**TINY, **waves)
    transformers.Wav2Vec2Model(config).save_pretrained(folders["waves"])
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(folders["waves"])
    config = transformers.ASTConfig(**TINY, max_length=128)
    transformers.ASTModel(config).save_pretrained(folders["spectrograms"])
    transformers.ASTFeatureExtractor(max_length=128).save_pretrained(folders["spectrograms"])
    return folders


def marked(names: Collection[str]) -> list[Any]:
    """Return the parameters of a test, with the marks of those that are slow or need more."""
    return [
        pytest.param(
            x,
            marks=[pytest.mark.slow] * (x in SLOW)
            + TORCHAUDIO * ("torchaudio" in x)
            + OPEN_CLIP * ("open_clip" in x),
        )
        for x in names
    ]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("variant", marked(VARIANTS))
def test_contract(check: str, variant: str, folders: dict[str, Path]) -> None:
    target, settings = VARIANTS[variant]
    CHECKS[check](maker(target.format(**folders), settings))


@pytest.mark.parametrize("variant", marked([x for x in VARIANTS if x not in NO_GRAPH]))
def test_its_graph_keeps_the_numbers_of_rows_and_tokens_free(
    variant: str, folders: dict[str, Path]
) -> None:
    model = model_with(variant, folders)
    check(model, trace(model).program.module(), "the graph")


@pytest.mark.parametrize("variant", marked(NO_GRAPH))
def test_what_no_graph_can_hold_is_one_clear_error(variant: str, folders: dict[str, Path]) -> None:
    with pytest.raises(FusionZooError, match=NO_GRAPH[variant]):
        trace(model_with(variant, folders))


def model_with(variant: str, folders: Mapping[str, Path]) -> FusionModel:
    target, settings = VARIANTS[variant]
    encoder = maker(target.format(**folders), settings)()
    return create_model("concat", {encoder.kind: encoder}, 5, dim=16).eval()
