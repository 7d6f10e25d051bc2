"""Copies trained together learn what each would have learned alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusionzoo import create_fusion, fusion_info, list_fusions
from fusionzoo.benchmark import train as fitting
from fusionzoo.benchmark.train import (
    FitResult,
    SingleTrainer,
    StackedTrainer,
    Trainer,
    fit,
    stackable,
)
from fusionzoo.model import FusionModel
from fusionzoo.structures import Features
from helpers.setup_benchmark import small

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


def alone(name: str, out: Path) -> list[FitResult]:
    cfg = small(out, epochs=3, batch_size=16, patience=None)
    results = []
    for seed in SEEDS:
        trainer = SingleTrainer(model(name, seed), cfg, TARGETS[TRAIN])
        results += fit(trainer, feed, TARGETS, TRAIN, VAL, [seed])
    return results


def test_plain_pooled_fusions_can_be_stacked_and_those_with_randomness_or_a_loss_cannot() -> None:
    assert {"sum", "gmu", "lmf", "late_mean", "film", "mutan"} <= set(STACKABLE)
    assert not {"concat", "embracenet", "mvae_poe", "qmf", "tmc", "misa", "mbt"} & set(STACKABLE)


@pytest.mark.parametrize("name", STACKABLE)
def test_stacked_seeds_equal_sequential_ones(name: str, tmp_path: Path) -> None:
    cfg = small(tmp_path, epochs=3, batch_size=16, patience=None)
    stack = StackedTrainer([model(name, seed) for seed in SEEDS], cfg)
    together = fit(stack, feed, TARGETS, TRAIN, VAL, SEEDS)
    for stacked, single in zip(together, alone(name, tmp_path), strict=True):
        assert stacked.loss == pytest.approx(single.loss, abs=1e-9)
        assert stacked.best_epoch == single.best_epoch
        for key, value in single.weights.items():
            torch.testing.assert_close(stacked.weights[key], value, atol=1e-8, rtol=1e-6)


# Validation losses of each epoch, by seed: when a real loss is least depends on the CPU.
LOSSES = {3: [2.0, 1.0, 1.5, 1.5], 4: [1.0, 1.5, 1.5], 5: [3.0, 2.5, 2.6, 2.0, 1.0, 1.1, 1.2]}


def plant_losses(patch: pytest.MonkeyPatch, seeds: Sequence[int]) -> list[dict[str, Tensor]]:
    """Replace validation by `LOSSES`; return the list that collects the first copy's weights."""
    weights: list[dict[str, Tensor]] = []

    def planted(trainer: Trainer, *_: object) -> list[float]:
        weights.append(trainer.weights(0))
        return [(LOSSES[seed] + [9.0] * 9)[len(weights) - 1] for seed in seeds]

    patch.setattr(fitting, "validate", planted)
    return weights


def test_the_patience_of_each_seed_runs_out_on_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = small(tmp_path, epochs=30, batch_size=16, patience=2, optim={"lr": 3e-2})
    plant_losses(monkeypatch, SEEDS)
    stack = StackedTrainer([model("gmu", seed) for seed in SEEDS], cfg)
    together = fit(stack, feed, TARGETS, TRAIN, VAL, SEEDS)
    assert [(result.best_epoch, result.epochs) for result in together] == [(2, 4), (1, 3), (5, 7)]
    for seed, stacked in zip(SEEDS, together, strict=True):
        plant_losses(monkeypatch, [seed])
        trainer = SingleTrainer(model("gmu", seed), cfg, TARGETS[TRAIN])
        (single,) = fit(trainer, feed, TARGETS, TRAIN, VAL, [seed])
        assert stacked[1:] == single[1:]  # best epoch, epochs, loss
        for key, value in single.weights.items():
            torch.testing.assert_close(stacked.weights[key], value, atol=1e-8, rtol=1e-6)


def test_the_best_epoch_is_kept_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = small(tmp_path, epochs=7, batch_size=16, patience=None, optim={"lr": 3e-2})
    weights = plant_losses(monkeypatch, [5])
    trainer = SingleTrainer(model("gmu", 0), cfg, TARGETS[TRAIN])
    (best,) = fit(trainer, feed, TARGETS, TRAIN, VAL, [0])
    assert (best.best_epoch, best.epochs, len(weights)) == (5, 7, 7)
    for key, value in best.weights.items():
        assert torch.equal(value, weights[4][key])
    assert any(not torch.equal(value, weights[6][key]) for key, value in best.weights.items())


def test_the_loss_of_an_epoch_is_that_of_its_weights_on_the_validation_rows(tmp_path: Path) -> None:
    cfg = small(tmp_path, epochs=2, batch_size=16, patience=None, optim={"lr": 3e-2})
    trainer = SingleTrainer(model("gmu", 0), cfg, TARGETS[TRAIN])
    (best,) = fit(trainer, feed, TARGETS, TRAIN, VAL, [0])
    again = model("gmu", 1)
    again.load_state_dict(best.weights)
    again.eval()
    (features,) = feed([VAL], -1)
    loss = torch.nn.functional.cross_entropy(again.fusion(features).logits, TARGETS[VAL])
    assert loss.item() == pytest.approx(best.loss, abs=1e-5)
