"""What is said of a benchmark: comparisons, controls, the verdict, and what summary.json holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..evaluation import statistics
from ..evaluation.modalities import interactions, shapley
from .cells import ALONE
from .leaderboard import SIGNIFICANT, outcome
from .strategies import Strategy, Summary, best_single, chosen_fusion


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


def controls(summary: Summary) -> dict[str, Any]:
    """Judge the controls: labels shuffled in training, each modality's pairing broken in testing.

    With shuffled labels nothing can be learned. Every strategy has a shuffle of its own, so that
    their mean is compared with the test split's most frequent class (one-sided t-test).
    """
    from scipy.stats import ttest_1samp

    counts = torch.bincount(summary.target)
    chance, found = float(counts.max() / counts.sum()), list(summary.controls.values())
    above, words = False, "The control with shuffled labels was not run."
    if found:
        spread = statistics.seed_interval(found)
        if len(found) > 1 and max(found) > min(found):
            above = bool(ttest_1samp(found, chance, alternative="greater").pvalue < SIGNIFICANT)
        words = (
            f"Trained on shuffled labels, {len(found)} strategies reach {spread.mean:.3f} on"
            f" average ({min(found):.3f} to {max(found):.3f}); the test split's most frequent class"
            f" makes {chance:.3f}: {'ABOVE CHANCE, SOMETHING LEAKS' if above else 'nothing leaks'}."
        )
    pairing = {
        one.name: {
            name: one.figure("accuracy")
            - one.figure("accuracy", modality=name, corruption="pairing")
            for name in summary.bench.modalities
        }
        for one in summary.kind("fusion")
    }
    return {
        "words": words,
        "chance": chance,
        "labels_shuffled": summary.controls,
        "above_chance": above,
        "loss_when_pairing_is_broken": pairing,
    }


def verdict(summary: Summary, tied: Sequence[str]) -> str:
    """Say in words whether fusion helped, by how much, and which fusions cannot be told apart."""
    chosen, best = chosen_fusion(summary), best_single(summary)
    if chosen is None or best is None:
        return "No verdict: no fusion or no single modality was trained to the end."
    line = summary.line(chosen.name)
    difference, low, high, p = (line[f"gain_{key}"] for key in ("difference", "low", "high", "p"))
    single = f"{best.name.removeprefix(ALONE)} alone"
    gain = f"{100 * difference:+.1f} points (95 % interval {100 * low:.1f} to {100 * high:.1f})"
    chance = "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
    by = f"`{chosen.name}`, chosen on validation data"
    words = {
        "tie": f"A tie: {gain} over {single}, {chance}; no difference can be shown ({by}).",
        "win": f"Fusion helps: {gain} over {single}, {chance} ({by}).",
        "loss": f"Fusion hurts: {gain} against {single}, {chance} ({by}).",
    }[outcome(difference, p)]
    fusions = summary.kind("fusion")
    if len(fusions) > 1:
        outcomes = [line["outcome"] for line in summary.leaderboard if "outcome" in line]
        wins, ties, losses = (outcomes.count(x) for x in ("win", "tie", "loss"))
        words += (
            f" Of {len(fusions)} fusions {wins} beat {single}, {ties} tie with it and {losses} lose"
            " to it (Holm-corrected)."
        )
        if len(tied) > 1:
            words += f" `{tied[0]}` leads; the best {len(tied)} cannot be told apart."
        else:
            words += f" `{tied[0]}` leads, ahead of every other."
    if len(chosen.seeds) == 1:
        words += (
            " One seed: the interval is over test samples alone; how much training's luck matters"
            " cannot be said."
        )
    if summary.failed:
        words += f" {len(summary.failed)} strategies failed: {', '.join(summary.failed)}."
    return words
