"""Calibration: temperatures, thresholds, conformal sets and intervals, stored with the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import f1_score

import fusionzoo as fz
from fusionzoo import FusionZooError
from fusionzoo.cli import main
from fusionzoo.inference import say_unlearnt
from fusionzoo.model.confidence import Calibration, TargetCalibration
from fusionzoo.structures import Labels
from fusionzoo.targets import AnyOf, Level, Number, OneOf, Target
from fusionzoo.training.calibrate import (
    best_thresholds,
    calibrate,
    covered,
    f1_of_occurring,
    measure,
)

QUICK: dict[str, Any] = {"epochs": 2, "num_workers": 0, "log": "none", "device": "cpu"}
TARGETS: list[Target] = [
    OneOf("class", classes=("a", "b", "c")),
    AnyOf("tags", classes=("sea", "sun", "sky")),
    Level("stage", classes=("1", "2", "4", "5")),
    Number("age", mean=40, deviation=10),
]


def drawn(target: Target, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits (N, width), and labels (N, C) that are drawn with their probabilities."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, target.width, generator=generator, dtype=torch.float64)
    uniform = torch.rand(logits.shape, generator=generator, dtype=torch.float64)
    if isinstance(target, OneOf):
        labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).double()
    elif isinstance(target, AnyOf):
        labels = (uniform < logits.sigmoid()).double()
    elif isinstance(target, Level):  # the level is above k while each conditional draw says so
        labels = (uniform < logits.sigmoid()).double().cumprod(-1).sum(-1, keepdim=True)
    else:
        labels = logits + torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    return logits, labels


@pytest.mark.parametrize("target", TARGETS[:3], ids=lambda target: target.kind)
def test_a_temperature_undoes_logits_that_are_three_times_too_sure(target: Target) -> None:
    logits, labels = drawn(target, 3000)
    calibration = calibrate([target], 3 * logits, labels, "auto")
    temperature = calibration.targets[target.name].temperature
    assert temperature is not None and temperature == pytest.approx(3, rel=0.15)
    new_logits, new_labels = drawn(target, 3000, seed=1)
    figures = measure(calibration, [target], 3 * new_logits, new_labels)[target.name]
    assert figures["nll_after"] < figures["nll_before"]
    assert figures["ece_after"] < 0.04 < figures["ece_before"]


def test_few_samples_get_a_temperature_on_demand_and_a_missing_label_is_left_out() -> None:
    logits, labels = drawn(TARGETS[0], 30)
    assert calibrate(TARGETS[:1], 3 * logits, labels, "auto").targets["class"].temperature is None
    forced = calibrate(TARGETS[:1], 3 * logits, labels, "temperature")
    assert forced.targets["class"].temperature is not None
    parts = [drawn(target, 100) for target in TARGETS]
    logits = torch.cat([x for x, _ in parts], 1)
    labels = torch.cat([x for _, x in parts], 1)
    labels[:40, -1] = float("nan")
    calibration = calibrate(TARGETS, logits, labels, "auto")
    assert [len(x.scores) for x in calibration.targets.values()] == [100, 100, 100, 60]
    assert measure(calibration, TARGETS, logits, labels)["age"]["samples"] == 60


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.kind)
@pytest.mark.parametrize("certainty", [1, 8])  # 8: the likeliest class is right more often
def test_a_region_holds_the_labels_whose_misfit_is_within_the_limit(
    target: Target, certainty: int
) -> None:
    logits, labels = drawn(target, 200)
    logits, held = certainty * logits, 0
    misfits = target.misfit(logits, labels)
    limit = float(misfits.sort().values[150])
    region = target.region(logits, limit)
    for row in range(200):
        if isinstance(target, Number):
            truth = float(target.original(labels[row, 0]))
            inside = region["lower"][row] <= truth <= region["upper"][row]
        elif isinstance(target, Level):
            ends = (target.classes.index(region[name][row]) for name in ("lower", "upper"))
            inside = next(ends) <= labels[row, 0] <= next(ends)
        elif isinstance(target, AnyOf):
            here = {n for n, x in zip(target.classes, labels[row], strict=True) if x}
            inside = here <= {*region["set"][row].split(";")}
        else:
            inside = target.classes[int(labels[row, 0])] in region["set"][row].split(";")
        assert inside or misfits[row] >= limit
        assert not inside or misfits[row] <= limit + 1e-9
        held += bool(inside)
    assert covered(target, logits, labels, limit) == pytest.approx(held / 200, abs=0.011)


def test_the_limit_is_the_conformal_quantile_and_an_impossible_one_is_refused() -> None:
    entry = TargetCalibration(scores=[float(x) for x in range(1, 20)])
    assert entry.limit(0.9, "age") == 18  # ceil(20 * 0.9)
    assert entry.limit(0.95, "age") == 19
    with pytest.raises(FusionZooError, match=r"19 validation samples, .* at most 0\.95"):
        entry.limit(0.96, "age")


def test_a_threshold_has_the_highest_f1_of_all_and_predict_uses_it() -> None:
    logits, labels = drawn(TARGETS[1], 80)
    labels[:, 2] = 0
    thresholds = best_thresholds(logits, labels)
    assert thresholds[2] == 0.5
    for column in (0, 1):
        shares, truth = logits.sigmoid()[:, column], labels[:, column].long()
        scores = [f1_score(truth, shares > x) for x in np.linspace(0, 1, 51)]
        assert f1_score(truth, shares > thresholds[column]) >= max(scores) - 1e-12
    before = f1_of_occurring(logits > 0, labels)
    assert before <= f1_of_occurring(logits.sigmoid() > thresholds, labels)
    target = AnyOf("target", classes=("sea", "sun", "sky"))
    logits, labels = drawn(target, 2000)
    logits -= 1.5  # the model is too cautious
    calibration = calibrate([target], logits, labels, "auto")
    thresholds = calibration.targets["target"].thresholds
    assert all(0 < x < 0.5 for x in thresholds.values())
    (answer,) = calibration.decode([target], torch.tensor([[-0.5, -0.5, -9.0]]))
    assert isinstance(answer, Labels)
    assert answer.labels == [n for n, p in answer.probabilities.items() if p > thresholds[n]]


def test_chosen_thresholds_decide_alike_in_answers_and_figures_and_others_stay() -> None:
    targets: list[Target] = [
        OneOf("d", ("healthy", "sick")),
        AnyOf("tags", ("sea", "sun")),
        OneOf("kind", ("a", "b", "c")),
    ]
    stored = Calibration(
        targets={
            "d": TargetCalibration(temperature=2.0),
            "tags": TargetCalibration(thresholds={"sea": 0.4, "sun": 0.7}),
            "kind": TargetCalibration(),
        }
    )
    chosen = stored.with_thresholds(targets, 0.3, {"sea": 0.2})
    assert chosen.targets["d"].thresholds == {"sick": 0.3}
    assert chosen.targets["tags"].thresholds == {"sea": 0.2, "sun": 0.7}
    printed = {"d.sick": 0.3, "tags.sea": 0.2, "tags.sun": 0.7}  # by `evaluate`
    assert stored.with_thresholds(targets, None, printed) == chosen
    assert stored.with_thresholds(targets, None, {"sick": 0.3, "sea": 0.2}) == chosen
    assert stored.targets["d"].thresholds == {}  # the model that is stored stays as it is
    logits = torch.randn(200, 7, generator=torch.Generator().manual_seed(0))
    moved = chosen.move(targets, logits, torch.ones(200, dtype=torch.bool))
    assert torch.equal(moved[:, 4:], logits[:, 4:])
    for answer, row in zip(
        chosen.decode(targets, chosen.scale(targets, logits)), moved, strict=True
    ):
        assert (answer["d"].label == "sick") == (answer["d"].probabilities["sick"] >= 0.3)
        assert (answer["d"].label == "sick") == bool(row[1] > row[0])
        wanted = {x for x, logit in zip(("sea", "sun"), row[2:4], strict=True) if logit > 0}
        assert set(answer["tags"].labels) == wanted


@pytest.mark.parametrize(
    ("threshold", "thresholds", "problem"),
    [
        (0.3, {}, r"--threshold 0\.3 is for a model with one target of two classes, .* has 0"),
        (None, {"see": 0.2}, r"no label 'see'\. Did you mean 'sea'\?"),
    ],
)
def test_thresholds_that_do_not_fit_are_refused(
    threshold: float | None, thresholds: dict[str, float], problem: str
) -> None:
    targets: list[Target] = [AnyOf("tags", ("sea", "sun")), OneOf("kind", ("a", "b", "c"))]
    stored = Calibration(targets={x.name: TargetCalibration() for x in targets})
    with pytest.raises(FusionZooError, match=problem):
        stored.with_thresholds(targets, threshold, thresholds)
    both = [*targets, AnyOf("marks", ("sea", "sky"))]
    stored = Calibration(targets={x.name: TargetCalibration() for x in both})
    with pytest.raises(FusionZooError, match=r"no label 'sea'.*marks\.sea"):
        stored.with_thresholds(both, None, {"sea": 0.2})
    with pytest.raises(FusionZooError, match="--thresholds is for labels"):
        Calibration(targets={"kind": TargetCalibration()}).with_thresholds(
            targets[1:], None, {"a": 0.2}
        )


def test_a_model_says_where_no_thresholds_were_learnt(capsys: pytest.CaptureFixture[str]) -> None:
    encoders = {"a": {"name": "vector/mlp", "in_dim": 3, "dim": 8}}
    model = fz.create_model("gmu", encoders, targets=[AnyOf("tags", ("sea", "sun"))], dim=8)
    say_unlearnt(model)
    assert capsys.readouterr().out.startswith("tags: no thresholds were learnt, so labels are")
    say_unlearnt(model.with_thresholds(None, {"sea": 0.2}))
    assert capsys.readouterr().out == ""


def write_table(path: Path, count: int = 400, seed: int = 0) -> dict[str, Any]:
    """Write two vectors and labels of four kinds with known noise; return settings of the data."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, 6))
    level = x @ np.array([1.0, -0.5, 0.5, 1.0, 0.5, -0.5])
    noise = rng.standard_normal((3, count))
    words = [(level + noise[0] > 0, "sun"), (x[:, 0] + noise[1] > 0.5, "sea")]
    tags = [";".join(word for has, word in words if has[row]) or ";" for row in range(count)]
    kinds = np.where(
        rng.random(count) < 0.2, rng.integers(0, 3, count), np.digitize(level, (-1, 1))
    )
    table = {
        "id": [f"s{row}" for row in range(count)],
        "split": [("train", "train", "val", "test")[row % 4] for row in range(count)],
        "target": [f"k{kind}" for kind in kinds],
        "age": [f"{40 + 10 * value:.6f}" for value in level + noise[2]],
        "stage": [str(1 + rank) for rank in np.digitize(level + noise[0], (-1, 0, 1))],
        "tags": tags,
        "first": x[:, :3].tolist(),
        "second": x[:, 3:].tolist(),
    }
    pq.write_table(pa.table(table), path)
    return {"name": "manifest", "root": str(path), "kinds": {"first": "vector", "second": "vector"}}


