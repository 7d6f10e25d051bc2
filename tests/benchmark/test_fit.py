"""Copies trained together learn what each would have learned alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from setup_benchmark import small
from torch import Tensor

from fusionzoo import create_fusion, fusion_info, list_fusions
from fusionzoo.benchmark.fit import Fitted, Single, Stack, fit, stackable
from fusionzoo.model import FusionModel
from fusionzoo.structures import Features

DIMS = {"image": 12, "text": 8, "audio": 6}
DRAW = torch.Generator().manual_seed(0)
# In double precision: Adam divides by the gradient's size, so single precision hides nothing small.
POOLED = {
    name: torch.randn(90, width, generator=DRAW, dtype=torch.float64)
    for name, width in DIMS.items()
}
PRESENT = {name: torch.rand(90, generator=DRAW) > 0.2 for name in DIMS}
TARGETS = torch.randint(4, (90,), generator=DRAW)
TRAIN, VAL = torch.arange(60), torch.arange(60, 90)
SEEDS = (3, 4, 5)


def feed(chunks: Sequence[Tensor], epoch: int) -> Iterator[dict[str, Features]]:
    for rows in chunks:
        yield {
            name: Features(x[rows][..., None, :], PRESENT[name][rows][..., None], x[rows])
            for name, x in POOLED.items()
        }


def model(name: str, seed: int) -> FusionModel:
    torch.manual_seed(seed)
    return FusionModel({}, create_fusion(name, DIMS, 8, 4).double(), {}, list("wxyz"))


def can(name: str) -> bool:
    if fusion_info(name).reads == "tokens":
        return False
    return stackable(model(name, 0).fusion, next(feed([TRAIN[:8]], -1)))


STACKABLE = [name for name in list_fusions() if can(name)]


def alone(name: str, out: Path) -> list[Fitted]:
    cfg = small(out, epochs=3, batch_size=16, patience=None)
    return [
        fit(Single(model(name, seed), cfg, TARGETS[TRAIN]), feed, TARGETS, TRAIN, VAL, [seed])[0]
        for seed in SEEDS
    ]


def test_plain_pooled_fusions_can_be_stacked_and_those_with_chance_or_a_loss_cannot() -> None:
    assert {"sum", "gmu", "lmf", "late_mean", "film", "mutan"} <= set(STACKABLE)
    assert not {"concat", "embracenet", "mvae_poe", "qmf", "tmc", "misa", "mbt"} & set(STACKABLE)


@pytest.mark.parametrize("name", STACKABLE)
def test_stacked_seeds_equal_sequential_ones(name: str, tmp_path: Path) -> None:
    cfg = small(tmp_path, epochs=3, batch_size=16, patience=None)
    stack = Stack([model(name, seed) for seed in SEEDS], cfg)
    together = fit(stack, feed, TARGETS, TRAIN, VAL, SEEDS)
    for one, two in zip(together, alone(name, tmp_path), strict=True):
        assert one.loss == pytest.approx(two.loss, abs=1e-9)
        assert one.best_epoch == two.best_epoch
        for key, value in two.weights.items():
            torch.testing.assert_close(one.weights[key], value, atol=1e-8, rtol=1e-6)


def test_the_patience_of_each_seed_runs_out_on_its_own(tmp_path: Path) -> None:
    cfg = small(tmp_path, epochs=30, batch_size=16, patience=2, optim={"lr": 3e-2})
    stack = Stack([model("gmu", seed) for seed in SEEDS], cfg)
    together = fit(stack, feed, TARGETS, TRAIN, VAL, SEEDS)
    for seed, one in zip(SEEDS, together, strict=True):
        single = Single(model("gmu", seed), cfg, TARGETS[TRAIN])
        (two,) = fit(single, feed, TARGETS, TRAIN, VAL, [seed])
        assert (one.best_epoch, one.epochs) == (two.best_epoch, two.epochs)
        assert one.epochs == one.best_epoch + 2 < 30


def test_the_best_epoch_is_kept_not_the_last(tmp_path: Path) -> None:
    cfg = small(tmp_path, epochs=25, batch_size=16, patience=None, optim={"lr": 3e-2})
    (found,) = fit(Single(model("gmu", 0), cfg, TARGETS[TRAIN]), feed, TARGETS, TRAIN, VAL, [0])
    assert found.best_epoch < 25
    kept = model("gmu", 1)
    kept.load_state_dict(found.weights)
    kept.eval()
    (given,) = feed([VAL], -1)
    loss = torch.nn.functional.cross_entropy(kept.fusion(given).logits, TARGETS[VAL])
    assert loss.item() == pytest.approx(found.loss, abs=1e-5)
