"""Models of fusionzoo inside other libraries answer as they do at home."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fusionzoo.errors import FusionZooError
from fusionzoo.model.fusion_model import FusionModel, create_model
from fusionzoo.tools.sentence_transformers import wrap

PICTURE = np.full((20, 30, 3), 200, np.uint8)
SAMPLES: list[Any] = [
    {"text": "a red thing"},
    {"image": PICTURE},
    "only words, of which there are a few more",
    {"text": "both", "image": PICTURE},
    {},
]


@pytest.fixture
def model() -> FusionModel:
    net = {"pretrained": False, "channels": [8, 8, 8, 8], "stem_width": 8}
    encoders: dict[str, Any] = {
        "text": {"name": "chars", "dim": 8, "num_layers": 1, "num_heads": 2},
        "image": {"name": "timm/resnet10t", "size": 32, **net},
    }
    return create_model({"name": "gmu", "dim": 8}, encoders, 2).eval()


@pytest.mark.slow  # the import of sentence-transformers takes seconds
@pytest.mark.needs("sentence_transformers")
def test_a_sentence_transformer_returns_the_model_s_own_vectors(model: FusionModel) -> None:
    wrapped = wrap(model)
    vectors = wrapped.encode(SAMPLES, convert_to_tensor=True)
    own = model.embed([{"text": x} if isinstance(x, str) else x for x in SAMPLES])
    assert torch.equal(vectors, own["fused"])  # mixed modalities in one call, longest first
    assert wrapped.get_embedding_dimension() == 8
    assert wrapped.similarity(vectors, vectors).shape == (5, 5)
    text = wrap(model, "text").encode(["a red thing"], convert_to_tensor=True)
    assert torch.equal(text, model.embed([{"text": "a red thing"}])["text"])
    with pytest.raises(FusionZooError, match="no vectors 'sound'; it has fused, text, image"):
        wrap(model, "sound")
