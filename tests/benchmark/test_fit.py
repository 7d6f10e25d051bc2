"""Copies trained together learn what each would have learned alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusionzoo import create_fusion, fusion_info, list_fusions
from fusionzoo.benchmark import candidates, feeds, schedule
from fusionzoo.benchmark import train as fitting
from fusionzoo.benchmark.bench import Job, open_bench
from fusionzoo.benchmark.train import (
    BalancedTrainer,
    CachedEncoder,
    FeedTrainer,
    FitResult,
    SingleTrainer,
    StackedTrainer,
    fit,
    refit,
    stackable,
)
from fusionzoo.features.encode import StoredFeatures
from fusionzoo.machine.distributed import World
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.structures import Features
from fusionzoo.training.balance import StrategyInputs
from fusionzoo.training.multitask import plain_tasks
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


def model(name: str, seed: int, **settings: bool) -> FusionModel:
    torch.manual_seed(seed)
    return FusionModel({}, create_fusion(name, DIMS, 8, 4, **settings).double(), {}, list("wxyz"))


def can(name: str) -> bool:
    if fusion_info(name).reads == "tokens":
        return False
    return stackable(model(name, 0).fusion, next(feed([TRAIN[:8]], -1)))


STACKABLE = [name for name in list_fusions() if can(name)]


def alone(name: str, out: Path, **settings: bool) -> list[FitResult]:
    cfg = small(out, epochs=3, batch_size=16, patience=None)
    results = []
    for seed in SEEDS:
        trainer = SingleTrainer(model(name, seed, **settings), cfg, TARGETS[TRAIN])
        results += fit(trainer, feed, TARGETS, TRAIN, VAL, [seed])
    return results


def test_plain_pooled_fusions_can_be_stacked_and_those_with_randomness_or_a_loss_cannot() -> None:
    assert {"sum", "gmu", "lmf", "late_mean", "film", "mutan"} <= set(STACKABLE)
    assert not {"concat", "embracenet", "mvae_poe", "qmf", "tmc", "misa", "mbt"} & set(STACKABLE)


CASES = [*((name, False) for name in STACKABLE), ("lmf", True), ("gmu", True), ("late_mean", True)]


@pytest.mark.parametrize(("name", "linear_skip"), CASES)
def test_stacked_seeds_equal_sequential_ones(name: str, linear_skip: bool, tmp_path: Path) -> None:
    cfg = small(tmp_path, epochs=3, batch_size=16, patience=None)
    assert stackable(model(name, 0, linear_skip=linear_skip).fusion, next(feed([TRAIN[:8]], -1)))
    stack = StackedTrainer([model(name, seed, linear_skip=linear_skip) for seed in SEEDS], cfg)
    together = fit(stack, feed, TARGETS, TRAIN, VAL, SEEDS)
    for stacked, single in zip(
        together, alone(name, tmp_path, linear_skip=linear_skip), strict=True
    ):
        assert not linear_skip or stacked.weights["fusion.linear_skip.image.weight"].any()
        assert stacked.loss == pytest.approx(single.loss, abs=1e-9)
        assert stacked.best_epoch == single.best_epoch
        for key, value in single.weights.items():
            torch.testing.assert_close(stacked.weights[key], value, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("name", ["concat", "embracenet"])
def test_randomness_is_seen_before_a_layer_that_starts_at_zero(name: str) -> None:
    assert not stackable(model(name, 0, linear_skip=True).fusion, next(feed([TRAIN[:8]], -1)))


# Validation losses of each epoch, by seed: when a real loss is least depends on the CPU.
LOSSES = {3: [2.0, 1.0, 1.5, 1.5], 4: [1.0, 1.5, 1.5], 5: [3.0, 2.5, 2.6, 2.0, 1.0, 1.1, 1.2]}


def plant_losses(patch: pytest.MonkeyPatch, seeds: Sequence[int]) -> list[dict[str, Tensor]]:
    """Replace validation by `LOSSES`; return the list that collects the first copy's weights."""
    weights: list[dict[str, Tensor]] = []

    def planted(trainer: FeedTrainer, *_: object) -> Tensor:
        weights.append(trainer.weights(0))
        losses = [(LOSSES[seed] + [9.0] * 9)[len(weights) - 1] for seed in seeds]
        return torch.tensor(losses)[:, None, None].expand(-1, 2, 2)

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
        assert stacked[1:4] == single[1:4]  # best epoch, epochs, loss
        assert torch.equal(stacked.losses, single.losses)
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


