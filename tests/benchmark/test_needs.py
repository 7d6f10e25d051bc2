"""What the data needs: when it is computed, how much it may cost, and what stands in its place."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusionzoo.benchmark.api import run
from fusionzoo.benchmark.report import needs
from fusionzoo.benchmark.report.needs import (
    affordable,
    clustering_seconds,
    probe_seconds,
    read_stored,
)
from helpers.setup_benchmark import small


def bench(tmp_path: Path, **changes: Any) -> Any:
    fields = {
        "cfg": small(tmp_path, **changes),
        "modalities": {"a": "vector", "b": "vector"},
        "dims": {"a": 8, "b": 8},
        "targets": torch.zeros(400, dtype=torch.int64),
        "folds": (None,),
        "features": ({"a": {}, "b": {}},),
        "trained_alone": (),
        "scheme": None,
        "from_splits": False,
        "weights": None,
    }
    return SimpleNamespace(**fields)


def test_recombined_samples_stay_within_what_they_may_cost() -> None:
    for macs in (1e3, 1e6, 1e8):
        for modalities in (2, 3, 6):
            samples, completions = affordable(modalities, 1000, macs)
            passes = samples if modalities == 2 else (modalities + 1) * completions
            least = samples == needs.FEWEST_SAMPLES or completions == needs.FEWEST_COMPLETIONS
            assert least or samples * passes * macs <= needs.RECOMBINED
    assert affordable(2, 1000, 1e3) == (300, 1)
    assert affordable(2, 70, 1e3) == (70, 1)
    assert affordable(3, 1000, 1e3) == (300, 256)
    assert affordable(3, 1000, 1e12) == (300, 16)


def test_the_cost_of_clusters_grows_with_folds_rows_and_modalities(tmp_path: Path) -> None:
    few = bench(tmp_path)
    assert clustering_seconds(few, fixed=True) < 5
    few.folds = (None,) * 5
    assert clustering_seconds(few, fixed=False) == 5 * clustering_seconds(few, fixed=True)
    wide = bench(tmp_path)
    wide.dims = dict.fromkeys("ab", 4096)
    wide.targets = torch.zeros(20_000)
    assert clustering_seconds(wide, fixed=True) > needs.SECONDS


def test_the_cost_of_probes_counts_in_every_fold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = bench(tmp_path, analyses=None)
    once = probe_seconds(several)
    several.folds = (None,) * 5
    assert probe_seconds(several) == pytest.approx(5 * once)
    several.modalities, several.dims = dict.fromkeys("abc", "vector"), dict.fromkeys("abc", 768)
    several.targets = torch.zeros(900)
    assert 30 < probe_seconds(several) < 45  # measured: 30 s, and 12 s for the clusters
    assert clustering_seconds(several, fixed=True) < 15
    monkeypatch.setattr(needs, "clustering_seconds", lambda *_, **__: 50.0)
    (note,) = needs._information(several)["notes"]
    assert re.fullmatch(r"Redundancy and synergy would take about 8\d s: `--analyses true`\.", note)


@pytest.mark.parametrize("wanted", [None, True])
def test_a_long_analysis_is_left_out_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool | None
) -> None:
    monkeypatch.setattr(needs, "clustering_seconds", lambda *_, **__: 1e3)
    monkeypatch.setattr(needs, "setup_of", lambda *_, **__: pytest.skip("computed"))
    if wanted:
        with pytest.raises(pytest.skip.Exception):
            needs._information(bench(tmp_path, analyses=True))
    else:
        (note,) = needs._information(bench(tmp_path, analyses=None))["notes"]
        assert note == "Redundancy and synergy would take about 1001 s: `--analyses true`."


def test_other_targets_and_missing_features_are_said(tmp_path: Path) -> None:
    numbers = bench(tmp_path)
    numbers.scheme = ("a number",)
    (note,) = needs._information(numbers)["notes"]
    assert "one class for each sample" in note
    nothing = bench(tmp_path)
    nothing.features = ()
    (note,) = needs._information(nothing)["notes"]
    assert "cached features" in note


def test_off_and_finetune_have_no_section(tmp_path: Path) -> None:
    for changes in ({"analyses": False}, {"analyses": None, "mode": "finetune"}):
        nothing: Any = None
        assert needs.analyse_needs(bench(tmp_path, **changes), nothing, nothing) is None
    assert not (tmp_path / needs.FILE).exists()


def test_stored_figures_are_those_of_the_same_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "needs.json"
    assert read_stored(path, "a") is None
    path.write_text('{"key": "a", "notes": []}')
    assert read_stored(path, "a") == {"notes": []}
    assert read_stored(path, "b") is None
    path.write_text("{")
    assert read_stored(path, "a") is None


@pytest.mark.slow
def test_a_second_run_reads_them_and_off_leaves_the_trials_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = small(tmp_path, seeds=1, corruptions=False, controls=False, fusions="gmu", analyses=True)
    first = run(cfg).figures["needs"]
    stored = sorted((tmp_path / "cells").iterdir())
    monkeypatch.setattr(needs, "decompose_data", None)  # would raise
    assert run(cfg).figures["needs"] == first
    off = run(replace(cfg, analyses=False))
    assert "needs" not in off.figures
    assert "What the data needs" not in off.page.read_text()
    assert sorted((tmp_path / "cells").iterdir()) == stored
    assert json.loads((tmp_path / needs.FILE).read_text())["emap"]["fusion"] == "gmu"
