"""`--train.seeds`: one model of the same model trained from several seeds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

import fusionzoo
from fusionzoo.errors import FusionZooError
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.training.report import Run
from helpers.trainings import kill_in

ROWS = [
    {
        "text": "good thing" if number % 3 else "bad day",
        "a": number % 7,
        "b": number % 5,
        "size": (number % 3) + 0.1 * (number % 7),
        "sort": ("low", "mid", "high")[number % 3],
        "split": ("train", "train", "val", "test")[number % 4],
    }
    for number in range(120)
]
DATA = {"name": "interactions", "samples": 200}
TABLE = {"columns": {"text": "text", "tabular": ["a", "b"]}}


def run(out: Path, data: Any = None, seeds: int = 2, **settings: Any) -> Run:
    fusion = {"name": "gmu", "dim": 8}
    common = {"fusion": fusion, "epochs": 2, "log": "none", "device": "cpu", "out": out}
    return fusionzoo.train(data or DATA, **{**common, "seeds": seeds, **settings})


def members(folder: Path) -> list[FusionModel]:
    return [fusionzoo.load(x) for x in sorted((folder / "seeds").iterdir())]


def logits(model: FusionModel, samples: list[Any]) -> Tensor:
    with torch.no_grad():
        return model(model.batch(samples)).logits


def samples(count: int = 20) -> list[Any]:
    split = fusionzoo.create_dataset(DATA).split("test")
    return [split[number] for number in range(count)]


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("runs") / "a", calibrate="none")


def test_probabilities_are_the_mean_of_those_of_the_seeds_also_of_one_modality(joined: Run) -> None:
    model, parts = joined.model, members(joined.folder)
    shares = [logits(x, samples()).softmax(-1) for x in parts]
    assert not torch.allclose(shares[0], shares[1], atol=1e-3)  # the seeds differ
    torch.testing.assert_close(logits(model, samples()).softmax(-1), sum(shares) / 2)
    assert model.spec["encoders"]["a"]["name"] == "ensemble"  # trained, so kept apart
    only_a = [{"a": samples(1)[0].values["a"]}]
    shares = [
        x.predict(only_a, fallback="unimodal")[0].probabilities for x in members(joined.folder)
    ]
    answer = joined.model.predict(only_a, fallback="unimodal")[0].probabilities
    assert answer == pytest.approx(
        {name: (shares[0][name] + shares[1][name]) / 2 for name in answer}
    )
    assert answer != pytest.approx(joined.model.predict(only_a)[0].probabilities)


def test_embeddings_are_as_similar_as_the_mean_of_the_seeds_says(joined: Run) -> None:
    vectors = [x.embed(samples())["fused"] for x in (joined.model, *members(joined.folder))]
    whole, *parts = [torch.cosine_similarity(x[:10], x[10:]) for x in vectors]
    torch.testing.assert_close(whole, sum(parts) / 2)
    weights = [x.weights(samples())["a"] for x in (joined.model, *members(joined.folder))]
    torch.testing.assert_close(weights[0], sum(weights[1:]) / 2)
    assert (vectors[0] * vectors[0]).sum(1) == pytest.approx(1)


def test_the_folder_is_that_of_any_model(joined: Run, tmp_path: Path) -> None:
    again = fusionzoo.load(joined.model.save(tmp_path / "again"))
    assert torch.equal(logits(again, samples()), logits(joined.model, samples()))
    found = fusionzoo.evaluate(joined, DATA)
    assert found["accuracy"] == joined.metrics["test"]["accuracy"]
    assert fusionzoo.predict(joined, DATA, split="test").num_rows == 40
    path = fusionzoo.embed(joined, DATA, out=tmp_path / "e.parquet")
    assert fusionzoo.read_embeddings(path).vectors.shape == (200, 16)


def test_results_name_what_each_seed_reached(joined: Run) -> None:
    listed = json.loads((joined.folder / "seeds.json").read_text())["finished"]
    assert [x["seed"] for x in listed] == [0, 1]
    reached = [
        json.loads((joined.folder / f"seeds/{n}/metrics.json").read_text())["val"] for n in (1, 2)
    ]
    assert [x["val"] for x in joined.metrics["seeds"]] == reached
    lines = [row[0] for row in joined.results()[1]]
    assert {"fusion: ensemble", "seed 0 alone", "seed 1 alone", "a alone"} <= {*lines}
    assert not list(joined.folder.glob("seeds/*/checkpoints"))
    card = (joined.folder / "model" / "README.md").read_text()
    assert "the fusion `ensemble of 2 gmu`" in card
    assert "with 2 seeds joined, each of its best epoch by validation" in card


@pytest.mark.parametrize("text", ["trained", "frozen"])
def test_numbers_are_the_mean_and_frozen_encoders_are_shared(text: str, tmp_path: Path) -> None:
    chars: dict[str, Any] = {"name": "chars", "dim": 8, "num_layers": 1}
    weights = tmp_path / "chars.pt"
    torch.save(fusionzoo.create_encoder("text", **chars).state_dict(), weights)
    if text == "frozen":
        chars |= {"freeze": "all", "weights": str(weights)}
    encoders = {"text": chars, "tabular": {"dim": 8}}
    data = {"name": "manifest", "root": str(tmp_path / "data.csv"), **TABLE}
    pd.DataFrame(ROWS).to_csv(data["root"], index=False)
    targets = {"size": {"name": "regression"}, "sort": {"name": "classification"}}
    result = run(tmp_path / "a", data, targets=targets, encoders=encoders, epochs=1)
    names = {name: x["name"] for name, x in result.model.spec["encoders"].items()}
    assert (names["text"] == "chars") == (text == "frozen")
    assert names["tabular"] == "ensemble"
    rows = [
        {"text": "good day", "tabular": {"a": 1, "b": 2}},
        {"text": "bad"},
        {"tabular": {"a": 3, "b": None}},
    ]
    whole, *parts = [logits(x, rows) for x in (result.model, *members(result.folder))]
    torch.testing.assert_close(whole[:, 0], (parts[0] + parts[1])[:, 0] / 2)
    shares = [x[:, 1:].softmax(-1) for x in parts]
    torch.testing.assert_close(whole[:, 1:].softmax(-1), (shares[0] + shares[1]) / 2)


def test_seeds_that_are_stopped_go_on_to_the_same_bits(joined: Run, tmp_path: Path) -> None:
    kill_in(2, lambda: run(tmp_path / "a", calibrate="none"))
    with pytest.raises(FusionZooError, match="was trained on data with other"):
        run(tmp_path / "a", {**DATA, "samples": 210}, resume=True)
    listed = tmp_path / "a" / "seeds.json"
    stored = json.loads(listed.read_text())
    for finished in stored["finished"]:  # as earlier versions wrote it
        finished |= {"rank": [0.5, -0.7], "figure": 0.5}
    listed.write_text(json.dumps(stored))
    result = run(tmp_path / "a", calibrate="none", resume="auto")
    for name, x in joined.model.state_dict().items():
        assert torch.equal(x, result.model.state_dict()[name]), name
    more = run(tmp_path / "a", seeds=3, calibrate="none", resume=True)
    assert [x["seed"] for x in more.metrics["seeds"]] == [0, 1, 2]
    assert more.metrics["seeds"][:2] == joined.metrics["seeds"]
    assert "seeds: 3" in (tmp_path / "a" / "config.yaml").read_text()


def test_seeds_for_which_there_is_no_time_are_left_out(tmp_path: Path) -> None:
    result = run(tmp_path / "a", seeds=3, time_limit=0.01)
    assert len(result.metrics["seeds"]) == 1
    expected, answer = (logits(x, samples()) for x in (*members(tmp_path / "a"), result.model))
    torch.testing.assert_close(answer.softmax(-1), expected.softmax(-1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trials": 2}, "keeps the best of several trainings, and"),
        ({"refit": True}, "learns from the validation split"),
        ({"matryoshka": "4"}, "puts the vectors of all seeds side by side"),
        ({"balance": "contrastive_align"}, "learns a common space, another one with each seed"),
        ({"objective": {"name": "none"}}, "averages answers, and"),
    ],
)
def test_what_cannot_be_joined_is_refused_before_training(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(FusionZooError, match=message):
        run(tmp_path / "a", **settings)
    assert not (tmp_path / "a").exists()


def test_what_training_makes_stands_in_no_list() -> None:
    assert "ensemble" not in fusionzoo.list_fusions()
    assert "ensemble" not in fusionzoo.list_encoders()
    with pytest.raises(FusionZooError, match=r"is made by training: --train\.seeds 3"):
        fusionzoo.create_model("ensemble", {"a": {"name": "vector/mlp", "in_dim": 4}}, 2)
    with pytest.raises(FusionZooError, match=r"is made by training: --train\.seeds 3"):
        fusionzoo.create_model("gmu", {"a": {"name": "ensemble", "kind": "vector"}}, 2)


@pytest.mark.slow
def test_two_processes_join_what_they_trained(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "train.py", "--data.name", "interactions", "--log", "none"]
    command += ["--data.samples", "200", "--fusion.dim", "8", "--train.epochs", "1"]
    command += ["--train.seeds", "2", "--dist.nproc", "2", "--out", str(tmp_path / "a")]
    subprocess.run([*command, "--device", "cpu"], cwd=Path(__file__).parents[2], check=True)
    shares = [logits(x, samples()).softmax(-1) for x in members(tmp_path / "a")]
    answer = logits(fusionzoo.load(tmp_path / "a"), samples()).softmax(-1)
    torch.testing.assert_close(answer, (shares[0] + shares[1]) / 2)
    metrics = json.loads((tmp_path / "a" / "metrics.json").read_text())
    found = fusionzoo.evaluate(tmp_path / "a", DATA)
    assert found["accuracy"] == pytest.approx(metrics["test"]["accuracy"])
