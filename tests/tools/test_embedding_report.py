"""The quality report: figures against planted data, a page that a browser shows, exports."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import fusionzoo as fz
from fusionzoo import FusionZooError
from fusionzoo.cli import main
from fusionzoo.tools.embedding_report.figures import probe_rows, probes
from helpers.browser import needs_browser, probe

COUNT, CLASSES = 90, 3


def vectors_of(values: np.ndarray) -> Any:
    flat = pa.array(values.astype(np.float32).ravel())
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def write(folder: Path, name: str, rotate: bool = False, order: Any = None) -> Path:
    """Write embeddings of three classes: `fused` tells them apart, `image` does not."""
    rng = np.random.default_rng(0)
    classes = np.arange(COUNT) % CLASSES
    fused = 4 * np.eye(CLASSES, 8)[classes] + 0.5 * rng.standard_normal((COUNT, 8))
    noise = rng.standard_normal((COUNT, 8))
    shared = rng.standard_normal((COUNT, 6))
    if rotate:
        fused = fused @ np.linalg.qr(rng.standard_normal((8, 8)))[0]
    columns = {
        "fused": fused,
        "image": noise,
        "text": noise + 3,
        "aligned_image": shared,
        "aligned_text": shared + 0.3 * rng.standard_normal((COUNT, 6)),
    }
    present = np.arange(COUNT) % 9 > 0
    table = pa.table(
        {
            "id": [f"s{row}" for row in range(COUNT)],
            "split": ["train" if row < 60 else "test" for row in range(COUNT)],
            "target": ["abc"[label] for label in classes],
            "present_image": np.ones(COUNT, bool),
            "present_text": present,
            **{name: vectors_of(values) for name, values in columns.items()},
        }
    )
    data = {"name": "manifest", "root": str(folder / "data.parquet")}
    metadata = {"fusionzoo": json.dumps({"data": data})}
    table = table if order is None else table.take(pa.array(order))
    pq.write_table(table.replace_schema_metadata(metadata), folder / name)
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of embeddings and the data behind them: images and texts, in groups of three."""
    folder = tmp_path_factory.mktemp("report")
    for row in range(COUNT):
        Image.new("RGB", (40, 30), (2 * row, 255 - 2 * row, 90)).save(folder / f"{row}.png")
    rows = {
        "id": [f"s{row}" for row in range(COUNT)],
        "split": ["train" if row < 60 else "test" for row in range(COUNT)],
        "target": ["abc"[row % 3] for row in range(COUNT)],
        "group": [f"g{row // 3}" for row in range(COUNT)],
        "image": [f"{row}.png" for row in range(COUNT)],
        "text": [f"<b>thing</b> {row}" if row % 9 else None for row in range(COUNT)],
    }
    pq.write_table(pa.table(rows), folder / "data.parquet")
    write(folder, "emb.parquet")
    write(folder, "other.parquet", rotate=True, order=np.random.default_rng(1).permutation(COUNT))
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> Any:
    return fz.embed_report(folder / "emb.parquet", folder / "other.parquet")


def line(report: Any, column: str, file: str = "emb") -> dict[str, Any]:
    return next(x for x in report.columns if (x["vectors"], x["file"]) == (column, file))


def test_probes_tell_planted_classes_apart_and_noise_not(report: Any) -> None:
    fused, noise = line(report, "fused"), line(report, "image")
    assert fused["linear_probe"].mean > 0.95 and fused["knn"].mean > 0.95
    assert noise["linear_probe"].low < 1 / 3 < noise["linear_probe"].high
    assert fused["silhouette"] > 0.5 > noise["silhouette"] + 0.4
    assert fused["linear_probe"].low <= fused["linear_probe"].mean <= fused["linear_probe"].high


def test_only_rows_that_have_the_vector_are_measured(report: Any) -> None:
    assert line(report, "text")["samples"] == COUNT - COUNT // 9
    assert line(report, "image")["samples"] == COUNT


def test_groups_are_never_split_between_folds() -> None:
    rng = np.random.default_rng(0)
    centres, groups = rng.standard_normal((20, 16)), np.arange(240) // 12
    vectors = (centres[groups] + 0.01 * rng.standard_normal((240, 16))).astype(np.float32)
    targets = np.array(["a", "b"] * 10)[groups]  # a class per group, without any pattern
    apart = probes(vectors, targets, [str(x) for x in groups])
    leaking = probes(vectors, targets, [str(x) for x in range(240)])
    assert leaking["knn"].mean > 0.95 > apart["knn"].mean + 0.2
    assert apart["knn"].high - apart["knn"].low > leaking["knn"].high - leaking["knn"].low


def test_numbers_and_rare_values_are_no_classes() -> None:
    assert probe_rows([str(number / 7) for number in range(300)]) == []
    assert probe_rows([None] * 20 + ["a"] * 20) == []
    assert len(probe_rows(["a"] * 9 + ["b"] * 9 + ["rare"] * 2 + [None])) == 18


