"""Geometry of embeddings, against closed cases."""

from __future__ import annotations

import math

import pytest
import torch

from fusionzoo.evaluation import geometry
from fusionzoo.evaluation.geometry import (
    alignment,
    effective_rank,
    linear_cka,
    modality_gap,
    uniformity,
)


def drawn(count: int, dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def test_alignment_is_the_squared_distance_of_partners_at_length_one() -> None:
    x = drawn(50, 6)
    assert alignment(x, 3 * x) == pytest.approx(0, abs=1e-9)
    assert alignment(torch.eye(2), torch.eye(2).flip(0)) == pytest.approx(2)


def test_uniformity_of_a_point_of_opposites_and_of_a_sphere() -> None:
    assert uniformity(torch.ones(9, 4)) == pytest.approx(0)
    assert uniformity(torch.tensor([[1.0, 0], [-1, 0]])) == pytest.approx(-8)
    assert uniformity(drawn(3000, 512)) == pytest.approx(-4, abs=0.05)


def test_uniformity_is_the_same_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(40, 5)
    squares = torch.pdist(torch.nn.functional.normalize(x.double(), dim=1)).square()
    expected = float((-2 * squares).exp().mean().log())
    assert uniformity(x) == pytest.approx(expected)
    monkeypatch.setattr(geometry, "BLOCK", 7)
    assert uniformity(x) == pytest.approx(expected)


def test_effective_rank_counts_the_directions_in_use() -> None:
    line = torch.arange(20.0)[:, None] * drawn(1, 8)
    assert effective_rank(line) == pytest.approx(1, abs=1e-4)
    assert effective_rank(torch.cat([torch.eye(6), -torch.eye(6)])) == pytest.approx(6)


def test_the_gap_is_the_distance_of_the_means() -> None:
    x = drawn(500, 16)
    assert modality_gap(x, x) == 0
    assert modality_gap(torch.ones(5, 1), -torch.ones(3, 1)) == pytest.approx(2)


def test_cka_ignores_rotation_and_scale_and_is_zero_for_unrelated_vectors() -> None:
    x = drawn(200, 20)
    rotation = torch.linalg.qr(drawn(20, 20, seed=1)).Q
    assert linear_cka(x, 7 * x @ rotation + 3) == pytest.approx(1, abs=1e-6)
    unrelated = [linear_cka(drawn(60, 200, seed), drawn(60, 200, seed + 9)) for seed in range(5)]
    assert max(map(abs, unrelated)) < 0.15  # plain CKA is about 0.77 here
    assert 0.2 < linear_cka(x, torch.cat([x[:, :10], drawn(200, 10, 3)], dim=1)) < 0.9
    assert math.isnan(linear_cka(x[:3], x[:3]))
