"""Retrieval figures, against closed cases."""

from __future__ import annotations

import pytest
import torch

from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation import retrieval
from fusionzoo.evaluation.retrieval import rank_figures, ranks, retrieval_figures


def embedded(count: int, dim: int = 8) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(count))


def test_an_embedding_finds_itself() -> None:
    x = embedded(30)
    found = retrieval_figures({"a": x, "b": 3 * x}, torch.ones(30, 2, dtype=torch.bool))
    assert found["recall@1"] == found["mrr"] == found["median_rank"] == 1
    assert found["a_to_b.recall@1"] == found["b_to_a.recall@10"] == 1


def test_ranks_are_counted_by_hand() -> None:
    one = torch.tensor([[1.0, 0], [0, 1], [1, 1]])
    two = torch.tensor([[0.0, 1], [0, 1], [1, 1]])
    there, back = ranks(one, two)
    assert there.tolist() == [3, 2, 1]  # 0: both others are nearer or as near; 1: a tie with 0
    assert back.tolist() == [3, 1, 1]


def test_ties_and_nan_count_against_the_partner() -> None:
    same = torch.ones(5, 3)
    assert ranks(same, same)[0].tolist() == [5] * 5
    assert ranks(torch.full((5, 3), torch.nan), same)[1].tolist() == [5] * 5


def test_rank_figures_are_shares_and_means() -> None:
    found = rank_figures(torch.tensor([1, 2, 5, 20]))
    assert (found["recall@1"], found["recall@5"], found["recall@10"]) == (0.25, 0.75, 0.75)
    assert found["median_rank"] == 3.5
    assert found["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 5 + 1 / 20) / 4)


def test_blocks_do_not_change_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = embedded(50), embedded(50) + 0.8 * embedded(51)[:50]
    whole = ranks(one, two)
    cosines = torch.nn.functional.cosine_similarity(one[:, None], two[None], dim=-1)
    assert whole[0].tolist() == (cosines >= cosines.diag()[:, None] - 1e-6).sum(1).tolist()
    assert whole[1].tolist() == (cosines >= cosines.diag() - 1e-6).sum(0).tolist()
    monkeypatch.setattr(retrieval, "CELLS", 350)
    for ours, theirs in zip(ranks(one, two), whole, strict=True):
        assert torch.equal(ours, theirs)


def test_only_samples_that_have_both_take_part() -> None:
    x = embedded(20)
    present = torch.ones(20, 3, dtype=torch.bool)
    present[10:, 1] = False
    noise = x.clone()
    noise[10:] = torch.nan  # what is absent may be anything
    found = retrieval_figures({"a": x, "b": noise, "c": x}, present)
    assert found["recall@1"] == 1
    assert {name.partition(".")[0] for name in found if "_to_" in name} == {
        f"{m}_to_{n}" for m in "abc" for n in "abc" if m != n
    }


def test_without_a_pair_there_is_one_clear_error() -> None:
    present = torch.eye(2, dtype=torch.bool)
    with pytest.raises(FusionZooError, match="no sample has two modalities"):
        retrieval_figures({"a": embedded(2), "b": embedded(2)}, present)
