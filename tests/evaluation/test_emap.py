"""`emap`: the additive part of a function of several modalities."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import fusionzoo as fz
from fusionzoo.datasets import create_dataset
from fusionzoo.evaluation.pid import Logits, jackknife, project

ROWS = 12


def draws(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).double()


def product_of(parts: Sequence[torch.Tensor], combine: Any = torch.prod) -> Logits:
    def logits(chosen: Sequence[NDArray[np.int64]]) -> torch.Tensor:
        terms = [x[torch.from_numpy(rows)] for x, rows in zip(parts, chosen, strict=True)]
        return combine(torch.stack(terms), 0)

    return logits


@pytest.mark.parametrize("modalities", [2, 3, 4])
def test_an_additive_model_is_its_own_projection(modalities: int) -> None:
    logits = product_of([draws(ROWS, 3 + m)[:, :3] for m in range(modalities)], torch.sum)
    found = project(logits, ROWS, modalities, 5, 0).mean(0)
    every = [np.arange(ROWS)] * modalities
    torch.testing.assert_close(found, logits(every), rtol=0, atol=1e-12)


def test_the_projection_of_two_is_the_best_additive_fit() -> None:
    parts = [draws(ROWS, 2), draws(ROWS, 4)[:, :2]]
    found = project(product_of(parts), ROWS, 2, 1, 0)[0]
    table = parts[0][:, None] * parts[1][None]  # (n, n, K)
    fitted = table.mean(1)[:, None] + table.mean(0)[None] - table.mean((0, 1))
    diagonal = torch.arange(ROWS)
    torch.testing.assert_close(found, fitted[diagonal, diagonal])
    residual = table - fitted  # orthogonal to all functions of one modality
    assert residual.mean(0).abs().max() < 1e-12
    assert residual.mean(1).abs().max() < 1e-12
    signs = torch.tensor(list(product([-1.0, 1.0], repeat=2))).double()
    found = project(product_of([signs[:, :1], signs[:, 1:]]), 4, 2, 1, 0)[0]
    torch.testing.assert_close(found, torch.zeros(4, 1).double())


def test_the_standard_error_is_that_of_other_completions_and_of_all_pairs_none() -> None:
    """Shares of a product of three: without bias, and as far apart as their error says."""
    parts = [draws(ROWS, 1 + m)[:, :1] for m in range(3)]
    logits = product_of(parts)
    model = logits([np.arange(ROWS)] * 3)
    table = torch.einsum("i,j,k->ijk", *(x[:, 0] for x in parts))
    single = table.mean((1, 2)) + table.mean((0, 2)) + table.mean((0, 1))

    def share(projection: torch.Tensor) -> float:
        return float((model - projection).square().sum() / (model - model.mean(0)).square().sum())

    exact = share((single - 2 * table.mean())[:, None])
    found = np.array([jackknife(project(logits, ROWS, 3, 64, seed), share) for seed in range(40)])
    spread = found[:, 0].std()
    assert abs(found[:, 0].mean() - exact) < 4 * spread / np.sqrt(40)
    assert 0.5 < found[:, 1].mean() / spread < 2
    blocks = project(product_of([draws(ROWS, 1), draws(ROWS, 2)[:, :1]]), ROWS, 2, 1, 0)
    assert jackknife(blocks, lambda x: float(x.sum())) == (float(blocks.sum()), 0.0)


@pytest.mark.slow
def test_interactions_carry_a_model_of_an_exclusive_or_and_no_late_fusion(tmp_path: Path) -> None:
    data = create_dataset("interactions", task="xor", samples=1000)
    settings = {"epochs": 15, "lr": 0.01, "log": "none"}
    for fusion in ("concat", "late_mean"):
        run = fz.train(data, fusion=fusion, out=str(tmp_path / fusion), **settings)
        found = fz.analyse(data, run.model, samples=100).emap
        assert found is not None
        if fusion == "concat":
            assert found.model > 0.9
            assert found.gain > 0.2
            assert found.share > 0.5
        else:
            assert found.gain == pytest.approx(0, abs=1e-9)
            assert found.share < 1e-9
