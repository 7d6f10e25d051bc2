"""A plain module as an encoder: what it may return, what it is told, and how it is stored."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fusionzoo
from fusionzoo.encoders import Encoder
from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Batch, Features, Sample


class Mean(nn.Module):
    """Average over positions, then project: (B, N, 2) -> (B, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(2, 3)

    def forward(self, values: Tensor) -> Tensor:
        return self.project(values.mean(1))


class Tokens(Mean):
    def forward(self, values: Tensor) -> Tensor:
        return self.project(values - values.mean(1, keepdim=True))


class AsFeatures(Mean):
    def forward(self, values: Tensor) -> Features:
        tokens = self.project(values)
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool)
        return Features(tokens, mask, tokens[:, 0])


class LikeHuggingFace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.embed(input_ids) + attention_mask.sum())


def tokenize(text: str) -> dict[str, Tensor]:
    ids = torch.tensor([1, *text.encode()])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def halve(value: Tensor) -> Tensor:
    return value.float() / 2


def model_of(encoder: Encoder, **settings: Any) -> fusionzoo.model.fusion_model.FusionModel:
    fusion = {"name": "concat", "dim": 4, "hidden": []}
    return fusionzoo.create_model(fusion, {"x": encoder}, 2, **settings).eval()


def sequences(*lengths: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(length, 2, generator=draw)} for length in lengths]


def wrap(module: nn.Module, **settings: Any) -> Encoder:
    return fusionzoo.wrap_encoder(
        module, **{"dim": 3, "kind": "sequence", "blank": torch.zeros(2, 2), **settings}
    )


@pytest.mark.parametrize("module", [Mean, Tokens])
def test_padding_and_batch_mates_change_nothing(module: type[nn.Module]) -> None:
    """The modules average over all positions: had they seen padding, rows would differ."""
    model = model_of(wrap(module()))
    samples = sequences(3, 5, 1, 5)
    together = model.embed(samples)
    for row, sample in enumerate(samples):
        for name, vectors in model.embed([sample]).items():
            torch.testing.assert_close(vectors[0], together[name][row])
    batch = model.collate()([Sample(str(i), "", None, s) for i, s in enumerate(samples)])
    found = model.encode(batch)["x"]
    counts = [3, 5, 1, 5] if module is Tokens else [1] * 4
    assert found.mask.sum(1).tolist() == counts


def test_a_missing_value_changes_nothing_even_where_its_blank_has_another_shape() -> None:
    module = Mean()
    model = model_of(wrap(module, blank=torch.zeros(7, 2)))
    (whole,) = sequences(4)
    found = model.embed([whole, {"x": None}])
    assert torch.equal(found["x"][1], torch.zeros(3))
    torch.testing.assert_close(found["x"][0], module(whole["x"][None])[0])


def test_features_and_outputs_of_transformers_are_understood() -> None:
    model = model_of(wrap(AsFeatures()))
    (sample,) = sequences(3)
    features = model.embed([sample])["x"]
    net = LikeHuggingFace()
    encoder = fusionzoo.wrap_encoder(net, dim=3, processor=tokenize, kind="text")
    text = fusionzoo.create_model("sum", {"words": encoder}, 2, dim=4).eval()
    short, long = ({"words": "ab"}, {"words": "a longer text"})
    batch = text.collate()([Sample("", "", None, x) for x in (short, long)])
    found = text.encode(batch)["words"]
    assert features.shape == (1, 3)
    assert found.mask.sum(1).tolist() == [3, 14]
    hidden = net.embed(batch.inputs["words"]["input_ids"][0, :3]) + 17
    torch.testing.assert_close(found.pooled[0], hidden.mean(0))


def test_pictures_go_through_the_processor_and_its_kind_follows_from_the_modality() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 8, stride=8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    encoder = fusionzoo.wrap_encoder(net, dim=4, processor=halve)
    model = fusionzoo.create_model("sum", {"image": encoder}, 2, dim=4)
    assert model.modalities == {"image": "image"}
    picture = torch.full((3, 16, 16), 10, dtype=torch.uint8)
    found = model.embed([{"image": picture.permute(1, 2, 0).numpy()}])["image"]
    net.eval()
    torch.testing.assert_close(found[0], net(halve(picture)[None])[0])


