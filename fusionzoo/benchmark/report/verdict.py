"""Comparisons between candidates, the verdict in words, and the contents of summary.json."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from fusionzoo.datasets.opening.naming import data_title
from fusionzoo.datasets.tables.table import word_list
from fusionzoo.evaluation import statistics
from fusionzoo.evaluation.measure import WEIGHTED_BY
from fusionzoo.evaluation.metrics import Metric
from fusionzoo.evaluation.shapley import interactions, shapley
from fusionzoo.evaluation.statistics import Comparison

from ..candidates import (
    EVERYTHING,
    HEADS,
    baseline_words,
    is_fitted,
    parse,
    single_modality,
    single_title,
)
from ..examine import tests_damage_later
from ..schedule import DAMAGED, Stage
from .leaderboard import EXTERNAL, SIGNIFICANT, outcome
from .results import (
    BEST_PRESENT,
    MAJORITY,
    MEAN_PRESENT,
    PRIOR,
    PRODUCT_PRESENT,
    CandidateResults,
    Choice,
    Summary,
    best_single,
    choose,
    chosen_fusion,
)
from .summary import controls

FEWEST_SAMPLES = 10  # for an interval
FALSE_OF_FEW = {2: 12, 3: 9}  # seeds: % of equal pairs, on 100 samples, with p < 0.05, at most
LARGE_SHARE = 0.2  # of the tests, of one group
GAIN = ("difference", "low", "high", "p")  # of a comparison


def pairwise(
    summary: Summary, candidates: Sequence[CandidateResults]
) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Compare all pairs; return win/tie/loss of row against column, and the comparisons."""
    pairs = [(i, j) for i in range(len(candidates)) for j in range(i)]
    comparisons = [summary.compare(candidates[i], candidates[j]) for i, j in pairs]
    corrected = statistics.holm([comparison.p for comparison in comparisons])
    matrix = [[""] * len(candidates) for _ in candidates]
    lines = []
    for (i, j), comparison, p in zip(pairs, comparisons, corrected, strict=True):
        matrix[i][j] = outcome(comparison.difference, p)
        matrix[j][i] = outcome(-comparison.difference, p)
        names = {"a": candidates[i].name, "b": candidates[j].name}
        lines.append({**names, **comparison._asdict(), "p_holm": p})
    return matrix, lines


def tied_with_leader(summary: Summary) -> list[str]:
    """Return the best fusion and those that cannot be told apart from it."""
    if not summary.of_kind("fusion"):
        return []
    leader, *others = summary.of_kind("fusion")
    comparisons = [summary.compare(leader, other) for other in others]
    corrected = statistics.holm([comparison.p for comparison in comparisons])
    ties = [other.name for other, p in zip(others, corrected, strict=True) if p >= SIGNIFICANT]
    return [leader.name, *ties]


def figures(summary: Summary) -> dict[str, Any]:
    """Return the contents of summary.json; nothing in it depends on the machine's speed."""
    bench = summary.bench
    tied = tied_with_leader(summary)
    words, behind = verdict(summary, tied)
    return {
        "verdict": words,
        "behind": behind,
        "data": _data_figures(summary),
        "mode": bench.cfg.mode,
        "seeds": bench.cfg.seeds,
        "metric": bench.metric.name,
        "tuning_trials": bench.cfg.tune,
        "refit": bench.cfg.refit,
        "protocol": bench.protocol,
        **({} if bench.weighted_by is None else {WEIGHTED_BY: bench.weighted_by}),
        "notes": bench.notes,
        "failed": summary.failed,
        "not_run": dict(bench.not_run),
        "leaderboard": summary.leaderboard,
        "external": _external_figures(summary),
        "controls": controls(summary),
        **_fusion_figures(summary, tied),
    }


