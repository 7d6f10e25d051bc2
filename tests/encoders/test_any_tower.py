"""Towers of every joint model of transformers equal its own `get_*_features`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import fusionzoo
from fusionzoo.encoders import create_encoder
from fusionzoo.model import create_model
from fusionzoo.structures import Sample
from fusionzoo.testing.encoders import CHECKS, batch_of, features_of, maker
from helpers import tiny_models as tiny

TEXTS = ["a red cat", "a much longer line of text to cat", "a"]
DRAW = torch.Generator().manual_seed(0)
PICTURES = [torch.randint(0, 256, (3, 40, side), generator=DRAW).byte() for side in (60, 40, 50)]
FAMILIES = [family for family in tiny.JOINT if family != "siglip2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_towers_equal_those_of_transformers_also_when_loaded(family: str, tmp_path: Path) -> None:
    from transformers import AutoModel

    source = tiny.save_joint(tmp_path / "source", family)
    whole = AutoModel.from_pretrained(source).eval()
    model = create_model("concat", dict.fromkeys(("image", "text"), f"hf-clip/{source}"), 2).eval()
    rows = [{"image": x, "text": y} for x, y in zip(PICTURES, TEXTS, strict=True)]
    rows += [{"image": None, "text": "a"}, {"image": PICTURES[0], "text": None}]
    batch = model.collate()([Sample(str(n), "", None, row) for n, row in enumerate(rows)])
    with torch.no_grad():
        encoder: Any
        for kind, encoder in model.named_encoders():
            values: list[Any] = PICTURES if kind == "image" else TEXTS
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
    ids = encoder.tokenizer(TEXTS, return_tensors="pt", **words)
    pooled = features_of(encoder, TEXTS).pooled
    with torch.no_grad():
        whole = AutoModel.from_pretrained(source).eval()
        expected = whole.get_text_features(ids["input_ids"]).pooler_output
    torch.testing.assert_close(pooled, expected, rtol=0, atol=1e-5)
    from transformers import AutoModel

    source = tiny.save_qwen_vl(tmp_path / "qwen")
    encoder: Any = create_encoder("text", f"hf-clip/{source}").eval()
    inputs = batch_of(encoder, TEXTS)
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
