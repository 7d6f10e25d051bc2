"""Samples with a single modality: what the fusion says of them, and that modality's own head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fusionzoo
from fusionzoo.encoders.base import Encoder
from fusionzoo.errors import FusionZooError
from fusionzoo.scripts.train import main as train
from fusionzoo.training.runs.report import falls_short, result_rows
from fusionzoo.training.tasks.multitask import plain_tasks

RUN = ["--data.name", "interactions", "--data.samples", "300", "--log", "none"]
RUN += ["--train.epochs", "2", "--data.missing", "0.3"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    assert train([*RUN, "--out", str(out)]) == 0
    return out


def accuracy(answers: list[Any], wanted: list[str | None]) -> float:
    return sum(a.label == b for a, b in zip(answers, wanted, strict=True)) / len(wanted)


def test_the_results_hold_what_the_fusion_says_given_each_modality_only(run: Path) -> None:
    model = fusionzoo.load(run)
    results = json.loads((run / "metrics.json").read_text())
    test = fusionzoo.create_dataset("interactions", samples=300, missing=0.3).split("test")
    samples = [test[row] for row in range(len(test))]
    for name in ("a", "b"):
        only = [x._replace(values={name: x.values[name]}) for x in samples if x is not None]
        assert results["given_only"][name].keys() == results["unimodal"][name].keys()
        answers = model.predict(only)
        assert results["given_only"][name]["accuracy"] == pytest.approx(
            accuracy(answers, test.labels)
        )


def test_each_test_sample_is_encoded_once_however_many_modalities_it_has(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, forward = [], Encoder.forward

    def counted(self: Encoder, inputs: Any) -> Any:
        calls.append(len(next(iter(inputs.values()))))
        return forward(self, inputs)

    monkeypatch.setattr(Encoder, "forward", counted)
    assert train(["--resume", "--out", str(run)]) == 0  # the run is over: only the test split
    test = fusionzoo.create_dataset("interactions", samples=300, missing=0.3).split("test")
    assert sum(calls) == int(test.present.sum()) + 2 * 2  # and two blank rows for each encoder


def test_a_sample_with_one_modality_may_be_answered_by_its_own_head(run: Path) -> None:
    model = fusionzoo.load(run)
    values = [0.5 * torch.ones(model.encoders["a"].spec["in_dim"]) for _ in range(2)]
    samples = [{"a": values[0]}, {"b": values[1]}, {"a": values[0], "b": values[1]}]
    plain, fallen = model.predict(samples), model.predict(samples, fallback="unimodal")
    assert fallen[2] == plain[2]
    batch = model.collate()([model._sample(one, 0) for one in samples])
    assert model.heads is not None
    with torch.no_grad():
        heads = model.heads(model.encode(batch))
    for row, name in enumerate("ab"):
        wanted = heads[name][row].softmax(-1)
        probabilities = torch.tensor([fallen[row].probabilities[c] for c in model.classes])
        torch.testing.assert_close(probabilities, wanted)
        assert fallen[row] != plain[row]


def test_a_model_without_heads_loads_and_cannot_fall_back(run: Path, tmp_path: Path) -> None:
    assert train([*RUN, "--train.unimodal", "false", "--out", str(tmp_path / "bare")]) == 0
    bare = fusionzoo.load(tmp_path / "bare")
    sample = {"a": torch.ones(bare.encoders["a"].spec["in_dim"])}
    assert len(bare.predict([sample])) == 1
    with pytest.raises(FusionZooError, match=r"has no head of each modality alone"):
        bare.predict([sample], fallback="unimodal")
    with pytest.raises(FusionZooError, match=r"fallback='unimodl' is neither"):
        fusionzoo.load(run).predict([sample], fallback="unimodl")  # type: ignore[arg-type]


def test_the_final_table_shows_it_and_names_what_falls_short() -> None:
    figures = {"accuracy": 0.9, "macro_f1": 0.9, "loss": 1.0}
    alone = {"image": {**figures, "accuracy": 0.62}, "text": {**figures, "accuracy": 0.5}}
    given_only = {"image": {**figures, "accuracy": 0.26}, "text": {**figures, "accuracy": 0.45}}
    tasks = plain_tasks()
    results = {"test": figures, "unimodal": alone, "given_only": given_only}
    _, rows = result_rows(tasks, "gmu", results)
    assert [row[:2] for row in rows] == [
        ("image alone", "0.620"),
        ("text alone", "0.500"),
        ("fusion given image only", "0.260"),
        ("fusion given text only", "0.450"),
        ("fusion: gmu", "0.900"),
        ("gain over image alone", "+28.0 points"),
    ]
    assert falls_short(tasks, alone, given_only) == ["image"]
