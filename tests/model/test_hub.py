"""Models on the Hub: pushed, loaded, resumed, refused; against a stand-in on 127.0.0.1."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import fusionzoo
import fusionzoo as fz
from fusionzoo.model.fusion_model import FusionModel, create_model
from fusionzoo.model.hub import is_repository
from fusionzoo.model.trained_on import Row, RunResults, TrainedOn
from helpers import tiny_models

TESTS = Path(__file__).parents[1]
SIDE = ["config.json", "digests.json"]


def session(scratch: Path, step: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "helpers.hub_session", str(scratch), step],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        cwd=scratch,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


@pytest.mark.slow
def test_models_are_pushed_to_the_hub_and_loaded_from_it(tmp_path: Path) -> None:
    said = session(tmp_path, "main")
    assert said["address"].endswith("/me/stamps")
    assert {*SIDE, "README.md", "model.safetensors", "text/tokenizer.json"} <= {*said["pushed"]}
    assert said["leaks"] == []  # no path of this machine
    assert said["equal"]
    assert said["branches"] == [2, 3]
    assert said["pushed again"]

    assert 'fz.load("me/stamps")' in said["card"]
    assert "2 classes" in said["card"]
    assert "3 classes" in said["card again"]  # nobody had edited it
    assert said["edited card"] == "My own words."
    assert said["own card"] == "My own words."

    assert "no model me/nothing" in said["missing"]
    assert said["revision"] == "me/stamps has no branch, tag or commit 'four'"
    assert "the token may not do this" in said["token"]
    assert "or it is private" in said["private"]
    assert said["private with a token"]

    assert said["cut"]
    assert said["parts"][0] == ""
    assert said["parts"][1].startswith("bytes=")
    assert "model.safetensors was changed" in said["tampered"]
    assert "text/model.py is of no kind" in said["text/model.py"]
    assert "text/weights.bin is of no kind" in said["text/weights.bin"]
    assert "must map the names of files in the folder" in said["../../out.json"]
    assert "plugins=['evil.py']" in said["plugins"]
    assert said["read before"] == SIDE  # no weights
    errors = [x for x in said.values() if isinstance(x, str) and not x.startswith(("---", "http"))]
    assert all("\n" not in error for error in errors)

    said = session(tmp_path, "offline")
    assert said["equal"]
    assert "the cache does not hold me/unknown" in said["unknown"]
    assert said["asked"] == []


def test_only_a_name_that_no_folder_has_is_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert is_repository("me/stamps")
    for name in ("stamps", "a/b/c", "runs/a", "models/a", "./a", "../a", "/tmp/a", Path("me/a")):
        assert not is_repository(name), name
    with pytest.raises(fz.FusionZooError, match="the Hub is not asked, as there is a folder 'mod"):
        fz.load("models/a")
    with pytest.raises(fz.FusionZooError, match="revision='x' is for models of the Hub"):
        fz.load("models/a", revision="x")


def test_a_name_that_is_none_of_a_repository_is_refused_before_anything_is_sent() -> None:
    model = fz.create_model(
        "mean", {"a": {"name": "vector/identity", "kind": "vector", "in_dim": 3}}, 2
    )
    with pytest.raises(fz.FusionZooError, match="'stamps' is no name of a repository"):
        model.push_to_hub("stamps")


# ---- the model card


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
