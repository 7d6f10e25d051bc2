"""The area under the curves of samples that lose a part of a modality."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fusionzoo.benchmark import api, store
from fusionzoo.benchmark.bench import damaged_rows, open_bench
from fusionzoo.benchmark.report.results import lost_area
from fusionzoo.evaluation.robustness import CORRUPTIONS, LOST_PART
from fusionzoo.html.template import breakable
from helpers import planted
from helpers.setup_benchmark import small


def test_every_kind_has_a_corruption_that_takes_a_part() -> None:
    assert set(LOST_PART) == set(CORRUPTIONS)
    assert all(LOST_PART[kind] in corruptions for kind, corruptions in CORRUPTIONS.items())


def test_the_area_of_lost_parts_is_that_of_its_curves(tmp_path: Path) -> None:
    cfg = small(tmp_path, controls=False, fusions="sum", balance="none,modality_dropout")
    report = api.run(cfg)
    (row, *_) = [x for x in report.figures["leaderboard"] if x["candidate"] == "sum"]
    bench, _ = open_bench(cfg)
    paths = store.folder_of(str(tmp_path)).glob("sum-f0-*.npz")
    seed_results = [result for path in paths for result in store.load(path) or ()]
    assert len(seed_results) == 2
    curves = []
    for result in seed_results:
        of = {(x["modality"], x["corruption"], x["severity"]): x["score"] for x in result.rows}
        start = of["", "undamaged", 0]
        for modality in "ab":
            one, three, five = (of[modality, "dropout", s] for s in (1, 3, 5))
            curves.append((start + one) / 2 + (one + three) + (three + five))
        assert result.lost_scores is not None
        assert result.lost_scores.shape == (7, len(damaged_rows(bench, bench.folds[0])))
    assert row["lost_area"] == pytest.approx(np.mean(curves) / 5, abs=1e-6)
    assert row["lost_area_low"] < row["lost_area"] < row["lost_area_high"]
    text = report.page.read_text(encoding="utf-8")
    section = text[text.index("<h2>Trained with modality dropout") :]
    section = section[: section.index("</table>")]
    assert "change of lost parts</th>" in section
    assert f"{row['lost_area']:.3f} ({row['lost_area_low']:.3f} to" in section
    for name in ("sum", "sum + modality_dropout"):
        assert f"<td>{breakable(name)}</td>" in section


def test_a_modality_that_a_strategy_does_not_see_leaves_its_score_as_it_is() -> None:
    candidate = planted.candidate("alone:image", [0.5])
    assert lost_area(candidate, ["image", "audio"]) is None
    candidate.lost_conditions = [("", "undamaged", 0), ("image", "occlusion", 1)]
    candidate.lost_conditions.append(("image", "occlusion", 5))
    candidate.lost_scores = np.array([[[1.0, 0.0], [0.5, 0.0], [0.0, 1.0]]])
    areas = lost_area(candidate, ["image", "audio"])
    assert areas is not None
    image = [(0.75 * 1 + 0.25 * 4) / 5, (0.0 + 0.5 * 4) / 5]
    np.testing.assert_allclose(areas, [[(image[0] + 1.0) / 2, (image[1] + 0.0) / 2]])


def test_trials_of_earlier_versions_are_read_without_scores_of_lost_parts(tmp_path: Path) -> None:
    cfg = small(tmp_path, controls=False, fusions="sum", seeds=1)
    api.run(cfg)
    for path in store.folder_of(str(tmp_path)).glob("*.npz"):
        with np.load(path) as arrays:
            old = {name: x for name, x in arrays.items() if not name.startswith("lost")}
        np.savez_compressed(path, allow_pickle=False, **old)
    report = api.run(cfg)
    assert all("lost_area" not in line for line in report.figures["leaderboard"])
    assert "lost_area" not in json.dumps(report.figures)
