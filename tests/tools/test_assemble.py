"""Models trained apart, joined by a late fusion without training."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fusionzoo as fz
from fusionzoo.cli import main
from fusionzoo.confidence import Calibration, TargetCalibration
from fusionzoo.files import write_json
from fusionzoo.fusion import FUSIONS, create_fusion, fixed_rules
from fusionzoo.model import FusionModel, UnimodalHeads, create_model
from fusionzoo.model_folder import files_of_model, write_digests
from fusionzoo.structures import Labels
from fusionzoo.targets import AnyOf, Level, Number, OneOf, Target
from fusionzoo.trained_on import TrainedOn

CHARS = {"name": "chars", "dim": 8, "num_layers": 1, "num_heads": 2, "max_length": 20}
VECTOR = {"name": "vector/mlp", "kind": "vector", "in_dim": 3, "dim": 6, "hidden": 8}
ENCODERS = {"text": CHARS, "title": {**CHARS, "kind": "text"}, "size": VECTOR}
SAMPLES: list[dict[str, Any]] = [
    {"text": "a red cat", "size": [1.0, 2.0, 3.0]},
    {"text": "dogs", "size": [0.5, -1.0, 0.0]},
    {"text": "three more words", "size": [-2.0, 0.1, 4.0]},
]


def model_of(
    folder: Path,
    *modalities: str,
    fusion: str = "gmu",
    classes: Sequence[str] = ("bird", "cat", "dog"),
    targets: Sequence[Target] | None = None,
    seed: int = 0,
    **added: Any,
) -> str:
    """Save a model with random weights and a prior; return its folder."""
    torch.manual_seed(seed)
    encoders = {name: ENCODERS[name] for name in modalities}
    model = create_model(
        {"name": fusion, "dim": 8},
        encoders,
        classes=() if targets is not None else classes,
        targets=targets,
    )
    prior = torch.rand(model.spec["num_outputs"])
    if len(modalities) > 1 and "heads" not in added:
        dims = {name: encoder.dim for name, encoder in model.named_encoders()}
        added["heads"] = UnimodalHeads(dims, 5, prior)
    model.complete(prior=prior, **added)
    return str(model.save(folder))


def only(*modalities: str) -> list[dict[str, Any]]:
    return [{name: sample[name] for name in modalities} for sample in SAMPLES]


def logits(model: FusionModel, samples: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.calibrated_logits(model.encode(model.batch(samples)))


def shares(model: FusionModel, samples: Any) -> torch.Tensor:
    return logits(model, samples).softmax(-1)


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, str]:
    return {
        "text": model_of(tmp_path / "a", "text", fusion="gmu", seed=1),
        "size": model_of(tmp_path / "b", "size", fusion="concat", seed=2),
    }


def table(path: Path, columns: Sequence[str], rows: int = 40) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", *columns])
        for row in range(rows):
            word = ("sun", "rain")[row % 2]
            cells = {"note": f"a {word} day {row}", "title": f"{word} {row * 7}", "kind": word}
            writer.writerow([f"r{row}", *(cells[name] for name in columns)])
    return path


# ---- answers


@pytest.mark.parametrize("fusion", ["late_mean", "late_max", "late_poe", "late_confidence"])
def test_given_one_modality_it_answers_as_that_modalitys_model(
    runs: dict[str, str], tmp_path: Path, fusion: str
) -> None:
    fz.assemble(runs, fusion=fusion, out=tmp_path / "ab")
    joint = fz.load(tmp_path / "ab")
    for name, folder in runs.items():
        answers = shares(fz.load(folder), only(name))
        torch.testing.assert_close(shares(joint, only(name)), answers, atol=1e-6, rtol=0)


def test_given_both_it_answers_with_the_rule_of_the_fusion(
    runs: dict[str, str], tmp_path: Path
) -> None:
    apart = torch.stack([logits(fz.load(runs[name]), only(name)) for name in runs])
    probabilities = apart.softmax(-1)
    largest = probabilities.amax(0)
    product = probabilities.prod(0)
    rules = {
        "late_mean": apart.mean(0).softmax(-1),
        "late_max": largest / largest.sum(-1, keepdim=True),
        "late_poe": product / product.sum(-1, keepdim=True),
    }
    for fusion, expected in rules.items():
        model = fz.assemble(runs, fusion=fusion, out=tmp_path / fusion)
        torch.testing.assert_close(shares(model, SAMPLES), expected, atol=1e-6, rtol=0)
    by_probability = {"name": "late_mean", "space": "prob"}
    model = fz.assemble(runs, fusion=by_probability, out=tmp_path / "prob")
    torch.testing.assert_close(shares(model, SAMPLES), probabilities.mean(0), atol=1e-6, rtol=0)


def test_a_product_of_experts_divides_by_the_mean_of_the_priors(
    runs: dict[str, str], tmp_path: Path
) -> None:
    rule = {"name": "late_poe", "prior": "train"}
    model = fz.assemble(runs, fusion=rule, out=tmp_path / "ab")
    models = [fz.load(folder) for folder in runs.values()]
    prior = torch.tensor([x.spec["prior"] for x in models]).log().mean(0).log_softmax(-1)
    apart = [logits(x, only(name)).log_softmax(-1) for name, x in zip(runs, models, strict=True)]
    expected = (apart[0] + apart[1] - prior).softmax(-1)
    torch.testing.assert_close(shares(model, SAMPLES), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(shares(model, only("text")), apart[0].exp(), atol=1e-6, rtol=0)


def train_on(path: Path, name: str, column: str) -> fz.Run:
    """Train a model of one column of text, in a folder of the modality's name beside the table."""
    return fz.train(
        {"name": "manifest", "root": str(path), "columns": {name: column, "target": "kind"}}
        | {"kinds": {name: "text"}},
        encoders={name: CHARS},
        fusion={"name": "gmu", "dim": 8},
        epochs=1,
        out=path.with_name(name),
    )


