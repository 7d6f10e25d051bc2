"""Samples with a single modality: what the fusion says of them, and that modality's own head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import fusionzoo
from fusionzoo.encoders.base import Encoder
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.cost import random_features
from fusionzoo.fusion import create_fusion, list_fusions
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.scripts.train import main as train
from fusionzoo.structures import Features
from fusionzoo.training.multitask import plain_tasks
from fusionzoo.training.report import falls_short, result_rows

RUN = ["--data.name", "interactions", "--data.samples", "300", "--log", "none"]
RUN += ["--train.epochs", "2", "--data.missing", "0.3"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    assert train([*RUN, "--out", str(out)]) == 0
    return out


def accuracy(answers: list[Any], wanted: list[str | None]) -> float:
    return sum(a.label == b for a, b in zip(answers, wanted, strict=True)) / len(wanted)


def test_the_fusion_given_one_modality_is_measured_among_samples_that_have_it(run: Path) -> None:
    model = fusionzoo.load(run)
    results = json.loads((run / "metrics.json").read_text())
    test = fusionzoo.create_dataset("interactions", samples=300, missing=0.3).split("test")
    data = {"name": "interactions", "samples": 300, "missing": 0.3}
    subsets = fusionzoo.evaluate(run, data, every_subset=True, num_workers=0)["subsets"]
    for column, name in enumerate("ab"):
        rows = test.present[:, column].nonzero()[:, 0].tolist()
        samples = [test[row] for row in rows]
        only = [x._replace(values={name: x.values[name]}) for x in samples if x is not None]
        given_only, where = results["given_only"][name], results["where_present"][name]
        assert given_only.keys() == results["unimodal"][name].keys() == where["unimodal"].keys()
        assert (where["samples"], where["of"]) == (len(rows), len(test))
        assert len(rows) < len(test)
        wanted = accuracy(model.predict(only), [test.labels[row] for row in rows])
        assert given_only["accuracy"] == subsets[name]["accuracy"] == pytest.approx(wanted)
        head = accuracy(model.predict(only, fallback="unimodal"), [test.labels[r] for r in rows])
        assert where["unimodal"]["accuracy"] == pytest.approx(head)
    lines = [row[0] for row in results["table"]["rows"]]
    count = results["where_present"]["a"]["samples"]
    assert f"a alone, {count} with it" in lines and f"fusion given a only, {count} with it" in lines


@pytest.mark.parametrize("name", list_fusions())
def test_every_fusion_answers_the_prior_where_nothing_is_present_and_no_other_row_changes(
    name: str,
) -> None:
    torch.manual_seed(0)
    widths = {"a": (3, 6), "b": (2, 5)}
    model = FusionModel({}, create_fusion(name, {"a": 6, "b": 5}, 8, 3), {}, ["x", "y", "z"]).eval()
    features = {
        m: Features(x.tokens, x.mask.index_fill(0, torch.tensor(rows), False), x.pooled)
        for (m, x), rows in zip(random_features(widths, 4).items(), ([1, 2], [1, 3]), strict=True)
    }
    with torch.no_grad():
        before = model.fuse(features)
        model.complete(prior=torch.tensor([0.5, 0.3, 0.2]))
        after = model.fuse(features)
        compiled = torch.compile(model.fuse, backend="eager") if name == "gmu" else model.fuse
        assert torch.equal(compiled(features).logits, after.logits)
    assert after.logits[1].softmax(0).tolist() == pytest.approx([0.5, 0.3, 0.2])
    assert torch.equal(after.logits[[0, 2, 3]], before.logits[[0, 2, 3]])
    assert torch.equal(after.embedding, before.embedding)
    assert "prior_logits" not in model.state_dict()


def test_a_sample_without_any_modality_is_answered_with_the_training_classes_shares(
    run: Path, tmp_path: Path
) -> None:
    model = fusionzoo.load(run)
    labels = (
        fusionzoo.create_dataset("interactions", samples=300, missing=0.3).split("train").labels
    )
    shares = {c: labels.count(c) / len(labels) for c in model.classes}
    again = fusionzoo.load(model.save(tmp_path / "again"))
    for loaded in (model, again):
        (answer,) = loaded.predict([{}])
        assert answer.probabilities == pytest.approx(shares)
    config = json.loads((run / "model" / "config.json").read_text())
    assert list(shares.values()) == pytest.approx(config["prior"])


def without_prior(folder: Path) -> None:
    """Make a model folder that of a version which stored no prior."""
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("prior")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "digests.json").unlink()


def test_a_model_folder_without_a_prior_answers_empty_samples_as_its_version_did(
    run: Path, tmp_path: Path
) -> None:
    new, folder = fusionzoo.load(run), tmp_path / "older"
    shutil.copytree(run / "model", folder)
    without_prior(folder)
    older = fusionzoo.load(folder)
    sample = {"a": torch.ones(new.encoders["a"].spec["in_dim"])}
    assert older.predict([sample]) == new.predict([sample])
    (answer,) = older.predict([{}])
    assert answer != new.predict([{}])[0]
    batch = older.collate()([older.sample({}, 0)])
    with torch.no_grad():
        wanted = older.fusion(older.encode(batch)).logits[0].softmax(0).tolist()
    assert answer.probabilities == pytest.approx(dict(zip(older.classes, wanted, strict=True)))
    config = json.loads((older.save(tmp_path / "again") / "config.json").read_text())
    assert "prior" not in config  # none is made up: the training split is not at hand


@pytest.mark.parametrize("older", [False, True])
def test_a_resumed_run_answers_empty_samples_as_one_that_was_not_interrupted(
    older: bool, run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "resumed"
    assert train([*RUN, "--train.epochs", "1", "--out", str(out)]) == 0
    if older:
        without_prior(out / "model")
    assert train(["--resume", "--out", str(out), "--train.epochs", "2"]) == 0
    (answer,), (wanted,) = (fusionzoo.load(x).predict([{}]) for x in (out, run))
    assert answer == wanted
    configs = [json.loads((x / "model" / "config.json").read_text()) for x in (out, run)]
    assert configs[0]["prior"] == configs[1]["prior"]


def test_each_test_sample_is_encoded_once_however_many_modalities_it_has(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, forward = [], Encoder.forward

    def counted(self: Encoder, inputs: Any) -> Any:
        calls.append(len(next(iter(inputs.values()))))
        return forward(self, inputs)

    monkeypatch.setattr(Encoder, "forward", counted)
    assert train(["--resume", "--out", str(run)]) == 0  # the run is over: calibration and test
    data = fusionzoo.create_dataset("interactions", samples=300, missing=0.3)
    present = sum(int(data.split(name).present.sum()) for name in ("val", "test"))
    assert sum(calls) == present + 2 * 2  # and two blank rows for each encoder


def test_a_sample_with_one_modality_may_be_answered_by_its_own_head(run: Path) -> None:
    model = fusionzoo.load(run)
    values = [0.5 * torch.ones(model.encoders["a"].spec["in_dim"]) for _ in range(2)]
    samples = [{"a": values[0]}, {"b": values[1]}, {"a": values[0], "b": values[1]}]
    plain, fallen = model.predict(samples), model.predict(samples, fallback="unimodal")
    assert fallen[2] == plain[2]
    batch = model.collate()([model.sample(one, 0) for one in samples])
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
    where = {name: {"samples": 9, "of": 9, "unimodal": x} for name, x in alone.items()}
    results = {"test": figures, "unimodal": alone, "given_only": given_only, "where_present": where}
    _, rows = result_rows(tasks, "fusion: gmu", results)
    assert [row[:2] for row in rows] == [
        ("image alone", "0.620"),
        ("text alone", "0.500"),
        ("fusion given image only", "0.260"),
        ("fusion given text only", "0.450"),
        ("fusion: gmu", "0.900"),
        ("gain over image alone", "+28.0 points"),
    ]
    assert falls_short(tasks, alone, given_only) == ["image"]