SEVERAL = {"target": {"name": "classification"}, "age": {"name": "regression"}}
SEVERAL |= {"stage": {"name": "ordinal"}, "tags": {"name": "multilabel"}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of four targets with calibration and one without it, of the same seed."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_table(folder / "data.parquet")
    made: dict[str, Any] = {"data": data}
    for mode in ("auto", "none"):
        out = folder / mode
        made[mode] = fz.train(data, targets=SEVERAL, calibrate=mode, out=out, **QUICK)
    return made


def test_calibration_touches_neither_training_nor_the_figures(runs: dict[str, Any]) -> None:
    with_it, without = runs["auto"], runs["none"]
    weights = [run.folder / "model" / "model.safetensors" for run in (with_it, without)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert with_it.metrics["test"] == without.metrics["test"]
    assert [x["val"] for x in with_it.history] == [x["val"] for x in without.history]
    assert not (without.folder / "model" / "calibration.json").exists()
    assert without.model.calibration is None and "calibration" not in without.metrics
    figures = with_it.metrics["calibration"]
    assert {*figures} == {*SEVERAL} and all(0.7 < x["coverage"] <= 1 for x in figures.values())


def test_a_model_without_calibration_answers_with_its_own_logits(runs: dict[str, Any]) -> None:
    model = runs["none"].model
    samples = [{"first": torch.ones(3), "second": torch.ones(3)}, {"first": torch.zeros(3)}]
    with torch.no_grad():
        logits = model(model.batch(samples)).logits
    features = model.encode(model.batch(samples))
    assert torch.equal(model.calibrated_logits(features), logits)
    only_scores = {x.name: TargetCalibration(scores=[1.0]) for x in model.answer_targets}
    model.calibration = Calibration(targets=only_scores)
    assert torch.equal(model.calibrated_logits(features), logits)
    model.calibration = None


def test_a_sample_without_any_modality_is_still_answered_by_the_prior(runs: dict[str, Any]) -> None:
    tempered = fz.load(runs["auto"].folder)
    entries = {x.name: TargetCalibration(temperature=5.0) for x in tempered.answer_targets}
    tempered.calibration = Calibration(targets=entries)
    plain = runs["none"].model
    assert tempered.predict([{}]) == plain.predict([{}])
    sample = [{"first": torch.ones(3), "second": torch.ones(3)}]
    (a,), (b,) = tempered.predict(sample), plain.predict(sample)
    assert a["target"].label == b["target"].label
    assert a["target"].probability < b["target"].probability


def test_a_finished_run_that_is_resumed_calibrates_to_the_same_bytes(runs: dict[str, Any]) -> None:
    folder = runs["auto"].folder
    stored = folder / "model" / "calibration.json"
    before = stored.read_bytes()
    stored.unlink()
    fz.train(out=folder, resume=True)
    assert stored.read_bytes() == before


def test_predictions_carry_sets_and_intervals_that_cover(
    runs: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = fz.predict(runs["auto"], runs["data"], split="test", coverage=0.9, **{"num_workers": 0})
    truth = pq.read_table(runs["data"]["root"]).to_pylist()
    labels = {row["id"]: row for row in truth}
    rows = table.to_pylist()
    hits = [row["age.lower"] <= float(labels[row["id"]]["age"]) <= row["age.upper"] for row in rows]
    measured = runs["auto"].metrics["calibration"]["age"]["coverage"]
    assert sum(hits) / len(hits) == pytest.approx(measured, abs=1e-9)
    held = [labels[row["id"]]["target"] in row["target.set"].split(";") for row in rows]
    measured = runs["auto"].metrics["calibration"]["target"]["coverage"]
    assert sum(held) / len(held) == pytest.approx(measured, abs=0.02)
    assert {"stage.lower", "stage.upper", "tags.set"} <= {*table.column_names}
    folder, path = str(runs["none"].folder), str(tmp_path / "p.csv")
    assert main(["predict", folder, "--coverage", "0.9", "--out", path]) == 2
    assert "--train.calibrate auto" in capsys.readouterr().err
    folder = str(runs["auto"].folder)
    assert main(["predict", folder, "--coverage", "0.999", "--out", path]) == 2
    assert "at most 0.99" in capsys.readouterr().err


def test_evaluation_measures_the_stored_calibration(runs: dict[str, Any]) -> None:
    figures = fz.evaluate(runs["auto"], runs["data"], num_workers=0)["calibration"]
    stored = runs["auto"].metrics["calibration"]
    assert {*figures} == {*stored}
    assert figures["age"]["coverage"] == pytest.approx(stored["age"]["coverage"], abs=0.02)
    assert figures["target"]["nll_after"] == pytest.approx(stored["target"]["nll_after"], abs=1e-4)
    assert "calibration" not in fz.evaluate(runs["none"], runs["data"], num_workers=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x["targets"]["age"].update(scores=[2.0, 1.0]), "not sorted"),
        (lambda x: x["targets"]["target"].update(temperature=-1.0), "temperature -1.0"),
        (lambda x: x["targets"].pop("age"), "the model of target, age"),
        (lambda x: x["targets"]["tags"].update(thresholds={"moon": 0.1}), "'tags' has not"),
        (lambda x: x["targets"]["target"].update(thresholds={"k0": 0.1}), "'target' has not"),
        (lambda x: x["targets"]["tags"].update(scores="none"), "targets.tags.scores"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(
    runs: dict[str, Any], tmp_path: Path, change: Any, message: str
) -> None:
    path = runs["auto"].folder / "model" / "calibration.json"
    contents = json.loads(path.read_text())
    change(contents)
    (tmp_path / "calibration.json").write_text(json.dumps(contents))
    with pytest.raises(FusionZooError, match=r"calibration\.json") as error:
        Calibration.load(tmp_path, runs["auto"].model.answer_targets)
    assert message in str(error.value)


@pytest.mark.nightly
def test_sets_and_intervals_for_90_percent_cover_88_to_92_on_average_over_20_splits(
    tmp_path: Path,
) -> None:
    shares: dict[str, list[float]] = {name: [] for name in SEVERAL}
    for seed in range(20):
        data = write_table(tmp_path / f"{seed}.parquet", 1600, seed)
        settings = {**QUICK, "epochs": 3, "unimodal": False, "optim": {"lr": 3e-3}}
        run = fz.train(data, targets=SEVERAL, out=tmp_path / str(seed), **settings)
        for name, figures in run.metrics["calibration"].items():
            shares[name].append(figures["coverage"])
    means = {name: sum(values) / 20 for name, values in shares.items()}
    assert all(0.88 <= mean <= 0.92 for mean in means.values()), means
