"""What a run can learn: losses against closed forms, several targets, runs from end to end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusionzoo
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.metrics import metric, row_mean
from fusionzoo.fusion import list_fusions
from fusionzoo.model.fusion_model import UnimodalHeads, create_model
from fusionzoo.scripts.embed import main as embed
from fusionzoo.scripts.train import main as train
from fusionzoo.structures import Batch, Labels, Prediction, StepContext, evaluating
from fusionzoo.targets import AnyOf, Level, Number, OneOf
from fusionzoo.testing.fusions import full
from fusionzoo.training.multitask import Tasks, plain_tasks
from fusionzoo.training.objective import Objective, freeze_unused
from fusionzoo.training.tasks import OBJECTIVES, Classification, Multilabel, Ordinal, Regression
from helpers.trainings import PREEMPTED, preempt_at

THREE = OneOf("y", ("a", "b", "c"))
FIVE = Level("grade", ("1", "2", "3", "4", "5"))
LOGITS = torch.randn(12, 5, generator=torch.Generator().manual_seed(3))
Y = torch.arange(12) % 3


def classify(**settings: Any) -> Classification:
    return Classification(THREE, Y[:9], **settings)


def test_without_gamma_the_loss_is_torchs_cross_entropy_bit_for_bit() -> None:
    logits = LOGITS[:, :3]
    wanted = F.cross_entropy(logits, Y, reduction="none")
    assert torch.equal(classify(gamma=0).criterion(logits, Y), wanted)
    assert torch.equal(plain_tasks().criterion(logits, Y), wanted)
    smooth = F.cross_entropy(logits, Y, reduction="none", label_smoothing=0.2)
    assert torch.equal(classify(label_smoothing=0.2).criterion(logits, Y[:, None].float()), smooth)


def test_focal_loss_is_the_papers() -> None:
    p = LOGITS[:, :3].softmax(-1).gather(1, Y[:, None])[:, 0]
    found = classify(gamma=2).criterion(LOGITS[:, :3], Y)
    torch.testing.assert_close(found, -((1 - p) ** 2) * p.log())
    sure = torch.tensor([[50.0, 0, 0]], requires_grad=True)
    classify(gamma=0.5).criterion(sure, torch.tensor([0])).sum().backward()  # type: ignore[no-untyped-call]
    assert sure.grad is not None
    assert sure.grad.isfinite().all()


def test_balanced_weights_make_the_classes_weigh_the_same() -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    task = Classification(THREE, labels, class_weights="balanced")
    loss = task.criterion(torch.zeros(6, 3), labels)
    sums = [loss[labels == k].sum().item() for k in range(3)]
    assert sums == pytest.approx([2 * torch.tensor(3.0).log().item()] * 3)
    given = Classification(THREE, labels, class_weights=[1, 0, 2])
    assert given.criterion(torch.zeros(6, 3), labels)[3:5].tolist() == [0, 0]
    labels = torch.tensor([0, 0, 0, 1])  # nobody has the third class
    task = Classification(THREE, labels, class_weights="balanced", label_smoothing=0.1)
    assert task.weight is not None
    assert task.weight.tolist() == pytest.approx([4 / 6, 2, 0])
    assert task.criterion(torch.zeros(4, 3), labels).isfinite().all()


def test_multilabel_balances_what_is_there_with_what_is_not() -> None:
    labels = torch.tensor([[1.0, 1], [0, 1], [0, 1], [0, 0]])
    target = AnyOf("tags", ("x", "y"))
    plain = Multilabel(target, labels).criterion(LOGITS[:4, :2], labels)
    wanted = F.binary_cross_entropy_with_logits(LOGITS[:4, :2], labels, reduction="none").mean(1)
    torch.testing.assert_close(plain, wanted)
    balanced = Multilabel(target, labels, pos_weight="balanced")
    assert balanced.weight is not None
    assert balanced.weight.tolist() == pytest.approx([3.5 / 1.5, 1.5 / 3.5])


@pytest.mark.parametrize(
    ("loss", "wanted"), [("mse", [0.25, 9]), ("mae", [0.5, 3]), ("huber", [0.125, 2.5])]
)
def test_regression_losses_are_their_formulae(loss: Any, wanted: list[float]) -> None:
    task = Regression(Number("age"), torch.zeros(2, 1), loss=loss)
    found = task.criterion(torch.tensor([[0.5], [-3.0]]), torch.zeros(2, 1))
    assert found.tolist() == pytest.approx(wanted)


def test_ordinal_thresholds_fall_and_their_loss_is_the_likelihood() -> None:
    logits = LOGITS[:, :4]
    above = FIVE.above(logits)
    assert (above[:, 1:] <= above[:, :-1]).all()
    shares = torch.tensor([list(one.probabilities.values()) for one in FIVE.decode(logits)])
    torch.testing.assert_close(shares.sum(1), torch.ones(12))
    level = torch.arange(12) % 5
    found = Ordinal(FIVE, level[:, None].float()).criterion(logits, level[:, None].float())
    torch.testing.assert_close(found, -shares.gather(1, level[:, None])[:, 0].log())
    assert [one.label for one in FIVE.decode(logits)] == [
        FIVE.classes[k] for k in FIVE.rank(logits)
    ]


def test_the_prior_is_the_answer_without_any_evidence() -> None:
    levels = torch.tensor([0, 1, 1, 2, 3, 4, 4, 4.0])[:, None]
    prior = Ordinal(FIVE, levels).prior(levels).log()[None]
    shares = list(FIVE.decode(prior)[0].probabilities.values())
    assert shares == pytest.approx([1 / 8, 2 / 8, 1 / 8, 1 / 8, 3 / 8])
    assert classify().prior(torch.tensor([0, 0, 1, 2])).tolist() == [0.5, 0.25, 0.25]
    labels = torch.tensor([[1.0, 0], [1, 0]])
    assert Multilabel(AnyOf("t", ("x", "y")), labels).prior(labels).log().isfinite().all()


def several(weights: list[float]) -> Tasks:
    level = torch.arange(5)[:, None].float()
    age = Regression(Number("age", mean=40, deviation=10), torch.zeros(5, 1))
    return Tasks([classify(), Ordinal(FIVE, level), age], weights)


def labels_of_three() -> torch.Tensor:
    return torch.stack([Y.float(), torch.arange(12) % 5, torch.randn(12)], dim=1)


def test_a_rows_loss_is_the_weighted_sum_over_its_labelled_tasks() -> None:
    tasks, target = several([1.0, 0.5, 2.0]), labels_of_three()
    logits = torch.randn(12, 3 + 4 + 1)
    parts = zip(tasks.tasks, logits.split([3, 4, 1], 1), target.split(1, 1), strict=True)
    each = torch.stack([task.criterion(*own) for task, *own in parts], dim=1)  # type: ignore[operator]
    missing = torch.rand(12, 3) < 0.4
    found = tasks.criterion(logits, target.masked_fill(missing, torch.nan))
    wanted = (each * torch.tensor([1.0, 0.5, 2.0])).masked_fill(missing, 0).sum(1)
    torch.testing.assert_close(found, wanted)
    tasks, target = several([1.0, 1.0, 1.0]), labels_of_three()
    target[2, 1], target[4] = torch.nan, torch.nan
    logits = torch.randn(12, 8, requires_grad=True)
    loss = tasks.criterion(logits, target)
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert loss[4] == 0
    assert not logits.grad[4].any()
    assert not logits.grad[2, 3:7].any()
    assert logits.grad[2, :3].any()
    assert logits.grad[2, 7]
    figures = tasks.metrics(logits.detach(), target)
    kept = [row for row in range(12) if row != 4]
    alone = tasks.tasks[2].metrics(logits.detach()[kept, 7:], target[kept, 2:])  # type: ignore[operator]
    assert figures["age.mae"] == alone["mae"]
    assert figures["loss"] == pytest.approx(
        sum(figures[f"{name}.loss"] for name in ("y", "grade", "age"))
    )


def test_the_leading_figure_ranks_and_loss_decides_a_tie() -> None:
    accuracy = plain_tasks()
    assert accuracy.rank({"accuracy": 0.9, "loss": 3}) > accuracy.rank({"accuracy": 0.8, "loss": 1})
    assert accuracy.rank({"accuracy": 0.9, "loss": 1}) > accuracy.rank({"accuracy": 0.9, "loss": 2})
    age = Tasks([Regression(Number("age"), torch.zeros(1, 1))])
    assert age.rank({"mae": 1.0, "loss": 3}) > age.rank({"mae": 2.0, "loss": 1})
    assert several([1, 1, 1]).rank({"loss": 1}) > several([1, 1, 1]).rank({"loss": 2})
    known = {"accuracy": 0.1, "loss": 9.0}  # figures that are NaN are the worst
    assert accuracy.rank(known) > accuracy.rank({"accuracy": 0.1, "loss": math.nan})
    assert accuracy.rank(known) > accuracy.rank({"accuracy": math.nan, "loss": 0.0})


def test_a_chosen_metric_ranks_in_its_direction_and_names_that_are_none_are_refused() -> None:
    two, labels = OneOf("y", ("a", "b")), torch.tensor([[0.0], [1.0]])
    task, age = Classification(two, labels), Regression(Number("z"), labels)
    by_auroc = Tasks([task], plain=True, metric="auroc")
    assert by_auroc.shown[0] == ("auroc", "AUROC")
    assert by_auroc.metrics(torch.eye(2), Y[:2])["auroc"] == 1  # slow, and yet of every epoch
    assert "auroc" not in Tasks([task], plain=True).metrics(torch.eye(2), Y[:2])
    assert by_auroc.rank({"auroc": 0.9, "loss": 3}) > by_auroc.rank({"auroc": 0.8, "loss": 1})
    by_rmse = Tasks([age], metric="rmse")
    assert by_rmse.rank({"rmse": 1.0, "loss": 3}) > by_rmse.rank({"rmse": 2.0, "loss": 1})
    assert by_rmse.rank({"rmse": 9.0, "loss": 3}) > by_rmse.rank({"loss": 1})
    by_loss = Tasks([task], plain=True, metric="loss")
    assert by_loss.rank({"accuracy": 0, "loss": 1}) > by_loss.rank({"accuracy": 1, "loss": 2})
    names = {"auroc": "y.auroc", "z.rmse": "z.rmse", "loss": "loss"}  # `auroc` is of the first
    for metric_name, leading in names.items():
        tasks = Tasks([task, age], [1.0, 1.0], metric=metric_name)
        assert (tasks.leading, tasks.higher) == (leading, leading == "y.auroc")
    assert by_loss.metric == several([1, 1, 1]).metric and by_auroc.metric.title == "AUROC"
    with pytest.raises(FusionZooError, match=r"--train\.metric auroq: .* Did you mean 'auroc'\?"):
        Tasks([task], metric="auroq")
    with pytest.raises(FusionZooError, match=r"--train\.metric sensitivity: no figure"):
        Tasks([classify()], metric="sensitivity")  # of three classes
    with pytest.raises(FusionZooError, match=r"auroc is not defined on the validation split"):
        by_auroc.check_leading(by_auroc.metrics(torch.eye(2), torch.zeros(2).long()))


def test_scores_by_a_chosen_metric_average_to_it_and_rows_without_a_label_move_nothing() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 3, generator=draw)
    labels = torch.stack([torch.arange(40) % 2, torch.randn(40, generator=draw)], 1)
    labels[:7, 0] = labels[5:9, 1] = math.nan
    weights = torch.arange(40) % 3 + 0.0
    pair = [Classification(OneOf("y", ("a", "b")), Y[:2]), Regression(Number("z"), labels[9:, 1:])]
    for name in ("y.auroc", "z.rmse", "z.r2"):
        tasks = Tasks(pair, [1.0, 1.0], metric=name)
        for w in (None, weights):
            scores = tasks.scores(logits, labels, w)
            figure = tasks.metric.shown(float(row_mean(scores, w)))
            assert figure == pytest.approx(tasks.metrics(logits, labels, w)[name], abs=1e-6)
            assert scores[:5].unique().numel() == (
                1 if name == "y.auroc" else 5 if w is None else 4
            )
        costs, losses = tasks.costs(logits, labels, weights)
        torch.testing.assert_close(costs, -scores)
        torch.testing.assert_close(losses.float(), tasks.criterion(logits, labels))
    plain, labelled = Tasks(pair[:1], plain=True, metric="auroc"), torch.arange(40) % 2
    assert plain.scores(logits[:, :2], torch.ones(40).long()).isnan().all()
    by_loss = Tasks(pair[:1], plain=True, metric="loss").scores(logits[:, :2], labelled)
    torch.testing.assert_close(-by_loss.float(), plain.criterion(logits[:, :2], labelled))


@pytest.mark.usefixtures("forget_plugins")
def test_a_plug_ins_metric_chooses_the_epoch_and_when_to_stop(data: Path, tmp_path: Path) -> None:
    values = iter(range(1000))

    @metric("classification", higher=False)
    def growing(logits: Tensor, target: Tensor) -> float:
        return float(next(values))

    chosen = [*column("kind", "classification"), "--train.metric", "growing"]
    assert train(flags(data, tmp_path / "run", *chosen, "--train.patience", "2")) == 0
    results = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert results["best_epoch"] == 1
    assert results["table"]["metrics"][0] == "growing"
    epochs = (tmp_path / "run" / "metrics.jsonl").read_text().count('"event": "epoch"')
    assert epochs == 3
    assert train(flags(data, tmp_path / "last", *chosen, "--train.select", "last")) == 2
    values = iter([math.nan] * 1000)
    assert train(flags(data, tmp_path / "nan", *chosen)) == 2


REFUSED = [f"late_{name}" for name in ("poe", "max", "confidence", "vote", "stacking")]
REFUSED += ["tmc", "qmf", "dbf", "ecml", "mmdynamics", "pdf", "simmlm"]


@pytest.mark.parametrize("name", list_fusions())
def test_a_fusion_learns_other_targets_unless_it_joins_probabilities(name: str) -> None:
    encoders = {m: {"name": "vector/mlp", "in_dim": 3, "dim": 8} for m in ("a", "b")}
    scheme = [Number("age"), AnyOf("tags", ("x", "y"))]
    if name in REFUSED:
        with pytest.raises(FusionZooError, match=f"fusion '{name}'.*objective 'classification'"):
            create_model(name, encoders, targets=scheme, dim=16)
        return
    model = create_model(name, encoders, targets=scheme, dim=16)
    labels = torch.tensor([[0.5, 1, 0], [torch.nan, 0, 1], [-1, torch.nan, torch.nan], [0, 1, 1]])
    tasks = Tasks(
        [Regression(scheme[0], labels[:, :1]), Multilabel(scheme[1], labels[[0, 1, 3], 1:])],
        [1.0, 1.0],
    )
    heads = UnimodalHeads(dict.fromkeys(encoders, 8), 16, tasks.prior(labels))
    objective = Objective(model, heads, tasks, list("abcd"), labels)
    freeze_unused(objective)
    inputs = {m: {"values": torch.randn(4, 3)} for m in encoders}
    present = torch.tensor([[True, True], [True, False], [False, True], [True, True]])
    for phase in range(len(model.fusion.phases)):
        step = objective(
            Batch(list("abcd"), inputs, present, labels),
            StepContext(0, 0.5, phase, rows=torch.arange(4)),
        )
        assert step.loss.isfinite().all()
        (step.loss.sum() + sum(own.sum() for own in step.unimodal_loss.values())).backward()


def test_a_mean_of_probabilities_learns_classes_alone() -> None:
    encoders = {"a": {"name": "vector/mlp", "in_dim": 3, "dim": 8}}
    with pytest.raises(FusionZooError, match="probabilities of classes"):
        create_model({"name": "late_mean", "space": "prob"}, encoders, targets=[Number("age")])


def vector(x: float) -> list[float]:
    return [x, 3.0, -3.0]  # the encoder normalises each vector: two numbers would be two signs


def write_data(path: Path, count: int = 250) -> Path:
    """Two vectors; every target follows from their first numbers; some labels are missing."""
    draw = torch.Generator().manual_seed(0)
    lines = []
    for row in range(count):
        x, y = torch.randn(2, generator=draw).tolist()
        noise = torch.randn(2, generator=draw).tolist()
        split = ("train", "train", "train", "val", "test")[row % 5]
        tags = [name for name, on in (("sun", x > 0), ("sea", y > 0), ("sky", x > y)) if on]
        lines.append(
            {
                "id": f"s{row}",
                "split": split,
                "a": [*vector(x), noise[0] / 4],
                "b": [*vector(y), noise[1] / 4],
                "kind": "up" if x + y > 0 else "down",
                "age": None if row % 7 == 0 else 50 + 10 * (x + y),
                "grade": None if row % 11 == 0 else 1 + sum(x + y > cut for cut in (-1, 0, 1)),
                "tags": tags,
            }
        )
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def sample(x: float, y: float) -> dict[str, Any]:
    return {"a": [*vector(x), 0.0], "b": [*vector(y), 0.0]}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.jsonl")


def flags(data: Path, out: Path, *more: str) -> list[str]:
    columns = ["--data.columns.a", "a", "--data.columns.b", "b", "--data.kinds.a", "vector"]
    columns += ["--data.kinds.b", "vector", "--data.name", "manifest", "--data.root", str(data)]
    quick = ["--train.epochs", "12", "--log", "none", "--optim.lr", "1e-2"]
    return [*columns, *quick, "--out", str(out), *more]


def column(name: str, objective: str) -> list[str]:
    return ["--data.columns.target", name, "--objective.name", objective]


RUNS = {
    "classification": ([*column("kind", "classification"), "--objective.gamma", "1"], "accuracy"),
    "multilabel": ([*column("tags", "multilabel"), "--objective.pos_weight", "balanced"], "map"),
    "regression": ([*column("age", "regression"), "--objective.loss", "huber"], "r2"),
    "ordinal": (column("grade", "ordinal"), "kappa"),
}


@pytest.mark.parametrize("name", RUNS)
def test_each_objective_learns_reports_and_predicts(
    name: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, figure = RUNS[name]
    assert train(flags(data, tmp_path / "run", *settings)) == 0
    shown = capsys.readouterr().out
    assert "gain over" in shown
    results = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert results["test"][figure] > 0.7
    assert results["test"][figure] > max(own[figure] for own in results["unimodal"].values())
    assert set(results["val"]) == set(results["test"])
    model = fusionzoo.load(tmp_path / "run")
    high, low = model.predict([sample(1.5, 1.2), {**sample(-1.5, 0), "b": None}])
    if name == "regression":
        assert high > 60 > 50 > low
    elif name == "multilabel":
        assert isinstance(high, Labels)
        assert set(high.labels) >= {"sun", "sea"}
        assert "sun" not in low.labels
    else:
        assert isinstance(high, Prediction)
        assert high.label in ("up", 4)
        assert sum(low.probabilities.values()) == pytest.approx(1)


@pytest.mark.parametrize(("positive", "named"), [("up", ()), ("down", ("--positive", "down"))])
def test_two_classes_have_their_auroc_in_the_table_which_says_the_positive_one(
    positive: str, named: tuple[str, ...], data: Path, tmp_path: Path, capsys: Any
) -> None:
    settings = ["--data.columns.target", "kind", "--train.epochs", "1", *named]
    assert train(flags(data, tmp_path / "run", *settings)) == 0
    title, *lines = capsys.readouterr().out.partition("Test split")[2].splitlines()
    assert title.endswith(f", positive: {positive}")
    assert "AUROC" in lines[1] and len(lines[1]) <= 80
    results = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert results["positive"] == positive
    curves = {"auroc", "average_precision"}
    assert curves | {"sensitivity", "specificity"} <= results["val"].keys()
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert not curves & last["val"].keys()  # of 10 classes they would take 3 % of a short epoch
    found = fusionzoo.evaluate(str(tmp_path / "run"))
    assert found["positive"] == positive
    assert found["auroc"] == pytest.approx(results["test"]["auroc"], abs=1e-6)
    assert found["unimodal"]["a"].keys() >= curves
    assert found["intervals"].keys() == {"auroc", "sensitivity", "specificity"}
    for name, bounds in found["intervals"].items():
        assert bounds["mean"] == pytest.approx(found[name])
        assert 0 <= bounds["low"] <= bounds["mean"] <= bounds["high"] <= 1
        assert bounds["low"] < bounds["high"]
    early = fusionzoo.evaluate(str(tmp_path / "run"), threshold=0.2)
    assert early["thresholds"] == {positive: 0.2}
    assert early["intervals"]["sensitivity"]["mean"] == early["sensitivity"]
    assert [early[x] for x in ("loss", "auroc")] == pytest.approx([found["loss"], found["auroc"]])
    rows = fusionzoo.predict(str(tmp_path / "run"), str(data), split="test", threshold=0.2)
    truth = {row["id"]: row["kind"] for row in map(json.loads, data.read_text().splitlines())}
    having = [x for x in rows.to_pylist() if truth[x["id"]] == positive]
    labels = [x["label"] for x in having]
    assert early["sensitivity"] == pytest.approx(labels.count(positive) / len(labels))
    [other] = {"up", "down"} - {positive}
    assert labels == [positive if x[f"p_{positive}"] >= 0.2 else other for x in having]


SEVERAL = ["--targets.kind.name", "classification", "--targets.kind.label_smoothing", "0.05"]
SEVERAL += ["--targets.age.name", "regression", "--targets.age.weight", "0.5"]
SEVERAL += ["--targets.grade.name", "ordinal", "--targets.tags.name", "multilabel"]


def test_several_targets_in_one_run(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train(flags(data, whole, *SEVERAL)) == 0
    assert "age: MAE" in capsys.readouterr().out
    results = json.loads((whole / "metrics.json").read_text())["test"]
    assert min(results["kind.accuracy"], results["age.r2"], results["grade.kappa"]) > 0.6
    (answer,) = fusionzoo.load(whole).predict([sample(1.5, 1.2)])
    assert set(answer) == {"kind", "age", "grade", "tags"}
    assert answer["kind"].label == "up"
    assert answer["age"] > 60
    assert preempt_at(28, lambda: train(flags(data, cut, *SEVERAL))) == PREEMPTED  # in epoch 6
    assert train(["--resume", "--out", str(cut)]) == 0
    assert json.loads((cut / "metrics.json").read_text())["test"] == results
    assert (cut / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
    assert embed(["--model", str(whole), "--out", str(tmp_path / "emb.parquet")]) == 0


def test_without_an_objective_no_target_is_needed(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    none = ["--objective.name", "none", "--balance", "contrastive_align"]
    assert train(flags(data, out, *none, "--train.epochs", "1")) == 0
    results = json.loads((out / "metrics.json").read_text())
    assert 0 <= results["test"]["recall@1"] <= 1
    model = fusionzoo.load(out)
    found = model.embed([sample(1, 0)])
    assert found["fused"].shape == (1, 128)
    aligned = {name: x.norm().item() for name, x in found.items() if name.startswith("aligned_")}
    assert aligned and all(norm == pytest.approx(1) for norm in aligned.values())
    with pytest.raises(FusionZooError, match="without a target"):
        model.predict([sample(1, 0)])


def test_a_data_set_of_classes_has_other_readings(tmp_path: Path) -> None:
    given = ["--data.name", "interactions", "--data.samples", "100", "--objective.name", "ordinal"]
    quick = ["--train.epochs", "1", "--log", "none"]
    assert train([*given, *quick, "--out", str(tmp_path / "run")]) == 0
    assert "kappa" in json.loads((tmp_path / "run" / "metrics.json").read_text())["test"]


NOTHING = ["--objective.name", "none", "--balance", "contrastive_align"]
KIND = column("kind", "classification")
MISTAKES = [
    (["--objective.name", "regresion"], "unknown objective 'regresion'. Did you mean 'regression'"),
    ([*column("age", "regression"), "--objective.los", "mse"], "no setting 'los'. Did you mean"),
    (
        [*column("age", "regression"), "--objective.loss", "l1"],
        "loss='l1': input should be 'mse', 'mae' or",
    ),
    ([*column("kind", "regression")], "row 1, sample 's0', column 'target': 'up' is no finite"),
    ([*column("age", "classification")], "no target"),
    ([*KIND, "--objective.gamma", "-1"], "gamma=-1; it must be"),
    ([*KIND, "--objective.class_weights", "[1]"], "each of the 2"),
    (["--targets.agee.name", "regression"], "no column 'agee' for --targets.agee. Did you mean"),
    (["--targets.age.name", "number"], "unknown objective 'number'."),
    (["--targets.age.weight", "2"], "targets.age has no name: give --targets.age.name"),
    ([*SEVERAL, "--targets.age.weight", "-1"], "targets.age.weight=-1; it must be"),
    ([*SEVERAL, "--objective.gamma", "1"], "--objective is about the one column `target`"),
    ([*SEVERAL, "--fusion.name", "tmc"], "fusion 'tmc' joins the probabilities of classes"),
    ([*SEVERAL, "--train.sampler", "class_weighted"], "class_weighted"),
    ([*NOTHING, "--optim.schedule", "plateau"], "plateau follows a validation loss"),
    ([*NOTHING, "--objective.gama", "1"], "objective 'none' has no setting 'gama'"),
    ([*KIND, "--balance", "ogm_ge", "--balance_settings.ogm_ge.alpha", "abc"], "alpha='abc': in"),
    (["--data.targets.age", "regression"], "leave --data.targets to train.py"),
]


@pytest.mark.parametrize(("args", "says"), MISTAKES)
def test_a_mistake_is_one_line(
    args: list[str], says: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(flags(data, tmp_path / "out", *args)) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("objective", ["regression", "multilabel"])
def test_a_run_that_diverges_ends_with_figures_that_are_nan(
    objective: str, data: Path, tmp_path: Path
) -> None:
    wild = ["--optim.name", "sgd", "--optim.lr", "1e30", "--optim.clip", "null"]
    wild += ["--optim.warmup", "0", "--train.max_bad_steps", "1000", "--train.epochs", "2"]
    name = {"regression": "age", "multilabel": "tags"}[objective]
    assert train(flags(data, tmp_path / "out", *column(name, objective), *wild)) == 0
    epochs = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    last = [line for line in map(json.loads, epochs) if line["event"] == "epoch"][-1]
    assert math.isnan(last["train"]["loss"])  # no step of it was made
    assert not math.isfinite(last["val"]["loss"])


def write_pairs(path: Path, val: str) -> list[str]:
    """Three modalities, of which a validation sample has those named."""
    lines = []
    for row in range(60):
        split = ("train", "val", "test")[row % 3]
        have = val if split == "val" else "abc"
        vectors = {name: [float(row), 1.0, ord(name) % 7] for name in have}
        lines.append({"id": f"s{row}", "split": split, "target": str(row % 2), **vectors})
    path.write_text("\n".join(map(json.dumps, lines)))
    found = ["--data.name", "manifest", "--data.root", str(path), "--log", "none"]
    for name in "abc":
        found += [f"--data.columns.{name}", name, f"--data.kinds.{name}", "vector"]
    return [*found, "--train.epochs", "1", "--balance", "contrastive_align"]


def test_a_pair_that_only_the_test_split_has_is_reported_there(tmp_path: Path) -> None:
    run = write_pairs(tmp_path / "data.jsonl", "ab")
    assert train([*run, "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert "a_to_c.recall@1" in found["test"]
    assert "a_to_b.recall@1" in found["val"]
    assert "a_to_c.recall@1" not in found["val"]


def test_retrieval_is_judged_where_there_are_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_pairs(tmp_path / "data.jsonl", "a")
    assert train([*run, "--out", str(tmp_path / "out")]) == 0
    assert train([*run, "--out", str(tmp_path / "none"), "--objective.name", "none"]) == 2
    assert "no sample of the val split has two modalities" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", list_fusions())
def test_no_fusion_learns_the_class_of_a_row_whose_class_weighs_nothing(name: str) -> None:
    """Whatever else its loss holds, another label of no weight changes nothing."""
    model = create_model(name, {m: {"name": "vector/mlp", "in_dim": 5, "dim": 6} for m in "ab"}, 3)
    weights = {"class_weights": [0.0, 0.0, 1.0]}
    tasks = Tasks([classify(**weights)], plain=True)
    objective = Objective(model, UnimodalHeads({}, 8, torch.full((3,), 1 / 3)), tasks)
    draw = torch.Generator().manual_seed(0)
    inputs = {m: {"values": torch.randn(8, 5, generator=draw)} for m in "ab"}
    losses = []
    for labels in ([0, 1] * 4, [1, 0] * 4, [2, 1] * 4):
        batch = Batch([str(i) for i in range(8)], inputs, full(8, 2), torch.tensor(labels))
        objective.memory = model.fusion.prepare(torch.arange(8) % 3)
        torch.manual_seed(0)
        with evaluating(objective):
            losses.append(objective(batch, StepContext(rows=torch.arange(8))).loss)
    nothing, swapped, counts = losses
    torch.testing.assert_close(nothing, swapped)
    assert not torch.allclose(nothing[::2], counts[::2])


@pytest.mark.parametrize("setting", ["gamma", "label_smoothing"])
@pytest.mark.parametrize("fusion", ["tmc", "missing_tokens"])
def test_what_a_fusions_own_loss_cannot_honour_is_one_line_at_the_start(
    fusion: str, setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--data.name interactions --fusion.name {fusion} --objective.{setting} 0.5 --log none"
    flags += " --fusion.base tmc" * (fusion == "missing_tokens")
    assert train([*flags.split(), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    wanted = f"error: --objective.{setting} 0.5: {fusion} learns by a loss of its own"
    assert said.startswith(wanted)
    assert said.count("\n") == 1


def test_a_gain_in_an_error_of_ones_own_is_above_zero_where_the_error_is_lower() -> None:
    class Deviance(Regression):
        errors = (*Regression.errors, "deviance")

    numbers = [Deviance(Number(name), torch.zeros(1, 1)) for name in ("age", "size")]
    less, more = {"deviance": 1.0, "age.deviance": 1.0}, {"deviance": 3.0, "age.deviance": 3.0}
    assert Tasks(numbers[:1]).gain("deviance", less, more) == "+2.000"
    assert Tasks(numbers, [1, 1]).gain("age.deviance", less, more) == "+2.000"
    plain = Regression(Number("size"), torch.zeros(1, 1))
    assert Tasks([numbers[0], plain], [1, 1]).gain("size.r2", {"size.r2": 1}, {"size.r2": 0}) == (
        "+1.000"
    )


@pytest.mark.usefixtures("forget_plugins")
def test_a_titled_metric_is_a_column_and_its_gain_is_positive_where_the_fusion_is_better() -> None:
    @metric("classification", title="surprise", higher=False)
    def own(logits: Tensor, target: Tensor) -> float:
        return 0.5

    labels = torch.tensor([[0.0], [1.0]])
    task = OBJECTIVES.create("classification", OneOf("y", classes=("a", "b")), labels)
    plain = Tasks([task], plain=True)
    assert plain.shown == (*task.shown, ("auroc", "AUROC"), ("own", "surprise"))
    assert plain.metrics(torch.zeros(2, 2), torch.tensor([0, 1]))["own"] == 0.5
    better, worse = {"accuracy": 0.9, "own": 1.0}, {"accuracy": 0.8, "own": 1.5}
    assert plain.gain("accuracy", better, worse) == "+10.0 points"
    assert plain.gain("own", better, worse) == "+0.500"
    several = Tasks([task, OBJECTIVES.create("regression", Number("z"), labels)], (1.0, 1.0))
    assert [name for name, _ in several.shown] == ["y.accuracy", "y.own", "z.mae"]
