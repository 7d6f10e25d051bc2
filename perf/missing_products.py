"""Compare replacements of an absent modality's factor in products: `perf/missing_products.py`.

Each fusion that multiplies modalities is trained on complete samples and tested on incomplete ones
under three rules: a factor of 1, the factor of the vector 0, and the factor of the running mean of
the training vectors (what the fusions do). Two tests on scikit-learn's 1,797 digits of 8 x 8:
`strips`, three modalities of 3, 2 and 3 rows, mean over the six incomplete subsets; `noise`, the
whole picture beside 16 numbers drawn around 1, which are then dropped. The first 1,400 digits of a
shuffle by the seed are trained on. Writes results/missing_products.csv; minutes on two cores.
"""

from __future__ import annotations

import argparse
import copy
import csv
import statistics
from collections.abc import Callable, Collection, Mapping
from itertools import combinations
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor
from tqdm import tqdm

from fusionzoo.fusion import Fusion, create_fusion
from fusionzoo.fusion.early._factorised import Factors
from fusionzoo.fusion.early._tucker import SlicedProduct
from fusionzoo.structures import Features

ROOT = Path(__file__).parents[1]
FUSIONS = ("mlb", "mfb", "mutan", "mcb", "mfh", "block")
HEADER = ["fusion", "rule", "seeds", "strips_complete", "strips_incomplete"]
HEADER += ["noise_present", "noise_absent"]
NUM_TRAIN, NUM_NOISE, BATCH, EPOCHS = 1400, 16, 128, 4
Vectors = dict[str, Tensor]
Rule = Callable[[Fusion, Vectors, Collection[str]], Tensor]


def strips(digits: Tensor) -> Vectors:
    """Cut pictures (N, 8, 8) in three."""
    parts = zip(("top", "middle", "bottom"), digits.split([3, 2, 3], dim=1), strict=True)
    return {name: x.flatten(1) for name, x in parts}


def beside_noise(digits: Tensor) -> Vectors:
    """Put noise around 1 beside whole pictures."""
    draw = torch.Generator().manual_seed(0)
    noise = 1 + torch.randn(len(digits), NUM_NOISE, generator=draw)
    return {"picture": digits.flatten(1), "noise": noise}


def features(vectors: Vectors, absent: Collection[str] = ()) -> dict[str, Features]:
    """Make features of one token each."""
    return {
        name: Features(x[:, None], torch.full((len(x), 1), name not in absent), x)
        for name, x in vectors.items()
    }


def zeroed(vectors: Vectors, absent: Collection[str]) -> Vectors:
    return {name: torch.zeros_like(x) if name in absent else x for name, x in vectors.items()}


# ---- the rules: logits of complete vectors of which some count as absent


def factor_of_one(fusion: Fusion, vectors: Vectors, absent: Collection[str]) -> Tensor:
    """Change a copy of the fusion so that the absent modalities' factors are 1 for the vector 0."""
    changed = copy.deepcopy(fusion)
    for column, name in enumerate(fusion.dims):
        if name in absent:
            _let_be_one(changed, column, name)
    return changed(features(zeroed(vectors, absent))).logits


@torch.no_grad()
def _let_be_one(fusion: Fusion, column: int, name: str) -> None:
    slices = [m for m in fusion.modules() if isinstance(m, SlicedProduct)]
    for one in slices:
        one.weight[column] = 0
        one.bias[column] = 1
    for factors in (m for m in fusion.modules() if isinstance(m, Factors) and not slices):
        linear = factors.maps[name]
        assert isinstance(linear, torch.nn.Linear)
        linear.weight.zero_()
        linear.bias.fill_(20.0 if getattr(fusion, "tanh", False) else 1.0)  # tanh(20) rounds to 1
    if hasattr(fusion, f"bucket_{name}"):  # the sketch of [1; 0] becomes the neutral [1, 0, ...]
        fusion.get_buffer(f"bucket_{name}")[0] = 0
        fusion.get_buffer(f"sign_{name}")[0] = 1


def factor_of_zero(fusion: Fusion, vectors: Vectors, absent: Collection[str]) -> Tensor:
    return fusion(features(zeroed(vectors, absent))).logits


def factor_of_mean(fusion: Fusion, vectors: Vectors, absent: Collection[str]) -> Tensor:
    return fusion(features(vectors, absent)).logits


RULES: Mapping[str, Rule] = {
    "factor 1": factor_of_one,
    "factor of zero": factor_of_zero,
    "running mean": factor_of_mean,
}


# ---- training and testing


def train(name: str, vectors: Vectors, target: Tensor, seed: int) -> Fusion:
    """Learn from complete samples."""
    torch.manual_seed(seed)
    fusion = create_fusion(name, {m: x.shape[1] for m, x in vectors.items()}, 32, 10).train()
    optimizer = torch.optim.AdamW(fusion.parameters(), lr=2e-3)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(target)).split(BATCH):
            logits = fusion(features({m: x[rows] for m, x in vectors.items()})).logits
            optimizer.zero_grad()
            F.cross_entropy(logits, target[rows]).backward()
            optimizer.step()
    return fusion.eval()


@torch.no_grad()
def figures(name: str, seed: int, digits: Tensor, target: Tensor) -> dict[str, list[float]]:
    """Return the columns of the table for each rule."""
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(seed))
    known, fresh = order[:NUM_TRAIN], order[NUM_TRAIN:]
    columns: dict[str, list[float]] = {rule: [] for rule in RULES}
    for vectors in (strips(digits), beside_noise(digits)):
        with torch.enable_grad():
            learned = {m: x[known] for m, x in vectors.items()}
            fusion = train(name, learned, target[known], seed)
        test = {m: x[fresh] for m, x in vectors.items()}
        subsets = [("noise",)] if "noise" in test else _incomplete(test)
        for rule, answer in RULES.items():
            complete = _accuracy(answer(fusion, test, ()), target[fresh])
            each = [_accuracy(answer(fusion, test, absent), target[fresh]) for absent in subsets]
            columns[rule] += [complete, statistics.mean(each)]
    return columns


def _incomplete(vectors: Vectors) -> list[tuple[str, ...]]:
    """Return all sets of absent modalities, except none and all."""
    return [some for count in range(1, len(vectors)) for some in combinations(vectors, count)]


def _accuracy(logits: Tensor, target: Tensor) -> float:
    return (logits.argmax(-1) == target).double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=FUSIONS, choices=FUSIONS, metavar="FUSION")
    parser.add_argument("--out", default=str(ROOT / "results" / "missing_products.csv"))
    flags = parser.parse_args()
    source = load_digits()
    digits = torch.tensor(source.images / 16, dtype=torch.float32)
    target = torch.tensor(source.target)
    with Path(flags.out).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        for name in tqdm(flags.only):
            runs = [figures(name, seed, digits, target) for seed in range(flags.seeds)]
            for rule in RULES:
                means = [statistics.mean(x) for x in zip(*(run[rule] for run in runs), strict=True)]
                writer.writerow([name, rule, flags.seeds, *(f"{x:.4f}" for x in means)])
            file.flush()
    print(f"wrote {flags.out}")


if __name__ == "__main__":
    main()
