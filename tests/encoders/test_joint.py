"""Towers of CLIP, SigLIP and CLAP: aligned as transformers aligns them, and read from disk once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fusionzoo
from fusionzoo.encoders import Encoder, create_encoder, hf
from fusionzoo.errors import FusionZooError
from fusionzoo.model.fusion_model import create_model
from fusionzoo.structures import Audio, Features, Sample
from fusionzoo.testing.encoders import CHECKS, batch_of, features_of, maker
from helpers import tiny_models as tiny

TEXTS = ["a red cat", "a much longer line of text", ""]
PICTURE = torch.randint(0, 256, (3, 40, 60), generator=torch.Generator().manual_seed(0)).byte()
CLIP_OF_SOUND = Audio(0.1 * torch.randn(9000, generator=torch.Generator().manual_seed(0)), 16_000)
TOWERS = [
    *(("clip", "image"), ("clip", "text"), ("siglip", "image"), ("siglip", "text")),
    *(("clap", "text"), ("clap", "audio")),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    saved = {name: tmp_path_factory.mktemp(name) for name in ("clip", "siglip", "clap")}
    return {name: getattr(tiny, f"save_{name}")(folder) for name, folder in saved.items()}


def features(encoder: Encoder, values: list[Any]) -> Features:
    return features_of(encoder.eval(), values)


def values_of(kind: str) -> list[Any]:
    return {"image": [PICTURE], "text": TEXTS, "audio": [CLIP_OF_SOUND]}[kind]


@torch.no_grad()
def transformers_vectors(folder: Path, family: str, kind: str, projected: bool) -> Tensor:
    """Return what transformers' own model and processors make of the values."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoModel

    model = AutoModel.from_pretrained(folder).eval()
    if kind == "image":
        processor = AutoImageProcessor.from_pretrained(folder)
        inputs = {"pixel_values": processor(PICTURE, return_tensors="pt")["pixel_values"]}
        run = model.get_image_features
    elif kind == "text":
        fixed = {"padding": "max_length", "max_length": 24} if family == "siglip" else {}
        words = tiny.tokenizer()(TEXTS, **{"padding": True, "return_tensors": "pt", **fixed})
        names = ("input_ids",) if family == "siglip" else ("input_ids", "attention_mask")
        inputs = {name: words[name] for name in names}
        run = model.get_text_features
    else:
        extractor = AutoFeatureExtractor.from_pretrained(folder)
        wave = CLIP_OF_SOUND.samples.numpy()
        extracted = extractor(wave, sampling_rate=16_000, return_tensors="pt")
        inputs = {"input_features": extracted["input_features"]}
        run = model.get_audio_features
    if not projected:
        run = {"image": "vision_model", "text": "text_model", "audio": "audio_model"}[kind]
        run = getattr(model, run)
    vectors: Tensor = run(**inputs).pooler_output
    return vectors


@pytest.mark.parametrize(("family", "kind"), TOWERS)
def test_a_pooled_vector_is_the_aligned_one_of_transformers(
    family: str, kind: str, folders: dict[str, Path]
) -> None:
    output = features(create_encoder(kind, f"hf-clip/{folders[family]}"), values_of(kind))
    expected = transformers_vectors(folders[family], family, kind, projected=True)
    assert expected.std() > 1e-3
    torch.testing.assert_close(output.pooled, expected, rtol=2e-3, atol=2e-3)
    assert output.tokens.shape[-1] == output.pooled.shape[-1] == expected.shape[1]


@pytest.mark.parametrize(("family", "kind"), [x for x in TOWERS if x[0] != "siglip"])
def test_without_projection_it_is_the_towers_own(
    family: str, kind: str, folders: dict[str, Path]
) -> None:
    encoder = create_encoder(kind, f"hf-clip/{folders[family]}", projection=False)
    expected = transformers_vectors(folders[family], family, kind, projected=False)
    output = features(encoder, values_of(kind))
    assert encoder.dim == 16
    torch.testing.assert_close(output.pooled, expected, rtol=2e-3, atol=2e-3)


def test_tokens_take_the_path_of_the_pooled_vector(folders: dict[str, Path]) -> None:
    """CLIP pools the last token of a text and SigLIP what comes last, so they equal that token."""
    output = features(create_encoder("text", f"hf-clip/{folders['clip']}"), TEXTS)
    last = output.tokens[torch.arange(3), output.mask.sum(1) - 1]
    torch.testing.assert_close(last, output.pooled)
    output = features(create_encoder("text", f"hf-clip/{folders['siglip']}"), ["a " * 40])
    torch.testing.assert_close(output.tokens[:, -1], output.pooled)
    clap = features(create_encoder("text", f"hf-clip/{folders['clap']}"), TEXTS)
    first = torch.nn.functional.normalize(clap.tokens[:, 0], dim=-1)
    torch.testing.assert_close(first, clap.pooled)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record each read of a checkpoint's weights."""
    sources, load = [], hf.load_model

    def counted(source: str, pretrained: bool) -> Any:
        sources.append(source)
        return load(source, pretrained)

    monkeypatch.setattr(hf, "load_model", counted)
    return sources


