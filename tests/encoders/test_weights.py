"""Loading weights whose names do not match, and initialising what is trained from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fusionzoo.encoders import create_encoder, initialise, load_weights
from fusionzoo.encoders.base import SCHEMES
from fusionzoo.errors import FusionZooError


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def written(tmp_path: Path, contents: Any, name: str = "w.pt") -> Path:
    path = tmp_path / name
    save_file(contents, path) if name.endswith("safetensors") else torch.save(contents, path)
    return path


def renamed(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + key: value for key, value in state.items()}


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_wrappers_prefixes_are_stripped(prefix: str, name: str, tmp_path: Path) -> None:
    source, target = net(), net()
    report = load_weights(target, written(tmp_path, renamed(source.state_dict(), prefix), name))
    assert len(report.matched) == 9
    assert not (report.missing or report.left_over or report.other_shape)
    for key, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[key], value)


def test_a_prefix_of_ones_own_is_stripped_inside_a_wrapper(tmp_path: Path) -> None:
    path = written(tmp_path, {"state_dict": renamed(net().state_dict(), "module.backbone.")})
    assert len(load_weights(net(), path, prefix="backbone.").matched) == 9
    with pytest.raises(
        FusionZooError, match=r"0 tensors loaded .* try prefix=, or match='position'"
    ):
        load_weights(net(), path)


def test_a_partial_fit_is_reported(tmp_path: Path) -> None:
    state = dict(net().state_dict())
    del state["0.bias"]
    state["2.weight"] = torch.zeros(5, 4)
    state["head.weight"] = torch.zeros(1)
    path = written(tmp_path, state)
    report = load_weights(net(), path)
    assert report.missing == ("0.bias",)
    assert report.other_shape == ("2.weight",)
    assert report.left_over == ("head.weight",)
    assert "7 tensors loaded" in str(report)
    assert "1 left over (head.weight)" in str(report)
    with pytest.raises(FusionZooError, match="1 missing"):
        load_weights(net(), path, strict=True)


@pytest.mark.parametrize("key", ["net", "state_dict", "model", "anything"])
@pytest.mark.parametrize("name", ["w.pt", "w.pth"])
def test_a_state_dict_is_found_under_any_key(key: str, name: str, tmp_path: Path) -> None:
    source, target = net(), net()
    optimizer = torch.optim.AdamW(source.parameters())
    source(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    contents = {key: source.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    report = load_weights(target, written(tmp_path, contents, name))
    assert len(report.matched) == 9 and not report.left_over
    assert f"{name}[{key!r}]" in str(report)
    assert torch.equal(target[0].weight, source[0].weight)


def test_state_dicts_may_be_nested_twice(tmp_path: Path) -> None:
    path = written(tmp_path, {"run": {"net": net().state_dict()}, "loss": torch.tensor(0.5)})
    assert len(load_weights(net(), path, strict=True).matched) == 9


def test_of_two_state_dicts_the_prefix_names_one(tmp_path: Path) -> None:
    teacher, student, target = net(), net(), net()
    both = {"teacher": teacher.state_dict(), "student": renamed(student.state_dict(), "body.")}
    path = written(tmp_path, both)
    with pytest.raises(FusionZooError, match=r"several state dicts, 'teacher', 'student': prefix="):
        load_weights(target, path)
    load_weights(target, path, prefix="teacher.", strict=True)
    assert torch.equal(target[0].weight, teacher[0].weight)
    load_weights(target, path, prefix="student.body.", strict=True)
    assert torch.equal(target[0].weight, student[0].weight)
    path = written(tmp_path, {"model": teacher.state_dict(), "ema": student.state_dict()})
    load_weights(target, path, strict=True)
    assert torch.equal(target[0].weight, teacher[0].weight)
    load_weights(target, path, prefix="ema.", strict=True)
    assert torch.equal(target[0].weight, student[0].weight)


def test_by_position_names_do_not_matter_and_shapes_do(tmp_path: Path) -> None:
    source, target = net(), net()
    state = {f"layer{i}": x for i, x in enumerate(source.state_dict().values())}
    report = load_weights(target, written(tmp_path, state), match="position")
    assert len(report.matched) == 9
    assert torch.equal(target[2].weight, source[2].weight)
    swapped = dict(reversed(state.items()))
    with pytest.raises(FusionZooError, match=r"tensor 0 is 'layer8' \(2,\), the module's is"):
        load_weights(net(), written(tmp_path, swapped), match="position")


def test_an_encoder_takes_its_networks_own_names_or_is_initialised(tmp_path: Path) -> None:
    import timm

    source = timm.create_model("resnet10t", pretrained=False)
    path = written(tmp_path, source.state_dict())
    encoder = create_encoder("image", "timm/resnet10t", pretrained=False, weights=str(path))
    assert torch.equal(encoder.net.conv1[0].weight, source.conv1[0].weight)
    encoder = create_encoder("vector", "vector/mlp", in_dim=4, init="constant")
    assert all((m.weight == 0).all() for m in encoder.modules() if isinstance(m, nn.Linear))


def test_code_in_a_checkpoint_is_not_executed(tmp_path: Path) -> None:
    class Sneaky:
        def __reduce__(self) -> tuple[Any, ...]:
            return print, ("executed",)

    path = tmp_path / "w.pt"
    torch.save({"x": Sneaky()}, path)
    with pytest.raises(FusionZooError, match="cannot be read as weights"):
        load_weights(net(), path)


@pytest.mark.parametrize("contents", [b"", b"no weights"])
def test_a_file_that_holds_no_weights_is_one_clear_error(contents: bytes, tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_bytes(contents)
    with pytest.raises(FusionZooError, match=r"w\.pt cannot be read"):
        load_weights(net(), tmp_path / "w.pt")
    with pytest.raises(FusionZooError, match="no weights file"):
        load_weights(net(), tmp_path / "nowhere.pt")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_scheme_sets_weights_by_layer_type(scheme: str) -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Linear(64, 64), nn.Embedding(50, 64)
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(7)
    initialise(module, scheme)
    conv, norm, linear, embedding = module
    wanted = {"xavier": (2 / 128) ** 0.5, "kaiming": (2 / 64) ** 0.5, "orthogonal": 64**-0.5}
    wanted |= {"trunc": 0.02, "normal": 0.02, "constant": 0.0}
    assert linear.weight.std().item() == pytest.approx(wanted[scheme.partition("_")[0]], rel=0.1)
    assert (linear.bias == 0).all()
    assert (conv.bias == 0).all()
    assert (norm.weight == 1).all()
    assert (norm.bias == 0).all()
    assert embedding.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_the_default_scheme_touches_nothing_and_others_take_settings() -> None:
    module = nn.Linear(3, 3)
    before = module.weight.clone()
    assert torch.equal(initialise(module).weight, before)
    assert (initialise(module, "constant", val=0.5).weight == 0.5).all()
    with pytest.raises(FusionZooError, match=r"unknown init 'xavier'\. Did you mean 'xavier_"):
        initialise(module, "xavier")


def test_an_encoder_that_weights_fill_in_part_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = create_encoder("vector", "vector/mlp", in_dim=3).state_dict()
    first = next(iter(state))
    settings = {"in_dim": 3, "weights": str(written(tmp_path, state))}
    create_encoder("vector", "vector/mlp", **settings)
    assert not caplog.records
    state[first] = torch.zeros(1, 1)
    settings["weights"] = str(written(tmp_path, state))
    create_encoder("vector", "vector/mlp", **settings)
    assert f"1 other shape ({first})" in caplog.text
