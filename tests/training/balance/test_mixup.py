"""MixUp: one share and one partner for all modalities of a pair, and a loss to match."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusionzoo.config import RunConfig, from_tree
from fusionzoo.datasets import create_dataset
from fusionzoo.errors import FusionZooError
from fusionzoo.machine.distributed import World
from fusionzoo.structures import Batch, Features, StepContext
from fusionzoo.training.balance import StrategyInputs, build_balance
from fusionzoo.training.balance.mixup import MixUp, mix, partner_features
from fusionzoo.training.build import build_objective
from helpers.strategies import (
    ROWS,
    TARGETS,
    make_batch,
    make_model,
    make_objective,
    make_trainer,
    only,
)


def features(tokens: list[list[float]]) -> Features:
    """Rows of tokens one wide; an empty row lacks the modality."""
    longest = max(map(len, tokens))
    values = torch.full((len(tokens), longest, 1), float("nan"))
    mask = torch.zeros(len(tokens), longest, dtype=torch.bool)
    for row, numbers in enumerate(tokens):
        values[row, : len(numbers), 0] = torch.tensor(numbers)
        mask[row, : len(numbers)] = True
    sums = [sum(numbers) if numbers else float("nan") for numbers in tokens]
    return Features(values, mask, torch.tensor(sums)[:, None])


def test_vectors_and_tokens_at_the_same_place_are_mixed_or_vectors_alone() -> None:
    x = features([[1.0, 2.0, 3.0], [10.0], [], [4.0]])
    partner = partner_features(x, 3, torch.tensor([1, 0, 1, 2]), World())
    mixed = mix(x, partner, torch.tensor([0.75, 0.75, 0.75, 0.75]), with_tokens=True)
    assert mixed.mask.sum(1).tolist() == [3, 3, 0, 1]
    assert mixed.tokens[0, :, 0].tolist() == [0.75 * 1 + 0.25 * 10, 2.0, 3.0]
    assert mixed.tokens[1, :, 0].tolist() == [0.75 * 10 + 0.25 * 1, 2.0, 3.0]
    assert mixed.pooled[:2, 0].tolist() == [0.75 * 6 + 0.25 * 10, 0.75 * 10 + 0.25 * 6]
    # A row that lacks the modality keeps lacking it; one whose partner lacks it is unmixed.
    assert not mixed.mask[2].any()
    assert mixed.tokens[3, 0, 0] == 4.0
    assert mixed.pooled[3, 0] == 4.0
    x = features([[1.0, 2.0], [10.0]])
    partner = partner_features(x, 0, torch.tensor([1, 0]), World())
    assert partner.tokens.shape == (2, 1, 1)
    mixed = mix(x, partner, torch.tensor([0.5, 0.5]), with_tokens=False)
    assert torch.equal(mixed.mask, x.mask)
    assert mixed.tokens is x.tokens
    assert mixed.pooled[:, 0].tolist() == [6.5, 6.5]


def mixed_step(fusion: str = "mean", absent: Any = (), epoch: float = 0.0) -> tuple[Any, ...]:
    objective = make_objective("mixup", model=make_model(fusion))
    strategy, batch = only(objective), make_batch(list(absent))
    plain = objective.model.encode(batch)
    rows = objective.rows(batch)
    context = StepContext(
        epoch=epoch, rows=rows, batch=batch, features=plain, criterion=objective.criterion
    )
    mixed = strategy.edit_features(context)
    return objective, strategy, context, plain, mixed


def test_all_modalities_of_a_row_have_one_partner_and_one_share() -> None:
    _, strategy, context, plain, mixed = mixed_step()
    assert isinstance(strategy, MixUp)
    pairs = strategy.pairs
    assert pairs is not None
    assert bool(((pairs.share >= 0.5) & (pairs.share <= 1)).all())
    assert sorted(pairs.position.tolist()) == list(range(ROWS))
    assert not (pairs.position == torch.arange(ROWS)).any()
    assert torch.equal(pairs.row, context.rows[pairs.position])
    share = pairs.share[:, None]
    for name, x in plain.items():
        expected = share * x.pooled + (1 - share) * x.pooled[pairs.position]
        torch.testing.assert_close(mixed[name].pooled, expected)
    torch.testing.assert_close(strategy.label_share, pairs.share)


def test_the_loss_is_that_of_both_labels_by_their_shares() -> None:
    objective, strategy, context, _, mixed = mixed_step("gmu", absent=[(0, 0), (3, 1), (3, 2)])
    pairs, label_share = strategy.pairs, strategy.label_share
    rows = {name: x.mask.any(1) for name, x in mixed.items()}
    present = torch.stack(list(rows.values()), 1).double()
    both = present * present[pairs.position]
    expected_share = (1 - (1 - pairs.share[:, None]) * both).mul(present).sum(1) / present.sum(1)
    torch.testing.assert_close(label_share, expected_share)
    output = objective.model.fusion(mixed)
    target = context.batch.target
    losses = [objective.criterion(output.logits, y) for y in (target, target[pairs.position])]
    trained = objective(context.batch, StepContext(rows=context.rows))
    expected = label_share * losses[0] + (1 - label_share) * losses[1]
    torch.testing.assert_close(trained.main_loss.values, expected.to(trained.main_loss.values))
    # The heads of each modality learn from what is not mixed.
    for name, logits in objective.heads(objective.model.encode(context.batch)).items():
        torch.testing.assert_close(trained.unimodal_logits[name], logits)


def test_the_partner_has_no_gradient() -> None:
    _objective, strategy, _, plain, mixed = mixed_step()
    (gradient,) = torch.autograd.grad(mixed["image"].pooled[3].sum(), plain["image"].pooled)
    share = strategy.pairs.share[3]
    expected = torch.zeros_like(gradient)
    expected[3] = share
    torch.testing.assert_close(gradient, expected)


def pairs_of(strategy: MixUp, rows_by_rank: list[list[int]], epoch: float = 0.0) -> dict[int, Any]:
    found = {}
    x = {"image": Features(torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.float64))}
    for rank, rows in enumerate(rows_by_rank):
        strategy.world = World(rank=rank, size=len(rows_by_rank))
        context = StepContext(epoch=epoch, rows=torch.tensor(rows), features=x)
        pairs = strategy.pair(rows_by_rank, context)
        found |= dict(
            zip(rows, zip(pairs.row.tolist(), pairs.share.tolist(), strict=True), strict=True)
        )
    return found


def test_pairs_depend_on_sample_and_epoch_and_not_on_order_or_processes() -> None:
    strategy: Any = only(make_objective("mixup"))
    one = pairs_of(strategy, [list(range(ROWS))])
    assert pairs_of(strategy, [list(reversed(range(ROWS)))]) == one
    assert pairs_of(strategy, [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]) == one
    assert pairs_of(strategy, [[5, 4, 3], [0, 1, 2, 6, 7, 8, 9, 10, 11]]) == one
    assert pairs_of(strategy, [list(range(ROWS))], epoch=1.0) != one
    assert pairs_of(strategy, [list(range(ROWS))], epoch=0.9) == one
    assert pairs_of(strategy, [[], [7]])[7][0] == 7


@pytest.mark.parametrize(
    ("settings", "targets", "message"),
    [
        ({"alpha": 0}, TARGETS, "alpha=0; it must be above 0"),
        ({}, torch.zeros(9), "mixes the losses of two classes: leave it out, or use --objective"),
        ({}, torch.zeros(9, 2), "mixes the losses of two classes"),
    ],
)
def test_where_it_does_not_apply_is_one_line(settings: Any, targets: Any, message: str) -> None:
    inputs = StrategyInputs(make_model("mean"), targets, 0, World())
    with pytest.raises(FusionZooError, match=message) as error:
        build_balance("mixup", {"mixup": settings}, inputs)
    assert "\n" not in str(error.value)


def test_fusions_that_remember_samples_and_strategies_that_read_labels_are_refused() -> None:
    trainer = make_trainer(make_objective("mixup", model=make_model("qmf")))
    with pytest.raises(FusionZooError, match="QMF remembers the losses of single samples"):
        trainer.step([make_batch()], StepContext())
    with pytest.raises(FusionZooError, match="mixup mixes samples, and ogm_ge and unimodal_aux"):
        make_objective("mixup,ogm_ge,unimodal_aux")
    both = make_trainer(make_objective("mixup,modality_dropout", model=make_model("mean")))
    assert both.step([make_batch()], StepContext()).skipped is None


@pytest.mark.parametrize("fusion", ["tmc", "mbt", "late_mean", "misa"])
def test_fusions_with_losses_of_their_own_and_class_weights_train(fusion: str) -> None:
    data = create_dataset("interactions", samples=60)
    tree = {
        "balance": "mixup",
        "fusion": {"name": fusion, "dim": 8},
        "encoders": {n: {**e, "in_dim": 8} for n, e in data.default_encoders.items()},
        "objective": {"name": "classification", "class_weights": "balanced"},
    }
    train_set = data.split("train")
    objective, _ = build_objective(from_tree(RunConfig, tree), train_set)
    batch: Batch = objective.model.collate()([train_set[row] for row in range(8)])
    output = objective(batch, StepContext(rows=objective.rows(batch)))
    assert output.main_loss is not None
    assert bool(output.main_loss.values.isfinite().all())
    plain = output.loss
    assert not torch.equal(plain, output.main_loss.values)