@pytest.mark.parametrize(
    ("family", "kinds"),
    [("clip", ("image", "text")), ("siglip", ("image", "text")), ("clap", ("text", "audio"))],
)
def test_a_checkpoint_is_read_once_for_two_towers(
    family: str, kinds: tuple[str, str], folders: dict[str, Path], reads: list[str]
) -> None:
    name = f"hf-clip/{folders[family]}"
    model = create_model("concat", dict.fromkeys(kinds, name), 2)
    assert reads == [str(folders[family])]
    together = dict(model.named_encoders())
    for kind, encoder in together.items():
        alone = create_encoder(kind, name).state_dict()
        assert alone.keys() == encoder.state_dict().keys()
        assert all(torch.equal(x, alone[key]) for key, x in encoder.state_dict().items())
    assert len(reads) == 3  # nothing is kept between two models


def test_two_modalities_with_one_tower_do_not_share_weights(
    folders: dict[str, Path], reads: list[str]
) -> None:
    name = f"hf-clip/{folders['clip']}"
    model = create_model(
        "concat", {"front": name, "back": name}, 2, kinds={"front": "image", "back": "image"}
    )
    front, back = (list(encoder.parameters()) for _, encoder in model.named_encoders())
    assert not {id(p) for p in front} & {id(p) for p in back}
    assert all(torch.equal(x, y) for x, y in zip(front, back, strict=True))
    assert len(reads) == 2


@pytest.mark.parametrize("name", [pytest.param("hf", marks=pytest.mark.slow), "hf-clip"])
def test_a_small_tower_of_a_large_model_loads_within_the_budget(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Towers that were dropped are not built again: CLAP's for text is the largest of a model."""
    monkeypatch.setattr("fusionzoo.model.loading.SPARE", 1 << 22)  # elements
    monkeypatch.setitem(tiny.TEXT, "vocab_size", 400_000)
    source = tiny.save_clap(tmp_path / "clap")
    saved = create_model("concat", {"audio": f"{name}/{source}"}, 2).save(tmp_path / "saved")
    size = (saved / "model.safetensors").stat().st_size
    assert size < (source / "model.safetensors").stat().st_size / 8
    fusionzoo.load(saved)


@pytest.mark.slow
@pytest.mark.needs("peft")
def test_towers_take_lora_and_partial_freezing(folders: dict[str, Path]) -> None:
    for family, kind in (("clip", "image"), ("siglip", "text"), ("clap", "audio")):
        name = f"hf-clip/{folders[family]}"
        last = create_encoder(kind, name, freeze="all_but_last_1")
        trained = {key for key, p in last.named_parameters() if p.requires_grad}
        assert trained and len(trained) < len(list(last.parameters()))
        adapted = create_encoder(kind, name, lora={"r": 2})
        trained = {key for key, p in adapted.named_parameters() if p.requires_grad}
        assert trained and all("lora_" in key for key in trained)


def test_clips_longer_than_the_window_are_cropped_without_global_chance(
    folders: dict[str, Path],
) -> None:
    """CLAP's extractor would draw the crop from NumPy's generator."""
    long = Audio(torch.linspace(-1, 1, 40_000), 16_000)
    for name in ("hf", "hf-clip"):
        prepare = create_encoder("audio", f"{name}/{folders['clap']}").processor(False)
        state = np.random.get_state()[1].copy()  # type: ignore[index,union-attr]
        first, second = prepare(long)["features"], prepare(long)["features"]
        assert torch.equal(first, second)
        assert (np.random.get_state()[1] == state).all()  # type: ignore[index]


def test_a_clap_that_fuses_long_clips_runs(tmp_path: Path) -> None:
    source = tiny.save_clap(tmp_path / "fused", fused=True)
    for name in ("hf", "hf-clip"):
        output = features(create_encoder("audio", f"{name}/{source}"), [CLIP_OF_SOUND])
        assert torch.isfinite(output.pooled).all()


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("audio", "hf-clip/{clip}", "is a clip: it encodes image and text, not audio"),
        ("image", "hf-clip/{clap}", "is a clap: it encodes text and audio, not image"),
        ("text", "hf/{clip}", "hf-clip/{clip} takes the tower of one"),
        ("text", "hf-clip/{words}", "is a bert, not a joint model"),
        ("vector", "hf-clip/{clip}", "reads audio or image or text: set kind="),
    ],
)
def test_a_tower_that_is_not_there_is_one_clear_error(
    kind: str, name: str, says: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    words = tiny.save_sentences(tmp_path / "words")
    with pytest.raises(FusionZooError) as caught:
        create_encoder(kind, name.format(**folders, words=words))
    assert says.format(**folders) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_the_token_that_clip_pools_is_refused(tmp_path: Path) -> None:
    from tokenizers import processors

    source = tiny.save_clip(tmp_path / "clip")
    words = tiny.tokenizer()
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 2)]
    )
    words.save_pretrained(source)
    with pytest.raises(FusionZooError, match="does not end a text with the token 3"):
        create_encoder("text", f"hf-clip/{source}")


