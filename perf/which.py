"""Compare fusions in each situation of docs/which.md: `python perf/which.py`.

One row of its table is one planted data set (of perf/situations.py, or `interactions`), and the
fusions that it recommends are compared with the plain ones. Every seed draws its own data, weights
and order and is one benchmark (`fusionzoo.benchmark`: same epochs, batches and optimiser for all,
the epoch with the least validation loss), so seeds are independent, and figures are compared with
paired t-tests over seeds, Holm-corrected over all pairs of a situation.

Writes results/which.csv: a line per situation and fusion with mean and 95 % interval, the best
possible figure, and `leader`: yes where no fusion is shown to be better. Prints for each situation
the winner, the fusions that share the lead, or "no difference shown". Some hours on two cores;
`--only long`, `--seeds 3`, `--samples 300` and `--epochs 2` make it shorter, and a second start
goes on where the first ended.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import situations
from situations import SITUATIONS, best_accuracy, best_aurc

import fusionzoo as fz
from fusionzoo.datasets.builtin.interactions import interactions_bayes_accuracy
from fusionzoo.evaluation.statistics import LEVEL, holm, seed_interval

ROOT = Path(__file__).parents[1]
PLAIN = ("concat", "gmu", "mean", "late_mean")
LOWER_IS_BETTER = ("aurc",)
COLUMNS = (
    *("situation", "data", "figure", "best_possible", "fusion", "mean", "low", "high"),
    *("leader", "seeds", "train_samples", "epochs", "commit"),
)


@dataclass(frozen=True)
class Row:
    """A row of the table in docs/which.md: the data that stands for it, and who is compared."""

    data: dict[str, Any]
    fusions: tuple[str, ...]
    best_possible: float
    epochs: int = 30
    figure: str = "accuracy"  # a column of the leaderboard
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # fusion -> settings


def planted(situation: str, samples: int, fusions: tuple[str, ...], **options: Any) -> Row:
    """Return the row of a data set `situations`."""
    data = {"name": "situations", "situation": situation, "samples": samples}
    best = {"best_possible": best_accuracy(situation), **options}
    return Row(data, (*PLAIN, *fusions), **best)


def interactions(data: dict[str, Any], best_possible: float, fusions: tuple[str, ...]) -> Row:
    """Return the row of a data set `interactions`."""
    return Row({"name": "interactions", **data}, (*PLAIN, *fusions), best_possible)


TOKENS = ("concat_transformer", "co_attention", "cross_attention", "mult")
ROWS = {
    # Four bits, each read right with probability 0.75, are their mean's sign: Phi(2 / 1.5) = 0.909.
    "redundant": interactions(
        {"task": "redundant", "num_modalities": 4, "samples": 600, "width": 16, "noise": 6.0},
        0.909,
        ("attn_pool",),
    ),
    "synergy": interactions(
        {"task": "xor", "num_modalities": 3, "samples": 1500},
        interactions_bayes_accuracy("xor", 3),
        ("lmf", "concat_transformer", "cross_attention"),
    ),
    "missing_at_test": planted(
        "missing_at_test",
        1500,
        ("late_poe", "mvae_poe", "embracenet", "missing_tokens", "shaspec"),
    ),
    "reliability": planted("reliability", 1500, ("qmf", "tmc", "late_confidence", "attn_pool")),
    "starved": planted("starved", 1500, ("ume", "late_stacking", "late_vote")),
    "modifier": planted("modifier", 2000, ("film", "cross_attention", "gated_xattn")),
    "alignment": planted("alignment", 5000, TOKENS, epochs=50),
    "long": planted("long", 2000, ("concat_transformer", "mbt", "perceiver", "qformer")),
    "ambiguous": planted(
        "ambiguous",
        1500,
        ("tmc", "mvae_poe", "qmf"),
        figure="aurc",
        best_possible=best_aurc(),
    ),
}
assert set(SITUATIONS) <= set(ROWS)


def main() -> None:
    """Run every benchmark that is not finished, then write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", type=int, default=10, help="data sets drawn per situation")
    parser.add_argument("--samples", type=int, help="instead of each situation's number")
    parser.add_argument("--epochs", type=int, help="instead of each situation's number")
    parser.add_argument("--tune", type=int, default=0, help="Optuna trials of each fusion")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "which")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "which.csv")
    flags = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for name in flags.only:
        figures, about = measure(name, flags)
        lines += table(name, figures, about)
        print(f"{name}: {conclusion(figures, ROWS[name].figure)}", flush=True)
    with flags.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    print(f"wrote {flags.out}")


