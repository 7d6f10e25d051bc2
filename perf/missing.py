"""Every fusion with each subset of modalities at test time: `python perf/missing.py`.

scikit-learn's 1,797 digits of 8 x 8 pixels, cut into strips of 3, 2 and 3 rows: three modalities of
which none suffices. The first 1,200 digits of a shuffle by the seed are trained on, the other 597
tested, complete and with every subset of one or two strips. Each fusion is trained twice: on
complete samples (`complete`), and with the strategy `modality_dropout` at its default rate. There
are no encoders: a strip is the vector of its pixels, or one such vector for each of its rows, with
zeros for the other rows, as tokens. The same epochs, batches and AdamW for all, fusions at their
defaults with a width of 32 (but for SETTINGS), the last epoch counts: nothing is tuned or chosen.

Writes results/missing.csv: a line for each fusion and way of training, means over the seeds that
are finished for all of them. About an hour on two cores; a second start goes on where the first
ended.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from _cells import Cell, run_all
from torch import Tensor

from fusionzoo import create_model, fusion_info, list_fusions
from fusionzoo.datasets.builtin.digits import read_digits
from fusionzoo.fusion import Fusion
from fusionzoo.machine.devices import seed_everything
from fusionzoo.machine.distributed import World
from fusionzoo.structures import Batch, Features, StepContext
from fusionzoo.training.balance.base import StrategyInputs, build_balance

ROOT = Path(__file__).parents[1]
STRIPS = {"top": slice(0, 3), "middle": slice(3, 5), "bottom": slice(5, 8)}
TRAIN_SHARE = 1200 / 1797
DIM, BATCH, LR = 32, 80, 2e-3
# Products made for vectors of hundreds of features are smaller for strips of 16 and 24 pixels.
SETTINGS: dict[str, dict[str, object]] = {
    "block": {"width": 320, "chunks": 4, "rank": 5},
    "mcb": {"sketch_dim": 2000},
    "mfb": {"width": 200},
    "mfh": {"width": 200},
    "mutan": {"width": 160},
    "tfn": {"proj_dim": 8},
}
WAYS = {"complete": "", "modality_dropout": "modality_dropout"}
SUBSETS = [names for count in (1, 2, 3) for names in combinations(STRIPS, count)]
PROPER = ["+".join(names) for names in SUBSETS[:-1]]
WHOLE = "+".join(STRIPS)
HEADER = ["fusion", "family", "training", "seeds", "epochs", "complete", "incomplete"]
HEADER += [
    "incomplete_deviation",
    "one_present",
    "two_present",
    "worst",
    "worst_subset",
    *PROPER,
    "settings",
]


class Digits(NamedTuple):
    """Strips of digits as features, and classes; the first rows are trained on."""

    features: dict[str, Features]
    target: Tensor

    def take(self, rows: Tensor, present: Tensor) -> dict[str, Features]:
        """Return the features of some rows, of which `present` (B, M) are there."""
        return {
            name: Features(x.tokens[rows], x.mask[rows] & here[:, None], x.pooled[rows])
            for (name, x), here in zip(self.features.items(), present.unbind(1), strict=True)
        }


@cache
def strips(seed: int, samples: int) -> Digits:
    """Return shuffled digits in three strips."""
    images, target = read_digits()
    order = np.random.default_rng(seed).permutation(len(target))[:samples]
    pixels = torch.from_numpy(images[order] / 16).float()
    features = {}
    for name, rows in STRIPS.items():
        strip = pixels[:, rows]
        count = strip.shape[1]
        tokens = (strip[:, :, None] * torch.eye(count)[None, :, :, None]).flatten(2)
        mask = torch.ones(len(strip), count, dtype=torch.bool)
        features[name] = Features(tokens, mask, strip.flatten(1))
    return Digits(features, torch.from_numpy(target[order]))


def accuracies(cell: Cell) -> dict[str, float]:
    """Train one fusion; return its accuracy with each subset of strips."""
    samples = cell.get("samples", 1797)
    digits = strips(cell["seed"], samples)
    num_train = round(samples * TRAIN_SHARE)
    fusion = train(cell, digits, num_train).eval()
    rows, figures = torch.arange(num_train, samples), {}
    with torch.no_grad():
        for names in SUBSETS:
            present = torch.tensor([name in names for name in STRIPS]).expand(len(rows), -1)
            answers = fusion(digits.take(rows, present)).logits.argmax(-1)
            right = answers == digits.target[rows]
            figures["+".join(names)] = right.double().mean().item()
    return figures


def train(cell: Cell, digits: Digits, num_train: int) -> Fusion:
    """Train a fusion in its phases, on what the strategy of the cell leaves of each sample."""
    seed_everything(cell["seed"])
    encoders = {
        name: {"name": "vector/identity", "in_dim": x.pooled.shape[1]}
        for name, x in digits.features.items()
    }
    settings = {"name": cell["fusion"], "dim": DIM, **SETTINGS.get(cell["fusion"], {})}
    model = create_model(settings, encoders, num_outputs=10)
    fusion, target = model.fusion.train(), digits.target[:num_train]
    strategies = build_balance(
        WAYS[cell["training"]], {}, StrategyInputs(model, target, cell["seed"], World())
    )
    memory, epochs, begun = fusion.prepare(target, (), cell["seed"]), cell["epochs"], 0
    for number, phase in enumerate(fusion.phases):
        learning = [p for n, p in fusion.named_parameters() if n.startswith(phase.trains)]
        optimizer = torch.optim.AdamW(learning, lr=LR, fused=True)
        share = sum(earlier.share for earlier in fusion.phases[: number + 1])
        for epoch in range(begun, round(epochs * share)):
            context = StepContext(
                epoch=float(epoch), phase=number, criterion=cross_entropy, memory=memory
            )
            for rows in torch.randperm(num_train).split(BATCH):
                batch = Batch([], {}, torch.ones(len(rows), len(STRIPS), dtype=torch.bool), None)
                for strategy in strategies.values():
                    batch = strategy.edit_batch(batch, rows, context)
                output = fusion(digits.take(rows, batch.present))
                loss = fusion.loss(output, target[rows], context._replace(rows=rows)).mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(learning, 1.0, foreach=True)
                optimizer.step()
        begun = round(epochs * share)
    return fusion


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of each row."""
    return torch.nn.functional.cross_entropy(logits, target, reduction="none")


