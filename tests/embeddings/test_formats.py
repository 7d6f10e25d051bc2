"""Every format in which embeddings are written is searched, measured and read the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fusionzoo as fz
from fusionzoo import FusionZooError
from fusionzoo.cli import main
from fusionzoo.embeddings.files import read_about
from fusionzoo.tools.search.search import Searcher
from fusionzoo.tools.search.vectors import open_vectors

COUNT = 60
OTHERS = ("shards", "e.npy")


@pytest.fixture(scope="module")
def data() -> list[dict[str, Any]]:
    """Rows of two classes; some lack `b`."""
    draw = np.random.default_rng(0)
    rows = []
    for number in range(COUNT):
        a = draw.standard_normal(5).astype(np.float32) + 2 * (number % 2)
        b = None if number % 7 == 3 else draw.standard_normal(3).astype(np.float32)
        rows.append({"id": f"s{number}", "target": "xy"[number % 2], "a": a, "b": b})
    return rows


def embed(data: Any, folder: Path, name: str, **settings: Any) -> Path:
    roles = {"a": "a", "b": "b"}
    dataset = fz.create_dataset(data, columns=roles, kinds=dict.fromkeys(roles, "vector"))
    encoders = {"a": {"name": "vector/identity"}, "b": {"name": "vector/identity"}}
    sizes = {"batch_size": 8, "row_group": 16, "num_workers": 0}
    out = fz.embed(dataset, encoders=encoders, out=folder / name, **sizes, **settings)
    assert out == folder / name
    return out


@pytest.fixture(scope="module")
def expected(data: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embed(data, tmp_path_factory.mktemp("plain"), "e.parquet")


@pytest.mark.parametrize("name", OTHERS)
def test_a_search_gives_the_same_hits_in_every_format(
    name: str, data: Any, expected: Path, tmp_path: Path
) -> None:
    out = embed(data, tmp_path, name)
    queries: list[dict[str, Any]] = [
        {"vector": data[5]["a"], "by": "a"},
        {"id": "s8"},
        {"id": ["s40", "s8", "s40"], "by": "b", "k": COUNT},
    ]
    for query in queries:
        found, wanted = fz.search(out, **query), fz.search(expected, **query)
        assert [hit.row for hit in found] == [hit.row for hit in wanted]
        assert [hit.columns for hit in found] == [hit.columns for hit in wanted]
        assert found.ids == [f"s{hit.row}" for hit in found]
    assert not any(hit.row % 7 == 3 for hit in found)  # of `b`, which these rows lack
    other = fz.search(expected, id="s8").ids  # ids of another file, of another format
    found = Searcher(expected).search({}, ids=["s8"], ids_from=out, k=11)
    assert found.ids == ["s8", *other]
    assert read_about(out)["model_digest"] == read_about(expected)["model_digest"]


def test_arrow_memory_is_not_copied(expected: Path, data: Any, tmp_path: Path) -> None:
    before = pa.total_allocated_bytes()
    blocks = list(open_vectors(embed(data, tmp_path, "e.npy")).blocks("a"))
    mapped = np.load(tmp_path / "e.a.npy")
    np.testing.assert_array_equal(np.concatenate([block.vectors for block in blocks]), mapped)
    del blocks
    assert pa.total_allocated_bytes() - before < mapped.nbytes


def test_files_that_do_not_belong_together_are_one_line(data: Any, tmp_path: Path) -> None:
    out = embed(data, tmp_path, "e.npy")
    np.save(tmp_path / "e.a.npy", np.zeros((3, 5), np.float32))
    folder = embed(data, tmp_path, "shards")
    pq.write_table(pa.table({"id": ["x"]}), folder / "z.parquet")
    (tmp_path / "empty").mkdir()
    np.save(tmp_path / "alone.npy", np.zeros((3, 5), np.float32))
    lists = pa.array([[1.0, 2.0], [3.0]], pa.list_(pa.float32()))
    pq.write_table(pa.table({"id": ["x", "y"], "fused": lists}), tmp_path / "ragged.parquet")
    cases = {
        out: "e.a.npy has the shape (3, 5), and e.rows.parquet 60 rows: they are not of one",
        folder: "z.parquet has other columns than part-00000.parquet",
        tmp_path / "empty": "empty has no Parquet file",
        tmp_path / "alone.npy": "alone.npy needs alone.rows.parquet beside it",
        tmp_path / "ragged.parquet": "ragged.parquet: 'fused': there are vectors of [1, 2] numbers",
    }
    for path, message in cases.items():
        with pytest.raises(FusionZooError, match=re.escape(message)) as error:
            fz.search(path, vector=[1.0, 2.0], by="fused")
        assert "\n" not in str(error.value)


@pytest.fixture
def arrow_plugin(tmp_path: Path, forget_plugins: Callable[[], None]) -> str:
    """Write the example of docs/plugins.md to a file."""
    text = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
    section = text.partition("## An embedding format in one file\n")[2]
    (tmp_path / "arrow.py").write_text(section.split("```python\n")[1].partition("```")[0])
    return str(tmp_path / "arrow.py")


def test_a_format_is_one_class_in_one_file(
    arrow_plugin: str, data: Any, expected: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FusionZooError, match=r"as .parquet or .npy, or into a folder"):
        embed(data, tmp_path, "e.arrow")
    out = embed(data, tmp_path, "e.arrow", plugins=arrow_plugin)
    hits = []
    for path in (expected, out):
        capsys.readouterr()
        flags = ["--plugins", arrow_plugin, "--id", "s8", "--json", "-"]
        assert main(["search", str(path), *flags]) == 0
        hits.append(json.loads(capsys.readouterr().out)["hits"])
    assert hits[0] == hits[1] and len(hits[0]) == 10
    for column in ("fused", "a", "b"):
        ids, vectors = fz.read_embeddings(out, column)
        assert ids == fz.read_embeddings(expected, column).ids
        np.testing.assert_array_equal(vectors, fz.read_embeddings(expected, column).vectors)
    rows = open_vectors(out).some("a", [50, 3, 50])[0]
    np.testing.assert_array_equal(rows, open_vectors(expected).some("a", [50, 3, 50])[0])