def test_runs_are_taken_as_train_returns_them(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", ["note", "title", "kind"])
    columns = {"text": "note", "title": "title"}
    trained = {name: train_on(path, name, column) for name, column in columns.items()}
    model = fz.assemble(trained, out=tmp_path / "ab")
    assert model.trained_on is not None
    assert model.trained_on.settings["root"] == path.name  # both read this file
    answers = [x.probabilities for x in model.predict([{"text": "a sun day"}])]
    expected = [x.probabilities for x in trained["text"].model.predict([{"text": "a sun day"}])]
    assert answers[0] == pytest.approx(expected[0], abs=1e-6)


def test_a_vote_names_the_class_of_the_only_modality(runs: dict[str, str], tmp_path: Path) -> None:
    model = fz.assemble(runs, fusion="late_vote", out=tmp_path / "ab")
    for name, folder in runs.items():
        labels = [x.label for x in fz.load(folder).predict(only(name))]
        assert [x.label for x in model.predict(only(name))] == labels


def test_the_folder_answers_as_the_model_that_was_returned(
    runs: dict[str, str], tmp_path: Path
) -> None:
    model = fz.assemble(runs, out=tmp_path / "ab")
    again = fz.load(tmp_path / "ab")
    assert torch.equal(logits(model, SAMPLES), logits(again, SAMPLES))
    again.save(tmp_path / "copy")
    assert torch.equal(logits(fz.load(tmp_path / "copy"), SAMPLES), logits(again, SAMPLES))


def test_embeddings_are_those_of_the_models_side_by_side(
    runs: dict[str, str], tmp_path: Path
) -> None:
    model = fz.assemble(runs, out=tmp_path / "ab")
    fused = model.embed(SAMPLES)["fused"]
    apart = [fz.load(runs[name]).embed(only(name))["fused"] for name in runs]
    torch.testing.assert_close(fused, torch.cat(apart, 1), atol=1e-6, rtol=0)
    alone = model.embed(only("size"))["fused"]
    assert not alone[:, :8].any() and torch.allclose(alone[:, 8:], apart[1], atol=1e-6)


def test_temperatures_of_the_models_are_kept(tmp_path: Path) -> None:
    warm = Calibration(targets={"target": TargetCalibration(temperature=2.5)})
    runs = {
        "text": model_of(tmp_path / "a", "text", calibration=warm),
        "size": model_of(tmp_path / "b", "size"),
    }
    model = fz.assemble(runs, out=tmp_path / "ab")
    answers = shares(fz.load(runs["text"]), only("text"))
    torch.testing.assert_close(shares(model, only("text")), answers, atol=1e-6, rtol=0)


def test_a_model_of_several_modalities_lends_its_own_head(tmp_path: Path) -> None:
    runs = {
        "text": model_of(tmp_path / "a", "size", "text", seed=3),
        "size": model_of(tmp_path / "b", "size", seed=4),
    }
    model = fz.assemble(runs, out=tmp_path / "ab")
    assert list(model.modalities) == ["text", "size"]
    both = fz.load(runs["text"])
    expected = [x.probabilities for x in both.predict(only("text"), fallback="unimodal")]
    answers = [x.probabilities for x in model.predict(only("text"))]
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer == pytest.approx(wanted, abs=1e-6)


def test_classes_in_another_order_are_mapped(tmp_path: Path) -> None:
    runs = {
        "text": model_of(tmp_path / "a", "text", classes=["cat", "dog", "bird"]),
        "size": model_of(tmp_path / "b", "size", classes=["bird", "cat", "dog"]),
    }
    model = fz.assemble(runs, out=tmp_path / "ab")
    assert model.classes == ["cat", "dog", "bird"]
    (answer,) = model.predict(only("size")[:1])
    (expected,) = fz.load(runs["size"]).predict(only("size")[:1])
    assert answer.probabilities == pytest.approx(expected.probabilities, abs=1e-6)


def test_several_targets_are_joined_by_name_and_numbers_in_their_unit(tmp_path: Path) -> None:
    first = [Number("price", mean=2.0, deviation=3.0), AnyOf("tags", classes=("a", "b"))]
    other = [AnyOf("tags", classes=("b", "a")), Number("price", mean=-5.0, deviation=0.5)]
    levels = [Level("grade", classes=("1", "2", "3"))]
    runs = {
        "text": model_of(tmp_path / "a", "text", targets=[*first, *levels]),
        "size": model_of(tmp_path / "b", "size", targets=[*levels, *other]),
    }
    model = fz.assemble(runs, out=tmp_path / "ab")
    for answer, expected in zip(
        model.predict(only("size")), fz.load(runs["size"]).predict(only("size")), strict=True
    ):
        assert answer["price"] == pytest.approx(expected["price"], abs=1e-5)
        assert isinstance(answer["tags"], Labels)
        assert answer["tags"].probabilities == pytest.approx(expected["tags"].probabilities)
        assert answer["grade"].label == expected["grade"].label
    prices = [[x["price"] for x in fz.load(runs[m]).predict(only(m))] for m in runs]
    joint = [x["price"] for x in model.predict(SAMPLES)]
    assert joint == pytest.approx([sum(pair) / 2 for pair in zip(*prices, strict=True)], abs=1e-5)


def test_a_sample_without_any_modality_gets_the_mean_of_the_priors(
    runs: dict[str, str], tmp_path: Path
) -> None:
    model = fz.assemble(runs, out=tmp_path / "ab")
    priors = torch.tensor([fz.load(folder).spec["prior"] for folder in runs.values()])
    expected = priors.log().mean(0).softmax(-1)
    torch.testing.assert_close(shares(model, [{}])[0], expected, atol=1e-6, rtol=0)


def test_the_commands_of_the_page_on_training_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "train.md").read_text(encoding="utf-8")
    section = page.partition("## Models trained apart")[2].partition("\n## ")[0]
    commands = "".join(re.findall(r"```bash\n(.*?)```", section, re.DOTALL)).replace("\\\n", " ")
    monkeypatch.chdir(tmp_path)
    small = ["--data.samples", "60", "--train.epochs", "1", "--train.num_workers", "0"]
    for line in commands.splitlines():
        _, *words = shlex.split(line)
        assert main([*words, *(small if words[0] == "train" else [])]) == 0
    frozen = fz.load("runs/frozen")
    for name in ("image", "text"):
        weights = fz.load(f"runs/{name}").encoders[name].state_dict()
        for key, tensor in frozen.encoders[name].state_dict().items():
            assert torch.equal(tensor, weights[key]), key


