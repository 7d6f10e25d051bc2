"""The HTML report: one file without network access; in a browser it loads, shows and sorts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusionzoo.benchmark.api import run
from fusionzoo.benchmark.report import page as report_html
from fusionzoo.benchmark.report.leaderboard import leaderboard, page_table, text_table
from fusionzoo.benchmark.report.page import heat_map, sections
from fusionzoo.benchmark.report.results import Summary
from fusionzoo.benchmark.report.verdict import figures
from fusionzoo.datasets.opening.naming import data_title
from fusionzoo.evaluation.metrics import COMPARED_BY
from fusionzoo.fusion import FUSIONS, list_fusions
from fusionzoo.html.template import csv_text
from helpers.browser import chromium, needs_browser, probe
from helpers.planted import candidate, damaged, summary
from helpers.setup_benchmark import small

pytestmark = pytest.mark.drawn

ARTEFACTS = Path(__file__).parents[2] / "build" / "artefacts"
PROBE = """
<script>
const visible = (node) => node.getClientRects().length > 0;
const luminance = (text) => {
  const linear = (x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const [r, g, b] = text.match(/[\\d.]+/g).map((x) => linear(x / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (a, b) => {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
};
addEventListener("load", () => {
  const table = document.querySelector("#leaderboard"), found = {errors: window.broken};
  const column = (n) => [...table.tBodies[0].rows].map((row) => row.cells[n].textContent.trim());
  const buttons = [...table.tHead.querySelectorAll("button")];
  found.before = column(1);
  buttons[1].click(); found.down = column(1); found.sort = buttons[1].parentNode.ariaSort;
  buttons[1].click(); found.up = column(1);
  buttons[0].click(); found.names = column(0);
  const parameters = buttons.findIndex((button) => button.textContent.startsWith("param"));
  buttons[parameters].click(); found.parameters = column(parameters).filter(Boolean);

  const width = document.documentElement.clientWidth;
  found.width = innerWidth;
  found.wide = document.documentElement.scrollWidth - innerWidth;
  found.outside = [...document.querySelectorAll("body *")].filter((node) =>
    visible(node) && !node.closest(".scroll > *") && node.getBoundingClientRect().right > width + 1
  ).map((node) => node.outerHTML.slice(0, 80));
  const frame = table.closest(".frame"), scroll = table.parentNode;
  const room = () => frame.clientWidth - table.scrollWidth;
  found.room = room(); found.hint = frame.classList.contains("more");
  found.pinned = getComputedStyle(table.rows[1].cells[0]).position;
  const shown = () => [...table.tHead.rows[0].cells].filter(visible).length;
  found.columns = [shown()];
  document.querySelector("#all-columns").click(); found.columns.push(shown());
  found.hint_for_all = frame.classList.contains("more");
  scroll.scrollLeft = 100;
  const left = (node) => node.getBoundingClientRect().left;
  found.moved = left(table.rows[1].cells[0]) - left(scroll);
  document.querySelector("#all-columns").click();

  const drawings = [...document.querySelectorAll("svg")].filter(visible);
  found.pictures = drawings.length; found.smallest = 100; found.overlaps = []; found.cut = [];
  for (const drawing of drawings) {
    const edge = drawing.getBoundingClientRect();
    const labels = [...drawing.querySelectorAll("text")].map((node) => {
      const size = parseFloat(getComputedStyle(node).fontSize) * drawing.getScreenCTM().a;
      found.smallest = Math.min(found.smallest, size);
      return [node.textContent, node.getBoundingClientRect()];
    });
    labels.forEach(([name, a], number) => {
      if (a.left < edge.left - 2 || a.right > edge.right + 2) found.cut.push(name);
      for (const [other, b] of labels.slice(number + 1)) {
        const over = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const under = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        const lines = 0.3 * Math.min(a.height, b.height);
        if (over > 1 && under > lines) found.overlaps.push([name, other]);
      }
    });
  }
  const paper = getComputedStyle(document.body).backgroundColor;
  found.paper = luminance(paper);
  found.text = contrast(getComputedStyle(drawings[0].querySelector("text")).fill, paper);
  const strokes = [...document.querySelectorAll("svg.plot path[style*='--c']")].filter(visible);
  found.strokes = strokes.length;
  found.lines = Math.min(...strokes.map((node) => contrast(getComputedStyle(node).stroke, paper)));
  const cells = [...document.querySelectorAll("td.h9")];
  const probe = document.createElement("canvas").getContext("2d");
  found.heat = Math.min(...cells.map((cell) => {
    for (const colour of [paper, getComputedStyle(cell).backgroundColor]) {
      probe.fillStyle = colour; probe.fillRect(0, 0, 1, 1);
    }
    const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
    return contrast(`rgb(${r}, ${g}, ${b})`, getComputedStyle(cell).color);
  }));
  const out = document.createElement("pre");
  out.id = "probe"; out.textContent = JSON.stringify(found); document.body.append(out);
  parent.postMessage(out.textContent, "*");
});
</script>
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSIONZOO_CACHE", str(out / "cache"))
        cfg = small(out, fusions="sum,gmu,max,late_mean,mbt")
        assert not run(cfg).failed
    return out / "index.html"


def many_candidates() -> Summary:
    """A planted report with every fusion, long names, baselines, a training strategy."""
    names = [*sorted(FUSIONS), "alone:image", "alone:audio", "majority class"]
    names += ["logistic regression on everything", "mean of single modalities"]
    candidates = []
    for number, name in enumerate(names):
        score = 0.4 + 0.01 * number
        results = candidate(name, [score, score + 0.02, score - 0.01], shift=number)
        if results.kind != "baseline":
            damaged(results, score)
        candidates.append(results)
    combined = candidate("gmu", [0.7, 0.72, 0.71])
    damaged(combined, 0.7)
    candidates.append(replace(combined, name="concat_transformer + gblend"))
    whole = summary(candidates)
    cfg = replace(whole.bench.cfg, seeds=3)
    whole = replace(whole, bench=replace(whole.bench, cfg=cfg))
    whole.leaderboard = leaderboard(whole)
    return whole


@pytest.fixture(scope="module")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole = many_candidates()
    path = tmp_path_factory.mktemp("long") / "index.html"
    path.write_text(report_html.page(whole, figures(whole)))
    return path


def test_the_files_that_the_page_links_stand_beside_it(page: Path) -> None:
    links = re.findall(r'href="([^"#:]+)"', page.read_text())
    assert links == ["results.parquet", "summary.json", "table.md", "table.tex", "config.yaml"]
    assert all((page.parent / name).is_file() for name in links)


def test_every_plot_is_explained_and_links_its_figures(page: Path) -> None:
    text = page.read_text()
    parts = re.split(r"<h2>", text)[1:]
    for section in parts:
        if "<svg" in section:
            assert "How to read it" in section
            assert "data:text/csv;base64," in section
    assert text.count('<svg class="plot"') == text.count("<svg") == 5
    assert text.index('id="verdict"') < text.index("<table")


def test_all_pairs_of_fusions_are_compared_also_after_one_seed() -> None:
    whole = summary([candidate("gmu", [0.9]), candidate("sum", [0.5]), candidate("max", [0.5])])
    pairs = sections(whole, "accuracy")["pairs"]
    assert pairs["names"] == ["gmu", "max", "sum"]
    assert pairs["matrix"] == [["", "win", "win"], ["loss", "", "tie"], ["loss", "tie", ""]]
    assert pairs["counts"] == [[2, 0, 0], [0, 1, 1], [0, 1, 1]]


def test_names_are_shown_as_code_and_each_candidate_has_its_calibration(page: Path) -> None:
    text = page.read_text()
    assert "`" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    verdict = re.search(r'id="verdict">(.*?)</p>', text)
    behind = re.search(r"<summary>The (\d+) sentences behind it</summary><ul>(.*?)</ul>", text)
    assert verdict and "<code>" in verdict[1]
    assert behind and behind[2].count("<li>") == int(behind[1]) and "<code>" in behind[2]
    assert "ECE if calibrated" in text
    summary = json.loads((page.parent / "summary.json").read_text())
    for line in summary["leaderboard"]:
        assert line["ece"] >= line["ece_debiased"] >= 0
        noise = line["ece"] <= line["ece_limit"] + 1e-9
        expected = "cannot be told from calibrated" if noise else "not calibrated"
        assert line["calibration"] == expected
    table = (page.parent / "table.md").read_text()
    assert "cannot be told from calibrated" in table
    assert summary["verdict"] in table and "`" in summary["verdict"]


def lines_of(*lines: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    columns, rows = page_table(lines, "mae")
    return [column.title for column in columns], [[cell.text for cell in row] for row in rows]


def test_columns_without_values_are_left_out_and_unknown_numbers_come_last() -> None:
    titles, rows = lines_of(
        {"candidate": "gmu", "family": "early", "mae": 1234.56, "low": float("nan")}
        | {"gain_difference": -3.25, "gain_p_holm": 0.0001, "outcome": "win", "spearman": 0.91234},
        {"candidate": "logistic regression on everything", "family": "baseline", "mae": 1.5},
    )
    assert titles == ["candidate", "MAE", "gain", "p\u00a0(Holm)", "outcome", "family", "spearman"]
    assert rows[0] == ["gmu", "1,235", "-3.25", "<0.001", "win", "early", "0.912"]
    assert rows[1][1:] == ["1.500", "", "", "", "baseline", ""]


def test_the_page_and_the_text_tables_show_the_same_cells() -> None:
    lines = [
        {"candidate": "gmu", "family": "early", "kind": "fusion", "mae": 1234.56, "low": math.nan}
        | {"high": math.nan, "gain_difference": -3.25, "gain_low": -4.0, "gain_high": 1.5}
        | {"gain_p_holm": 0.2, "missing_area": 1.0, "missing_area_low": 0.5},
        {"candidate": "alone:image", "family": "single", "kind": "single", "mae": 12.3456}
        | {"low": 11.0, "high": 13.0},
    ]
    columns, cells = page_table(lines, "mae")
    titles = [column.title.replace("\u00a0", " ") for column in columns]
    page_rows = [dict(zip(titles, [x.text for x in row], strict=True)) for row in cells]
    header, rows = text_table(lines, "mae")
    gain = "gain over best single"
    assert header == ["candidate", "family", "MAE", "95 %", gain, "p (Holm)"]
    assert rows[0] == ["gmu", "early", "1,235", "one seed", "-3.25 (-4 to +1.5)", "0.200"]
    for row, page_row in zip(rows, page_rows, strict=True):
        text_row = dict(zip(header, row, strict=True))
        for title in ("candidate", "family", "MAE", "p (Holm)"):
            assert text_row[title] == page_row[title]
    without_gain = [line for line in lines if line["kind"] == "single"]
    assert text_table(without_gain, "mae")[0] == ["candidate", "family", "MAE", "95 %"]


def test_numbers_with_units_or_separators_carry_the_number_that_sorts_them() -> None:
    line = {"candidate": "gmu", "accuracy": 0.5, "parameters": 128396}
    columns, (row,) = page_table([line | {"samples_per_second": 54321.0}], "accuracy")
    cells = {column.title: cell for column, cell in zip(columns, row, strict=True)}
    assert cells["param\u00adeters"][:2] == ("128 k", "128396")
    assert cells["samples/s"][:2] == ("54,321", "54321")
    assert cells["accuracy"][:2] == ("0.500", "")


def test_a_page_without_classes_shows_the_metric_that_there_is() -> None:
    candidates = [candidate(name, [0.5, 0.6]) for name in ("gmu", "alone:image", "majority class")]
    whole = summary(candidates)
    content = {**figures(whole), "metric": "mae", "shapley": {}, "controls": None}
    content["data"] = {**content["data"], "classes": 0, "test": 12345}
    for number, line in enumerate(whole.leaderboard):
        for key in set(line) - {"candidate", "family", "kind", "score", "low", "high", "seeds"}:
            del line[key]
        line["mae"] = 1200.5 + number
        for row in whole.candidate(line["candidate"]).rows:
            row["mae"] = line["mae"]
    text = report_html.page(whole, content)
    assert "12,345 test samples" in text
    assert "<h2>MAE and its interval</h2>" in text and "MAE on the test split" in text
    assert "<td>1,200</td>" in text.replace(' data-sort="1200.5"', "")
    for heading in ("Calibration", "Controls", "What each modality", "missing</h2>", "ECE"):
        assert heading not in text
    assert text.count("<svg") == 1


@pytest.mark.parametrize(
    ("settings", "title"),
    [
        ({"name": "stamps", "modalities": "image,text"}, "stamps"),
        ({"name": "manifest", "root": "/home/me/products.csv"}, "products"),
        ({"name": "manifest", "root": "products/data.parquet"}, "products"),
        ({"name": "folders", "root": "photos/birds/"}, "birds"),
        ({"name": "manifest", "root": "c/data-0123456789ab.parquet"}, "a table in memory"),
        ({"name": "/tmp/shop/metadata.csv", "in_memory": "5f"}, "shop"),
        ({"name": "interactions (xor)", "in_memory": "5f"}, "interactions (xor)"),
    ],
)
def test_a_report_is_named_after_the_data(settings: dict[str, Any], title: str) -> None:
    assert data_title(settings) == title


def test_title_heading_and_counts_are_those_of_the_data(page: Path) -> None:
    text = page.read_text()
    assert "<title>interactions (and): did fusion help?</title>" in text
    assert "<h1>Did fusion help on interactions (and)?</h1>" in text


@pytest.mark.slow
def test_a_page_with_every_fusion_stays_small(long_page: Path) -> None:
    text = long_page.read_text()
    assert len(re.findall(r"<tr class=", text)) == len(FUSIONS) + 6
    assert len(text) < 15_000 * len(list_fusions())  # bytes


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("which", ["page", "long_page"])
def test_a_browser_shows_and_sorts_it(
    which: str, width: int, dark: bool, request: pytest.FixtureRequest
) -> None:
    found = probe(request.getfixturevalue(which), PROBE, width, dark)
    assert found["errors"] == []
    assert found["width"] == width
    # sorted, also where a column has units
    assert found["down"] == sorted(found["before"], reverse=True)
    assert found["up"] == sorted(found["before"])
    assert found["sort"] == "descending"
    assert found["names"] == sorted(found["names"], key=str.lower, reverse=True)
    counts = [parse_readable(text) for text in found["parameters"]]
    assert len(counts) > 4 and counts == sorted(counts, reverse=True)
    # nothing is cut at the right; a table that is too wide scrolls in its frame and says so
    assert found["wide"] <= 0 and found["outside"] == []
    assert (found["room"] >= 0) == (width == 1400)
    assert found["hint"] == (width == 390)
    assert found["hint_for_all"] and found["columns"][1] > found["columns"][0] + 5
    assert found["pinned"] == "sticky" and abs(found["moved"]) <= 1
    # each figure once, its labels apart, inside and large enough
    assert found["pictures"] == 5
    assert found["overlaps"] == [] and found["cut"] == []
    assert found["smallest"] >= 10
    # readable on light and on dark paper
    assert (found["paper"] < 0.1) == dark
    assert found["text"] >= 7 and found["heat"] >= 4.5
    assert found["strokes"] > 5 and found["lines"] >= 2.7


@needs_browser
@pytest.mark.parametrize("width", [390, 1400])
def test_pictures_of_the_page_are_kept(long_page: Path, width: int) -> None:
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    picture = ARTEFACTS / f"report-{width}.png"
    chromium(long_page, f"--screenshot={picture}", f"--window-size={width},5000")
    assert picture.stat().st_size > 20_000


def parse_readable(text: str) -> float:
    number, _, prefix = text.partition(" ")
    return float(number) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[prefix]


def test_the_strongest_colour_is_the_best_figure_of_an_error_too() -> None:
    whole = summary([candidate("gmu", [0.6]), candidate("alone:image", [0.5])])
    damaged(whole.candidates[0], 0.6)
    regression = replace(whole, bench=replace(whole.bench, metric=COMPARED_BY["regression"]))
    shares = {"gmu": {"image": 0.1, "audio": 0.1}}
    for planted, best in ((whole, max), (regression, min)):
        heat = heat_map(planted, shares)
        ((_, figures_of_gmu, _),) = heat["rows"]
        known = [x for x in figures_of_gmu if x == x]
        assert heat["shade"](best(known)) == "h9"
        assert heat["shade"]((min if best is max else max)(known)) == "h0"
        assert heat["shade"](float("nan")) == ""


def test_no_cell_of_a_reports_csv_runs_as_a_formula() -> None:
    text = csv_text(["class", "=share"], [["=cmd|' /C calc'!A0", 0.5], ["-1", -0.5], ["-", 1]])
    assert text == "class,'=share\n'=cmd|' /C calc'!A0,0.5\n-1,-0.5\n-,1\n"