def test_it_learns_in_loader_workers_and_in_a_group_of_its_own() -> None:
    data = fusionzoo.create_dataset("interactions", samples=40, task="unique", width=2)
    encoders = {name: fusionzoo.wrap_encoder(nn.Linear(2, 3), dim=3, blank=torch.zeros(2))
                for name in data.modalities}  # fmt: skip
    model = fusionzoo.create_model(
        "sum", encoders, classes=data.classes, kinds=data.modalities, dim=4
    )
    collate = pickle.loads(pickle.dumps(model.collate(train=True)))
    batch: Batch = next(iter(DataLoader(data, 8, collate_fn=collate, num_workers=1)))
    model(batch).logits.sum().backward()
    for name, encoder in encoders.items():
        assert all((p.grad != 0).any() for p in encoder.parameters()), name


def test_the_folder_holds_the_weights_and_takes_a_module_again(tmp_path: Path) -> None:
    model = model_of(wrap(Mean()))
    folder = model.save(tmp_path / "m")
    samples = sequences(2, 4)
    with pytest.raises(FusionZooError) as caught:
        fusionzoo.load(folder)
    for part in ("the encoder of 'x' wraps a module", "encoders={'x': fusionzoo.wrap_encoder(...)"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    loaded = fusionzoo.load(folder, encoders={"x": wrap(Mean())})
    assert torch.equal(loaded.embed(samples)["fused"], model.embed(samples)["fused"])
    with pytest.raises(FusionZooError, match="has no modality 'y'"):
        fusionzoo.load(folder, encoders={"y": wrap(Mean())})
    with pytest.raises(FusionZooError, match=r"type Mean: fusionzoo\.wrap_encoder makes an"):
        fusionzoo.load(folder, encoders={"x": Mean()})  # type: ignore[dict-item]
    with pytest.raises(FusionZooError, match=r"model\.safetensors: .*project"):
        fusionzoo.load(folder, encoders={"x": wrap(nn.Linear(2, 3))})
    encoder = fusionzoo.create_encoder("notes", "chars", kind="text", dim=8)
    model = fusionzoo.create_model("sum", {"notes": encoder}, 2, dim=4)
    assert model.encoders["notes"] is encoder
    loaded = fusionzoo.load(model.save(tmp_path / "n"))
    sample = [{"notes": "some words"}]
    assert torch.equal(loaded.embed(sample)["fused"], model.embed(sample)["fused"])


def refuse(value: Tensor) -> Tensor:
    raise KeyError("pixels")


@pytest.mark.parametrize(
    ("module", "settings", "says"),
    [
        (Mean(), {"dim": 5}, "returns features of width 3, and dim=5"),
        (Mean(), {"blank": None}, "wrap_encoder of a sequence needs blank="),
        (Mean(), {"kind": None}, "encoders.x: say what it encodes, kind= one of image, text"),
        (Mean(), {"kind": "video"}, "kind='video' is neither 'image'"),
        (Mean(), {"dim": 0}, "dim=0; it must be a number of at least 1"),
        (Mean(), {"blank": torch.zeros(2, 4)}, "cannot encode a blank sequence"),
        (Mean(), {"processor": refuse}, "cannot prepare a value of type Tensor: 'pixels'"),
        (Mean(), {"processor": str}, "must return a tensor or a dict of tensors; 'values' is of"),
        (nn.Unflatten(1, (1, 2)), {}, "returned (1, 1, 2, 2); it must return (B, D), (B, T, D)"),
        (Mean(), {"kind": "text", "blank": None}, "cannot prepare a value of type str"),
    ],
)
def test_a_module_that_does_not_fit_is_one_line(
    module: nn.Module, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(FusionZooError) as caught:
        model_of(wrap(module, **settings))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_of_different_shapes_are_one_line() -> None:
    model = model_of(wrap(nn.Flatten(), dim=4, kind="sequence"))
    with pytest.raises(FusionZooError, match="must return tensors of one shape, but for the first"):
        model.embed([{"x": torch.zeros(2, 2)}, {"x": torch.zeros(2, 3)}])


@pytest.mark.parametrize("command", [fusionzoo.train, fusionzoo.benchmark])
def test_training_says_why_it_takes_no_module(command: Any) -> None:
    rows = [{"sequence": [[1.0, 2.0]], "target": "a"}] * 9
    with pytest.raises(
        FusionZooError, match=r"'sequence': \.\.\.\} is a module: training builds an"
    ):
        command(rows, encoders={"sequence": wrap(Mean(), kind="sequence")})