# ---- the rules


def test_fixed_rules_have_no_weights_beside_the_heads() -> None:
    assert fixed_rules() == ["late_confidence", "late_max", "late_mean", "late_poe", "late_vote"]
    heads = ("project.", "heads.", "prior_logits", "null")
    for name in fixed_rules():
        fusion = create_fusion(name, {"a": 3, "b": 4}, 5, 2)
        assert [x for x, _ in fusion.named_parameters() if not x.startswith(heads)] == []
        assert "trained_heads" not in FUSIONS[name].parameters


# ---- data


def test_a_table_with_both_columns_needs_no_setting(tmp_path: Path) -> None:
    columns = {"text": "note", "title": "title"}
    runs = {}
    for name, column in columns.items():
        path = table(tmp_path / f"{name}.csv", [column, "kind"])
        runs[name] = str(train_on(path, name, column).folder)
    out = tmp_path / "ab"
    words = [f"{name}={folder}" for name, folder in runs.items()]
    assert main(["assemble", *words, "--fusion", "late_mean", "--out", str(out)]) == 0
    both = table(tmp_path / "both.csv", ["kind", "title", "note"])
    joint = fz.predict(str(out), str(both)).to_pydict()
    assert all(joint["present_text"]) and all(joint["present_title"])
    for name, column in columns.items():
        path = table(tmp_path / f"{name}_only.csv", [column])
        answers = fz.predict(str(out), str(path)).to_pydict()
        expected = fz.predict(runs[name], str(path)).to_pydict()
        assert answers["label"] == expected["label"]
        assert answers["p_sun"] == pytest.approx(expected["p_sun"], abs=1e-6)
    metrics = fz.evaluate(str(out), str(both), split="all")
    assert {"accuracy", "loss"} <= metrics.keys()
    assert metrics["seen_in_training"]["train"] == 28  # whose ids both runs read
    embedded = fz.embed(str(out), str(both), out=tmp_path / "e.parquet")
    assert fz.read_embeddings(embedded)[1].shape == (40, 16)


