"""What a paper needs: others' predictions, LaTeX, figure files, work in shards."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.special import softmax

from fusionzoo.benchmark import api, store
from fusionzoo.benchmark.bench import Bench, open_bench
from fusionzoo.benchmark.report import external, page, tables
from fusionzoo.benchmark.report.external import with_predictions
from fusionzoo.benchmark.report.verdict import figures
from fusionzoo.benchmark.schedule import read_shard
from fusionzoo.errors import FusionZooError
from fusionzoo.scripts.benchmark import main
from helpers.planted import candidate, summary
from helpers.setup_benchmark import SMALL, small


def planted() -> Mapping[str, Any]:
    """Figures of a report in which `gmu` is best."""
    fusions = [candidate("gmu", [0.8, 0.81]), candidate("sum", [0.7, 0.71], 30)]
    return figures(summary([*fusions, candidate("alone:image", [0.5, 0.51], 9)]))


def flags(out: Path, **changes: Any) -> list[str]:
    """Return the small benchmark as flags of the command line."""
    settings = {**SMALL, "out": str(out), **changes}
    return [x for k, v in settings.items() for x in (f"--{k}", v if v is str(v) else json.dumps(v))]


def test_the_table_for_a_paper_has_the_best_in_bold_and_the_verdict_as_caption() -> None:
    measured = planted()
    text = tables.latex(measured)
    rows = text.partition("\\midrule\n")[2].partition("\\bottomrule")[0].splitlines()
    assert rows[0].startswith("gmu & ") and r" & \textbf{0.805} & " in rows[0]
    caption = re.search(r"\\caption\{(.*)\}\n", text)
    assert caption
    words = caption[1].replace(r"\texttt{gmu}", "`gmu`").replace(r"\%", "%").replace("$<$", "<")
    assert words.replace(r"\_", "_") == measured["verdict"]


@pytest.mark.drawn
def test_combined_ranks_are_table_and_figure_for_a_paper_too(tmp_path: Path) -> None:
    lines = planted()
    third = {**lines["leaderboard"][0], "candidate": "mean", "accuracy": 0.6, "score": 0.6}
    shown = {**lines, "leaderboard": [*lines["leaderboard"], third], "metric": "accuracy"}
    for name in "ab":
        (tmp_path / name).mkdir()
        of_data = {**shown, "data": {**shown["data"], "title": name}}
        (tmp_path / name / "summary.json").write_text(json.dumps(page._without_nan(of_data)))
    folders = [str(tmp_path / name) for name in "ab"]
    out = json.dumps(folders), "--out", str(tmp_path / "out")
    assert main(["--combine", *out, "--figures", "pdf"]) == 0
    assert (tmp_path / "out" / "figures" / "critical_difference.pdf").is_file()
    table = (tmp_path / "out" / "table.tex").read_text()
    assert r"gmu & \textbf{1.00} & \textbf{0.805} & \textbf{0.805} \\" in table
    assert r"\caption{Over 2 data sets" in table


@pytest.mark.drawn
def test_on_request_every_figure_of_a_report_is_a_pdf_too(tmp_path: Path) -> None:
    whole = summary([candidate("gmu", [0.8, 0.81]), candidate("alone:image", [0.5, 0.51], 9)])
    page.write(whole, figures(whole), tmp_path)
    assert not (tmp_path / "figures").exists()
    asked = replace(whole, bench=replace(whole.bench, cfg=replace(whole.bench.cfg, figures="pdf")))
    contents = []
    for _ in range(2):
        page.write(asked, figures(asked), tmp_path)
        contents.append({x.name: x.read_bytes() for x in (tmp_path / "figures").iterdir()})
    first, second = contents
    assert first == second  # without a date
    assert first.keys() == {"intervals.pdf", "calibration.pdf"}
    assert (tmp_path / "index.html").read_text().count("<svg") == len(first)
    for content in first.values():
        assert content.startswith(b"%PDF") and b"/Subtype /Type0" in content  # TrueType
        assert b"/Type3" not in content and b"CreationDate" not in content


@pytest.mark.parametrize("text", ["3", "0/4", "5/4", "a/b", "-1/2", "1/0"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(FusionZooError, match="write the part and the number of parts"):
        read_shard(text)


@pytest.mark.slow
def test_shards_together_do_all_jobs_once_and_the_report_is_the_same(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    changes = {"tune": 2, "folds": 3, "fusions": "sum"}
    assert main(flags(whole, **changes)) == 0
    for part in range(1, 4):
        before = {path: path.stat().st_mtime_ns for path in store.folder_of(parts).rglob("*.npz")}
        assert main([*flags(parts, **changes), "--shard", f"{part}/3"]) == 0
        after = {path: path.stat().st_mtime_ns for path in store.folder_of(parts).rglob("*.npz")}
        assert len(after) > len(before)
        assert {path: after[path] for path in before} == before
        assert not (parts / "summary.json").is_file()
    assert main(flags(parts, **changes)) == 0
    last = {path: path.stat().st_mtime_ns for path in store.folder_of(parts).rglob("*.npz")}
    assert last.keys() == after.keys()  # only tests on damaged samples were left
    assert (parts / "summary.json").read_text() == (whole / "summary.json").read_text()
    assert {path.name for path in last} == {p.name for p in store.folder_of(whole).rglob("*.npz")}


# ---- others' predictions


SMALLER: dict[str, Any] = {"fusions": "sum,gmu", "seeds": 1, "corruptions": "none"}


def write(path: Path, ids: list[str], shares: np.ndarray, classes: tuple[str, ...]) -> Path:
    columns = {f"p_{label}": shares[:, n] for n, label in enumerate(classes)}
    pq.write_table(pa.table({"id": ids, **columns}), path)
    return path


def test_the_predictions_of_a_copy_of_a_fusion_tie_with_it(tmp_path: Path) -> None:
    cfg = small(tmp_path / "a", **SMALLER)
    plain = api.run(cfg).figures
    bench, dataset = open_bench(cfg)
    chosen = plain["chosen_on_validation"]
    (cell,) = [x for x in (tmp_path / "a" / "cells").glob(f"{chosen}-f0-*.npz")]
    with np.load(cell) as stored:
        logits = stored["logits0"]
    ids = [dataset.ids[row] for row in bench.folds[0].test.tolist()]
    order = np.random.default_rng(0).permutation(len(ids))
    others = [*(ids[row] for row in order), "another sample"]
    answers = softmax(logits, axis=1)[order]
    shares = np.concatenate([answers, np.full((1, len(bench.classes)), 0.5)])
    path = write(tmp_path / "copy.parquet", others, shares, bench.classes)

    report = api.run(small(tmp_path / "a", external=str(path), **SMALLER))
    found = report.figures["external"]["copy"]
    assert (found["difference"], found["low"], found["high"], found["p"]) == (0, 0, 0, 1)
    lines = {line["candidate"]: line for line in report.figures["leaderboard"]}
    assert lines["copy"]["accuracy"] == lines[chosen]["accuracy"]
    assert lines["copy"]["gain_p"] == lines[chosen]["gain_p"]
    assert report.verdict == plain["verdict"]
    assert "<code>copy</code>, others" in report.page.read_text()
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["external"]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, list[str]]:
    bench, dataset = open_bench(small(tmp_path_factory.mktemp("bench"), **SMALLER))
    return bench, dataset.ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lacking", r"no prediction of 2 of \d+ samples that fold 0 tests: '\d+', '\d+'"),
        ("twice", "is there twice"),
        ("sum", "are not from 0 to 1 with sum 1"),
        ("column", "has no column 'p_"),
        ("name", "'sum' is measured here: rename the file"),
        ("seen", r"training saw 2 of \d+ samples that fold 0 tests"),
    ],
)
def test_predictions_that_cannot_be_compared_are_refused(
    opened: tuple[Bench, list[str]], tmp_path: Path, change: str, message: str
) -> None:
    bench, ids = opened
    tested = [ids[row] for row in bench.folds[0].test.tolist()]
    shares, classes = np.full((len(tested), len(bench.classes)), 0.5), bench.classes
    if change == "lacking":
        tested, shares = tested[2:], shares[2:]
    elif change == "twice":
        tested = [tested[0], *tested[:-1]]
    elif change == "sum":
        shares[3] = 0.4
    elif change == "column":
        classes = (*classes[:-1], "other")
    name = "sum" if change == "name" else "other"
    path = write(tmp_path / f"{name}.parquet", tested, shares, classes)
    if change == "seen":
        marks = pa.array([True, True, *[False] * (len(tested) - 2)])
        pq.write_table(pq.read_table(path).append_column("seen_in_training", marks), path)
    cfg = small(tmp_path, external=str(path), **SMALLER)
    with pytest.raises(FusionZooError, match=message):
        with_predictions(replace(bench, cfg=cfg), ids, ["sum", "gmu"])


GOOD: dict[str, Any] = {"id": ["1", "2"], "p_a": [0.3, 0.6], "p_b": [0.7, 0.4]}
TWICE = pa.table([GOOD[name] for name in ("id", "p_a", "p_a", "p_b")], ["id", "p_a", "p_a", "p_b"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as Parquet: .* 0 bytes"),
        (b"id,p_a,p_b\n1,0.3,0.7\n", "cannot be read as Parquet"),
        (b"PAR1junkPAR1", "cannot be read as Parquet"),
        (TWICE, "has two columns 'p_a'; it has id, p_a, p_a, p_b"),
        (GOOD | {"p_a": ["x", "y"]}, "column 'p_a' must hold numbers"),
        (GOOD | {"p_a": [[0.3], [0.6]]}, "column 'p_a' must hold numbers"),
        (GOOD | {"id": [b"1", b"\xff"]}, "column 'id' must hold text"),
        (GOOD | {"fold": [[0], [1]]}, "column 'fold' must hold whole numbers"),
        ({"p_a": [0.3], "p_b": [0.7]}, "has no column 'id'; it has p_a, p_b"),
    ],
)
def test_files_that_cannot_be_read_are_refused_in_one_line(
    content: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "others.parquet"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        pq.write_table(pa.table(content), path)
    with pytest.raises(FusionZooError, match=message) as error:
        external._read(str(path), ["a", "b"], by_fold=message.startswith("column 'fold'"))
    assert "\n" not in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("names", [["patient", "label", "p_a"], ["p_a", "case", "label"]])
def test_ids_are_read_under_the_name_of_the_data_s_column(names: list[str], tmp_path: Path) -> None:
    columns = {"patient": ["1", "2"], "case": ["1", "2"], "label": ["b", "a"], **GOOD}
    pq.write_table(pa.table({x: columns[x] for x in (*names, "p_b")}), tmp_path / "p.parquet")
    rows = external._read(str(tmp_path / "p.parquet"), ["a", "b"], by_fold=False, id_column="case")
    assert [*rows] == [("1", 0), ("2", 0)]
    assert rows["2", 0].logits.exp().tolist() == pytest.approx([0.6, 0.4])
