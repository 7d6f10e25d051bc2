"""How a trained fusion copes with an absent modality: two checks of fusions.

A fusion is trained on `left` and `right`, which both predict the class, and on `noise`, which does
not and whose mean is not 0, as few encoders' outputs have mean 0. Training samples are complete
unless the fusion declares that it `learns_absence` from incomplete ones.

Shapes: `B` batch, `D` width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import sqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.fusion import Fusion
from fusionzoo.structures import Features, StepContext

Maker = Callable[..., Fusion]  # (dims, dim, num_outputs) -> Fusion
WIDTHS = {"left": 8, "right": 6, "noise": 8}
CLASS_SHARES = (0.4, 0.2, 0.2, 0.2)
NUM_TRAIN, NUM_TEST, DIM = 128, 500, 16
BATCH, EPOCHS = 64, 30
RATES = (0.0, 0.3, 0.6, 0.9)  # of missing values
SLACK = 0.02  # of accuracy
SPREAD = 1.5  # of the centres of classes, in standard deviations of a sample around its centre


class Split(NamedTuple):
    """Vectors by modality, (B, D) each, and classes, (B,)."""

    vectors: dict[str, Tensor]
    target: Tensor


class Trained(NamedTuple):
    """A fusion in evaluation mode, with the training and test samples."""

    fusion: Fusion
    train: Split
    test: Split


def an_uninformative_modality_can_be_dropped(make: Maker) -> None:
    """Tried: noise, dropped or set to its training mean; at most 2 points (and 2 s.e.) worse."""
    fusion, train, test = trained(make)
    mean = train.vectors["noise"].mean(0).expand(NUM_TEST, -1)
    averaged = correct(fusion, test._replace(vectors={**test.vectors, "noise": mean}))
    dropped = correct(fusion, test, absent=("noise",))
    drop = averaged - dropped  # of each sample: 1, 0 or -1
    assert drop.mean() <= SLACK + 2 * drop.std() / sqrt(NUM_TEST), (
        f"accuracy {dropped.mean():.3f} without a modality of noise, {averaged.mean():.3f} with its"
        " training mean in its place: give an absent modality that mean (RunningMeans)"
    )


def missing_modalities_never_cost_more_than_all_knowledge(make: Maker) -> None:
    """Tried: 0 to 90 % of the test values missing; at least the majority class, less 3 s.e."""
    fusion, _, test = trained(make)
    majority = test.target.bincount().max().item() / NUM_TEST
    lowest = majority - 3 * sqrt(majority * (1 - majority) / NUM_TEST)
    by_subset = {
        names: correct(fusion, test, [m for m in WIDTHS if m not in names]).mean().item()
        for count in range(1, len(WIDTHS) + 1)
        for names in itertools.combinations(WIDTHS, count)
    }
    for rate in RATES:
        accuracy = _expected(by_subset, rate)
        assert accuracy >= lowest, (
            f"accuracy {accuracy:.3f} with {rate:.0%} of the values missing;"
            f" the majority class alone gives {majority:.3f}"
        )


def _expected(by_subset: Mapping[tuple[str, ...], float], rate: float) -> float:
    """Return the mean accuracy if each modality is missing at `rate`, but never all of them."""
    chances = {
        names: (1 - rate) ** len(names) * rate ** (len(WIDTHS) - len(names)) for names in by_subset
    }
    total = sum(chance * by_subset[names] for names, chance in chances.items())
    return total / sum(chances.values())


@lru_cache(maxsize=1)  # both checks use the same fusion
def trained(make: Maker) -> Trained:
    """Train all phases, `EPOCHS` epochs each."""
    draw = torch.Generator().manual_seed(0)
    centres = {m: torch.randn(len(CLASS_SHARES), w, generator=draw) for m, w in WIDTHS.items()}
    train, test = (_draw(count, centres, draw) for count in (NUM_TRAIN, NUM_TEST))
    torch.manual_seed(0)
    fusion = make(WIDTHS, DIM, len(CLASS_SHARES)).float().train()
    memory = fusion.prepare(train.target)
    for number, phase in enumerate(fusion.phases):
        learning = [p for n, p in fusion.named_parameters() if n.startswith(phase.trains)]
        optimizer = torch.optim.Adam(learning, lr=1e-2)
        for epoch in range(EPOCHS):
            for rows in torch.randperm(NUM_TRAIN, generator=draw).split(BATCH):
                hidden = torch.rand(BATCH, len(WIDTHS), generator=draw) < 1 / 3
                features = _features(_rows(train, rows), ~(hidden & fusion.learns_absence))
                context = StepContext(
                    rows=rows,
                    epoch=float(epoch),
                    phase=number,
                    criterion=_cross_entropy,
                    memory=memory,
                )
                optimizer.zero_grad()
                fusion.loss(fusion(features), train.target[rows], context).mean().backward()
                optimizer.step()
    return Trained(fusion.eval(), train, test)


@torch.no_grad()
def correct(fusion: Fusion, split: Split, absent: Sequence[str] = ()) -> Tensor:
    """Return whether each sample is classified correctly without some modalities, 1 or 0: (B,)."""
    present = torch.tensor([m not in absent for m in WIDTHS]).expand(len(split.target), -1)
    answers = fusion(_features(split, present)).logits.argmax(-1)
    return (answers == split.target).double()


def _draw(count: int, centres: Mapping[str, Tensor], draw: torch.Generator) -> Split:
    """Draw classes of unequal shares, and vectors around 1 + the class's centre (noise: 1)."""
    target = torch.multinomial(torch.tensor(CLASS_SHARES), count, True, generator=draw)
    vectors = {
        m: 1.0
        + (0.0 if m == "noise" else SPREAD) * centre[target]
        + torch.randn(count, centre.shape[1], generator=draw)
        for m, centre in centres.items()
    }
    return Split(vectors, target)


def _rows(split: Split, rows: Tensor) -> Split:
    return Split({m: x[rows] for m, x in split.vectors.items()}, split.target[rows])


def _features(split: Split, present: Tensor) -> dict[str, Features]:
    """Make features of one token each; `present` is (B, M)."""
    return {
        m: Features(x[:, None], present[:, column, None], x)
        for column, (m, x) in enumerate(split.vectors.items())
    }


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, reduction="none")