def line(name: str, way: str, epochs: int, runs: list[Mapping[str, float]]) -> list[object]:
    """Return a fusion's line of the table; `worst` is the subset with the lowest mean."""
    means = {subset: statistics.mean(run[subset] for run in runs) for subset in runs[0]}
    incomplete = [statistics.mean(run[subset] for subset in PROPER) for run in runs]
    worst = min(PROPER, key=means.__getitem__)
    by_count = [
        statistics.mean(means[subset] for subset in PROPER if subset.count("+") == plus)
        for plus in (0, 1)
    ]
    figures = [means[WHOLE], statistics.mean(incomplete)]
    figures += [statistics.stdev(incomplete) if len(runs) > 1 else 0.0, *by_count, means[worst]]
    columns = [f"{x:.4f}" for x in figures]
    by_subset = [f"{means[subset]:.4f}" for subset in PROPER]
    facts = [name, fusion_info(name).family, way, len(runs), epochs]
    settings = " ".join(f"{k}={v}" for k, v in SETTINGS.get(name, {}).items())
    return [*facts, *columns, worst, *by_subset, settings]


def table(
    results: Mapping[tuple[str, str, int], Mapping[str, float]], names: list[str], epochs: int
) -> Iterator[list[object]]:
    """Return the lines of all fusions, over the seeds that are finished for all of `names`."""
    pairs = [(name, way) for name in names for way in WAYS]
    seeds = sorted({seed for *_, seed in results})
    common = [seed for seed in seeds if all((*pair, seed) in results for pair in pairs)]
    if common:
        for name, way in pairs:
            yield line(name, way, epochs, [results[name, way, seed] for seed in common])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, help="fewer digits, to try the script")
    parser.add_argument("--only", nargs="*", help="some fusions; the table holds no others")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "missing.jsonl")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "missing.csv")
    flags = parser.parse_args()
    names = flags.only or list_fusions()
    size = {"samples": flags.samples} if flags.samples else {}
    cells = [
        {"fusion": name, "training": way, "epochs": flags.epochs, "seed": seed, **size}
        for seed in range(flags.seeds)
        for name in names
        for way in WAYS
    ]
    done = run_all(cells, accuracies, flags.runs, flags.jobs)
    results = {
        (cell["fusion"], cell["training"], cell["seed"]): figures
        for cell, figures in done
        if cell["epochs"] == flags.epochs and cell.get("samples") == flags.samples
    }
    with flags.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        writer.writerows(table(results, names, flags.epochs))
    print(f"wrote {flags.out}")


if __name__ == "__main__":
    main()
