"""What is said of a benchmark: comparisons, the verdict, and what summary.json holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusionzoo.evaluation import statistics
from fusionzoo.evaluation.modalities import interactions, shapley

from ..strategies import ALONE
from .controls import controls
from .leaderboard import SIGNIFICANT, outcome
from .results import MAJORITY, Strategy, Summary, best_single, chosen_fusion


def pairwise(strategies: Sequence[Strategy]) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Compare every two; return win/tie/loss of row against column, and the comparisons."""
    pairs = [(i, j) for i in range(len(strategies)) for j in range(i)]
    found = [statistics.compare(strategies[i].right, strategies[j].right) for i, j in pairs]
    corrected = statistics.holm([one.p for one in found])
    matrix = [[""] * len(strategies) for _ in strategies]
    lines = []
    for (i, j), one, p in zip(pairs, found, corrected, strict=True):
        matrix[i][j] = outcome(one.difference, p)
        matrix[j][i] = outcome(-one.difference, p)
        about = {"a": strategies[i].name, "b": strategies[j].name}
        lines.append({**about, **one._asdict(), "p_holm": p})
    return matrix, lines


def tied_with_leader(summary: Summary) -> list[str]:
    """Return the fusions that cannot be told apart from the one that leads, that one first."""
    if not summary.kind("fusion"):
        return []
    leader, *rest = summary.kind("fusion")
    compared = [statistics.compare(leader.right, one.right) for one in rest]
    corrected = statistics.holm([one.p for one in compared])
    ties = [o.name for o, p in zip(rest, corrected, strict=True) if p >= SIGNIFICANT]
    return [leader.name, *ties]


def figures(summary: Summary) -> dict[str, Any]:
    """Return what summary.json holds; nothing in it depends on how fast the machine was."""
    bench = summary.bench
    modalities = list(bench.modalities)
    chosen, best = chosen_fusion(summary), best_single(summary)
    tied = tied_with_leader(summary)
    found: dict[str, Any] = {
        "verdict": verdict(summary, tied),
        "data": {
            "name": bench.cfg.data["name"],
            "modalities": bench.modalities,
            "classes": len(bench.classes),
            "folds": len(bench.folds) if bench.cfg.folds else 0,
            "train": len(bench.folds[0].train),
            "val": len(bench.folds[0].val),
            "test": len(summary.target),
            "missing": {
                name: float((~bench.present[:, column]).double().mean())
                for column, name in enumerate(modalities)
            },
        },
        "mode": bench.cfg.mode,
        "seeds": bench.cfg.seeds,
        "tuning_trials": bench.cfg.tune,
        "notes": bench.notes,
        "failed": summary.failed,
        "leaderboard": summary.leaderboard,
        "controls": controls(summary),
    }
    if chosen is not None and best is not None:
        line = summary.line(chosen.name)
        found |= {
            "chosen_on_validation": chosen.name,
            "best_single": best.name.removeprefix(ALONE),
            "gain": {key: line[f"gain_{key}"] for key in ("difference", "low", "high", "p")},
            "leader": tied[0],
            "cannot_be_told_apart": tied,
        }
        scores = {one.name: one.by_subset(modalities) for one in summary.kind("fusion")}
        found["shapley"] = {name: shapley(own, modalities) for name, own in scores.items()}
        found["interactions"] = {
            name: {"+".join(pair): v for pair, v in interactions(own, modalities).items()}
            for name, own in scores.items()
        }
    return found


def verdict(summary: Summary, tied: Sequence[str]) -> str:
    """Say in words whether fusion helped, who leads the table, and who cannot be told apart."""
    chosen, best = chosen_fusion(summary), best_single(summary)
    if chosen is None or best is None:
        return "No verdict: no fusion or no single modality was trained to the end."
    single = f"{best.name.removeprefix(ALONE)} alone"
    sentences = [_gain(summary, chosen.name, single)]
    if len(summary.kind("fusion")) > 1:
        sentences.append(_outcomes(summary, single))
    sentences += _leader(summary, single, tied)
    if len(chosen.seeds) == 1:
        sentences.append(
            "One seed: the interval is over test samples alone; how much training's luck matters"
            " cannot be said."
        )
    if summary.bench.cfg.folds:
        sentences.append(
            f"The {len(summary.bench.folds)} folds share training data, which the interval does"
            " not know."
        )
    if summary.failed:
        sentences.append(f"{len(summary.failed)} strategies failed: {', '.join(summary.failed)}.")
    return " ".join(sentences)