def test_the_cost_of_the_metric_chooses_the_epoch_and_the_loss_breaks_ties(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = small(tmp_path, epochs=6, batch_size=16, patience=None, optim={"lr": 3e-2})
    pairs = iter([(3.0, 1.0), (2.0, 5.0), (2.0 - 1e-15, 4.0), (2.0, 6.0), (2.5, 0.1), (2.5, 0.1)])

    def planted(*_: object) -> Tensor:
        return torch.tensor(next(pairs)).double()[None, :, None].expand(1, 2, 30)

    monkeypatch.setattr(fitting, "validate", planted)
    (best,) = fit(
        SingleTrainer(model("gmu", 0), cfg, TARGETS[TRAIN]), feed, TARGETS, TRAIN, VAL, [0]
    )
    assert (best.best_epoch, best.loss) == (3, 4.0)
    assert best.losses.mean().item() == pytest.approx(2.0)  # of the costs beside it


def test_the_losses_of_a_seed_are_means_over_its_best_epoch_and_those_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = small(tmp_path, epochs=9, batch_size=16, patience=2, optim={"lr": 3e-2})
    plant_losses(monkeypatch, SEEDS)
    stack = StackedTrainer([model("gmu", seed) for seed in SEEDS], cfg)
    found = fit(stack, feed, TARGETS, TRAIN, VAL, SEEDS)
    # By hand from LOSSES: epochs 1 to 3, 1 and 2 (the best one is the first), 4 to 6.
    means = [(2.0 + 1.0 + 1.5) / 3, (1.0 + 1.5) / 2, (2.0 + 1.0 + 1.1) / 3]
    for result, mean in zip(found, means, strict=True):
        torch.testing.assert_close(result.losses, torch.full((2,), mean))


@pytest.mark.parametrize("stacked", [False, True])
def test_training_again_follows_the_same_schedule_and_stops_after_its_epochs(
    stacked: bool, tmp_path: Path
) -> None:
    cfg = small(tmp_path, epochs=4, batch_size=16, patience=None, optim={"lr": 3e-2})
    seeds = [3, 4] if stacked else [3]
    kept: dict[int, dict[str, Tensor]] = {}

    def trainer() -> FeedTrainer:
        models = [model("gmu", seed) for seed in seeds]
        return StackedTrainer(models, cfg) if stacked else SingleTrainer(models[0], cfg, TARGETS)

    whole = trainer()
    for epoch, _ in fitting._epochs(whole, feed, TARGETS, TRAIN, seeds):
        kept[epoch + 1] = whole.weights(0)
    again = refit(trainer(), feed, TARGETS, TRAIN, seeds, [2, 4][: len(seeds)])
    assert len(again) == len(seeds)
    for key, value in again[0].items():
        assert torch.equal(value, kept[2][key])


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


WHOLE = torch.arange(60) % 3 + 1.0  # of the training rows
TWICE = torch.arange(60).repeat_interleave(WHOLE.long())


def trained(trainer: FeedTrainer, rows: Sequence[int]) -> dict[str, torch.Tensor]:
    """The weights of the first model after a step on these rows of the training split."""
    chosen = torch.as_tensor(rows)
    (batch,) = feed([TRAIN[chosen]], 0)
    trainer.train(True)
    is_stacked = isinstance(trainer, StackedTrainer)
    if is_stacked:
        batch = {n: type(x)(*(part[None] for part in x)) for n, x in batch.items()}
    trainer.step(batch, chosen[None], TARGETS[TRAIN[chosen]][None], 0.0, 0)
    return trainer.weights(0)


def test_every_trainer_takes_a_weight_of_2_for_a_row_listed_twice(tmp_path: Path) -> None:
    cfg = small(tmp_path, epochs=1, batch_size=200, patience=None)
    cfg = replace(cfg, optim=replace(cfg.optim, name="sgd", settings={"momentum": 0}, lr=0.1))
    wanted = trained(SingleTrainer(model("gmu", 0), cfg, TARGETS[TRAIN]), TWICE.tolist())
    plain = trained(SingleTrainer(model("gmu", 0), cfg, TARGETS[TRAIN]), range(60))
    single = SingleTrainer(model("gmu", 0), cfg, TARGETS[TRAIN], weights=WHOLE)
    stacked = StackedTrainer([model("gmu", 0)], cfg, weights=WHOLE)
    cached = model("gmu", 0)
    cached.encoders.update({n: CachedEncoder(n, "vector", width) for n, width in DIMS.items()})
    inputs = StrategyInputs(cached, TARGETS[TRAIN], 0, World())
    balanced = BalancedTrainer(inputs, cfg, plain_tasks(), [], TRAIN, weights=WHOLE)
    for trainer in (single, stacked, balanced):
        found = trained(trainer, range(60))
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)
        assert any(not torch.allclose(found[x], plain[x], atol=1e-5) for x in plain)


# ---- feeds


def ragged(rows: int, width: int) -> StoredFeatures:
    """Features of 0 to 6 tokens per sample."""
    offsets = torch.nn.functional.pad(torch.randint(0, 7, (rows,)).cumsum(0), (1, 0))
    return StoredFeatures(torch.randn(rows, width), torch.randn(int(offsets[-1]), width), offsets)


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("name", ["mbt", "gmu"])
def test_features_scaled_once_equal_those_scaled_by_batch(
    name: str, seeds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    bench, dataset = open_bench(small(tmp_path, fusions="mbt,gmu"))
    stored = {"a": ragged(len(dataset), 5), "b": ragged(len(dataset), 3)}
    monkeypatch.setattr(feeds, "load_features", lambda description: stored[description["name"]])
    bench = replace(bench, features=({x: {"name": x} for x in stored},))
    job = Job(name, 0, (0,), False, candidates.settings_of(bench.cfg, name), {})
    rows = [torch.randint(0, len(dataset), (seeds, 9)).squeeze(0) for _ in range(8)]
    rows.append(torch.where(~stored["a"].present)[0])  # all lack a modality

    def batches() -> list[Any]:
        return [[tuple(x[m]) for m in "ab"] for x in feeds.ProbeFeed(bench, job)(rows, 0)]

    once = batches()
    monkeypatch.setattr(feeds, "WHOLE_BYTES", 0)
    torch.testing.assert_close(once, batches(), rtol=0, atol=0)


@pytest.mark.parametrize(("name", "same"), [("gmu", True), ("alone:a", True), ("mbt", False)])
def test_trials_on_pooled_vectors_do_not_depend_on_the_tokens_beside_them(
    name: str, same: bool, tmp_path: Path
) -> None:
    bench, _ = open_bench(small(tmp_path, fusions="mbt,gmu"))
    job = Job(name, 0, (0,), False, candidates.settings_of(bench.cfg, name), {})
    few, many = (
        replace(bench, features=({x: {"name": x, "max_tokens": tokens} for x in "ab"},))
        for tokens in (1, None)
    )
    assert (schedule.path_of(few, job) == schedule.path_of(many, job)) == same
    assert (schedule._path(few, job) == schedule._path(many, job)) == same
