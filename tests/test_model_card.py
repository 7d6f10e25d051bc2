"""The model card says what a stranger asks, and never replaces what the author wrote."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import fusionzoo
from fusionzoo.model import FusionModel, create_model
from fusionzoo.trained_on import Row, RunResults, TrainedOn
from helpers import tiny_models

VECTOR = {"name": "vector/mlp", "kind": "vector", "in_dim": 3, "dim": 8, "hidden": 8}
RESULTS = RunResults(
    fingerprint="0123456789abcdef",
    samples={"train": 90, "val": 30, "test": 40},
    best_epoch=7,
    titles={"accuracy": "accuracy", "macro_f1": "macro F1"},
    rows=[
        Row(
            given=["a", "b"], samples=40, metrics={"accuracy": [0.9, 0.77, 0.96], "macro_f1": [0.8]}
        ),
        Row(given=["b"], samples=31, metrics={"accuracy": [0.5, 0.34, 0.66]}),
    ],
)


def build(**encoders: Any) -> FusionModel:
    encoders = encoders or {"a": VECTOR, "b": VECTOR}
    model = create_model({"name": "gmu", "dim": 8}, encoders, classes=["cat", "d|o`g\n"])
    settings = {"name": "manifest", "root": "/home/me/secret/birds.csv"}
    return model.complete(
        prior=torch.tensor([0.5, 0.5]), trained_on=TrainedOn(settings=settings, results=RESULTS)
    )


def card_of(model: FusionModel, folder: Path) -> str:
    return (model.save(folder) / "README.md").read_text()


def test_a_card_says_what_a_stranger_asks(tmp_path: Path) -> None:
    text = card_of(build(), tmp_path)
    for words in (
        "It answers one of 2 classes: `cat`, `d/o'g`.",
        "Trained on `birds.csv`: 90 train, 30 val, 40 test samples.",
        "`0123456789abcdef`",
        "| every modality | 40 | 0.900 [0.770, 0.960] | 0.800 |",
        "| b only | 31 | 0.500 [0.340, 0.660] | - |",
        "| a | vector | vector/mlp | trained from scratch | - |",
        "The fusion `gmu`: its gate is 0",
        "answered with the training split's prior",
        f"Saved by fusionzoo {fusionzoo.__version__} with torch {torch.__version__}",
    ):
        assert words in text
    assert "/home/me" not in text


def test_names_are_no_markdown_html_or_code_in_a_card(tmp_path: Path) -> None:
    quoted, marked = 'a": print("ran"), "b', "<img src=x>|[x](y)"
    text = card_of(build(**{quoted: VECTOR, marked: VECTOR}), tmp_path)
    code = text.partition("```python\n")[2].partition("```")[0]
    (samples,) = [x for x in ast.walk(ast.parse(code)) if isinstance(x, ast.Dict)]
    assert [x.value for x in samples.keys if isinstance(x, ast.Constant)] == [quoted, marked]
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert any(r"&lt;img src=x&gt;/\[x\](y)" in line for line in table)
    assert not any("<img" in line or line.count(" | ") > 4 for line in table)


def test_the_hub_reads_the_results_of_a_card(tmp_path: Path) -> None:
    front = yaml.safe_load(card_of(build(), tmp_path).split("---\n")[1])
    assert front["license"] == "unknown"
    assert front["library_name"] == "fusionzoo"
    (index,) = front["model-index"]
    metrics = [x for result in index["results"] for x in result["metrics"]]
    assert {(x["name"], x["value"]) for x in metrics} == {
        ("accuracy, given a and b", 0.9),
        ("macro F1, given a and b", 0.8),
        ("accuracy, given b", 0.5),
    }
    assert metrics[0]["args"] == {"samples": 40, "interval_95": [0.77, 0.96]}


def test_results_and_card_travel_with_the_model(tmp_path: Path) -> None:
    text = card_of(build(), tmp_path / "a")
    assert card_of(fusionzoo.load(tmp_path / "a"), tmp_path / "b") == text


def test_a_readme_that_somebody_wrote_or_edited_is_kept(tmp_path: Path) -> None:
    model, readme = build(), tmp_path / "README.md"
    text = card_of(model, tmp_path)
    model.complete(
        prior=torch.tensor([0.1, 0.9]), trained_on=TrainedOn(settings={"name": "digits"})
    )
    assert "Trained on `digits`" in card_of(model, tmp_path)  # nobody had edited the card
    readme.write_text(text.replace("A multimodal model", "My multimodal model"))
    edited = card_of(model, tmp_path)
    assert edited.startswith(text[:200])
    assert "My multimodal model" in edited
    assert card_of(fusionzoo.load(tmp_path), tmp_path / "elsewhere") == edited
    readme.write_bytes(b"\xff not UTF-8")
    model.save(tmp_path)
    assert readme.read_bytes() == b"\xff not UTF-8"
    fusionzoo.load(tmp_path)


def test_the_licence_of_the_first_weights_is_said_even_after_loading(tmp_path: Path) -> None:
    tiny_models.save_sentences(folder := tmp_path / "my bert")
    (tmp_path / "mine.pt").write_bytes(b"")
    torch.save(build().encoders["a"].state_dict(), tmp_path / "mine.pt")
    encoders = {"text": f"hf/{folder}", "b": {**VECTOR, "weights": str(tmp_path / "mine.pt")}}
    model = build(**encoders)
    for times in range(2):
        text = card_of(model, tmp_path / f"model-{times}")
        assert "| text | text | hf/my bert | hf/my bert | unknown |" in text
        assert "| b | vector | vector/mlp | mine.pt | unknown |" in text
        model = fusionzoo.load(tmp_path / f"model-{times}")
    (folder / "README.md").write_text("---\ntags: [a]\nlicense: mit\n---\n")
    assert "| hf/my bert | mit |" in card_of(build(**encoders), tmp_path / "model-2")


def test_a_card_without_a_training_run_says_so(tmp_path: Path) -> None:
    model = create_model("mean", {"a": VECTOR}, 2)
    text = card_of(model, tmp_path)
    assert "What it was trained on is not known" in text
    assert "None were measured" in text
    assert "print(model.embed(samples))" in text


@pytest.mark.parametrize(
    "root", ["/home/me/a b/birds.csv", "~/birds.csv", "C:\\Users\\me\\birds.csv"]
)
def test_what_goes_to_the_hub_names_no_path_of_this_machine(root: str, tmp_path: Path) -> None:
    settings = {"name": "manifest", "root": root, "sources": [{"root": root}]}
    model = build().complete(trained_on=TrainedOn(settings=settings))
    model._save(tmp_path, repository="me/birds")
    loaded = fusionzoo.load(tmp_path).trained_on
    assert loaded is not None
    public = {"name": "manifest", "root": "birds.csv", "sources": [{"root": "birds.csv"}]}
    assert json.loads(json.dumps(loaded.settings)) == public
