"""Whether a comparison can be relied on: questions, answered from the figures of a run.

They are those of the reliability checklist of "Fusion or Confusion?" (2025, arXiv:2512.22991), and
what else a reader of this report should know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..bench import metric_named
from ..candidates import ALONE, EVERYTHING

ENOUGH_SEEDS = 3
Figures = Mapping[str, Any]


class Line(NamedTuple):
    """A question, whether the run can say yes to it, and why."""

    question: str
    met: bool
    evidence: str


def checklist(figures: Figures) -> list[Line]:
    """Answer the questions from the contents of summary.json."""
    return [*_equal_terms(figures), *_statistics(figures), *_data(figures), *_whole(figures)]


def _equal_terms(figures: Figures) -> Iterator[Line]:
    fusions = [line for line in figures["leaderboard"] if line["kind"] == "fusion"]
    heads = [x for x in figures["leaderboard"] if x["candidate"].startswith(ALONE)]
    trained = [*fusions, *heads]
    counted = f"{len(fusions)} fusions and {len(heads)} single modalities"
    trials = figures["tuning_trials"]
    untuned = [line["candidate"] for line in trained if not line.get("tuned_settings")]
    if not trials:
        evidence = "nothing is tuned: default settings for all"
    elif untuned:
        evidence = f"not tuned yet: {_names(untuned)}"
    else:
        evidence = f"{trials} trials on validation data for each of {counted}"
    question = "Are single modalities tuned as fusions are?"
    yield Line(question, bool(trials) and not untuned and bool(heads), evidence)
    seeds = sorted({line["seeds"] for line in trained})
    shown = f"{' or '.join(map(str, seeds))} seed{'' if seeds == [1] else 's'}"
    shown += f" and {trials or 'no'} trials"
    met = len(seeds) == 1 and (not trials or not untuned)
    evidence = f"{counted}: {shown} each, and the best epoch by validation"
    yield Line("Has every candidate the same budget?", met, evidence)
    others = [x["candidate"] for x in figures["leaderboard"] if x["candidate"] in EVERYTHING]
    evidence = _names(others) if others else "`--baselines all` adds them"
    yield Line("Are there simple rivals on all features?", bool(others), evidence)


def _statistics(figures: Figures) -> Iterator[Line]:
    seeds, metric = figures["seeds"], metric_named(figures["metric"])
    evidence = "intervals cover the variation between trainings"
    if seeds < ENOUGH_SEEDS:
        evidence = "too few to tell how much trainings vary"
    yield Line("Several seeds?", seeds >= ENOUGH_SEEDS, f"{seeds}: {evidence}")
    gain = figures.get("gain")
    if gain is None:
        yield Line("Is the gain tested?", False, "there is no single modality to compare with")
    else:
        mean, low, high = (metric.difference(gain[x]) for x in ("difference", "low", "high"))
        fusions = sum(line["kind"] == "fusion" for line in figures["leaderboard"])
        evidence = f"{mean} (95 % interval {low} to {high}), p = {gain['p']:.3f}; outcomes of"
        evidence += f" {fusions} fusions are corrected by Holm's method"
        yield Line("Is the gain tested?", True, evidence)
    chosen = figures.get("chosen_by_fold", ())
    evidence = f"on validation data, in each of {len(chosen)} splits" if chosen else "no fusion"
    if gain is not None:
        evidence += "; the single modality is the best on test data, which favours it"
    yield Line("Is the fusion chosen without test data?", bool(chosen), evidence)
    controls = figures.get("controls") or {}
    evidence = controls.get("words", "not run: `--controls true`")
    met = bool(controls) and not controls.get("above_chance")
    yield Line("Does training on shuffled labels stay at chance?", met, evidence)


def _data(figures: Figures) -> Iterator[Line]:
    missing = {name: share for name, share in figures["data"]["missing"].items() if share}
    shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in missing.items())
    question = "Are gains by coverage and by fusion told apart?"
    if not missing:
        yield Line(question, True, "no sample lacks a modality")
    else:
        met = figures.get("coverage") is not None
        evidence = f"missing: {shares}" + ("; the report has both parts" if met else "")
        yield Line(question, met, evidence)
    evidence = "not looked for by this command: `fusionzoo data check` does"
    yield Line("Were duplicates between splits looked for?", False, evidence)


def _whole(figures: Figures) -> Iterator[Line]:
    lacking = {**figures["failed"], **figures.get("not_run", {})}
    evidence = f"without result: {_names(lacking)}" if lacking else "all candidates have a result"
    stopped = figures.get("stopped")
    if stopped:
        evidence += f"; {stopped}"
    yield Line("Is everything reported that was tried?", not lacking and not stopped, evidence)
    evidence = "one: `--combine` ranks fusions over the reports of several"
    yield Line("More than one data set?", False, evidence)


def _names(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)
