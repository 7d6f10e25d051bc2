"""Images that only the checkpoint's own processor prepares right: as the library, row by row."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import fusionzoo
from fusionzoo.encoders import create_encoder
from fusionzoo.model import create_model
from fusionzoo.structures import Sample
from fusionzoo.testing.encoders import features_of
from helpers import tiny_models as tiny

DRAW = torch.Generator().manual_seed(0)
SHAPES = ((40, 60), (40, 20), (40, 60), (64, 64))
PICTURES = [torch.randint(0, 256, (3, *shape), generator=DRAW).byte() for shape in SHAPES]


def save_mobilevit(folder: Path) -> Path:
    """Save a ViT whose processor swaps red and blue."""
    from transformers import MobileViTImageProcessor

    tiny.save_vit(folder)
    size = {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}
    MobileViTImageProcessor(**size).save_pretrained(folder)
    return folder


def library(name: str, source: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return tokens (T, D) and the pooled vector (D,) of each picture, as transformers has them."""
    from transformers import AutoImageProcessor, AutoModel

    prepare, whole = AutoImageProcessor.from_pretrained(source), AutoModel.from_pretrained(source)
    rows = []
    for picture in PICTURES:
        inputs = prepare(picture, return_tensors="pt")
        with torch.no_grad():
            if name == "mobilevit":
                hidden = whole.eval()(**inputs).last_hidden_state[0]
                rows.append((hidden[1:], hidden[0]))
                continue
            output = whole.eval().get_image_features(**inputs)
        if name == "siglip2":
            real = inputs["pixel_attention_mask"][0].bool()
            rows.append((output.last_hidden_state[0][real], output.pooler_output[0]))
        else:
            tokens = torch.cat(list(output.pooler_output))
            rows.append((tokens, tokens.mean(0)))
    return rows


CASES = {
    "siglip2": ("hf-clip", lambda folder: tiny.save_joint(folder, "siglip2")),
    "qwen2_vl": ("hf-clip", tiny.save_qwen_vl),
    "mobilevit": ("hf", save_mobilevit),
}


@pytest.mark.parametrize("case", CASES)
def test_features_are_those_of_the_library_also_when_loaded(case: str, tmp_path: Path) -> None:
    prefix, save = CASES[case]
    source = save(tmp_path / "source")
    encoders = {"image": f"{prefix}/{source}", "text": {"name": "chars", "dim": 8, "num_heads": 2}}
    model = create_model("concat", encoders, 2, dim=8).eval()
    features = features_of(dict(model.named_encoders())["image"], PICTURES)
    for row, (tokens, pooled) in enumerate(library(case, source)):
        found = features.tokens[row][features.mask[row]]
        torch.testing.assert_close(found, tokens, rtol=0, atol=1e-5)
        torch.testing.assert_close(features.pooled[row], pooled, rtol=0, atol=1e-5)
    assert pooled.std() > 1e-3
    values = [{"image": x, "text": "a"} for x in PICTURES] + [{"image": None, "text": "b"}]
    samples = [Sample(str(n), "", None, value) for n, value in enumerate(values)]
    with torch.no_grad():
        logits = model(model.collate()(samples)).logits
        saved = model.save(tmp_path / "saved")
        shutil.rmtree(source)
        loaded = fusionzoo.load(saved).eval()
        assert torch.equal(loaded(loaded.collate()(samples)).logits, logits)


def test_training_crops_the_picture_before_it_is_cut_into_patches(tmp_path: Path) -> None:
    source = tiny.save_qwen_vl(tmp_path)
    encoder = create_encoder("image", f"hf-clip/{source}", augment="crop_flip")
    training, evaluation = encoder.processor(True), encoder.processor(False)
    picture = PICTURES[3]
    again, first, second = (
        training(picture, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(again["pixel_values"], first["pixel_values"])
    assert not torch.equal(first["pixel_values"], evaluation(picture)["pixel_values"])
    assert not torch.equal(first["pixel_values"][:8].sum(), second["pixel_values"][:8].sum())
    assert training.varies(picture) and not evaluation.varies(picture)
    assert torch.equal(training(picture)["pixel_values"], evaluation(picture)["pixel_values"])