def test_what_the_models_remember_is_merged_and_differences_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def remembers(root: str, word: str, target: str, **more: Any) -> TrainedOn:
        columns = {"text": word, "target": target}
        settings = {"name": "manifest", "root": root, "columns": columns, **more}
        return TrainedOn(settings=settings | {"kinds": {"text": "text"}})

    a = model_of(tmp_path / "a", "text", trained_on=remembers("a.csv", "note", "kind"))
    b = model_of(tmp_path / "b", "text", trained_on=remembers("b.csv", "heading", "class"))
    model = fz.assemble({"text": a, "title": b}, out=tmp_path / "ab")
    assert model.trained_on is not None
    assert model.trained_on.settings == {
        "name": "manifest",
        "columns": {"text": "note", "title": "heading"},
        "kinds": {"text": "text", "title": "text"},
    }
    said = capsys.readouterr().out
    assert "data.root" in said and "column of target (class, kind)" in said
    with pytest.raises(fz.FusionZooError, match=r"models of several files, and has no data of its"):
        fz.evaluate(tmp_path / "ab")
    c = model_of(tmp_path / "c", "text", trained_on=remembers("c.csv", "x", "kind", na=["-"]))
    with pytest.raises(fz.FusionZooError, match="another na="):
        fz.assemble({"text": a, "title": c}, out=tmp_path / "ac")


