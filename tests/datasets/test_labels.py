"""Columns of labels and of weights: what they hold, what views keep, and errors that name cells."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import fusionzoo as fz
from fusionzoo.datasets import Collate, PairedDataset, create_dataset
from fusionzoo.datasets.shards.write import Settings, write_shards
from fusionzoo.datasets.sources.infer import objective_hint, target_kind
from fusionzoo.datasets.summary import data_summary
from fusionzoo.encoders import create_encoder
from fusionzoo.errors import FusionZooError
from fusionzoo.inputs.identity import data_identity
from fusionzoo.targets import AnyOf, from_spec, named_sets, words

CSV = """id,split,text,kind,age,grade,tags
a,train,one,cat,10,1,sun;sea
b,train,two,dog,20,3,;
c,train,three,cat,30,10,sun
d,val,four,,,10,
e,val,five,dog,40,1,sea
f,test,six,cat,20,3,sea; sun
"""
KINDS = ("classification", "regression", "ordinal", "multilabel")
KIND_OF = dict(zip(("kind", "age", "grade", "tags"), KINDS, strict=True))


def open_csv(folder: Path, text: str = CSV, **settings: Any) -> PairedDataset:
    (folder / "m.csv").write_text(text)
    return create_dataset("manifest", root=str(folder / "m.csv"), **settings)


@pytest.mark.parametrize("targets", [None, {"kind": "classification", "age": "regression"}])
def test_the_positive_one_of_two_classes_is_the_second(targets: Any, tmp_path: Path) -> None:
    settings = {"columns": {"target": "kind"}} if targets is None else {"targets": targets}
    text = CSV.replace(",,,10,", ",dog,30,10,")

    def classes(positive: str | None) -> list[str]:
        data = open_csv(tmp_path, text, positive=positive, **settings)
        copy = data.to_manifest(tmp_path / "copy.csv")
        for written in (data, create_dataset(**copy)):
            sample, of_dog = written[0], written[1]
            assert sample is not None and of_dog is not None
            names = written.classes or list(written.scheme[0].classes)
            places = [x.target if targets is None else x.target[0] for x in (sample, of_dog)]
            assert [names[int(place)] for place in places] == ["cat", "dog"]
        return names

    assert classes(None) == classes("dog") == ["cat", "dog"]
    assert classes("cat") == ["dog", "cat"]
    with pytest.raises(FusionZooError, match=r"no label .cta..*Did you mean .cat."):
        classes("cta")


def test_a_positive_class_of_three_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FusionZooError, match="goes with a target of two classes"):
        open_csv(
            tmp_path,
            CSV.replace(",,,10,", ",cow,,10,").replace("three,cat", "three,cow"),
            columns={"target": "kind"},
            positive="cow",
        )


def test_each_kind_of_column_becomes_numbers(tmp_path: Path) -> None:
    data = open_csv(tmp_path, targets=KIND_OF)
    assert data.classes == []
    kind, age, grade, tags = data.scheme
    assert (kind.classes, grade.classes) == (("cat", "dog"), ("1", "3", "10"))
    assert tags.classes == ("sea", "sun")
    assert (age.mean, age.deviation) == (20, pytest.approx((200 / 3) ** 0.5))
    nan = torch.nan
    wanted = torch.tensor(
        [
            [0, -10 / age.deviation, 0, 1, 1],
            [1, 0, 1, 0, 0],
            [0, 10 / age.deviation, 2, 0, 1],
            [nan, nan, 2, nan, nan],
            [1, 20 / age.deviation, 0, 1, 0],
            [0, 0, 1, 1, 1],
        ]
    )
    torch.testing.assert_close(data.targets, wanted, equal_nan=True)
    assert data.table["tags"].to_pylist()[1] == ";"  # the words stay
    assert data[0].target == tuple(wanted[0].tolist())
    for one in data.scheme:
        assert from_spec(json.loads(json.dumps(one.spec))) == one


def test_a_batch_carries_them_and_views_keep_them(tmp_path: Path) -> None:
    data = open_csv(tmp_path, targets=KIND_OF)
    for view in (data, data.drop(0.0), data.select("text"), data.only("text")):
        assert torch.equal(view.targets.nan_to_num(), data.targets.nan_to_num())
    test = data.split("test")
    encoder = create_encoder("text", "chars", dim=8)
    collate = Collate({"text": encoder.processor(False)}, columns=5)
    batch = collate([test[0]])
    assert torch.equal(batch.target, data.targets[5:])
    empty = collate([None])
    assert empty.target.shape == (0, 5)


def test_without_targets_nothing_is_read(tmp_path: Path) -> None:
    data = open_csv(tmp_path, columns={"target": "kind"}, targets={})
    assert data.targets.shape == (6, 0)
    assert data[3].target == ()
    assert data.labels[:2] == ["cat", "dog"]
    with pytest.raises(FusionZooError, match="no target"):
        open_csv(tmp_path, columns={"target": "kind"})  # as a plain class, one is missing


def test_lists_and_numbers_of_json_are_labels_too(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "split": "train", "text": "x", "tags": ["sun", "sea"], "grade": 1},
        {"id": "b", "split": "train", "text": "y", "tags": [], "grade": 2.0},
        {"id": "c", "split": "train", "text": "z", "tags": None, "grade": None},
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kinds = {"tags": "multilabel", "grade": "ordinal"}
    data = create_dataset("manifest", root=str(tmp_path / "m.jsonl"), targets=kinds)
    assert data.targets[:2].tolist() == [[1, 1, 0], [0, 0, 1]]
    assert data.targets[2].isnan().all()


def test_joined_sources_bring_their_columns(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    one = open_csv(tmp_path / "one", targets={"age": "regression"})
    short = "id,split,text,tags\na,train,eins,x\nb,train,zwei,\ne,val,fünf,x\nf,test,sechs,x\n"
    two = open_csv(tmp_path, short, targets={"tags": "multilabel"})
    data = PairedDataset.join({"left": one, "right": two})
    assert [target.name for target in data.scheme] == ["age", "tags"]
    assert data.targets.shape == (4, 2)
    assert data.targets[:, 1].isnan().tolist() == [False, True, False, False]


def test_a_data_set_can_be_read_in_another_way() -> None:
    data = create_dataset("digits", samples=60).with_targets({"target": "ordinal"})
    assert data.scheme[0].classes == tuple(map(str, range(10)))


@pytest.mark.parametrize(
    ("change", "targets", "says"),
    [
        (("20,3,;", "old,3,;"), {"age": "regression"}, "row 3, sample 'b', column 'age': 'old' is"),
        (("20,3,sea", "20,7,sea"), {"grade": "ordinal"}, "row 7, sample 'f', column 'grade': '7'"),
        (("e,val,five,dog", "e,val,five,emu"), {"kind": "classification"}, "'emu' is a label that"),
        (("e,val,five,dog", "e,val,five,"), {"kind": "classification"}, "no sample of split 'val'"),
        (("a,", "a,"), {"id": "classification"}, "'id' cannot be a target"),
        (("a,", "a,"), {"age": "regresion"}, "'regresion' is no kind of target. Did you mean"),
    ],
)
def test_a_wrong_label_is_one_error_that_names_it(
    change: tuple[str, str], targets: dict[str, str], says: str, tmp_path: Path
) -> None:
    with pytest.raises(FusionZooError) as caught:
        open_csv(tmp_path, CSV.replace(*change), targets=targets)
    assert says in str(caught.value)
    assert "m.csv" in str(caught.value) or "is no kind" in says


GENRES = [["Action", "Drama"], ["Horror"], ["Drama"], [], ["Action", "Horror"], ["Drama"]]
FORMS = {
    "python": str,
    "json": json.dumps,
    "numpy": lambda names: str(np.array(names)),
    "numpy scalars": lambda names: f"[{', '.join(f'np.str_({name!r})' for name in names)}]",
    "words": lambda names: f"[{', '.join(names)}]",
    "arrow": lambda names: names,
    "array": lambda names: np.array(names, dtype=object),
    "tuple": tuple,
    "mixed": lambda names: str(names) if len(names) != 1 else names[0],
}


def open_labels(cells: Sequence[Any], kind: str = "multilabel", **settings: Any) -> PairedDataset:
    rows = [{"split": "train", "text": "t", "target": cell} for cell in cells]
    return create_dataset(rows, targets={"target": kind}, **settings)


@pytest.mark.parametrize("separator", [";", ","])
@pytest.mark.parametrize("form", FORMS)
def test_lists_of_labels_are_the_same_labels_in_every_form(form: str, separator: str) -> None:
    data = open_labels([FORMS[form](names) for names in GENRES], label_separator=separator)
    assert data.scheme[0].classes == ("Action", "Drama", "Horror")
    wanted = [[float(name in names) for name in data.scheme[0].classes] for names in GENRES]
    assert data.targets.tolist() == wanted


@pytest.mark.parametrize(
    "form",
    [
        list,
        np.array,
        torch.tensor,
        str,
        lambda bits: str(np.array(bits)),
        lambda bits: [bool(bit) for bit in bits],
        lambda bits: str([float(bit) for bit in bits]),
        lambda bits: str(np.array(bits, dtype=bool)),
        lambda bits: f"[{', '.join(f'np.int64({bit})' for bit in bits)}]",
    ],
)
def test_vectors_of_0_and_1_are_labels_by_position(form: Callable[[list[int]], Any]) -> None:
    vectors = [[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 0]]
    data = open_labels([form(bits) for bits in vectors])
    assert data.scheme[0].classes == ("0", "1", "2", "3")  # the last occurs nowhere
    assert data.targets.tolist() == vectors
    assert any("vectors of 0 and 1 in target as labels 0 to 3" in x for x in data_summary(data))


def test_lists_of_class_numbers_are_no_vectors() -> None:
    data = open_labels([[0], [1], [0, 1], [1.0]])
    assert data.labels == ["0", "1", "0;1", "1"]
    assert open_labels([[0, 2], [1, 2], [0, 1], None]).labels == ["0;2", "1;2", "0;1", None]


def test_a_label_with_the_separator_stays_whole_if_it_came_in_a_list() -> None:
    cells = [["salt; pepper", "oil"], ["oil"], ["[sic]"], "['salt; pepper']", '["oil"]']
    data = open_labels(cells)
    assert data.scheme[0].classes == ("[sic]", "oil", "salt; pepper")
    answer = torch.tensor([[-1.0, 2.0, 3.0]])
    assert named_sets(data.scheme[0].classes, answer > 0) == ['["oil", "salt; pepper"]']
    assert words(named_sets(data.scheme[0].classes, answer > 0)[0]) == ["oil", "salt; pepper"]


def test_lists_of_labels_keep_every_label_in_every_split() -> None:
    rows = [{"text": "t", "tags": ["a; b", "c"] if n % 10 else ["a; b", "d"]} for n in range(60)]
    data = create_dataset(rows, targets={"tags": "multilabel"})
    for split in ("train", "val", "test"):
        cells = data.split(split).column("tags")
        assert {word for cell in cells for word in words(cell)} == {"a; b", "c", "d"}


def test_the_labels_of_a_join_are_read_in_the_same_way(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,split,text\n" + "".join(f"{n},train,t\n" for n in range(4)))
    table = pa.table({"id": list("0123"), "text": ["t"] * 4, "tags": ["[1 0]", "[0 1]"] * 2})
    data = create_dataset(
        "manifest", root=str(tmp_path / "a.csv"), join={"b": table}, targets={"tags": "multilabel"}
    )
    assert data.targets.tolist() == [[1, 0], [0, 1]] * 2


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ([[1, 0, 0], [0, 1]], "the vectors of 0 and 1 have 2 and 3 entries"),
        ([[0.9, 0.1], [0.2, 0.8]], "[0.9, 0.1] is a vector of other numbers than 0 and 1"),
        (["[0 0 1 ... 0 1 0]", "[1]"], "row 1, column 'target': a list of labels is cut off"),
        ([{"a": 1}, {"a": (1, 2)}], "column 'target': no labels: a mapping of a is no value"),
        ([range, len], "column 'target': "),
    ],
)
def test_lists_that_are_no_labels_are_one_line(cells: list[Any], says: str) -> None:
    with pytest.raises(FusionZooError) as caught:
        open_labels(cells)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_vectors_of_an_open_data_set_are_refused() -> None:
    rows = [{"text": "t", "split": "train", "target": bits} for bits in ([1, 0, 0], [0, 1, 0])]
    with pytest.raises(FusionZooError, match="'1;0;0' holds a label twice, as a vector"):
        create_dataset(rows).with_targets({"target": "multilabel"})


def test_vectors_are_no_labels_of_a_target_with_names() -> None:
    target = AnyOf.learn("y", ["a;b", "b"])
    with pytest.raises(FusionZooError, match=r"'\[1 0\]' is a vector of 2 labels without names"):
        target.encode("[1 0]")
    with pytest.raises(FusionZooError, match="others are not alike"):
        AnyOf.learn("y", ["[1 0]", "[2]"])


def test_lists_in_brackets_are_inferred_and_hinted_at() -> None:
    table = {"text": ["a b c d"] * 6, "y": [str(names) for names in GENRES]}
    assert target_kind("y", pa.array(table["y"])).kind == "multilabel"
    hint = objective_hint(pa.array(table["y"]))
    assert hint.endswith("are lists of labels: --objective.name multilabel")


def spelled(values: Sequence[Any]) -> pa.Table:
    ids = [f"r{n}" for n in range(len(values))]
    return pa.table({"id": ids, "split": ["train"] * len(ids), "text": ids, "target": values})


def write_csv(folder: Path, values: Sequence[Any]) -> Path:
    spelled(pa.array([str(x) for x in values])).to_pandas().to_csv(folder / "m.csv", index=False)
    return folder / "m.csv"


@pytest.mark.parametrize(
    ("written", "values", "classes"),
    [
        (["True", "False"], [True, False], ["false", "true"]),
        (["TRUE", "FALSE"], [True, False], ["false", "true"]),
        (["1.0", "0.0"], [1, 0], ["0", "1"]),
        (["2", "10"], [2.0, 10.0], ["2", "10"]),
        (["-1.000", "1.50"], ["-1", "1.50"], ["-1", "1.50"]),
        (["007", "08.0"], ["007", "08"], ["007", "08"]),
    ],
)
@pytest.mark.parametrize("targets", [None, {"target": "classification"}, {"target": "multilabel"}])
def test_a_class_has_one_spelling_in_all_formats(
    written: list[str],
    values: list[Any],
    classes: list[str],
    targets: dict[str, str] | None,
    tmp_path: Path,
) -> None:
    table, path = spelled(values), write_csv(tmp_path, written)
    pq.write_table(table, tmp_path / "m.parquet")
    rows = "".join(json.dumps(row) + "\n" for row in table.to_pylist())
    (tmp_path / "m.jsonl").write_text(rows)
    sources = [path, tmp_path / "m.parquet", tmp_path / "m.jsonl", table, table.to_pandas()]
    for source in sources:
        data = create_dataset(source, targets=targets)
        found = data.classes if data.scheme is None else list(data.scheme[0].classes)
        assert sorted(found) == sorted(classes)


def test_class_folders_and_other_label_columns_have_this_spelling_too(tmp_path: Path) -> None:
    for name in ("True", "2.0"):
        (tmp_path / name).mkdir()
        for number in range(20):
            (tmp_path / name / f"{number}.txt").write_text("t")
    assert create_dataset(tmp_path).classes == ["2", "true"]
    view = create_dataset(spelled(["a", "b"]).append_column("y", [["True", "1.0"]]))
    scheme = view.with_targets({"y": "classification"}).scheme
    assert scheme[0].classes == ("1", "true")


@pytest.mark.parametrize("word", ["NA", "None", "nan", "#N/A"])
def test_a_class_that_is_read_as_missing_is_named_with_the_setting(
    word: str, tmp_path: Path
) -> None:
    path = write_csv(tmp_path, [word, "EU", "AS", "EU"])
    with pytest.raises(FusionZooError) as caught:
        create_dataset(path)
    place = "row 2, sample 'r0' (split 'train')"
    assert f"{place} has no target (read as missing: {word!r} 1" in str(caught.value)
    assert "`--data.na ''` reads such words as they are" in str(caught.value)
    assert create_dataset(path, na="").classes == sorted([word, "EU", "AS"])


# ---- weights


ROWS = 24


def table(**columns: Any) -> dict[str, list[Any]]:
    return {
        "id": [f"r{row}" for row in range(ROWS)],
        "age": [20 + row % 7 for row in range(ROWS)],
        "text": [f"word {row % 5}" for row in range(ROWS)],
        "target": ["yes" if row % 2 else "no" for row in range(ROWS)],
        "w": [row / 2 for row in range(ROWS)],
        **columns,
    }


def opened(**settings: Any) -> PairedDataset:
    chosen = {"weight_column": "w", "columns": {"tabular": "age"}, **settings}
    return fz.create_dataset(table(), **chosen)


def weights_of(data: PairedDataset) -> dict[str, float]:
    return dict(zip(data.ids, data.weights.tolist(), strict=True))


def test_a_column_of_weights_is_read_and_is_no_input() -> None:
    inferred = fz.create_dataset(table(), target="target", weight_column="W ")
    assert inferred.weight_column == "w"
    sample = inferred[3]
    assert sample is not None and {*sample.values["tabular"]} == {"age"} and sample.weight == 1.5
    assert inferred.weights is not None and inferred.weights.dtype == torch.float32
    assert inferred.weights.tolist() == table()["w"]
    assert "weights   0 to 11.5, mean 5.75 (column 'w')" in data_summary(inferred)
    assert opened(weight_column=None).weights is None
    unweighted = opened(weight_column=None)[3]
    assert unweighted is not None and unweighted.weight is None


VIEWS = {
    "subset": lambda data: data.subset([7, 3]),
    "split": lambda data: data.split("val"),
    "select": lambda data: data.select("text"),
    "only": lambda data: data.only("tabular"),
    "edited": lambda data: data.edited(lambda sample: sample),
    "hold_out": lambda data: data.with_splits(
        {key: "test" if row % 3 else "train" for row, key in enumerate(data.ids)}, "list"
    ).hold_out(0.3),
    "with_splits": lambda data: data.with_splits({"r9": "train", "r4": "train"}, "list"),
    "draw_splits": lambda data: data.draw_splits(1, (0.5, 0.25, 0.25)),
    "drop": lambda data: data.drop(0.3),
    "with_policy": lambda data: data.with_policy(on_error="skip"),
    "with_targets": lambda data: data.with_targets({"target": "classification"}),
}


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_keeps_its_samples_weights(name: str) -> None:
    data = opened()
    wanted, view = weights_of(data), VIEWS[name](data)
    assert len(view) and weights_of(view) == {key: wanted[key] for key in view.ids}
    samples = [view[row] for row in range(len(view))]
    assert {x.id: x.weight for x in samples if x} == weights_of(view)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_a_written_manifest_opens_with_its_weights(name: str, tmp_path: Path) -> None:
    data = opened(columns={})
    again = fz.create_dataset(**data.to_manifest(tmp_path / name))
    assert weights_of(again) == weights_of(data)


def test_shards_of_a_data_set_have_its_weights(tmp_path: Path) -> None:
    data = opened(columns={})
    write_shards(data, tmp_path / "shards", Settings())
    again = fz.create_dataset(tmp_path / "shards", weight_column="w")
    assert weights_of(again) == weights_of(data)


def test_joined_sources_keep_the_weights_of_the_one_that_has_them() -> None:
    left = opened(columns={})
    right = fz.create_dataset({"id": table()["id"], "vector": [[1.0, row] for row in range(ROWS)]})
    joined = PairedDataset.join({"text": left, "vector": right})
    assert weights_of(joined) == weights_of(left)
    by_settings = fz.create_dataset(table(), weight_column="w", join={"vector": right})
    assert weights_of(by_settings) == weights_of(left)
    other = fz.create_dataset(
        {"id": table()["id"], "vector": [[1.0]] * ROWS, "v": [1] * ROWS}, weight_column="v"
    )
    with pytest.raises(FusionZooError, match="different weights: 'w' of text, 'v'"):
        PairedDataset.join({"text": left, "vector": other})


@pytest.mark.parametrize(
    ("cell", "said"),
    [(None, "is empty"), ("NaN", "is 'NaN'"), (-0.5, "is '-0.5'"), ("x", "is 'x'"), ("inf", "inf")],
)
def test_a_cell_that_is_no_weight_is_one_error_with_its_place(cell: Any, said: str) -> None:
    cells: list[str | None] = [str(x) for x in table()["w"]]
    cells[4] = cell if cell is None else str(cell)
    place = r"row 5, sample 'r4': the weight in column 'w' "
    with pytest.raises(FusionZooError, match=place + f".*{said}"):
        fz.create_dataset(table(w=cells), columns={"tabular": "age"}, weight_column="w")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weight_column": "weigth"}, "no column 'weigth'"),
        ({"weight_column": "target"}, "'target' is the target, and the weight"),
        ({"weight_column": "age"}, "'age' is the weight"),
        ({"weight_column": "text", "columns": {"text": "text"}}, "is the text, and the weight"),
    ],
)
def test_a_column_that_is_something_else_is_no_weight(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(FusionZooError, match=said):
        opened(**settings)


def test_decimal_commas_and_words_for_missing_cells_hold_for_weights(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id;text;w\na;x;1,5\nb;y;0,25\n")
    data = fz.create_dataset(path, weight_column="w", decimal=",", delimiter=";")
    assert data.weights is not None and data.weights.tolist() == [1.5, 0.25]


def test_other_weights_are_other_data() -> None:
    before, after = data_identity(opened()), data_identity(opened(weight_column=None))
    assert "weights" in before and {x: y for x, y in before.items() if x != "weights"} == after
