"""Folders of sentence-transformers: pooled as their files say, with the vectors of that package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fusionzoo.encoders import Encoder, create_encoder
from fusionzoo.errors import FusionZooError
from fusionzoo.testing.encoders import features_of
from helpers import tiny_models as tiny

TEXTS = ["a red cat", "a much longer line of text", ""]


def pooled(encoder: Encoder, texts: list[str]) -> Tensor:
    return features_of(encoder.eval(), texts).pooled


@torch.no_grad()
def expected_vectors(folder: Path, pool: Any) -> Tensor:
    """Compute vectors from the folder's files, text by text, with transformers alone."""
    from transformers import BertModel

    model, words = BertModel.from_pretrained(folder).eval(), tiny.tokenizer()
    dense = load_file(folder / "2_Dense" / "model.safetensors")
    vectors = []
    for text in TEXTS:
        ids = torch.tensor([words(text, truncation=True, max_length=12)["input_ids"]])
        vector = pool(model(ids).last_hidden_state[0])
        vector = (dense["linear.weight"] @ vector + dense["linear.bias"]).tanh()
        vectors.append(vector / vector.norm())
    return torch.stack(vectors)


def weighted(tokens: Tensor) -> Tensor:
    weights = torch.arange(1.0, len(tokens) + 1)
    return (weights[:, None] * tokens).sum(0) / weights.sum()


POOLS = {
    "mean_tokens": lambda tokens: tokens.mean(0),
    "cls_token": lambda tokens: tokens[0],
    "max_tokens": lambda tokens: tokens.amax(0),
    "mean_sqrt_len_tokens": lambda tokens: tokens.sum(0) / len(tokens) ** 0.5,
    "weightedmean_tokens": weighted,
    "lasttoken": lambda tokens: tokens[-1],
}


@pytest.mark.parametrize("pooling", POOLS)
def test_vectors_follow_the_folders_modules(pooling: str, tmp_path: Path) -> None:
    folder = tiny.save_sentences(tmp_path, pooling)
    encoder = create_encoder("text", f"hf/{folder}")
    assert encoder.dim == 10
    expected = expected_vectors(folder, POOLS[pooling])
    torch.testing.assert_close(pooled(encoder, TEXTS), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.needs("sentence_transformers")
def test_vectors_are_those_of_the_package(tmp_path: Path) -> None:
    import sentence_transformers as package

    for pooling in POOLS:
        folder = tiny.save_sentences(tmp_path / pooling, pooling)
        model = package.SentenceTransformer(str(folder), device="cpu")
        expected = model.encode(TEXTS, convert_to_tensor=True)
        torch.testing.assert_close(pooled(create_encoder("text", f"hf/{folder}"), TEXTS), expected)


def test_the_newer_form_of_the_pooling_file_is_read_unless_pooling_is_set(tmp_path: Path) -> None:
    folder = tiny.save_sentences(tmp_path / "old", "max_tokens")
    expected = pooled(create_encoder("text", f"hf/{folder}"), TEXTS)
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "max"}')
    assert torch.equal(pooled(create_encoder("text", f"hf/{folder}"), TEXTS), expected)
    folder = tiny.save_sentences(tmp_path / "set")
    encoder = create_encoder("text", f"hf/{folder}", pooling="mean")
    (folder / "modules.json").unlink()
    plain = create_encoder("text", f"hf/{folder}")
    assert encoder.dim == plain.dim == 16
    assert torch.equal(pooled(encoder, TEXTS), pooled(plain, TEXTS))


def test_the_folder_sets_length_case_and_prompt(tmp_path: Path) -> None:
    folder = tiny.save_sentences(tmp_path, max_seq_length=5)
    encoder = create_encoder("text", f"hf/{folder}")
    prepare = encoder.processor(False)
    assert len(prepare("a " * 40)["input_ids"]) == 5
    prompt = {"prompts": {"query": "red cat "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompt))
    prompted = create_encoder("text", f"hf/{folder}")
    expected = pooled(encoder, ["red cat a"])
    assert torch.equal(pooled(prompted, ["a"]), expected)
    longer = create_encoder("text", f"hf/{folder}", max_length=9).processor(False)
    assert len(longer("a " * 40)["input_ids"]) == 9


def test_another_pooling_in_a_folder_is_another_entry_of_the_feature_cache(tmp_path: Path) -> None:
    from fusionzoo import create_dataset
    from fusionzoo.features.encode import describe, key_of

    data = create_dataset([{"text": text or "a", "target": "a"} for text in TEXTS])
    keys = set()
    for pooling in ("mean_tokens", "max_tokens", "mean_tokens"):
        folder = tiny.save_sentences(tmp_path / "model", pooling)
        keys.add(key_of(describe(create_encoder("text", f"hf/{folder}", freeze="all"), data)))
    assert len(keys) == 2


DENSE = {"in_features": 16, "out_features": 10, "activation_function": "torch.nn.Tanh"}
TRANSFORMER, POOLING = ({"type": f"x.{kind}"} for kind in ("Transformer", "Pooling"))
POOLED, LSTM = {**POOLING, "path": "1_Pooling"}, {"type": "x.LSTM", "path": "1_LSTM"}


@pytest.mark.parametrize(
    ("file", "contents", "says"),
    [
        ("modules.json", "[", "cannot be read as JSON"),
        ("modules.json", [], "must list 1 to 16 modules"),
        ("modules.json", [TRANSFORMER, {"type": "x.WordWeights"}], "only a Transformer followed"),
        ("modules.json", [TRANSFORMER, {**POOLING, "path": "../x"}], "leaves the folder"),
        ("modules.json", [TRANSFORMER, {**POOLING, "path": "none"}], "none/config.json is missing"),
        ("modules.json", [TRANSFORMER, POOLED, LSTM], "a module LSTM is not supported"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}, "mean and cls is not supp"),
        ("1_Pooling/config.json", {}, "pooling by nothing is not supported"),
        ("2_Dense/config.json", {**DENSE, "in_features": 8}, "reads 8 values, and 16 come before"),
        ("2_Dense/config.json", {**DENSE, "out_features": 11}, "does not fit"),
        ("2_Dense/config.json", {**DENSE, "out_features": 10**12}, "must be 1 to"),
        ("2_Dense/config.json", {**DENSE, "activation_function": "os.system"}, "only a plain l"),
        ("2_Dense/model.safetensors", "no weights", "cannot be read as weights"),
    ],
)
def test_a_module_that_is_not_understood_is_one_clear_error(
    file: str, contents: Any, says: str, tmp_path: Path
) -> None:
    folder = tiny.save_sentences(tmp_path / "model")
    (folder / file).write_text(contents if isinstance(contents, str) else json.dumps(contents))
    with pytest.raises(FusionZooError) as caught:
        create_encoder("text", f"hf/{folder}")
    assert says in str(caught.value) and "\n" not in str(caught.value)
