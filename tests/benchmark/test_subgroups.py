"""Where fusion helps, by group of samples: told from noise, and without training anything again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

import fusionzoo as fz
from fusionzoo.benchmark import api, jobs
from fusionzoo.benchmark.bench import Fold
from fusionzoo.benchmark.report import page
from fusionzoo.benchmark.report.leaderboard import leaderboard, paper_table
from fusionzoo.benchmark.report.results import CandidateResults, Summary
from fusionzoo.benchmark.report.subgroups import figures_by_group
from fusionzoo.errors import FusionZooError
from helpers.planted import ALL, ITEMS, candidate, summary
from helpers.setup_benchmark import small, vectors

QUICK: dict[str, Any] = {"seeds": 1, "controls": False, "corruptions": "none", "epochs": 8}
QUICK |= {"fusions": "concat,sum", "baselines": "alone", "optim": {"lr": 1e-2}}


def two_sites(path: Path) -> dict[str, Any]:
    """A manifest: at site near `a` tells the class alone, at site far it takes both."""
    draw, count = np.random.default_rng(0), 450
    labels = draw.integers(2, size=count)
    far, signs = np.arange(count) % 2 == 1, 2.0 * labels - 1
    a = draw.normal(size=(count, 4)) + np.where(far, 0.4, 0.9)[:, None] * signs[:, None]
    b = draw.normal(size=(count, 4)) + np.where(far, 1.0, 0.0)[:, None] * signs[:, None]
    data = vectors(path, [f"c{x}" for x in labels], {"a": a.tolist(), "b": b.tolist()})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, is_far in zip(rows, far, strict=True):
        row["site"] = "far" if is_far else "near"
    path.write_text("\n".join(map(json.dumps, rows)))
    return data


def test_a_finished_benchmark_tells_where_fusion_helps_and_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = two_sites(tmp_path / "data.jsonl")
    monkeypatch.setattr(page, "page", lambda *_: "")  # most of the time
    plain = api.run(small(tmp_path, data=data, **QUICK))
    monkeypatch.setattr(jobs, "run_job", lambda *_: pytest.fail("a job was run again"))
    report = api.run(small(tmp_path, data=data, subgroups="site", **QUICK))
    assert not report.failed
    assert report.verdict == plain.verdict
    assert plain.figures["subgroups"] == {}
    found = report.figures["subgroups"]["site"]
    gains = {name: group["gain"] for name, group in found["groups"].items()}
    assert gains["far"]["low"] > 0 >= gains["near"]["low"]
    report.print()
    assert found["words"] in capsys.readouterr().out
    assert "against a alone fusion helps in 'far'" in found["words"]

    lines = {line["candidate"]: line for line in report.figures["leaderboard"]}
    for name, line in lines.items():
        by_group = found["candidates"][name]
        assert line["worst_group_site"] == min(by_group.values())
        assert by_group[line["name_of_worst_group_site"]] == line["worst_group_site"]
    assert "| worst site |" in (tmp_path / "table.md").read_text()
    rows = pq.read_table(tmp_path / "results.parquet").to_pylist()
    of_sum = {x["subset"]: x for x in rows if x["candidate"] == "sum"}
    whole, *parts = (of_sum[f"a+b{group}"] for group in ("", ", site=far", ", site=near"))
    assert sum(x["samples"] for x in parts) == whole["samples"]
    mean = sum(x["samples"] * x["accuracy"] for x in parts) / whole["samples"]
    assert mean == pytest.approx(whole["accuracy"])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("sit", r"no column 'sit'\. Did you mean 'site'\? It has: .*sex"),
        ("one", "one.* 1 group among 60 samples, expected 2 to 20"),
        ("age", "age.* 25 groups among 60 samples"),
    ],
)
def test_a_column_without_groups_is_refused_before_anything_is_trained(
    column: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "prepare", lambda *_: pytest.fail("encoders were run"))
    with pytest.raises(FusionZooError, match=message):
        fz.benchmark(table(), target="y", out=tmp_path, subgroups=["sex", column], tune=0)


def table() -> dict[str, Any]:
    """A table whose columns are all inputs, besides a vector."""
    count = 60
    rows = {"y": ["no", "yes"] * 30, "v": np.random.default_rng(0).normal(size=(count, 3)).tolist()}
    rows |= {"sex": ["f", "f", "m"] * 20, "site": ["1", "2", "3", None] * 15}
    data = pd.DataFrame(rows | {"one": ["x"] * count, "age": [20 + n % 25 for n in range(count)]})
    return {"name": "manifest", "root": data, "kinds": {"v": "vector"}}


ORDER = np.random.default_rng(0).permutation(ITEMS)  # of `candidate`: the first ones are right


def planted(candidates: list[CandidateResults], names: list[str], folds: int = 1) -> Summary:
    """A finished benchmark; `names` are the groups of the items in the order of `ORDER`."""
    whole = summary(candidates, folds)
    cells = dict(zip(ORDER.tolist(), names, strict=True))
    groups = {"site": tuple(cells[row] for row in range(ITEMS))}
    whole = replace(whole, bench=replace(whole.bench, subgroups=groups))
    whole.leaderboard = leaderboard(whole)
    return whole


def test_a_gain_is_told_by_group_over_seeds_and_small_groups_are_only_shown() -> None:
    names = ["A"] * 100 + ["B"] * 95 + ["C"] * 5
    single, fusion = candidate("alone:image", [0.5] * 3), candidate("sum", [0.84, 0.85, 0.86])
    whole = planted([fusion, single, candidate("mean of singles", [0.95])], names)
    found = figures_by_group(whole)["site"]
    sizes = {name: x["samples"] for name, x in found["groups"].items()}
    assert sizes == {"A": 100, "B": 95, "C": 5}
    assert found["groups"]["B"]["gain"]["mean"] == pytest.approx((68 + 70 + 72) / 3 / 95)
    assert found["groups"]["A"]["gain"]["mean"] == 0  # no answer differs: no interval
    assert "gain" not in found["groups"]["C"]
    assert (found["worst"], found["leader"]) == ("B", "mean of singles")
    assert found["words"].startswith(
        "By site: against image alone fusion helps in 'B', and cannot be told to help or hurt in"
        " 'A'; told apart as worse off than the others: 'B' (0.737, "
    )
    every = figures_by_group(planted([fusion, single], ["A", "B"] * 100))["site"]["words"]
    assert every.startswith("By site: fusion helps in every group, against image alone; no group")
    other = candidate("sum", [0.5] * 3, shift=9)
    same = figures_by_group(planted([single, other], ["A", "B"] * 100))["site"]["words"]
    assert "whether fusion helps in any group, against image alone, cannot be told" in same
    line = {x["candidate"]: x for x in whole.leaderboard}["sum"]
    assert line["worst_group_site"] == pytest.approx(70 / 95)
    assert line["name_of_worst_group_site"] == "B"
    header, _, bold = paper_table(whole.leaderboard, "accuracy")
    assert sum(x[header.index("worst site")] for x in bold) == 1


def test_tests_of_one_sample_in_several_splits_count_once() -> None:
    names = ["A", "B"] * 100
    once = planted([candidate("sum", [0.8]), candidate("alone:image", [0.6], shift=50)], names)
    rows = ALL[: ITEMS // 2]
    half = replace(once.bench, folds=(Fold(ALL[ITEMS // 2 :], ALL[:0], rows),))
    twice = replace(half, folds=half.folds * 2, cfg=replace(half.cfg, splits="a,b"))
    found = []
    for bench in (half, twice):
        times = len(bench.folds)
        candidates = [
            replace(
                x,
                logits=x.logits[:, rows].repeat(1, times, 1),
                scores=np.tile(x.scores[:, rows], (1, times)),
                validation=x.validation[:1] * times,
            )
            for x in once.candidates
        ]
        whole = replace(once, bench=bench, target=once.target[rows].repeat(times))
        whole = replace(whole, candidates=candidates)
        whole.leaderboard = leaderboard(whole)
        found.append(figures_by_group(whole)["site"]["groups"])
    for name, first in found[0].items():
        second = found[1][name]
        assert second["samples"] == first["samples"]
        assert second["gain"]["mean"] == pytest.approx(first["gain"]["mean"])
        width, wider = (x["gain"]["high"] - x["gain"]["low"] for x in (first, second))
        assert wider == pytest.approx(width / (1 - twice.test_share) ** 0.5)
