"""Summaries of benchmarks with planted predictions, to test what reports say about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import one_hot

from fusionzoo.benchmark.bench import Bench, Fold
from fusionzoo.benchmark.report.leaderboard import leaderboard
from fusionzoo.benchmark.report.results import CandidateResults, Summary, Validation, row_label
from fusionzoo.evaluation.metrics import right
from fusionzoo.evaluation.shapley import subsets
from helpers.setup_benchmark import small

ITEMS, CLASSES = 200, 4
TARGET = torch.arange(ITEMS) % CLASSES
ALL = torch.arange(ITEMS)


def candidate(name: str, accuracies: list[float], shift: int = 0) -> CandidateResults:
    """A candidate that classifies this share of items correctly in each seed, in a fixed order.

    `shift` rotates the order, so that two candidates are correct on different items.
    """
    order = np.roll(np.random.default_rng(0).permutation(ITEMS), shift)
    predictions = torch.stack([(TARGET + 1) % CLASSES for _ in accuracies])
    for prediction, accuracy in zip(predictions, accuracies, strict=True):
        correct = torch.from_numpy(order[: round(accuracy * ITEMS)])
        prediction[correct] = TARGET[correct]
    logits = 3.0 * one_hot(predictions, CLASSES)
    kind = "fusion"
    if name.startswith("alone:"):
        kind = "single"
    elif " " in name:
        kind = "baseline"
    rows = [
        {"fold": 0, "seed": seed, "samples": ITEMS, "subset": "full", "modality": ""}
        | {"corruption": "", "severity": 0}
        | dict.fromkeys(("score", "accuracy", "macro_f1"), accuracy)
        | dict.fromkeys(("ece", "brier", "nll"), 0.0)
        for seed, accuracy in enumerate(accuracies)
    ]
    family = "early" if kind == "fusion" else kind
    seeds = list(range(len(accuracies)))
    scores = right(logits.flatten(0, 1), TARGET.repeat(len(seeds))).reshape(len(seeds), -1).numpy()
    validation = [Validation(float(np.mean(accuracies)), 1.0)]
    return CandidateResults(name, kind, family, seeds, logits.float(), scores, validation, rows)


def damaged(
    results: CandidateResults, score: float, modalities: Sequence[str] = ("image", "audio")
) -> None:
    """Add scores without modalities and on corrupted samples, and costs."""
    row = {"fold": 0, "seed": 0, "samples": 1, "subset": "full", "modality": ""}
    row |= {"corruption": "", "severity": 0}
    for subset in subsets(modalities)[:-1]:
        share = 0.3 + 0.6 * sum([1 / (2 + modalities.index(name)) for name in subset])
        name = row_label(subset, modalities)
        results.rows.append(row | {"subset": name, "score": share * score})
    results.rows.append(row | {"corruption": "undamaged", "score": score})
    for number, modality in enumerate(modalities):
        names = "gain hum" if number % 2 else "blur noise jpeg occlusion contrast"
        for name in [*names.split(), "pairing"]:
            for severity in range(1, 6):
                labels = {"modality": modality, "corruption": name, "severity": severity}
                results.rows.append(row | labels | {"score": score * (1 - 0.1 * severity)})
    size = 10.0 ** (1 + len(results.rows) % 5 + 3 * score)
    results.facts |= {"parameters": size, "macs": 2 * size, "seconds": score, "latency_ms": 1.5}


def summary(
    candidates: list[CandidateResults],
    folds: int = 1,
    controls: Mapping[str, torch.Tensor] | None = None,
    target: torch.Tensor = TARGET,
) -> Summary:
    """A finished benchmark of these candidates; all folds validate alike unless planted."""
    for results in candidates:
        if len(results.validation) == 1:
            results.validation *= folds
    cfg = small(Path("nowhere"), folds=folds if folds > 1 else 0)
    parts = ALL.tensor_split(folds)
    bench = Bench(
        cfg,
        {"image": "image", "audio": "audio"},
        tuple(str(k) for k in range(int(target.max()) + 1)),
        target,
        torch.ones(len(target), 2, dtype=torch.bool),
        tuple(Fold(ALL[:0], ALL[:0], part) for part in parts),
    )
    logits = {name: one_hot(x).float() for name, x in (controls or {}).items()}
    whole = Summary(bench, target, candidates, logits, {})
    whole.leaderboard = leaderboard(whole)
    return whole