def provisional(summary: Summary, stage: Stage, names: Sequence[str]) -> str:
    """Say that a verdict is provisional: what is done, what is not, what stopped it."""
    cfg = summary.bench.cfg
    seeds = min(len(x.seeds) for x in summary.candidates if x.name in names)
    done = f"every candidate has {seeds} of {cfg.seeds} seed{'s' if cfg.seeds > 1 else ''}"
    if summary.bench.of_folds:
        of = f"{summary.bench.of_folds} {summary.bench.fold_word}s"
        done += f", 1 of {of} ({len(summary.target):,} samples)"
    if (cfg.tune or 0) > 1:
        kinds = ("single", "fusion")
        trained = [x for x in summary.candidates if x.kind in kinds and not is_fitted(x.name)]
        done += f", {len(stage.tuned)} of {len(trained)} are tuned"
    known = {candidate.name for candidate in summary.candidates} | set(summary.failed)
    waiting = [f"`{name}`" for name in names if name not in known]
    if waiting:
        done += f"; not run yet: {', '.join(waiting)}"
    if tests_damage_later(summary.bench) and (stage.stopped or stage.name != DAMAGED):
        done += "; damaged samples are tested last"
    stopped = f"stopped by {stage.stopped}, " if stage.stopped else ""
    return f"PROVISIONAL ({stopped}{done})."


def _external_figures(summary: Summary) -> dict[str, dict[str, Any]]:
    """Return how others' predictions compare with the fusion that validation data chose."""
    fusion = chosen_fusion(summary)
    if fusion is None:
        return {}
    found = {}
    for other in summary.of_kind(EXTERNAL):
        comparison = summary.compare(other, fusion.results)
        words = (
            f"`{other.name}`, others' predictions, against the fusion chosen on validation data:"
            f" {_points(summary.bench.metric, comparison)}, {_chance(comparison.p)}"
        )
        found[other.name] = {"words": words, **_gain_figures(comparison)}
    return found


def _data_figures(summary: Summary) -> dict[str, Any]:
    bench = summary.bench
    return {
        "name": bench.cfg.data["name"],
        "title": data_title(bench.cfg.data),
        "modalities": bench.modalities,
        "classes": len(bench.classes),
        "folds": len(bench.folds) if bench.cross_validated else 0,
        "train": len(bench.folds[0].train),
        "val": len(bench.folds[0].val),
        "test": len(summary.target),
        "tested_samples": int(summary.first_tests.sum()),
        "fold_word": bench.fold_word,
        "missing": {
            name: float((~bench.present[:, column]).double().mean())
            for column, name in enumerate(bench.modalities)
        },
    }


def _fusion_figures(summary: Summary, tied: Sequence[str]) -> dict[str, Any]:
    """Return the gain over the best single modality and what it is made of, that over the models of
    all features, the leader and the modalities' shares; nothing if there is no fusion."""
    chosen, best = chosen_fusion(summary), best_single(summary)
    if chosen is None:
        return {}
    figures: dict[str, Any] = {
        "chosen_on_validation": chosen.name,  # in most folds: the one to train
        "chosen_by_fold": chosen.by_fold,
    }
    if best is not None:
        figures |= {
            "single_by_fold": choose(summary, summary.of_kind("single"), "").by_fold,
            "best_single": single_modality(best.name),
            "best_single_row": best.name,
            "gain": _gain_figures(summary.compare(chosen.results, best)),
        }
        if parts := coverage(summary, chosen, best):
            figures |= {
                "coverage": _gain_figures(parts.coverage),
                "fusion_of_several": {"samples": parts.samples, **_gain_figures(parts.fusion)},
                "presence": _by_presence(summary, chosen, best),
            }
    if compared := _against_everything(summary, chosen):
        everything, gain = compared
        names = {"name": everything.name, "by_fold": everything.by_fold}
        figures["everything"] = names | _gain_figures(gain)
    modalities = list(summary.bench.modalities)
    scores = {
        fusion.name: fusion.score_by_subset(modalities) for fusion in summary.of_kind("fusion")
    }
    return figures | {
        "leader": tied[0],
        "cannot_be_told_apart": tied,
        "shapley": {name: shapley(by_subset, modalities) for name, by_subset in scores.items()},
        "interactions": {
            name: {"+".join(pair): v for pair, v in interactions(by_subset, modalities).items()}
            for name, by_subset in scores.items()
        },
    }


