"""Figures by task, against closed cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from sklearn.metrics import average_precision_score, f1_score, recall_score, roc_auc_score
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.calibration import calibration
from fusionzoo.evaluation.metrics import (
    METRICS,
    closeness,
    figures,
    metric,
    metrics_of,
    multilabel_scores,
    right,
    row_scores,
)
from fusionzoo.evaluation.statistics import by_group, crossed, effective_size
from fusionzoo.evaluation.subgroups import compare_subgroups
from fusionzoo.targets import AnyOf, OneOf
from fusionzoo.training.calibrate import (
    best_thresholds,
    calibrate,
    expected_error,
    fit_temperature,
    log_loss,
)
from fusionzoo.training.calibrate import measure as measure_calibration
from fusionzoo.training.multitask import Tasks, plain_tasks
from fusionzoo.training.tasks import OBJECTIVES

SCORES = {
    "classification": right,
    "multilabel": multilabel_scores,
    "regression": closeness,
    "ordinal": closeness,
}


def test_macro_f1_is_sklearns_over_the_classes_that_occur() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 6, generator=draw)
    target = torch.randint(4, (40,), generator=draw)  # two classes never occur, but are answered
    wanted = f1_score(target, logits.argmax(-1), labels=[0, 1, 2, 3], average="macro")
    assert figures("classification", logits, target)["macro_f1"] == pytest.approx(wanted, abs=1e-6)


def test_of_two_classes_the_second_is_the_positive_one_and_a_class_alone_has_no_curve() -> None:
    draw = torch.Generator().manual_seed(0)
    logits, target = torch.randn(40, 2, generator=draw), torch.arange(40) % 2
    margin, predicted = logits[:, 1] - logits[:, 0], logits.argmax(-1)
    found = figures("classification", logits, target)
    found |= figures("classification", logits, target, slow=True)
    assert found["auroc"] == pytest.approx(roc_auc_score(target, margin))
    assert found["average_precision"] == pytest.approx(average_precision_score(target, margin))
    assert found["sensitivity"] == pytest.approx(recall_score(target, predicted))
    assert found["specificity"] == pytest.approx(recall_score(target, predicted, pos_label=0))
    alone = figures("classification", logits, torch.ones(40).long(), slow=True)
    alone |= figures("multilabel", logits, torch.tensor([[1, 0]]).expand(40, 2), slow=True)
    assert alone and all(map(math.isnan, alone.values()))
    assert "sensitivity" not in figures("classification", torch.randn(40, 3), target)


def test_the_auroc_of_several_classes_is_over_those_in_the_labels() -> None:
    draw = torch.Generator().manual_seed(0)
    logits, target = torch.randn(40, 4, generator=draw), torch.arange(40) % 3  # none is of the last
    each = [roc_auc_score(target == k, logits.softmax(-1)[:, k]) for k in range(3)]
    found = figures("classification", logits, target, slow=True)
    assert found["auroc"] == pytest.approx(sum(each) / 3)
    labels = torch.stack([target == 0, target == 1, target < 9], 1).long()  # all have the last
    each = [roc_auc_score(labels[:, k], logits[:, k]) for k in range(2)]
    found = figures("multilabel", logits[:, :3], labels, slow=True)
    assert found["auroc"] == pytest.approx(sum(each) / 2)


def test_what_never_varies_has_no_rank_and_explains_nothing() -> None:
    found = figures("regression", torch.ones(4), torch.tensor([1.0, 2, 3, 4]))
    assert found["spearman"] == 0
    assert figures("regression", torch.tensor([1.0, 2]), torch.ones(2))["r2"] == 0
    assert figures("multilabel", torch.ones(2, 2), torch.zeros(2, 2))["map"] == 0


def test_ordinal_kappa_of_right_answers_is_1() -> None:
    t = torch.randint(5, (50,), generator=torch.Generator().manual_seed(0))
    assert figures("ordinal", t, t) == {"mae": 0, "accuracy": 1, "kappa": 1}
    assert figures("ordinal", torch.ones(3), torch.ones(3))["kappa"] == 1


@pytest.mark.parametrize("task", METRICS.families)
def test_the_mean_of_the_scores_is_the_leading_figure(task: str) -> None:
    draw = torch.Generator().manual_seed(0)
    if task == "classification":
        answer, target = torch.randn(30, 4, generator=draw), torch.randint(4, (30,), generator=draw)
    elif task == "multilabel":
        answer = torch.randn(30, 4, generator=draw)
        target = torch.randint(2, (30, 4), generator=draw)
    else:
        answer, target = torch.randn(30, generator=draw), torch.randn(30, generator=draw)
    leading = next(iter(figures(task, answer, target).values()))
    assert SCORES[task](answer, target).mean().abs().item() == pytest.approx(leading)


def test_multilabel_macro_f1_is_sklearns_without_undefined_labels() -> None:
    target = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 0]])
    assert figures("multilabel", target * 2.0 - 1, target)["macro_f1"] == 1
    spurious = target * 2.0 - 1
    spurious[0, 2] = 1  # now it is given: its F1 is 0
    assert figures("multilabel", spurious, target)["macro_f1"] == pytest.approx(2 / 3)
    assert figures("multilabel", -torch.ones(3, 2), torch.zeros(3, 2))["macro_f1"] == 1
    draw = torch.Generator().manual_seed(0)
    target = (torch.rand(30, 8, generator=draw) < 0.3).long()
    logits = torch.randn(30, 8, generator=draw)
    target[:, [2, 5]], logits[:, 5] = 0, -1.0  # 2: never occurs but is given; 5: neither
    wanted = f1_score(target, logits > 0, average="macro", zero_division=float("nan"))
    assert figures("multilabel", logits, target)["macro_f1"] == pytest.approx(wanted)


def test_targets_of_different_levels_give_no_rank_correlation_for_nothing() -> None:
    draw = torch.Generator().manual_seed(0)
    level = torch.tensor([0.0, 100.0, 200.0])
    target = torch.randn(400, 3, generator=draw) + level
    ignorant = torch.randn(400, 3, generator=draw) + level
    assert abs(figures("regression", ignorant, target)["spearman"]) < 0.1
    assert figures("regression", ignorant, target)["r2"] < 0


def test_regression_figures_are_the_means_over_the_targets_that_vary() -> None:
    draw = torch.Generator().manual_seed(1)
    target = torch.randn(50, 3, generator=draw) * torch.tensor([1.0, 10.0, 1000.0])
    prediction = target + torch.randn(50, 3, generator=draw) * torch.tensor([2.0, 1.0, 300.0])
    each = [figures("regression", prediction[:, k], target[:, k]) for k in range(3)]
    for name, value in figures("regression", prediction, target).items():
        assert value == pytest.approx(sum(one[name] for one in each) / 3), name
    moving = torch.tensor([1.0, 2, 3, 4])
    target = torch.stack([moving, torch.full((4,), 7.0)], dim=1)
    exact = figures("regression", target, target)
    assert (exact["r2"], exact["spearman"]) == (pytest.approx(1), pytest.approx(1))
    wrong = figures("regression", target + torch.tensor([0.0, 1.0]), target)
    assert (wrong["r2"], wrong["spearman"]) == (pytest.approx(1), pytest.approx(1))
    assert wrong["mae"] == 0.5  # the errors count all the same
    still = figures("regression", torch.full((4, 2), 7.0), target)
    assert still["spearman"] == 0  # a prediction that never varies knows no ranks


@pytest.mark.usefixtures("forget_plugins")
def test_a_metric_that_does_not_fit_is_one_line_that_names_it() -> None:
    def own(answer: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return answer

    metric("ordinal")(own)
    levels = torch.tensor([0, 1, 1])
    with pytest.raises(FusionZooError, match=r"'ordinal\.own' returned a Tensor, not a number"):
        figures("ordinal", levels, levels)
    with pytest.raises(FusionZooError, match=r"unknown family 'regresion'\. Did you mean"):
        metric("regresion")(own)
    with pytest.raises(FusionZooError, match=r"metric 'regression\.mae' is registered twice"):
        metric("regression", name="mae")(own)
    with pytest.raises(FusionZooError, match="metric 'loss': this is the objective's figure"):
        metric("regression", name="loss")(own)


# ---- weights


ROWS, CLASSES = 60, 4
WHOLE = torch.arange(ROWS) % 4 + 1.0  # weights that are numbers of equal rows


def sample(kind: str) -> tuple[Tensor, Tensor]:
    """Answers and labels as the metrics of a kind take them, some of them right."""
    draw = torch.Generator().manual_seed(0)
    if kind == "classification":
        target = torch.randint(CLASSES, (ROWS,), generator=draw)
        return torch.randn(ROWS, CLASSES, generator=draw) + torch.eye(CLASSES)[target], target
    if kind == "multilabel":
        target = torch.randint(2, (ROWS, CLASSES), generator=draw)
        return torch.randn(ROWS, CLASSES, generator=draw) + target - 0.5, target
    if kind == "ordinal":
        target = torch.randint(CLASSES, (ROWS,), generator=draw)
        step = torch.randint(-1, 2, (ROWS,), generator=draw)
        return (target + step).clamp(0, CLASSES - 1), target
    target = torch.randint(12, (ROWS,), generator=draw).double()  # with ties
    return target + 3 * torch.randn(ROWS, generator=draw).double().round(), target


def sample_of(name: str) -> tuple[Tensor, Tensor]:
    answer, target = sample(METRICS[name].family)
    return (answer[:, :2], target % 2) if METRICS[name].two_classes else (answer, target)


def f1(answer: Tensor, target: Tensor, average: str, weights: Any) -> float:
    undefined = 1.0 if average == "samples" else float("nan")
    options: Any = {"average": average, "sample_weight": weights, "zero_division": undefined}
    return float(reference.f1_score(target, answer, **options))


# metric -> the same by scikit-learn, of answers, labels and weights
BY_SKLEARN: dict[str, Callable[[Tensor, Tensor, Any], float]] = {
    "classification.accuracy": lambda x, y, w: reference.accuracy_score(
        y, x.argmax(1), sample_weight=w
    ),
    "classification.macro_f1": lambda x, y, w: f1(x.argmax(1), y, "macro", w),
    "classification.sensitivity": lambda x, y, w: reference.recall_score(
        y, x.argmax(1), sample_weight=w
    ),
    "classification.specificity": lambda x, y, w: reference.recall_score(
        y, x.argmax(1), pos_label=0, sample_weight=w
    ),
    "classification.auroc": lambda x, y, w: reference.roc_auc_score(
        y, x.softmax(1), multi_class="ovr", sample_weight=w
    ),
    "classification.average_precision": lambda x, y, w: reference.average_precision_score(
        y, x.softmax(1), sample_weight=w
    ),
    "multilabel.sample_f1": lambda x, y, w: f1(x > 0, y, "samples", w),
    "multilabel.macro_f1": lambda x, y, w: f1(x > 0, y, "macro", w),
    "multilabel.map": lambda x, y, w: reference.average_precision_score(y, x, sample_weight=w),
    "multilabel.auroc": lambda x, y, w: reference.roc_auc_score(y, x, sample_weight=w),
    "regression.mae": lambda x, y, w: reference.mean_absolute_error(y, x, sample_weight=w),
    "regression.rmse": lambda x, y, w: reference.root_mean_squared_error(y, x, sample_weight=w),
    "regression.r2": lambda x, y, w: reference.r2_score(y, x, sample_weight=w),
    "ordinal.mae": lambda x, y, w: reference.mean_absolute_error(y, x, sample_weight=w),
    "ordinal.accuracy": lambda x, y, w: reference.accuracy_score(y, x, sample_weight=w),
    "ordinal.kappa": lambda x, y, w: reference.cohen_kappa_score(
        x, y, weights="quadratic", sample_weight=w
    ),
}
NOT_IN_SKLEARN = {"regression.spearman"}  # rows listed twice stand for it


def test_every_built_in_metric_has_a_reference() -> None:
    built_in = {name for name in METRICS if METRICS[name].cls.__module__.startswith("fusionzoo")}
    assert built_in == BY_SKLEARN.keys() | NOT_IN_SKLEARN


@pytest.mark.parametrize("name", BY_SKLEARN)
def test_a_metric_is_sklearns_with_and_without_sample_weight(name: str) -> None:
    answer, target = sample_of(name)
    plain = float(METRICS[name].cls(answer, target))
    assert plain == pytest.approx(BY_SKLEARN[name](answer, target, None), abs=1e-6)
    weights = torch.rand(ROWS, generator=torch.Generator().manual_seed(1)).double() + 0.01
    found = float(METRICS[name].cls(answer, target, weights))
    assert found == pytest.approx(BY_SKLEARN[name](answer, target, weights.numpy()), abs=1e-9)
    assert found != pytest.approx(plain, abs=1e-6)


@pytest.mark.parametrize("weights", [None, WHOLE.double()])
@pytest.mark.parametrize("name", [*BY_SKLEARN, *NOT_IN_SKLEARN])
def test_row_scores_average_to_the_metric_and_tell_what_leaving_rows_out_does(
    name: str, weights: Tensor | None
) -> None:
    rows, figure = sample_of(name), METRICS[name].cls
    assert METRICS[name].has_slope
    slopes, jackknife = (row_scores(figure, rows, weights, x) for x in (True, False))
    for scores in (slopes, jackknife):
        expected = float(figure(*rows) if weights is None else figure(*rows, weights))
        assert np.average(scores, weights=weights) == pytest.approx(expected, abs=1e-6)
    errors = [by_group(x[None].numpy(), weights=WHOLE.numpy()).std() for x in (slopes, jackknife)]
    assert errors[0] == pytest.approx(errors[1], rel=0.1)
    assert np.corrcoef(slopes, jackknife)[0, 1] > 0.98


def test_the_variance_of_the_row_scores_of_auroc_is_delongs() -> None:
    draw = torch.Generator().manual_seed(0)
    target = (torch.arange(60) % 3 == 0).long()
    pair = torch.randn(2, 60, generator=draw).double() + target
    pair[0] = pair[0].round()  # ties
    truth, components, scores = target.bool(), [], []
    for margin in pair:
        ahead = margin[truth][:, None] - margin[~truth]
        order = (ahead > 0) + 0.5 * (ahead == 0)  # (positive, negative)
        components.append((order.mean(1), order.mean(0)))
        logits = torch.stack([torch.zeros(60).double(), margin], 1)
        scores.append(row_scores(METRICS["classification.auroc"].cls, (logits, target), None, True))
        assert scores[-1].mean().item() == pytest.approx(roc_auc_score(target, margin))
    sides = [(x - y).var(correction=0) / len(x) for x, y in zip(*components, strict=True)]
    variance = (scores[0] - scores[1]).var(correction=0) / 60
    assert variance.item() == pytest.approx(sum(sides).item())  # type: ignore[union-attr]


def test_a_metric_without_slope_leaves_out_2000_rows_at_most_and_a_constant_moves_no_row() -> None:
    rows = torch.randn(2001, 2), torch.arange(2001) % 2
    with pytest.raises(FusionZooError, match=r"2,001 samples.* allows 2,000: compute it by torch"):
        row_scores(lambda x, y: 0.5, rows, None, False)
    still = row_scores(METRICS["regression.r2"].cls, (torch.rand(4), torch.ones(4)), None, True)
    assert still.tolist() == [0, 0, 0, 0]
    exact = torch.arange(4.0)
    scores = row_scores(METRICS["regression.rmse"].cls, (exact, exact), None, True)
    assert scores.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("name", [*BY_SKLEARN, *NOT_IN_SKLEARN])
def test_a_weight_of_2_is_a_row_listed_twice(name: str) -> None:
    answer, target = sample_of(name)
    twice = torch.arange(ROWS).repeat_interleave(WHOLE.long())
    found = float(METRICS[name].cls(answer, target, WHOLE.double()))
    listed = float(METRICS[name].cls(answer[twice], target[twice]))
    assert found == pytest.approx(listed, abs=1e-7)


def test_a_row_of_weight_0_is_left_out_of_all_figures() -> None:
    tasks, (logits, target) = plain_tasks(), sample("classification")
    target[:5] = 3
    weights = torch.where((torch.arange(ROWS) < 5) | (target == 3), 0, WHOLE)  # a class is gone
    logits[0] = torch.nan
    counts = weights > 0
    found = tasks.metrics(logits, target, weights)
    assert found == tasks.metrics(logits[counts], target[counts], weights[counts])
    with pytest.raises(FusionZooError, match="all weights of these samples are 0"):
        tasks.metrics(logits, target, torch.zeros(ROWS))


def test_the_loss_of_every_objective_is_the_weighted_mean() -> None:
    draw = torch.Generator().manual_seed(0)
    for name, target, labels in (
        ("multilabel", AnyOf("a", tuple("xyz")), torch.randint(2, (ROWS, 3), generator=draw)),
        ("classification", OneOf("a", tuple("xyz")), torch.randint(3, (ROWS, 1), generator=draw)),
    ):
        tasks = Tasks([OBJECTIVES.create(name, target, labels.float())])
        logits = torch.randn(ROWS, 3, generator=draw)
        wanted = np.average(tasks.criterion(logits, labels.float()), weights=WHOLE)
        loss = tasks.metrics(logits, labels.float(), WHOLE)["loss"]
        assert loss == pytest.approx(wanted, abs=1e-6)


def test_a_metric_without_weights_is_refused_before_it_could_ignore_them() -> None:
    tasks = plain_tasks()
    tasks.check_weights()
    try:

        @metric("classification")
        def unweighable(logits: Tensor, target: Tensor) -> float:
            return 0.0

        assert metrics_of("classification")[-1].key == "unweighable"
        with pytest.raises(FusionZooError, match=r"'classification.unweighable' has no parameter"):
            tasks.check_weights()
    finally:
        del METRICS._entries["classification.unweighable"]


def test_calibration_figures_are_those_of_rows_listed_twice() -> None:
    logits, target = sample("classification")
    twice = torch.arange(ROWS).repeat_interleave(WHOLE.long())
    found, wanted = calibration(logits, target, WHOLE), calibration(logits[twice], target[twice])
    assert found == pytest.approx(wanted, abs=1e-6)
    nll = reference.log_loss(target, logits.double().softmax(1), sample_weight=WHOLE)
    assert found["nll"] == pytest.approx(nll, abs=1e-6)
    labels, kind = target[:, None].double(), OneOf("a", tuple("wxyz"))
    pairs = [
        (f(kind, logits.double(), labels, WHOLE), f(kind, logits[twice].double(), labels[twice]))
        for f in (log_loss, expected_error, fit_temperature)
    ]
    for weighed, listed in pairs:
        assert weighed == pytest.approx(listed, abs=1e-5)
    several, truth = sample("multilabel")
    limits = best_thresholds(several.double(), truth, WHOLE.double())
    assert torch.equal(limits, best_thresholds(several[twice].double(), truth[twice]))


def test_a_calibration_by_weights_covers_as_that_of_rows_listed_twice() -> None:
    (logits, target), kind = sample("classification"), OneOf("a", tuple("wxyz"))
    twice = torch.arange(ROWS).repeat_interleave(WHOLE.long())
    by_weight = calibrate([kind], logits, target, "temperature", WHOLE)
    by_rows = calibrate([kind], logits[twice], target[twice], "temperature")
    weighed, listed = by_weight.targets["a"], by_rows.targets["a"]
    assert weighed.temperature == pytest.approx(listed.temperature, abs=1e-4)
    # As many scores as samples, each of which stands for the same weight.
    assert len(weighed.scores) == ROWS
    for share in (0.25, 0.5, 0.9):
        ends = [np.quantile(x.scores, share, method="inverted_cdf") for x in (weighed, listed)]
        assert ends[0] == pytest.approx(ends[1], abs=0.05)
    figures = measure_calibration(by_rows, [kind], logits, target, WHOLE)["a"]
    listed_figures = measure_calibration(by_rows, [kind], logits[twice], target[twice])["a"]
    assert figures.pop("samples") == ROWS and listed_figures.pop("samples") == len(twice)
    assert figures == pytest.approx(listed_figures, abs=1e-6)


def test_weighted_scores_and_subgroups_have_the_weighted_mean() -> None:
    draw = np.random.default_rng(0)
    scores, weights = draw.random((2, 50)), draw.random(50)
    found = by_group(scores, weights=weights)
    assert found.mean() == pytest.approx(np.average(scores, axis=1, weights=weights).mean())
    # Shifted scores shift the mean and leave the interval: that of s w / mean(w) would grow.
    (one, _), (other, _) = (crossed(x, weights=weights) for x in (scores, scores + 5))
    assert other.high - other.low == pytest.approx(one.high - one.low)
    assert effective_size(np.array([3.0, 1, 1, 0])) == 2
    scores, weights = np.array([1.0, 0, 1, 1, 0, 1]), np.array([3.0, 1, 1, 1, 1, 2])
    names, clusters = np.array(list("aabbbb")), list("123456")
    groups, _ = compare_subgroups(scores[None], names, clusters, weights=weights)
    assert [group.score.mean for group in groups] == pytest.approx([0.75, 0.8])
    assert groups[0].difference.mean == pytest.approx(-0.05)