def test_a_rotated_copy_in_another_order_is_the_same_space(report: Any) -> None:
    names, matrix = report.cka
    first, second = names.index("emb: fused"), names.index("other: fused")
    assert matrix[first][second] == pytest.approx(1, abs=1e-6)
    assert abs(matrix[first][names.index("emb: image")]) < 0.2
    same = line(report, "fused", "other")["linear_probe"]
    assert same.mean == pytest.approx(line(report, "fused")["linear_probe"].mean, abs=0.03)


def test_retrieval_counts_groups_of_the_data_as_right(report: Any) -> None:
    figures = report.retrieval["emb"]["image_to_text"]
    assert figures["recall@1"].mean > 0.9 and figures["map"].mean < figures["mrr"].mean
    pair = report.pairs[0]
    assert pair["alignment"] < 0.3 < 1 < pair["of_others"]


def test_a_split_can_be_measured_alone_and_training_rows_are_noted(folder: Path) -> None:
    whole = fz.embed_report(folder / "emb.parquet")
    test = fz.embed_report(folder / "emb.parquet", split="test")
    assert any("--split test" in note for note in whole.notes) and test.notes == []
    assert len(test.samples[0].ids) == 30
    with pytest.raises(FusionZooError, match="split 'tset' has 0 rows"):
        fz.embed_report(folder / "emb.parquet", split="tset")


def test_json_has_no_nan_and_the_same_figures(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    flags = ["--html", "", "--json", str(out), "--samples", "40"]
    assert main(["embed-report", str(folder / "emb.parquet"), *flags]) == 0
    figures = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert figures["columns"][0]["samples"] == 40
    assert not math.isnan(figures["columns"][0]["linear_probe"]["mean"])


def test_files_without_the_same_ids_are_refused(folder: Path, tmp_path: Path) -> None:
    table = pq.read_table(folder / "emb.parquet")
    pq.write_table(table.slice(0, 50), tmp_path / "part.parquet")
    with pytest.raises(FusionZooError, match="has no row with the id 's50'"):
        fz.embed_report(folder / "emb.parquet", tmp_path / "part.parquet")
    with pytest.raises(FusionZooError, match="at least 2 rows"):
        fz.embed_report(folder / "emb.parquet", samples=1)


@pytest.fixture(scope="module")
def page(report: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = report.to_html(tmp_path_factory.mktemp("page") / "report.html", points=60)
    return path


@pytest.mark.slow
def test_the_page_holds_the_data_of_its_maps(page: Path) -> None:
    text = page.read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert [one["name"] for one in data["maps"]] == [
        "fused",
        "image",
        "text",
        "aligned: each modality's vector",
    ]
    assert "<b>thing" not in text.partition('id="data"')[2]  # escaped in the script


PROBE = """
<script>
addEventListener("load", () => {
  const get = (id) => document.getElementById(id), found = {};
  const width = document.documentElement.clientWidth;
  found.wide = document.documentElement.scrollWidth - innerWidth;
  found.outside = [...document.querySelectorAll("body *")].filter((node) =>
    node.getClientRects().length && !node.closest(".scroll > *") &&
    node.getBoundingClientRect().right > width + 1).map((node) => node.outerHTML.slice(0, 80));
  found.count = get("count").textContent; found.legend = get("legend").children.length;
  const pen = get("map").getContext("2d");
  const painted = () => new Set(new Uint32Array(
    pen.getImageData(0, 0, get("map").width, get("map").height).data.buffer)).size;
  found.colours = painted();
  const box = get("map").getBoundingClientRect(), spot = spots[7];
  const at = {clientX: box.left + spot.x, clientY: box.top + spot.y, bubbles: true};
  get("map").dispatchEvent(new PointerEvent("pointermove", at));
  const tip = get("tip").getBoundingClientRect();
  found.tip = get("tip").textContent; found.picture = !!get("tip").querySelector("img");
  found.named = found.tip.includes(data.samples[spot.number].id);
  found.inside = tip.right <= box.right + 1 && tip.left >= box.left - 1;
  get("search").value = "s11"; get("search").dispatchEvent(new Event("input"));
  found.searched = get("count").textContent;
  get("search").value = ""; get("search").dispatchEvent(new Event("input"));
  get("legend").querySelector("button").click(); found.without = get("count").textContent;
  get("which").value = "3"; get("colour").value = "modality";
  get("colour").dispatchEvent(new Event("change"));
  found.modalities = [...get("legend").children].map((node) => node.textContent);
  found.broken = window.broken;
  const out = document.createElement("pre");
  out.id = "probe"; out.textContent = JSON.stringify(found); document.body.append(out);
  parent.postMessage(out.textContent, "*");
});
</script>
"""


@needs_browser
@pytest.mark.parametrize("width", [390, 1400])
def test_a_browser_shows_the_map_on_a_desktop_and_a_phone(page: Path, width: int) -> None:
    found = probe(page, PROBE, width)
    assert found["broken"] == []
    assert found["wide"] <= 0 and found["outside"] == []
    assert found["count"] == "60 of 60 points" and found["legend"] == CLASSES
    assert found["colours"] > CLASSES
    assert found["named"] and found["picture"] and found["inside"]
    assert found["searched"] == "1 of 60 points"
    assert found["without"] == "40 of 60 points"
    assert sorted(found["modalities"]) == ["image (30)", "text (30)"]