def verdict(summary: Summary, tied: Sequence[str]) -> tuple[str, list[str]]:
    """Say whether fusion helped, also against the models of all features; and the sentences behind
    that: which part is coverage, which candidate leads, which ones tie with it, what was tested."""
    chosen, best = chosen_fusion(summary), best_single(summary)
    wanted = {*baseline_words(summary.bench.cfg)} & {HEADS, "linear"}
    if chosen is None or (best is None and wanted):
        return "No verdict: no fusion or no single modality was trained to the end.", []
    if best is None:
        single, first, sentences = "", _without_singles(summary, chosen), []
    else:
        single = single_title(best.name)
        parts = coverage(summary, chosen, best)
        first = _gain(summary, chosen, best, parts)
        sentences = _coverage_words(summary, best, parts)
        if len(summary.of_kind("fusion")) > 1:
            sentences.append(_outcomes(summary, single))
    sentences += _leader(summary, single, tied)
    sentences += [*_seed_words(chosen.results), *_group_words(summary)]
    if summary.bench.cross_validated:
        sentences.append(_tested(summary))
    if summary.failed:
        sentences.append(f"{len(summary.failed)} candidates failed: {', '.join(summary.failed)}.")
    return " ".join([first, *_everything_words(summary, chosen)]), sentences


def _seed_words(fusion: CandidateResults) -> list[str]:
    """Say what one seed, or a few that vary, leave unknown of training runs."""
    count = len(fusion.seeds)
    if count == 1:
        return [
            "One seed: the interval covers test samples only, not the variation between training"
            " runs."
        ]
    if count not in FALSE_OF_FEW or not np.ptp(fusion.scores, axis=0).any():
        return []
    return [
        f"Only {count} seeds, which vary: p < 0.05 may come out for {FALSE_OF_FEW[count]} % of"
        " equally good pairs, with 5 seeds for 5 %."
    ]


def _group_words(summary: Summary) -> list[str]:
    """Say how few groups the intervals rest on where one has a large part of the samples."""
    if not summary.bench.groups:
        return []
    _, numbers = np.unique(summary.groups, return_inverse=True)
    sizes = np.bincount(numbers, summary.weights).astype(np.float64)
    share, alike = sizes.max() / sizes.sum(), statistics.effective_size(sizes)
    if share < LARGE_SHARE or alike > len(sizes) / 2:
        return []
    return [
        f"One of {len(sizes)} groups has {share:.0%} of the tests: intervals rest on as much as"
        f" {alike} group{'s' * (alike > 1)} of equal size would tell."
    ]


def _tested(summary: Summary) -> str:
    """Say how often samples were tested, and that the interval counts what splits share."""
    if not summary.bench.from_splits:
        return (
            f"Every sample was tested once in {summary.folds} folds; the interval counts that their"
            " training data overlaps."
        )
    tests, samples = len(summary.target), int(summary.first_tests.sum())
    words = f"{samples:,} samples, each tested once; the interval counts"
    if tests > samples:
        words = f"{tests:,} tests of {samples:,} samples; the interval counts a sample once, and"
    protocol = summary.bench.protocol.partition(";")[0]
    return f"Tested on {protocol}: {words} that training data overlaps."


def _without_singles(summary: Summary, chosen: Choice) -> str:
    """Say that no modality alone was trained, and what validation data chose."""
    words = ",".join(word_list(summary.bench.cfg.baselines))
    how = how_chosen(chosen, summary.bench.fold_word)
    return (
        f"No single modality was trained (--baselines {words}), so there is none to compare"
        f" fusion with: `alone` or `linear` there trains them. The fusion is {how}."
    )


class Coverage(NamedTuple):
    """The parts of a gain over one modality where samples lack modalities."""

    coverage: Comparison  # of the best single that is present, over the best single
    fusion: Comparison  # of the fusion over that, on the samples with two modalities or more
    samples: int  # the number of those


def coverage(summary: Summary, choice: Choice, best: CandidateResults) -> Coverage | None:
    """Tell the gain of answering samples that lack a modality from that of fusing several.

    None: no sample lacks any, or too few have two, or none of one of two classes.
    """
    names = [candidate.name for candidate in summary.candidates]
    several = summary.present.sum(1) > 1
    if BEST_PRESENT not in names or several.sum() < FEWEST_SAMPLES:
        return None
    cascade = summary.candidate(BEST_PRESENT)
    fusion = summary.compare(choice.results, cascade, several)
    if math.isnan(fusion.difference):
        return None
    count = int((several & summary.first_tests).sum())
    return Coverage(summary.compare(cascade, best), fusion, count)


def _against_everything(summary: Summary, chosen: Choice) -> tuple[Choice, Comparison] | None:
    """Return the best by validation of the models of all features, and the fusion's gain."""
    fitted = [x for x in summary.candidates if x.name in EVERYTHING]
    if not fitted:
        return None
    everything = choose(summary, fitted, "")
    return everything, summary.compare(chosen.results, everything.results)