def test_what_cells_hold_is_remembered_where_a_model_reads_numbers(tmp_path: Path) -> None:
    def remembers(unit: str, **more: Any) -> TrainedOn:
        columns = {"size": ["weight", "height"], "text": "note"}
        kinds = {"size": "vector", "weight": f"number {unit}", "age": "none"}
        settings = {"name": "manifest", "root": "a.csv", "columns": columns, "kinds": kinds}
        return TrainedOn(settings=settings | more)

    text = model_of(tmp_path / "text", "text", trained_on=remembers("kg"))
    size = model_of(tmp_path / "size", "size", trained_on=remembers("kg", decimal=","))
    model = fz.assemble({"text": text, "size": size}, out=tmp_path / "ab")
    assert model.trained_on is not None
    settings = model.trained_on.settings
    assert settings["kinds"] == {"size": "vector", "weight": "number kg"}
    assert settings["decimal"] == ","  # the text's model has none, and reads no numbers
    for changes, words in (
        ({"unit": "g", "decimal": ","}, "read 'weight' as number g, another of the models as numb"),
        ({"unit": "kg"}, "another decimal="),
    ):
        other = model_of(tmp_path / changes["unit"], "size", trained_on=remembers(**changes))
        with pytest.raises(fz.FusionZooError, match=words):
            fz.assemble({"size": size, "width": other}, out=tmp_path / "ac")


# ---- mistakes


def test_models_that_do_not_belong_together_are_named(tmp_path: Path) -> None:
    text = model_of(tmp_path / "a", "text", classes=["bird", "cat", "dog"])
    others = {
        "fewer": (dict(classes=["cat", "dog"]), r"only .*a has bird\."),
        "more": (dict(classes=["cat", "cow", "dog"]), r"only .*a has bird; only .*more has cow"),
        "number": (dict(targets=[Number("target")]), "is classification in .*a and regression in"),
        "other": (dict(targets=[OneOf("age", classes=("1", "2"))]), "answers target, .* age"),
        "none": (dict(targets=[]), "without a target"),
    }
    for name, (settings, message) in others.items():
        size = model_of(tmp_path / name, "size", **settings)  # type: ignore[arg-type]
        with pytest.raises(fz.FusionZooError, match=message):
            fz.assemble({"text": text, "size": size}, out=tmp_path / "out")
    levels = [
        model_of(tmp_path / order, name, targets=[Level("grade", classes=tuple(order))])
        for name, order in (("text", "abc"), ("size", "cba"))
    ]
    with pytest.raises(fz.FusionZooError, match="another order: a, b, c, and c, b, a"):
        fz.assemble({"text": levels[0], "size": levels[1]}, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["size={b}"], "two models or more"),
        (["{a}", "size={b}"], "expected MODALITY=MODEL, such as image=runs/a"),
        (["text={a}", "size={b}", "text={b}"], "'text' has a model already"),
        (["text={a}", "size={b}", "--fusion", "gmu"], "joined by late_confidence, late_max"),
        (["text={a}", "size={b}", "--fusion", "late_weighted"], "it needs training"),
        (["text={a}", "size={b}", "--fusion.spice", "3"], "has no setting 'spice'"),
        (["text={a}", "size={b}", "--fusion.dim", "3"], "--fusion.dim: it follows"),
        (["text={a}", "sise={b}"], "no modality 'sise'. Did you mean 'size'?"),
        (["text={a}", "size={c}"], "there is no such folder"),
        (["text={a}", "size={b}", "--out", "{a}"], "name another folder"),
        (["text={a}", "size={both}"], "no classifier of 'size' alone"),
    ],
)
def test_a_mistake_is_one_line(
    runs: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    both = model_of(tmp_path / "both", "text", "size", heads=None)
    names = {"a": runs["text"], "b": runs["size"], "c": str(tmp_path / "c"), "both": both}
    flags = [word.format(**names) for word in words]
    flags += [] if "--out" in flags else ["--out", str(tmp_path / "out")]
    assert main(["assemble", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_whose_trained_heads_were_changed_is_refused(
    runs: dict[str, str], tmp_path: Path
) -> None:
    fz.assemble(runs, out=tmp_path / "ab")
    path = tmp_path / "ab" / "config.json"
    config = json.loads(path.read_text())
    for change, message in (
        ({"text": {}}, "head of each modality"),
        ({"text": {"name": "gmu"}, "size": {}}, "has no setting 'modality'"),
    ):
        config["fusion"]["trained_heads"] = change
        write_json(path, config)
        write_digests(tmp_path / "ab", files_of_model(tmp_path / "ab", list(runs)))
        with pytest.raises(fz.FusionZooError, match=message):
            fz.load(tmp_path / "ab")
