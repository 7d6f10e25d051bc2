"""Figures by task, against closed cases."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score, recall_score, roc_auc_score

from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.metrics import (
    METRICS,
    closeness,
    figures,
    metric,
    multilabel_scores,
    right,
)

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
