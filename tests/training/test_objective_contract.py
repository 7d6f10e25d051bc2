"""Every registered objective keeps the contract, and its checks catch what commonly goes wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.cli import main
from fusionzoo.evaluation.metrics import Metric, metric
from fusionzoo.targets import KINDS
from fusionzoo.testing.checks import Checks
from fusionzoo.testing.objectives import CHECKS, Subject, subject
from fusionzoo.training.tasks import NO_TARGET, OBJECTIVES, Classification, Regression, Task

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in OBJECTIVES),
    ("classification", {"label_smoothing": 0.1}),
    ("classification", {"gamma": 2.0}),
    ("classification", {"class_weights": "balanced"}),
    ("multilabel", {"pos_weight": "balanced"}),
    ("regression", {"loss": "mae"}),
    ("regression", {"loss": "huber", "delta": 0.5}),
]
# Other settings have another best constant, and weights are compared with the plain loss.
OF_THE_DEFAULTS = ("its_prior_is_the_best_constant", "weights_are_honoured")
CASES = [
    pytest.param(name, settings, check, id="-".join([name, *settings, check]))
    for name, settings in SETTINGS
    for check in CHECKS
    if not (settings and check in OF_THE_DEFAULTS)
]


@pytest.mark.parametrize(("name", "settings", "check"), CASES)
def test_contract(name: str, settings: dict[str, Any], check: str) -> None:
    CHECKS[check](subject(name, settings))


def test_every_kind_of_target_is_tried() -> None:
    assert {OBJECTIVES[name].target for name in OBJECTIVES} == {*KINDS, NO_TARGET}
    assert all(kind.examples for kind in KINDS.values())


class Sound(Task):
    """Cross-entropy of one class; each mutant breaks a line of it."""

    leading, shown = "accuracy", (("accuracy", "accuracy"),)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), target, reduction="none")

    def criterion(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.loss(logits, target if target.ndim == 1 else target[:, 0].long())

    def metrics(self, logits: Tensor, target: Tensor) -> dict[str, float]:
        right = (logits.argmax(-1) == target).double().mean().item()
        return {"accuracy": right, "loss": self.criterion(logits, target).mean().item()}

    def prior(self, labels: Tensor) -> Tensor:
        return torch.bincount(labels, minlength=3) / len(labels)


class MeanOfTheBatch(Sound):
    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), target)


class LossInHalfPrecision(Sound):
    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, reduction="none")


class OnlyIndices(Sound):
    def criterion(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.loss(logits, target.reshape(-1).long().roll(target.ndim - 1))


class CentredByTheBatch(Sound):
    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return super().loss(logits - 0.1 * logits.mean(0) * logits, target)


class LogOfASoftmax(Sound):
    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        chances = logits.float().softmax(-1)
        return -chances.gather(1, target[:, None])[:, 0].log()


class HalfDetached(Sound):
    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        logits = logits.float()
        right = logits.gather(1, target[:, None])[:, 0]
        return logits.detach().logsumexp(-1) - right


class EvenPrior(Sound):
    def prior(self, labels: Tensor) -> Tensor:
        return torch.full((3,), 1 / 3)


class UndefinedForOneRow(Sound):
    def metrics(self, logits: Tensor, target: Tensor) -> dict[str, float]:
        return {**super().metrics(logits, target), "spread": logits[:, 0].std().item()}


class NoLeadingFigure(Sound):
    leading = "macro_f1"


class WrongWayRound(Sound):
    higher = False


class ScoresOfAnotherFigure(Sound):
    def scores(self, logits: Tensor, target: Tensor) -> Tensor:
        return -self.criterion(logits, target).double()


class WeightsIgnored(Classification):
    def criterion(self, logits: Tensor, target: Tensor) -> Tensor:
        weight, self.weight = self.weight, None
        loss = super().criterion(logits, target)
        self.weight = weight
        return loss


class FarFromTheMean(Regression):
    def prior(self, labels: Tensor) -> Tensor:
        return torch.full((1,), 10.0)


CAUGHT_BY: dict[type[Task], str] = {
    MeanOfTheBatch: "its_loss_has_one_value_for_each_row",
    LossInHalfPrecision: "its_loss_has_one_value_for_each_row",
    OnlyIndices: "labels_in_a_column_count_the_same",
    CentredByTheBatch: "a_rows_loss_does_not_depend_on_other_rows",
    LogOfASoftmax: "extreme_logits_give_finite_losses_and_gradients",
    HalfDetached: "its_gradient_is_the_derivative",
    EvenPrior: "its_prior_is_the_best_constant",
    FarFromTheMean: "its_prior_is_the_best_constant",
    UndefinedForOneRow: "its_metrics_are_finite",
    NoLeadingFigure: "its_metrics_are_finite",
    ScoresOfAnotherFigure: "its_scores_average_to_its_metric",
    WrongWayRound: "a_lower_loss_means_a_better_leading_metric",
    WeightsIgnored: "weights_are_honoured",
}


def test_the_sound_one_passes() -> None:
    assert [x for x in CHECKS.run(subject(f"{__file__}:Sound")) if x[1]] == []


@pytest.mark.usefixtures("forget_plugins")
def test_one_compared_by_a_metric_of_which_less_is_better_passes() -> None:
    @metric("classification", higher=False)
    def share_wrong(logits: Tensor, target: Tensor) -> float:
        return (logits.argmax(-1) != target).double().mean().item()

    class Wrong(Classification):
        metric = Metric("share_wrong", "share wrong", False, True)

        def scores(self, logits: Tensor, target: Tensor) -> Tensor:
            return -(logits.argmax(-1) != target).double()

    CHECKS["its_scores_average_to_its_metric"](Subject(Wrong, "classification"))


@pytest.mark.parametrize("mutant", CAUGHT_BY, ids=lambda mutant: mutant.__name__)
def test_the_broken_one_is_caught(mutant: type[Task]) -> None:
    check = CAUGHT_BY[mutant]
    broken = subject(f"{__file__}:{mutant.__name__}")
    assert dict(Checks({check: CHECKS[check]}).run(broken))[check]


def test_every_check_catches_something() -> None:
    assert set(CAUGHT_BY.values()) == set(CHECKS)


def test_the_command_line_says_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "check", "--objective", f"{__file__}:EvenPrior"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  its prior is the best constant\n" in out
    assert "Found: AssertionError: the constant log(prior) has a loss of 1.0986" in out
    assert main(["zoo", "check", "--objective", "regression", "--set", "loss=huber"]) == 0
    assert f"{len(CHECKS)} of {len(CHECKS)} checks passed" in capsys.readouterr().out
    assert main(["zoo", "check", "--objective", "regression", "--set", "delta=0"]) == 2
    assert "delta=0" in capsys.readouterr().err
    assert main(["zoo", "check", "--objective", "fusionzoo.evaluation.metrics:accuracy"]) == 2
    assert "accuracy is no subclass of Task, as an objective is" in capsys.readouterr().err
