"""Whether a comparison can be relied on: each answer follows from the figures of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fusionzoo.benchmark.report.page import Report

STAMPS = Path(__file__).parents[2] / "results" / "benchmark" / "stamps_seven"


def figures(**changes: Any) -> dict[str, Any]:
    """Return the figures of a tuned benchmark with three seeds on incomplete data, changed."""
    return {**Report.read(STAMPS).figures, **changes}


def answers(of: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    lines = Report(STAMPS, of).checklist
    return {line.question: (line.met, line.evidence) for line in lines}


def test_a_tuned_benchmark_with_seeds_and_controls_meets_what_it_can() -> None:
    found = answers(figures(not_run={}))
    assert {question for question, (met, _) in found.items() if not met} == {
        "Were duplicates between splits looked for?",
        "More than one data set?",
    }
    assert found["Is the gain tested?"][1].startswith("+5.6 (95 % interval +1.8 to +9.3)")
    assert "`kernel sum on everything`" in found["Are there simple rivals on all features?"][1]
    assert "audio 3.1 %" in found["Are gains by coverage and by fusion told apart?"][1]


@pytest.mark.parametrize(
    ("changes", "question", "evidence"),
    [
        ({"tuning_trials": 0}, "Are single modalities tuned as fusions are?", "default settings"),
        ({"seeds": 1}, "Several seeds?", "1: too few"),
        ({"gain": None}, "Is the gain tested?", "no single modality"),
        ({"chosen_by_fold": []}, "Is the fusion chosen without test data?", "no fusion"),
        ({"controls": {}}, "Does training on shuffled labels stay at chance?", "--controls true"),
        ({"coverage": None}, "Are gains by coverage and by fusion told apart?", "missing: text"),
        ({"failed": {"mbt": "no memory"}}, "Is everything reported that was tried?", "`mbt`"),
        ({"stopped": "2 of 9 left"}, "Is everything reported that was tried?", "2 of 9 left"),
    ],
)
def test_what_a_run_lacks_is_a_no_with_its_reason(
    changes: dict[str, Any], question: str, evidence: str
) -> None:
    met, said = answers(figures(**changes))[question]
    assert not met
    assert evidence in said


def test_a_candidate_with_fewer_seeds_or_without_tuning_is_named() -> None:
    changed = figures()
    first = next(x for x in changed["leaderboard"] if x["kind"] == "fusion")
    first |= {"seeds": 1, "tuned_settings": ""}
    found = answers(changed)
    said = f"not tuned yet: `{first['candidate']}`"
    assert found["Are single modalities tuned as fusions are?"] == (False, said)
    assert "1 or 3 seeds" in found["Has every candidate the same budget?"][1]