# ---- towers of every family


LINES = ["a red cat", "a much longer line of text to cat", "a"]
DRAW = torch.Generator().manual_seed(0)
PICTURES = [torch.randint(0, 256, (3, 40, side), generator=DRAW).byte() for side in (60, 40, 50)]
FAMILIES = [family for family in tiny.JOINT if family != "siglip2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_towers_equal_those_of_transformers_also_when_loaded(family: str, tmp_path: Path) -> None:
    from transformers import AutoModel

    source = tiny.save_joint(tmp_path / "source", family)
    whole = AutoModel.from_pretrained(source).eval()
    model = create_model("concat", dict.fromkeys(("image", "text"), f"hf-clip/{source}"), 2).eval()
    rows = [{"image": x, "text": y} for x, y in zip(PICTURES, LINES, strict=True)]
    rows += [{"image": None, "text": "a"}, {"image": PICTURES[0], "text": None}]
    batch = model.collate()([Sample(str(n), "", None, row) for n, row in enumerate(rows)])
    with torch.no_grad():
        encoder: Any
        for kind, encoder in model.named_encoders():
            values: list[Any] = PICTURES if kind == "image" else LINES
            inputs = batch_of(encoder, values)
            output = encoder(inputs)
            if kind == "image":
                expected = whole.get_image_features(encoder.normalise(inputs["pixels"]))
            else:
                expected = whole.get_text_features(inputs["input_ids"], inputs["attention_mask"])
            vectors = expected.pooler_output
            vectors = vectors[:, 0] if vectors.ndim == 3 else vectors
            assert vectors.std() > 1e-3
            torch.testing.assert_close(output.pooled, vectors, rtol=0, atol=1e-5)
            assert output.tokens.shape[2] == output.pooled.shape[1] == encoder.dim
            for row, value in enumerate(values):
                alone = features_of(encoder, [value]).pooled[0]
                torch.testing.assert_close(output.pooled[row], alone, rtol=0, atol=1e-5)
        kept = sum(x.numel() for _, e in model.named_encoders() for x in e.parameters())
        assert kept <= sum(x.numel() for x in whole.parameters())
        logits = model(batch).logits
        saved = model.save(tmp_path / "saved")
        shutil.rmtree(source)
        assert torch.equal(fusionzoo.load(saved).eval()(batch).logits, logits)
    assert torch.isfinite(logits).all()


def test_texts_of_siglip_2_have_its_length_and_language_models_read_them(tmp_path: Path) -> None:
    from transformers import AutoModel

    source = tiny.save_joint(tmp_path / "siglip2", "siglip2")
    encoder: Any = create_encoder("text", f"hf-clip/{source}").eval()
    words = {"padding": "max_length", "max_length": 24, "padding_side": "right"}
    ids = encoder.tokenizer(LINES, return_tensors="pt", **words)
    pooled = features_of(encoder, LINES).pooled
    with torch.no_grad():
        whole = AutoModel.from_pretrained(source).eval()
        expected = whole.get_text_features(ids["input_ids"]).pooler_output
    torch.testing.assert_close(pooled, expected, rtol=0, atol=1e-5)
    from transformers import AutoModel

    source = tiny.save_qwen_vl(tmp_path / "qwen")
    encoder: Any = create_encoder("text", f"hf-clip/{source}").eval()
    inputs = batch_of(encoder, LINES)
    whole = AutoModel.from_pretrained(source).eval().get_decoder()
    with torch.no_grad():
        output = encoder(inputs)
        for row, mask in enumerate(inputs["attention_mask"]):
            tokens = whole(inputs["input_ids"][row : row + 1, mask]).last_hidden_state[0]
            torch.testing.assert_close(output.tokens[row, mask], tokens, rtol=0, atol=1e-5)
            torch.testing.assert_close(output.pooled[row], tokens.mean(0), rtol=0, atol=1e-5)
    CHECKS["a_trained_model_answers_alike_once_it_is_loaded"](
        maker(f"hf-clip/{source}", {"kind": "text"})
    )
