"""The words of a report agree with its table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fusionzoo.benchmark.report.page import page
from fusionzoo.benchmark.report.results import Summary, Validation, choose
from fusionzoo.benchmark.report.summary import controls
from fusionzoo.benchmark.report.verdict import figures, tied_with_leader, verdict
from fusionzoo.html.template import code
from helpers.planted import ITEMS, TARGET, candidate, summary


def words(whole: Summary) -> str:
    first, behind = verdict(whole, tied_with_leader(whole))
    return " ".join([first, *behind])


AUDIO = ("alone:audio", [0.6, 0.6])
VERDICTS: dict[str, tuple[list[Any], str, list[str], list[str]]] = {  # start, held, not held
    "a clear gain is a win": (
        [("gmu", [0.8, 0.81, 0.8]), ("alone:audio", [0.6] * 3)],
        "Fusion helps: +20.3 points (95 % interval +",
        *(["In the table `gmu` leads with 0.803."], []),
    ),
    "a clear loss is a loss": (
        [
            *(("gmu", [0.52, 0.51, 0.52]), ("sum", [0.4, 0.4, 0.41])),
            *(("alone:audio", [0.62, 0.62, 0.61]), ("alone:image", [0.30, 0.31, 0.30])),
        ],
        "Fusion hurts: -10.0 points (95 % interval -",
        [
            "Of 2 fusions none beats audio alone and 2 lose to it",
            "In the table audio alone leads with 0.617, above every fusion",
            "the best of them is `gmu` with 0.517",
            "Every other fusion scores significantly below `gmu`",
        ],
        ["A tie", "`gmu` leads"],
    ),
    "a loss that cannot be shown has a width": (  # 10 points below, but the two seeds differ by 30
        [("gmu", [0.65, 0.35], 60), ("sum", [0.3, 0.3], 90), AUDIO],
        "Fusion shows no difference: -10.0 points (95 % interval -",
        [
            "leaves room for a loss of 100.0 and a gain of 100.0 points",  # two seeds
            "In the table audio alone leads with 0.600, above every fusion",
        ],
        ["tie"],
    ),
    "a small gain leads but ties with the single": (
        [("gmu", [0.62, 0.61], 40), AUDIO],
        "Fusion shows no difference: +1.5 points (95 % interval -",
        ["a gain of", "`gmu` leads with 0.615; it cannot be told apart from audio alone."],
        [],
    ),
    "fusions that tie with the leader are counted": (
        [
            *(("gmu", [0.8, 0.8, 0.8]), ("sum", [0.795, 0.8, 0.8], 3)),
            *(("max", [0.5, 0.5, 0.5]), ("alone:audio", [0.55] * 3)),
        ],
        "Fusion helps",
        [
            "Of 3 fusions 2 beat audio alone and 1 loses to it (Holm-corrected)",
            "1 other fusion cannot be told apart from `gmu`",
        ],
        ["ahead of every other"],
    ),
    "a baseline above every fusion leads": (
        [("gmu", [0.7, 0.7]), AUDIO, ("mean of single modalities", [0.75, 0.75])],
        "Fusion helps",
        [
            "In the table the baseline `mean of single modalities` leads with 0.750",
            "the best of them is `gmu` with 0.700",
        ],
        [],
    ),
    "the majority class may beat every fusion": (
        [("gmu", [0.2, 0.2]), AUDIO, ("majority class", [0.3, 0.3])],
        *("Fusion hurts", ["Every fusion scores below the majority class (0.300)."], []),
    ),
    "equal scores lead together": (
        [("gmu", [0.6, 0.6]), AUDIO],
        "Fusion shows no difference: +0.0 points",
        *(["In the table `gmu` and audio alone lead with 0.600"], []),
    ),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict_says_what_the_table_shows(case: str) -> None:
    candidates, start, held, not_held = VERDICTS[case]
    text = words(summary([candidate(*x[:2], shift=sum(x[2:])) for x in candidates]))
    assert text.startswith(start)
    assert [x for x in held if x not in text] == [] == [x for x in not_held if x in text]


def test_the_verdict_states_how_one_seed_and_folds_limit_the_interval() -> None:
    candidates = [candidate("gmu", [0.8]), candidate("alone:audio", [0.6])]
    one_seed = words(summary(candidates))
    assert "One seed: the interval covers test samples only" in one_seed
    assert "folds" not in one_seed
    assert "Every sample was tested once in 4 folds" in words(summary(candidates, folds=4))


@pytest.mark.parametrize(
    ("accuracies", "share"), [([0.8, 0.7], 12), ([0.8, 0.8, 0.7], 9), ([0.8] * 3, 0), ([0.8], 0)]
)
def test_the_verdict_warns_of_few_seeds_that_vary(accuracies: list[float], share: int) -> None:
    single = candidate("alone:audio", [0.6] * len(accuracies))
    text = words(summary([candidate("gmu", accuracies), single]))
    assert ("seeds, which vary: p < 0.05 may" in text) == bool(share)
    assert f"may come out for {share} % of" in text or not share


@pytest.mark.parametrize(("largest", "others"), [(120, 2), (40, 40), (1, 1)])
def test_the_verdict_warns_of_a_group_that_has_a_large_part_of_the_tests(
    largest: int, others: int
) -> None:
    whole = summary([candidate("gmu", [0.8, 0.8]), candidate("alone:audio", [0.6, 0.6])])
    groups = ["large"] * largest + [str(k // others) for k in range(ITEMS - largest)]
    text = words(replace(whole, bench=replace(whole.bench, groups=tuple(groups))))
    warning = "One of 41 groups has 60% of the tests: intervals rest on as much as 3 groups"
    assert (warning in text) == ("One of" in text) == (largest == 120)


def test_folds_whose_training_data_overlaps_widen_the_interval() -> None:
    candidates = [candidate("gmu", [0.8, 0.7]), candidate("alone:audio", [0.6, 0.6])]
    one, four = (summary(candidates, folds=count).line("gmu") for count in (1, 4))
    assert one["gain_difference"] == four["gain_difference"]
    widths = [line["gain_high"] - line["gain_low"] for line in (one, four)]
    assert widths[1] == pytest.approx(widths[0] * (4 / 3) ** 0.5)


# ---- the choice in each fold


def chosen_apart() -> Summary:
    """Four folds: `gmu` is chosen in three of them, `sum`, which is worse there, in the last."""
    gmu, sums = candidate("gmu", [0.8, 0.8]), candidate("sum", [0.6, 0.6], shift=90)
    gmu.validation = [Validation(0.9, 1.0)] * 3 + [Validation(0.1, 1.0)]
    sums.validation = [Validation(0.5, 1.0)] * 4
    return summary([gmu, sums, candidate("alone:audio", [0.5, 0.5], shift=30)], folds=4)


def test_the_verdict_is_about_the_fusion_that_each_fold_chose() -> None:
    whole = chosen_apart()
    content = figures(whole)
    assert content["chosen_by_fold"] == ["gmu", "gmu", "gmu", "sum"]
    assert content["chosen_on_validation"] == "gmu"  # the name that a reader is told to train
    gmu, sums, single = (whole.candidate(x).scores for x in ("gmu", "sum", "alone:audio"))
    mixed = np.concatenate([gmu[:, :150], sums[:, 150:]], 1)
    assert content["gain"]["difference"] == pytest.approx((mixed - single).mean())
    text = content["verdict"]
    assert "(chosen in each of 4 folds on its validation data: `gmu` in 3, `sum` in 1)" in text
    assert "The one to train is `gmu`, chosen most often." in text
    html = page(whole, content)
    assert "fusion gmu, gmu, gmu, sum; single modality alone:audio, alone:audio" in html


def test_one_choice_in_all_folds_is_named_once() -> None:
    whole = chosen_apart()
    whole.candidate("gmu").validation[3] = Validation(0.9, 1.0)
    text = words(whole)
    assert "(`gmu`, chosen on validation data in each of 4 folds)" in text
    assert "The one to train" not in text


def test_among_equally_frequent_choices_the_best_on_all_validation_data_is_named() -> None:
    whole = chosen_apart()
    whole.candidate("gmu").validation[2] = Validation(0.0, 1.0)
    text = words(whole)
    assert "The one to train is `sum`, of those the best on all validation data." in text


def test_a_choice_in_each_fold_is_not_optimistic_though_folds_share_samples() -> None:
    # Ten candidates that guess; each fold validates on the samples that the next one tests.
    draw = np.random.default_rng(0)
    whole, in_folds, over_all = chosen_apart(), [], []
    for _ in range(100):
        candidates = []
        for number in range(10):
            results = candidate(f"fusion{number}", [0.5])
            results.scores = draw.integers(0, 2, (1, ITEMS)).astype(float)
            means = results.scores.reshape(4, -1).mean(1)
            results.validation = [Validation(float(x), 0.0) for x in np.roll(means, -1)]
            candidates.append(results)
        in_folds.append(choose(whole, candidates, "").results.scores.mean())
        over_all.append(max(candidates, key=lambda x: x.val_score).scores.mean())
    assert np.mean(over_all) > 0.54
    assert np.mean(in_folds) == pytest.approx(0.5, abs=0.01)


def test_candidates_with_different_seeds_are_compared_on_those_that_both_have() -> None:
    gmu, single = candidate("gmu", [0.9, 0.7, 0.7]), candidate("alone:audio", [0.6])
    whole = summary([gmu, candidate("sum", [0.5, 0.5]), single], folds=4)
    assert whole.line("gmu")["gain_difference"] == pytest.approx(0.3)
    assert whole.line("gmu")["accuracy"] == pytest.approx(0.7667, abs=1e-3)
    whole.candidate("gmu").validation[3] = Validation(0.0, 1.0)
    choice = choose(whole, whole.of_kind("fusion"), "")
    assert choice.by_fold == ["gmu", "gmu", "gmu", "sum"] and choice.results.seeds == [0, 1]
    assert figures(whole)["verdict"].startswith("Fusion helps")


# ---- controls


def predictions(correct: float, target: torch.Tensor = TARGET) -> torch.Tensor:
    """Predictions of which this share is correct, spread evenly over the classes; the others are
    off by 1, 2, ... classes in turn."""
    classes = int(target.max()) + 1
    wrong = (target + 1 + torch.arange(len(target)) // classes % (classes - 1)) % classes
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(0))
    return torch.where(order < correct * len(target), target, wrong)


def judge(predicted: dict[str, torch.Tensor], target: torch.Tensor = TARGET) -> dict[str, object]:
    accuracies = {"alone:audio": [0.6], "gmu": [0.7]}
    whole = summary([candidate(name, x) for name, x in accuracies.items()], controls=predicted)
    whole.target = target
    return controls(whole)


def test_controls_at_chance_show_no_leak_and_say_what_chance_allows() -> None:
    result = judge({name: predictions(x) for name, x in (("a", 0.23), ("b", 0.25), ("c", 0.28))})
    assert not result["above_chance"]
    assert "reach 0.253 on average (0.230 to 0.280)" in str(result["words"])
    assert "None exceeds it: no sign of a leak." in str(result["words"])


@pytest.mark.parametrize("names", ["a", "ab", "abcdef"])
def test_a_control_that_follows_every_class_is_a_leak_however_many_others_do_not(
    names: str,
) -> None:
    ten = torch.arange(ITEMS) % 10
    predicted = {name: predictions(0.1, ten) for name in names} | {"gmu": predictions(0.5, ten)}
    result = judge(predicted, ten)
    assert result["above_chance"]
    assert "SOMETHING LEAKS: `gmu` (0.500)" in str(result["words"])
    assert "no sign" not in str(result["words"])


def test_a_control_far_above_chance_is_never_called_clean() -> None:
    # Two of four classes are predicted without an error, the others never: a lucky shuffle of
    # classes that form clusters does that as well as a leak.
    lucky = torch.where(TARGET < 2, TARGET, 5 - TARGET)
    result = judge({"gmu": lucky, "a": predictions(0.25)})
    assert result["beyond_noise"] == ["gmu"]
    assert "`gmu` (0.500) exceeds it" in str(result["words"])
    assert "leak" in str(result["words"])
    assert "no sign of a leak" not in str(result["words"])


def test_controls_that_are_all_a_little_above_chance_are_a_leak_on_average() -> None:
    result = judge({name: predictions(0.28 + 0.005 * k) for k, name in enumerate("abcdef")})
    assert result["beyond_noise"] == []
    assert result["above_chance"]
    assert "ABOVE CHANCE ON AVERAGE" in str(result["words"])


def test_the_report_states_that_no_controls_were_run() -> None:
    assert judge({})["words"] == "The control with shuffled labels was not run."


# ---- HTML


def test_html_shows_names_as_code_and_escapes_the_rest() -> None:
    assert code("`gmu` <0.001") == "<code>gmu</code> &lt;0.001"