def measure(name: str, flags: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return the figure of every fusion, a value per seed, and what the table says of the runs."""
    row = ROWS[name]
    data = {**row.data, **({"samples": flags.samples} if flags.samples else {})}
    epochs = flags.epochs or row.epochs
    figures: dict[str, list[float]] = {fusion: [] for fusion in row.fusions}
    for seed in range(flags.seeds):
        folder = f"{name}-{data['samples']}-{epochs}-{flags.tune}-{seed}"
        report = fz.benchmark(
            {**data, "seed": seed},
            fusions=list(row.fusions),
            seeds=1,
            seed=seed,
            plugins=situations.__file__,
            out=flags.runs / folder,
            mode="finetune",
            folds=0,  # the data set's split: of `missing_at_test`, only test samples lack values
            tune=flags.tune,
            fusion={"dim": 32},
            settings=row.settings,
            epochs=epochs,
            patience=None,
            batch_size=64,
            optim={"lr": 2e-3},
            corruptions=False,
            controls=False,
            jobs=flags.jobs,
            device="cpu",
        )
        if report.failed:
            raise SystemExit(f"{name}: {report.failed}")
        by_fusion = {line["candidate"]: line for line in report.figures["leaderboard"]}
        for fusion, values in figures.items():
            values.append(float(by_fusion[fusion][row.figure]))
    about = {"train_samples": data["samples"] * 3 // 5, "epochs": epochs, "seeds": flags.seeds}
    return figures, about


def better(a: Sequence[float], b: Sequence[float], figure: str) -> float:
    """Return by how much a is better than b on average."""
    gain = float(np.mean(a) - np.mean(b))
    return -gain if figure in LOWER_IS_BETTER else gain


def beaten(figures: Mapping[str, Sequence[float]], figure: str) -> dict[str, set[str]]:
    """Return, for each fusion, those that are shown to be better."""
    pairs = list(itertools.combinations(figures, 2))
    p_values = holm([paired_p(figures[a], figures[b]) for a, b in pairs])
    losers: dict[str, set[str]] = {name: set() for name in figures}
    for (a, b), p in zip(pairs, p_values, strict=True):
        if p < 1 - LEVEL:
            loser, winner = (b, a) if better(figures[a], figures[b], figure) > 0 else (a, b)
            losers[loser].add(winner)
    return losers


def paired_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the p-value of the paired t-test over seeds; 1 for a single seed."""
    from scipy.stats import t

    gains = np.subtract(a, b)
    if len(gains) < 2 or not gains.any():
        return 1.0
    error = float(gains.std(ddof=1)) / len(gains) ** 0.5
    return 2 * float(t.sf(abs(gains.mean()) / max(error, 1e-12), len(gains) - 1))


def conclusion(figures: Mapping[str, Sequence[float]], figure: str) -> str:
    """Name the winner, those that share the lead, or say that no difference is shown."""
    losers = beaten(figures, figure)
    best = max(figures, key=lambda name: better(figures[name], [0.0], figure))
    means = {name: float(np.mean(values)) for name, values in figures.items()}
    if not any(losers.values()):
        return f"no difference shown ({best} {means[best]:.3f})"
    leaders = [name for name in figures if not losers[name]]
    leaders.sort(key=lambda name: -better(figures[name], [0.0], figure))
    words = ", ".join(f"{name} {means[name]:.3f}" for name in leaders)
    others = [x for x in figures if x not in leaders]
    if len(leaders) == 1:
        return f"winner {words}, above {', '.join(others)}"
    return f"no winner among {words}; each loser has one that beats it: {', '.join(others)}"


def table(
    name: str, figures: Mapping[str, Sequence[float]], about: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the lines of one situation, the best fusion first."""
    row, losers = ROWS[name], beaten(figures, ROWS[name].figure)
    data = " ".join(f"{key}={value}" for key, value in row.data.items() if key != "samples")
    lines = []
    for fusion, values in figures.items():
        interval = seed_interval(values)
        shown = {key: f"{value:.4f}" for key, value in interval._asdict().items()}
        leader = "no" if losers[fusion] else "yes"
        facts = {"situation": name, "data": data, "figure": row.figure, "fusion": fusion}
        best = f"{row.best_possible:.4f}"
        lines.append({**facts, "best_possible": best, **shown, "leader": leader, **about})
        lines[-1]["commit"] = commit()
    sign = 1 if row.figure in LOWER_IS_BETTER else -1
    return sorted(lines, key=lambda line: sign * float(line["mean"]))


def commit() -> str:
    """Return the short name of the commit, with `-dirty` where the tree has changes."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
