"""Models of libraries whose folders could once not be written or read: saved, loaded, equal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from fusionzoo.encoders import create_encoder
from fusionzoo.errors import FusionZooError
from fusionzoo.loading import SPARE, TENSOR, bounded_allocation
from fusionzoo.testing.encoders import CHECKS, features_of, maker
from helpers import tiny_models as tiny
from helpers.tiny_models import SMALL, TEXT, tokenizer

DECODER = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "NomicBert": TEXT,  # transformers splits its weights: parameters are views of one tensor
    "T5Gemma": {part: DECODER for part in ("encoder", "decoder")},  # its encoder has a config alone
    "Canine": {**SMALL, "num_hash_buckets": 16},  # it takes no fewer than four tokens
    "Reformer": {  # its tokens are twice as wide as config.hidden_size
        **{"hidden_size": 16, "attn_layers": ["local"], "num_attention_heads": 2},
        **{"attention_head_size": 8, "feed_forward_size": 16, "vocab_size": 16, "pad_token_id": 0},
        **{"axial_pos_shape": [4, 32], "axial_pos_embds_dim": [8, 8]},
    },
    "XLNet": {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16, "vocab_size": 16},
}
RANDOM: dict[str, Any] = {"pretrained": False}
CAUSES: dict[str, tuple[str, dict[str, Any]]] = {  # what once kept a model from being used or read
    "rows that depend on padding": ("hf/FNet", {"kind": "text"}),
    "four tokens at least": ("hf/Canine", {"kind": "text"}),
    "weights that are views of one tensor": ("hf/NomicBert", {"kind": "text"}),
    "a width that is not hidden_size": ("hf/XLNet", {"kind": "text"}),
    "half of an encoder-decoder": ("hf/T5Gemma", {"kind": "text"}),
    "features as long as the clip": ("hf/moonshine", {"kind": "audio"}),
    "a mask of the features": ("hf/audioflamingo3_encoder", {"kind": "audio"}),
    "a tower among others": ("hf-clip/blip", {"kind": "text"}),
    "a mel spectrogram for a model of one size": ("mel/test_vit", RANDOM),
    "a dropped classifier of ten times the rest": ("torchvision/alexnet", RANDOM),
    "a class that wants its weights' version": ("torchvision/mnasnet0_5", RANDOM),
    "a head that nothing calls": ("timm/mobilenetv3_small_050", {**RANDOM, "size": 64}),
    "a net that reads its layers' weights": (
        "timm/eva02_tiny_patch14_224",
        {**RANDOM, "img_size": 56, "lora": {"r": 2}},
    ),
}


def text_folder(folder: Path, family: str) -> Path:
    """Write a tiny model of transformers with its tokenizer."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**CONFIGS.get(family, TEXT))
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "cause",
    [
        pytest.param(x, marks=[pytest.mark.needs("peft")] * ("lora" in settings))
        for x, (_, settings) in CAUSES.items()
    ],
)
def test_a_trained_model_answers_alike_once_it_is_loaded(cause: str, tmp_path: Path) -> None:
    target, settings = CAUSES[cause]
    library, _, family = target.partition("/")
    if library == "hf":
        write = text_folder if settings["kind"] == "text" else tiny.save_sound
        target = f"hf/{write(tmp_path, family)}"
    elif library == "hf-clip":
        target = f"hf-clip/{tiny.save_joint(tmp_path, family)}"
    CHECKS["a_trained_model_answers_alike_once_it_is_loaded"](maker(target, settings))


@pytest.mark.parametrize(
    ("family", "by_length"), [("FNet", True), ("Canine", True), ("Bert", False)]
)
def test_a_text_is_encoded_alike_beside_a_longer_one(
    family: str, by_length: bool, tmp_path: Path
) -> None:
    """FNet mixes all positions of a row, the padding too."""
    encoder = create_encoder("text", f"hf/{text_folder(tmp_path, family)}").eval()
    assert encoder.one_length == by_length
    long = "a red cat on a warm old wall by the sea"
    alone, both = (features_of(encoder, x) for x in (["a red cat"], ["a red cat", long]))
    torch.testing.assert_close(both.pooled[0], alone.pooled[0], rtol=1e-5, atol=1e-6)
    length = alone.tokens.shape[1]
    torch.testing.assert_close(both.tokens[0, :length], alone.tokens[0], rtol=1e-5, atol=1e-6)
    assert both.mask[0].sum() == length


def test_tensors_that_are_dropped_do_not_count_against_the_bound(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(8)}, tmp_path / "weights")
    with bounded_allocation(tmp_path / "weights"):
        for _ in range(8):  # HaloNet pads in each of its layers
            assert F.pad(torch.zeros(8), (0, SPARE // 2)).sum() == 0
        nn.Linear(2 * SPARE, 8)  # a classifier that is not kept
        assert torch.zeros(8).sum() == 0


@pytest.mark.parametrize(
    "build",
    [
        lambda: torch.zeros(2 * SPARE),
        lambda: torch.zeros(2 * SPARE) + torch.ones(1),
        lambda: nn.Parameter(torch.zeros(2 * SPARE).exp()[:2]),
        lambda: float(torch.zeros(2 * SPARE).sum()),
        lambda: [torch.zeros(8) for _ in range(SPARE // TENSOR)],
        lambda: [torch.zeros(2 * SPARE) for _ in range(SPARE // TENSOR)],
    ],
)
def test_what_is_kept_or_computed_with_is_refused(build: Callable[[], Any], tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "weights")
    too_large = r"config.json: the settings ask for far larger tensors than weights holds"
    with pytest.raises(FusionZooError, match=too_large), bounded_allocation(tmp_path / "weights"):
        kept = build()  # noqa: F841


def test_models_that_cannot_be_trained_or_read_no_text_alone_say_so(tmp_path: Path) -> None:
    # It trains on texts of one length alone.
    source = text_folder(tmp_path / "first", "Reformer")
    encoder = create_encoder("text", f"hf/{source}")
    assert encoder.dim == 2 * 16
    prepare = encoder.processor(True)
    inputs = prepare.collate([prepare("a red cat")])
    with pytest.raises(FusionZooError, match=r"ReformerModel encodes texts, but cannot be trained"):
        encoder.train()(inputs)
    encoder.freeze("all")
    assert encoder.train()(inputs).pooled.shape == (1, 32)
    source = text_folder(tmp_path / "source", "Xmod")  # it wants to know the language
    with pytest.raises(FusionZooError, match=r"XmodModel does not encode a text alone: Input lang"):
        create_encoder("text", f"hf/{source}")


def test_a_peft_that_cannot_be_imported_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "peft.py").write_text("raise OSError('torchaudio was built for CUDA 13.0')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [x for x in sys.modules if x.partition(".")[0] == "peft"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(FusionZooError, match=r"installed but cannot be imported: torchaudio was b"):
        create_encoder("image", "timm/test_vit", pretrained=False, lora={"r": 2})
