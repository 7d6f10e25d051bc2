"""What trials read of cached features, however they are held."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionzoo.benchmark import candidates, feeds, schedule
from fusionzoo.benchmark.bench import Job, open_bench
from fusionzoo.features.encode import StoredFeatures
from helpers.setup_benchmark import small


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
