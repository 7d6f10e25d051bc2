"""Join sources of several modalities, one to many, and write what came out as a manifest."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import fusionzoo as fz
from fusionzoo import PairedDataset
from fusionzoo.datasets.summary import data_summary
from fusionzoo.datasets.tables.paths import collecting
from fusionzoo.errors import FusionZooError
from helpers.samples import assert_same


def products(number: int = 6, **changes: Any) -> list[dict[str, Any]]:
    """An image and a description of each product; its id is the product."""
    return [
        {
            "id": f"p{n}",
            "image": np.full((2, 2), n, np.uint8),
            "text": f"product {n}",
            "price": n * 1.5,
            **{name: values[n] for name, values in changes.items()},
        }
        for n in range(number)
    ]


def reviews(number: int = 12) -> list[dict[str, Any]]:
    """Two reviews of each product: a text and a vector."""
    values = [{"text": f"review {n}", "vector": [float(n), 1.0]} for n in range(number)]
    return [
        {"id": f"r{n}", "product": f"p{n // 2}", "target": "ab"[n % 2], **row}
        for n, row in enumerate(values)
    ]


def join(left: Any, right: Any, **settings: Any) -> PairedDataset:
    """Join products with reviews by product."""
    sources = {"item": fz.create_dataset(left), "review": fz.create_dataset(right, targets={})}
    on = {"item": "id", "review": "product"}
    return PairedDataset.join(sources, **{"on": on, **settings})


# ---- modalities and rows


def test_one_picture_belongs_to_many_reviews() -> None:
    data = join(products(), reviews())
    assert data.ids == [f"r{n}" for n in range(12)]
    assert list(data.modalities.values()) == ["image", "text", "text", "vector"]
    values = data[5].values
    assert values["image"].unique().tolist() == [2]
    assert (values["item_text"], values["review_text"]) == ("product 2", "review 5")
    assert values["vector"].tolist() == [5.0, 1.0]
    assert data.column("price")[4:8] == ["3", "3", "4.5", "4.5"]


def test_the_positive_class_is_that_of_the_source_with_the_labels() -> None:
    sources = {"item": fz.create_dataset(products())}
    sources["review"] = fz.create_dataset("manifest", root=reviews(), positive="a")
    data = PairedDataset.join(sources, on={"item": "id", "review": "product"})
    assert data.classes == ["b", "a"]


def test_samples_of_one_product_share_group_and_split() -> None:
    data = join(products(40), reviews(80))
    assert data.groups == [f"p{n // 2}" for n in range(80)]
    pairs = set(zip(data.groups, data.split_names, strict=True))
    assert len(pairs) == 40
    assert set(data.splits) == {"train", "val", "test"}
    assert data.provenance.split_rule.startswith("by a hash")
    assert "samples of one 'product' belong together" in "\n".join(data_summary(data))


def test_an_outer_join_keeps_products_without_reviews_under_unique_ids() -> None:
    items = [*products(), {"id": "r0", "image": np.zeros((2, 2), np.uint8)}]
    data = join(items, reviews(4), how="outer")
    unreviewed = [f"item/{key}" for key in ("p2", "p3", "p4", "p5", "r0")]
    assert data.ids == ["r0", "r1", "r2", "r3", *unreviewed]
    assert data.present[4].tolist() == [True, True, False, False]
    assert data[4].values["vector"] is None
    orphans = [*reviews(2), {"id": "x", "product": "none", "text": "lost"}]
    kept = join(products(1), orphans, how="outer")
    assert kept.ids == ["r0", "r1", "x"]
    assert kept.present[2].tolist() == [False, False, True, False]


def test_a_source_named_after_one_of_its_modalities_gives_that_one() -> None:
    left = fz.create_dataset(products())
    sound = fz.create_dataset([{"id": f"p{n}", "vector": [1.0]} for n in range(3)])
    data = PairedDataset.join({"text": left, "sound": sound})
    assert data.modalities == {"text": "text", "sound": "vector"}
    assert "text: image" in data.provenance.unused
    both = PairedDataset.join({"both": left, "sound": sound})
    assert both.modalities == {"image": "image", "text": "text", "sound": "vector"}


def test_a_column_of_both_sources_joins_them_one_to_one() -> None:
    left = fz.create_dataset([{"id": f"l{n}", "key": n, "text": "x"} for n in range(4)])
    right = fz.create_dataset([{"id": f"r{n}", "key": n, "vector": [n]} for n in range(2, 6)])
    sources = {"text": left, "vector": right}
    inner = PairedDataset.join(sources, on="key")
    assert (inner.ids, inner.column("key")) == (["l2", "l3"], ["2", "3"])
    assert "group" not in inner.table.column_names
    outer = PairedDataset.join(sources, on="key", how="outer")
    assert outer.ids == ["l0", "l1", "l2", "l3", "vector/r4", "vector/r5"]


def test_samples_without_ids_of_their_own_have_those_of_the_key() -> None:
    left = [{"product": row["id"], "image": row["image"]} for row in products()]
    right = [{name: x for name, x in row.items() if name != "id"} for row in reviews()]
    joined = join(left, right[::2], on="product")
    assert joined.ids == [f"p{n}" for n in range(6)]
    assert joined.provenance.id_column == "product"
    assert not joined.provenance.numbered
    several = join(left, right, on="product")  # two reviews of each product
    assert several.ids == [str(n) for n in range(12)]
    assert several.provenance.numbered


def test_a_view_joins_with_its_own_rows() -> None:
    few = fz.create_dataset(products()).subset([4, 1])
    data = PairedDataset.join({"item": few, "note": fz.create_dataset(products()).select("text")})
    assert data.ids == ["p4", "p1"]
    assert [data[n].values["image"].max().item() for n in range(2)] == [4, 1]
    assert data[0].values["note"] == "product 4"


def test_wrong_joins_are_one_line() -> None:
    item, review = fz.create_dataset(products()), fz.create_dataset(reviews(), targets={})
    holes = fz.create_dataset([*reviews(2), {"id": "x", "text": "y"}], targets={})
    lenient = fz.create_dataset(reviews(), targets={}, on_error="missing")
    unnamed = fz.create_dataset([{"text": "y"}, {"text": "z"}])
    sources, on = {"item": item, "review": review}, {"item": "id", "review": "product"}
    for chosen, settings, says in (
        (sources, {"on": "produkt"}, "source 'item' (the list) has no column 'produkt' to join on"),
        (sources, {"on": {"reviews": "product"}}, "no source 'reviews' to join. Did you mean"),
        (sources, {}, "no id is in all sources; they have, for instance, {'item': 'p0'"),
        ({"item": item, "review": unnamed}, {}, "review has no column of ids"),
        ({"item": item, "review": unnamed}, {"how": "outer"}, "review has no column of ids"),
        (sources, {"how": "right"}, "how='right' is neither"),
        ({}, {}, "there are no sources"),
        ({"a": review, "b": review}, {"on": "product"}, "a has 2 with product 'p0'; b has 2"),
        ({"item": item, "review": holes}, {"on": on}, "'x': 'product', to join on, is empty"),
        ({"item": item, "review": lenient}, {}, "need the same on_error"),
    ):
        with pytest.raises(FusionZooError, match=re.escape(says)) as caught:
            PairedDataset.join(chosen, **settings)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


# ---- splits, targets, columns


@pytest.mark.parametrize("sources", [[1, 2], {"a": None}, None])
def test_sources_that_are_no_data_sets_by_name_are_one_line(sources: Any) -> None:
    with pytest.raises(FusionZooError, match="join takes data sets by name"):
        PairedDataset.join(sources)


def test_splits_of_a_column_come_before_splits_by_hash() -> None:
    splits = ["train", "test"] * 20
    left = fz.create_dataset(products(40, split=splits))
    right = fz.create_dataset([{"id": f"p{n}", "vector": [n]} for n in range(40)])
    assert left.split_names != right.split_names
    for sources in ({"item": left, "v": right}, {"v": right, "item": left}):
        data = PairedDataset.join(sources)
        assert data.split_names == splits
        assert data.provenance.split_rule == "column 'split'"


def test_samples_that_only_a_source_without_splits_has_are_split_by_hash_and_counted() -> None:
    left = fz.create_dataset(products(3, split=["train"] * 3))
    right = fz.create_dataset([{"id": f"p{n}", "vector": [n]} for n in range(10)])
    data = PairedDataset.join({"item": left, "v": right}, how="outer")
    assert data.split_names == ["train"] * 3 + right.split_names[3:]
    rule = data.provenance.split_rule
    assert rule == "column 'split'; 7 samples without one by a hash of 'id'"


def test_splits_by_hash_of_groups_come_before_those_of_ids() -> None:
    patients = [{"id": str(n), "patient": n // 10, "text": "x"} for n in range(60)]
    right = fz.create_dataset([{"id": str(n), "vector": [n]} for n in range(60)])
    left = fz.create_dataset(patients, group_column="patient")
    data = PairedDataset.join({"v": right, "text": left})
    assert data.split_names == left.split_names
    assert data.groups == left.groups


def test_a_join_of_a_join_is_a_join() -> None:
    clips = fz.create_dataset([{"id": f"r{n}", "sequence": [[float(n)]]} for n in range(12)])
    data = PairedDataset.join({"pairs": join(products(), reviews()), "clip": clips})
    assert set(data.modalities) == {"image", "item_text", "review_text", "vector", "clip"}
    assert data.groups == [f"p{n // 2}" for n in range(12)]
    assert data[7].values["image"].max() == 3
    assert data[7].values["clip"].tolist() == [[7.0]]
    assert data.provenance.split_rule.startswith("by a hash")


def test_other_columns_of_sources_can_be_targets() -> None:
    data = join(products(), reviews()).with_targets({"price": "regression"})
    assert data.targets[:, 0].argsort(stable=True).tolist() == list(range(12))
    left = fz.create_dataset([{"id": "a", "text": "x", "age": 1}])
    right = fz.create_dataset([{"id": "a", "vector": [1], "age": 2}])
    both = PairedDataset.join({"text": left, "vector": right})
    assert (both.column("text_age"), both.column("vector_age")) == (["1"], ["2"])


# ---- the command line of a manifest


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def test_a_manifest_joins_others_by_its_settings(tmp_path: Path) -> None:
    (tmp_path / "vectors").mkdir()
    np.save(tmp_path / "vectors" / "v.npy", np.ones(2, np.float32))
    rows = [{"id": n, "text": f"t{n}", "product": n % 2, "age": n} for n in range(4)]
    root = write(tmp_path / "main.csv", rows)
    tags = write(tmp_path / "tags.csv", [{"key": n, "words": f"tag {n}"} for n in range(2)])
    vector = [{"id": n, "file": "v.npy", "target": "xy"[n % 2]} for n in range(4)]
    vectors = write(tmp_path / "vectors" / "v.csv", vector)
    sensor = {"root": vectors, "columns": {"vector": "file"}}
    data = fz.create_dataset("manifest", root=root, join={"sensor": sensor})
    assert data.modalities == {"text": "text", "sensor": "vector"}
    assert data.classes == ["x", "y"]
    assert data[2].values["sensor"].tolist() == [1.0, 1.0]
    data = fz.create_dataset(
        "manifest",
        root=root,
        join={"tag": {"root": tags, "columns": {"text": "words"}}},
        on={"root": "product", "tag": "key"},
        targets={"age": "regression"},
    )
    assert [data[n].values["tag"] for n in range(4)] == ["tag 0", "tag 0", "tag 1", "tag 1"]
    assert data.ids == ["0", "2", "1", "3"]
    assert data.scheme[0].name == "age"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"join": {"text": "other.csv"}}, "the manifest itself has 'text'"),
        ({"join": {"audio": "none.csv"}}, "no file none.csv"),
        ({"join": {"audio": {"rot": "x"}}}, 'join={"audio": ...} names no file'),
    ],
)
def test_wrong_settings_of_a_join_are_one_line(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    root = write(tmp_path / "main.csv", [{"id": 1, "text": "x"}])
    with pytest.raises(FusionZooError, match=re.escape(says)):
        fz.create_dataset("manifest", root=root, **settings)


@pytest.mark.parametrize("how", ["inner", "left", "outer"])
def test_joins_of_the_command_line_are_those_made_by_hand(how: Any, tmp_path: Path) -> None:
    import pandas as pd

    from fusionzoo.config import RunConfig, from_args
    from fusionzoo.datasets.opening.spec import DataSpec

    notes = [{"id": f"r{n}", "key": n % 5, "text": f"note {n}"} for n in range(12)]
    titles = [{"key": n, "words": f"title {n}"} for n in (1, 2, 3, 7, 8)]
    root, other = write(tmp_path / "notes.csv", notes), write(tmp_path / "titles.csv", titles)
    flags = ["--data.name", "manifest", "--data.root", root, "--data.how", how]
    flags += ["--data.join.title.root", other, "--data.join.title.columns.text", "words"]
    data = DataSpec(settings=from_args(RunConfig, [*flags, "--data.on", "key"]).data).open()
    by_hand = pd.DataFrame(notes).merge(pd.DataFrame(titles), how=how, on="key")
    ids = by_hand["id"].fillna("title/").tolist()
    assert sorted(x.partition("/")[0] for x in data.ids) == sorted(x.rstrip("/") for x in ids)
    values = [tuple(data[n].values[name] for name in ("text", "title")) for n in range(len(data))]
    columns = by_hand[["text", "words"]].astype(object)
    wanted = columns.where(columns.notna(), None).itertuples(index=False, name=None)
    assert sorted(values, key=str) == sorted(wanted, key=str)


@pytest.fixture
def letters(tmp_path: Path) -> dict[str, Any]:
    """Ten labelled rows, four without text; ids 2 to 11 have a vector, 5 and 11 none."""
    np.save(tmp_path / "v.npy", np.ones(2, np.float32))
    rows = [{"id": n, "text": "" if n % 3 == 0 else f"t{n}", "target": n % 2} for n in range(10)]
    clips = [{"id": n, "vector": "" if n in (5, 11) else "v.npy"} for n in range(2, 12)]
    return {
        "root": write(tmp_path / "main.csv", rows),
        "join": {"clip": write(tmp_path / "clips.csv", clips)},
    }


def test_a_row_that_is_empty_in_one_source_only_is_kept_by_a_join(letters: dict[str, Any]) -> None:
    data = fz.create_dataset("manifest", **letters)
    assert data.ids == [str(n) for n in range(2, 10)]
    assert data.present.sum(0).tolist() == [5, 7]
    assert data.labels[1] == "1" and data.present[1].tolist() == [False, True]
    summary = "\n".join(data_summary(data))
    assert (
        "joined    in both 8, only in root 2 (left out), only in clip 2 (left out)"
        " (--data.how inner)"
    ) in summary
    assert "'target'" not in summary.split("unused")[1]


@pytest.mark.parametrize(("how", "num", "empty"), [("left", 10, ["0"]), ("outer", 12, ["0", "11"])])
def test_samples_that_are_empty_in_all_sources_are_refused_or_dropped_after_a_join(
    letters: dict[str, Any], how: str, num: int, empty: list[str]
) -> None:
    with pytest.raises(FusionZooError, match=f"empty, as in {len(empty)} of {num} joined samples"):
        fz.create_dataset("manifest", **letters, how=how, targets={})
    data = fz.create_dataset("manifest", **letters, how=how, targets={}, drop_empty=True)
    assert data.ids == [str(n) for n in range(num) if str(n) not in empty]
    assert f"{len(empty)} row{'s' * (len(empty) > 1)} left out" in "\n".join(data_summary(data))


@pytest.mark.parametrize("targets", [None, {"age": "regression"}])
def test_a_root_table_of_labels_alone_is_joined_with_the_modalities(
    letters: dict[str, Any], tmp_path: Path, targets: dict[str, str] | None
) -> None:
    rows = [{"id": n, "age": n, "split": "train", "target": "ab"[n % 2]} for n in range(4)]
    labels = write(tmp_path / "labels.csv", rows)
    data = fz.create_dataset("manifest", root=labels, join=letters["join"], targets=targets)
    assert (data.ids, data.modalities) == (["2", "3"], {"clip": "vector"})
    assert data.provenance.unused == (("root: age",) if targets is None else ("root: target",))
    with pytest.raises(FusionZooError, match=r"clips\.csv has no column of a modality"):
        bare = write(tmp_path / "clips.csv", [{"id": n, "sound": "x"} for n in range(4)])
        fz.create_dataset("manifest", root=letters["root"], join={"clip": bare})
    with pytest.raises(FusionZooError, match=r"labels\.csv has no column of a modality"):
        fz.create_dataset("manifest", root=labels)


def test_a_check_of_joined_tables_finds_the_samples_without_any_modality(
    letters: dict[str, Any],
) -> None:
    with collecting() as refusals:
        fz.create_dataset("manifest", **letters, how="outer")
    assert [(refusal.kind, refusal.row) for refusal in refusals] == [
        ("empty_sample", 0),
        ("empty_sample", 11),
    ]


def test_a_left_join_keeps_the_first_source_and_three_sources_are_counted() -> None:
    sources = {
        name: fz.create_dataset([{"id": str(n), "vector": [n]} for n in numbers])
        for name, numbers in {"a": range(4), "b": range(2, 6), "c": range(3, 9)}.items()
    }
    data = PairedDataset.join(sources, how="left")
    assert data.ids == ["0", "1", "2", "3"]
    assert data.provenance.joined == (
        "in all 1, only in a 2, only in b 0, only in c 3 (left out), only in a and b 1,"
        " only in b and c 2 (left out) (--data.how left)"
    )


# ---- to_manifest


def test_a_join_is_written_and_read_again(tmp_path: Path) -> None:
    data = join(products(), reviews(4), how="outer")
    settings = data.to_manifest(tmp_path / "joined.parquet")
    assert_same(data, fz.create_dataset(**settings))
    path_alone = fz.create_dataset(tmp_path / "joined.parquet", targets={})
    assert_same(data, path_alone)
    assert path_alone.column("price") == data.column("price")
    labelled = data.with_targets({"price": "regression"})
    again = fz.create_dataset(**labelled.to_manifest(tmp_path / "labelled.parquet"))
    assert torch.equal(again.targets, labelled.targets)


def test_files_are_referenced_relative_to_the_manifest(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for n in range(3):
        Image.new("RGB", (3, 2), (n, 0, 0)).save(photos / f"{n}.png")
    rows = [{"id": n, "scan": f"{n}.png" if n else "", "text": f"t, {n}"} for n in range(3)]
    path = write(photos / "p.csv", rows)
    data = fz.create_dataset(path, kinds={"scan": "image"})
    settings = data.to_manifest(tmp_path / "all.csv")
    assert settings == {
        "name": "manifest",
        "root": str(tmp_path / "all.csv"),
        "na": (),
        "kinds": {"scan": "image"},
    }
    assert "photos/1.png" in (tmp_path / "all.csv").read_text()
    assert_same(data, fz.create_dataset(**settings))
    beside = tmp_path / "other"
    settings = data.to_manifest(beside / "all.jsonl")
    assert settings["allow_outside"] is True
    assert_same(data, fz.create_dataset(**settings))
    with pytest.raises(FusionZooError, match="outside of"):
        fz.create_dataset(beside / "all.jsonl", kinds={"scan": "image"})
    data.to_manifest(beside / "all.parquet", embed=True)
    assert_same(data, fz.create_dataset(beside / "all.parquet"))
    cells = pq.read_table(beside / "all.parquet")["scan"].to_pylist()
    assert cells[1]["bytes"] == (photos / "1.png").read_bytes()


def test_values_in_memory_are_embedded_exactly(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = [
        {
            "id": f"s{n}",
            "split": "train",
            "target": "x",
            "image": Image.fromarray(draw.integers(0, 256, (5, 4, 4), np.uint8), "RGBA"),
            "audio": (draw.uniform(-1, 1, 50).astype(np.float32), 8000 + n),
            "vector": draw.standard_normal(3),
            "sequence": torch.randn(n + 1, 2, generator=torch.Generator().manual_seed(n)),
            "text": None if n == 1 else "words\nand lines",
        }
        for n in range(3)
    ]
    data = fz.create_dataset(rows)
    assert_same(data, fz.create_dataset(**data.to_manifest(tmp_path / "m.parquet")))
    some = data.subset([2, 0]).select("vector,text")
    assert_same(some, fz.create_dataset(**some.to_manifest(tmp_path / "m.jsonl")))
    for name, says in (
        ("m.csv", "image is in memory, which .csv cannot store: write .parquet"),
        ("m.jsonl", "image is in memory, which .jsonl cannot store"),
        ("m.xml", "the suffix of a manifest is one of .parquet, .jsonl"),
    ):
        with pytest.raises(FusionZooError) as caught:
            data.to_manifest(tmp_path / "new" / name)
        assert says in str(caught.value)
        assert not (tmp_path / "new" / name).exists()
    with pytest.raises(FusionZooError, match=r"only \.parquet embeds"):
        some.to_manifest(tmp_path / "m.csv", embed=True)


def test_a_value_that_cannot_be_written_names_its_sample(tmp_path: Path) -> None:
    rows = [{"id": "a", "vector": [[1.0]], "text": "x"}]
    data = fz.create_dataset(rows)
    with pytest.raises(FusionZooError, match=r"the list, sample 'a', vector: .*expected 1 dim"):
        data.to_manifest(tmp_path / "m.parquet")
    assert list(tmp_path.iterdir()) == []