def _gain_figures(comparison: Comparison) -> dict[str, float]:
    return {key: getattr(comparison, key) for key in GAIN}


def _everything_words(summary: Summary, chosen: Choice) -> list[str]:
    """Say what the chosen fusion gains over the models that are fitted on everything."""
    compared = _against_everything(summary, chosen)
    if compared is None:
        return []
    everything, gain = compared
    names = " or ".join(f"`{name}`" for name in dict.fromkeys(everything.by_fold))
    return [
        f"Against {names}, chosen likewise: {_points(summary.bench.metric, gain)},"
        f" {_chance(gain.p)}."
    ]


def _by_presence(summary: Summary, choice: Choice, best: CandidateResults) -> list[dict[str, Any]]:
    """Return the figures on the samples with each set of modalities, the most frequent first.

    The gain is that of the fusion over the best single that is present.
    """
    metric, cascade = summary.bench.metric, summary.candidate(BEST_PRESENT)
    means = [x for x in summary.candidates if x.name in (MEAN_PRESENT, PRODUCT_PRESENT)]
    patterns, numbers = np.unique(summary.present, axis=0, return_inverse=True)
    lines = []
    for number, pattern in enumerate(patterns):
        rows = numbers.reshape(-1) == number
        line: dict[str, Any] = {
            "present": "+".join(compress(summary.bench.modalities, pattern)) or "none",
            "samples": int((rows & summary.first_tests).sum()),
        }
        for candidate in (best, cascade, *means, choice.results):
            scores = summary.scores_of(candidate, rows)
            line[candidate.name] = metric.shown(summary.mean(scores, rows))
        counted = rows if summary.weights is None else rows & (summary.weights > 0)
        if counted.sum() >= FEWEST_SAMPLES and not math.isnan(line[cascade.name]):
            gain = summary.compare(choice.results, cascade, rows)
            line |= {"gain": gain.difference, "gain_low": gain.low, "gain_high": gain.high}
        lines.append(line)
    return sorted(lines, key=lambda line: -line["samples"])


def _coverage_words(summary: Summary, best: CandidateResults, parts: Coverage | None) -> list[str]:
    """Say which part of the gain is coverage, and which is fusion."""
    if parts is None:
        return []
    metric = summary.bench.metric
    return [
        f"Some samples lack modalities. Coverage, by `{BEST_PRESENT}`, which fuses nothing:"
        f" {_points(metric, parts.coverage)} against {single_title(best.name)},"
        f" {_chance(parts.coverage.p)}. Fusion, on the {parts.samples:,} samples with two"
        f" modalities or more: {_points(metric, parts.fusion)} against `{BEST_PRESENT}`,"
        f" {_chance(parts.fusion.p)}."
    ]


def _points(metric: Metric, comparison: Comparison) -> str:
    """Write a difference with its interval."""
    difference, low, high = comparison[:3]
    bounds = f"{metric.difference(low)} to {metric.difference(high)}"
    if metric.share:
        return f"{metric.difference(difference)} points (95 % interval {bounds})"
    way = "lower" if (difference < 0) == metric.higher else "higher"
    words = f"{metric.title} {way} by {abs(difference):.3g}"
    return f"{words} (95 % interval of the gain {bounds})"