def _gain(summary: Summary, name: str, single: str) -> str:
    """Say what the fusion chosen on validation data gained over the best single modality."""
    line = summary.line(name)
    difference, low, high, p = (line[f"gain_{key}"] for key in ("difference", "low", "high", "p"))
    loss, gain = min(100 * max(-low, 0), 100), min(100 * max(high, 0), 100)
    points = f"{100 * difference:+.1f} points (95 % interval {100 * low:+.1f} to {100 * high:+.1f})"
    chance = "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
    by = f"(`{name}`, chosen on validation data)"
    return {
        "win": f"Fusion helps: {points} over {single}, {chance} {by}.",
        "loss": f"Fusion hurts: {points} against {single}, {chance} {by}.",
        "tie": (
            f"Fusion shows no difference: {points} against {single}, {chance} {by}; the interval"
            f" leaves room for a loss of {loss:.1f} and a gain of {gain:.1f} points."
        ),
    }[outcome(difference, p)]


def _outcomes(summary: Summary, single: str) -> str:
    """Count the fusions that beat the best single modality, that lose to it, and the others."""
    outcomes = [line["outcome"] for line in summary.leaderboard if "outcome" in line]
    wins, ties, losses = (outcomes.count(x) for x in ("win", "tie", "loss"))
    parts = [f"{wins or 'none'} {'beat' if wins > 1 else 'beats'} {single}"]
    if losses:
        parts.append(f"{losses} {'lose' if losses > 1 else 'loses'} to it")
    if ties:
        parts.append(f"{ties} cannot be told apart from it")
    counts = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return f"Of {len(outcomes)} fusions {counts} (Holm-corrected)."


def _leader(summary: Summary, single: str, tied: Sequence[str]) -> list[str]:
    """Say who leads the whole table, baselines too, and which fusions come close."""
    leader, top = summary.line(tied[0]), summary.leaderboard[0]
    several = len(summary.kind("fusion")) > 1
    name, accuracy = f"`{tied[0]}`", leader["accuracy"]
    if top["accuracy"] > accuracy + 1e-9:
        first = f"the baseline `{top['strategy']}`"
        if top["family"] == "single":
            first = f"{top['strategy'].removeprefix(ALONE)} alone"
        words = f"In the table {first} leads with {top['accuracy']:.3f}, above every fusion"
        words += f"; the best of them is {name} with {accuracy:.3f}."
    elif abs(accuracy - _best_single_accuracy(summary)) < 1e-9:
        words = f"In the table {name} and {single} lead with {accuracy:.3f}."
    else:
        words = f"In the table {name} leads with {accuracy:.3f}"
        words += f"; it cannot be told apart from {single}." if leader["outcome"] == "tie" else "."
    sentences = [words]
    if several:
        others = f"{len(tied) - 1} other fusion{'s' if len(tied) > 2 else ''}"
        sentences.append(
            f"{others} cannot be told apart from {name}."
            if len(tied) > 1
            else f"Every other fusion scores significantly below {name} (Holm-corrected)."
        )
    majority = [line for line in summary.leaderboard if line["strategy"] == MAJORITY]
    if majority and majority[0]["accuracy"] > accuracy + 1e-9:
        share = majority[0]["accuracy"]
        sentences.append(f"Not even the majority class ({share:.3f}) is reached by a fusion.")
    return sentences


def _best_single_accuracy(summary: Summary) -> float:
    return max(line["accuracy"] for line in summary.leaderboard if line["family"] == "single")