def _chance(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def _gain(summary: Summary, choice: Choice, best: CandidateResults, parts: Coverage | None) -> str:
    """State the gain of the fusion chosen in each fold over the best single modality."""
    metric, single = summary.bench.metric, single_title(best.name)
    comparison = summary.compare(choice.results, best)
    difference, low, high, p = comparison[:4]
    points, chance = _points(metric, comparison), _chance(p)
    by = f"({how_chosen(choice, summary.bench.fold_word)})"
    most = 1.0 if metric.share else math.inf
    loss, gain = (metric.difference(min(max(x, 0.0), most)).removeprefix("+") for x in (-low, high))
    words = {
        "win": f"{_what_helps(parts)}: {points} over {single}, {chance} {by}.",
        "loss": f"Fusion hurts: {points} against {single}, {chance} {by}.",
        "tie": (
            f"Fusion shows no difference: {points} against {single}, {chance} {by}; the interval"
            f" leaves room for a loss of {loss} and a gain of {gain}{' points' * metric.share}."
        ),
    }[outcome(difference, p)]
    return words + _to_train(choice)


def _what_helps(parts: Coverage | None) -> str:
    """Name what a gain over the best single modality comes from."""
    if parts is None:
        return "Fusion helps"
    covers, fuses = (outcome(x.difference, x.p) for x in (parts.coverage, parts.fusion))
    if fuses == "win":
        return "Fusion helps"
    if covers == "win":
        return f"Coverage helps, fusion {'hurts' if fuses == 'loss' else 'is not shown to'}"
    return "Several modalities help, by coverage or by fusion"


def how_chosen(choice: Choice, fold_word: str) -> str:
    """Name what validation data chose, and in how many folds."""
    folds = f"{len(choice.by_fold)} {fold_word}s"
    if len(choice.counts) == 1:
        several = f" in each of {folds}" * (len(choice.by_fold) > 1)
        return f"`{choice.name}`, chosen on validation data{several}"
    counts = [f"`{name}` in {n}" for name, n in choice.counts.items()]
    return f"chosen in each of {folds} on its validation data: {', '.join(counts)}"


def _to_train(choice: Choice) -> str:
    """Name the one fusion to train where the folds chose several."""
    if len(choice.counts) == 1:
        return ""
    most = [name for name, n in choice.counts.items() if n == max(choice.counts.values())]
    why = "chosen most often" if len(most) == 1 else "of those the best on all validation data"
    return f" The one to train is `{choice.name}`, {why}."


def _outcomes(summary: Summary, single: str) -> str:
    """Count the fusions that beat the best single modality, lose to it or tie with it."""
    outcomes = [line["outcome"] for line in summary.leaderboard if "outcome" in line]
    wins, ties, losses = (outcomes.count(x) for x in ("win", "tie", "loss"))
    parts = [f"{wins or 'none'} {'beat' if wins > 1 else 'beats'} {single}"]
    if losses:
        parts.append(f"{losses} {'lose' if losses > 1 else 'loses'} to it")
    if ties:
        parts.append(f"{ties} cannot be told apart from it")
    counts = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return f"Of {len(outcomes)} {_kinds(summary)} {counts} (Holm-corrected)."


def _kinds(summary: Summary) -> str:
    """Name what is compared: fusions, or fusions under training strategies too."""
    trained = any(parse(fusion.name).balance for fusion in summary.of_kind("fusion"))
    return "fusions and training strategies" if trained else "fusions"


def _leader(summary: Summary, single: str, tied: Sequence[str]) -> list[str]:
    """Name the leader of the whole table, with baselines, and the fusions close to the best one.

    `single` is the best single modality in words, empty if none was trained.
    """
    metric, leader = summary.bench.metric, summary.line(tied[0])
    table = [line for line in summary.leaderboard if line["kind"] != "chosen"]
    several = len(summary.of_kind("fusion")) > 1
    name, top, score = f"`{tied[0]}`", table[0], leader["score"]
    shown = f"{metric.shown(score):.3f}"
    if top["score"] > score + 1e-9:
        first = f"the baseline `{top['candidate']}`"
        if top["family"] == "single":
            first = single_title(top["candidate"])
        words = f"In the table {first} leads with {metric.shown(top['score']):.3f}, above every"
        words += f" fusion; the best of them is {name} with {shown}."
    elif single and abs(score - max(x["score"] for x in table if x["family"] == "single")) < 1e-9:
        words = f"In the table {name} and {single} lead with {shown}."
    else:
        words = f"In the table {name} leads with {shown}"
        ties = leader.get("outcome") == "tie"
        words += f"; it cannot be told apart from {single}." if ties else "."
    sentences = [words]
    if several and len(tied) > 1:
        others = f"{len(tied) - 1} other fusion{'s' if len(tied) > 2 else ''}"
        sentences.append(f"{others} cannot be told apart from {name}.")
    elif several:
        below = f"Every other fusion scores significantly below {name} (Holm-corrected)."
        sentences.append(below)
    for line in table:
        if line["candidate"] in (MAJORITY, PRIOR) and line["score"] > score + 1e-9:
            share = f"{metric.shown(line['score']):.3f}"
            sentences.append(f"Every fusion scores below the {line['candidate']} ({share}).")
    return sentences
