"""Tables and data sets in memory: DataFrames, lists, dicts, Hugging Face, PyTorch."""

from __future__ import annotations

import io
import json
import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

import fusionzoo as fz
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.datasets.sources import in_memory
from fusionzoo.datasets.summary import data_summary
from fusionzoo.errors import FusionZooError

WORDS = ("red", "blue and long", "green")


def rows(number: int = 40) -> list[dict[str, Any]]:
    """Texts and vectors from which the class follows."""
    draw = np.random.default_rng(0)
    return [
        {
            "id": f"r{n}",
            "split": ("train", "train", "val", "test")[n % 4],
            "target": "ab"[n // 4 % 2],
            "text": f"{WORDS[n // 4 % 2]} {n}",
            "vector": (draw.standard_normal(3) + 3 * (n // 4 % 2)).astype(np.float32),
            "weight": n / 2,
        }
        for n in range(number)
    ]


def picture(size: tuple[int, int] = (4, 3), colour: tuple[int, int, int] = (1, 2, 3)) -> Any:
    return Image.new("RGB", size, colour)


def png() -> bytes:
    buffer = io.BytesIO()
    picture().save(buffer, format="png")
    return buffer.getvalue()


def error_of(data: Any, **settings: Any) -> str:
    with pytest.raises(FusionZooError) as caught:
        fz.create_dataset(data, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Counted(Dataset[Any]):
    """A map-style data set that counts its reads; some items cannot be read the second time."""

    def __init__(self, items: list[Any], broken: tuple[int, ...] = ()) -> None:
        self.items, self.broken = items, broken
        self.reads = [0] * len(items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        if self.reads[index] > 1 and index in self.broken:
            raise OSError("disk gone")
        return self.items[index]


# ---- values


def test_a_value_tells_its_kind_and_stays_undecoded_until_it_is_read() -> None:
    clip = np.linspace(-0.5, 0.5, 50).astype(np.float32)
    data = fz.create_dataset(
        [
            {"photo": picture(), "voice": (clip, 8000), "text": "one"},
            {"photo": None, "voice": {"array": clip.tolist(), "sampling_rate": 16000}},
            {"photo": picture((2, 2))},
        ]
    )
    assert data.modalities == {"text": "text", "photo": "image", "voice": "audio"}
    assert data.present.tolist() == [[True, True, True], [False, False, True], [False, True, False]]
    assert isinstance(data.reference("photo", 0), Image.Image)
    assert data[0].values["photo"].shape == (3, 3, 4)
    assert torch.equal(data[0].values["voice"].samples, torch.from_numpy(clip))
    assert data[1].values["voice"].rate == 16000
    assert "inferred  column 'photo' is image" in data_summary(data)


def test_a_decoder_of_torchcodec_is_a_clip_whose_channels_are_averaged() -> None:
    class Samples(NamedTuple):
        data: torch.Tensor
        sample_rate: float

    class Decoder:
        def get_all_samples(self) -> Samples:
            return Samples(torch.tensor([[0.5, 0.0], [0.0, 0.5]]), 8000.0)

    data = fz.create_dataset([{"voice": Decoder()}])
    assert data.modalities == {"voice": "audio"}
    assert data[0].values["voice"].samples.tolist() == [0.25, 0.25]


def test_a_broken_picture_in_memory_is_found_when_it_is_read() -> None:
    table = [{"id": str(n), "image": png() if n % 2 else b"no picture"} for n in range(4)]
    data = fz.create_dataset(table)
    assert data[1].values["image"].shape == (3, 3, 4)
    with pytest.raises(
        FusionZooError, match="the list, row 1, sample '0', image: <bytes> cannot be read"
    ):
        data[0]
    lenient = fz.create_dataset(table, on_error="missing", max_errors=1.0)
    assert lenient[0].values["image"] is None
    assert lenient.failures() == [("0", "image")]


def test_numbers_missing_values_and_mixed_columns_are_text_of_roles() -> None:
    nan = float("nan")
    data = fz.create_dataset(
        {
            "id": [1, "b", 3],
            "text": ["x", "y", nan],
            "vector": [[1, 2], None, [0.5, 1]],
            "target": np.array([0, 1, 0]),
            "split": ("train", "train", "test"),
            "age": torch.tensor([1.5, 2.5, 3.5]),
        }
    )
    assert data.ids == ["1", "b", "3"]
    assert data.classes == ["0", "1"]
    assert data.present.tolist() == [[True, True], [True, False], [False, True]]
    ages = data.with_targets({"age": "regression"})
    assert ages.targets[:, 0].argsort().tolist() == [0, 1, 2]
    assert data.column("age") == ["1.5", "2.5", "3.5"]


def test_an_array_of_all_rows_is_a_column() -> None:
    frames = np.random.default_rng(0).standard_normal((6, 5, 2)).astype(np.float32)
    pictures = np.arange(6 * 4 * 4 * 3, dtype=np.uint8).reshape(6, 4, 4, 3)
    data = fz.create_dataset({"sequence": torch.from_numpy(frames), "image": pictures})
    assert torch.equal(data[2].values["sequence"], torch.from_numpy(frames[2]))
    assert torch.equal(data[5].values["image"], torch.from_numpy(pictures[5]).permute(2, 0, 1))


def test_the_settings_of_a_manifest_apply() -> None:
    table = [
        {"key": n, "picture": np.full((2, 2), n, np.uint8), "who": f"p{n % 4}", "text": "words"}
        for n in range(40)
    ]
    data = fz.create_dataset(
        table,
        columns={"id": "key", "scan": "picture"},
        kinds={"scan": "image"},
        group_column="who",
        shares=[0.5, 0.25, 0.25],
        modalities="scan",
    )
    assert data.modalities == {"scan": "image"}
    assert data.ids[:2] == ["0", "1"]
    where = {(group, split) for group, split in zip(data.groups, data.split_names, strict=True)}
    assert len(where) == 4
    assert data[7].values["scan"].unique().tolist() == [7]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (3, "data is of type int, and no name, path, settings or table"),
        ([], "the list has no rows"),
        ({}, "settings of a data set need its name"),
        ({"text": ["a"], "target": ["x", "y"]}, "'text' has 1, 'target' has 2"),
        ([{"words": "a"}], "the list has no column of a modality"),
        (Counted([1, 2]), "the Counted, item 0 is of type int: expected a dict or tuple"),
    ],
)
def test_what_cannot_be_used_is_one_line(data: Any, says: str) -> None:
    assert says in error_of(data)


# ---- DataFrames and Arrow


def test_a_data_frame_may_hold_objects_and_an_index_of_ids() -> None:
    frame = pd.DataFrame(
        {
            "key": ["a", "b", "c"],
            "image": [picture(), None, picture()],
            "text": ["x", pd.NA, None],
            "vector": [np.ones(2), np.zeros(2), None],
            "target": pd.Categorical(["u", "v", "u"]),
            "split": ["train", "train", "test"],
        }
    )
    data = fz.create_dataset(frame, columns={"id": "key"})
    assert data.present.tolist() == [[True, True, True], [False, False, True], [True, False, False]]
    assert data.classes == ["u", "v"]
    plain = frame.drop(columns="image").rename(columns={"key": "id"}).set_index("id").iloc[:2]
    assert fz.create_dataset(plain).ids == ["a", "b"]
    twice = pd.DataFrame([[picture(), "x"]], columns=["image", "image"])
    assert "the DataFrame has two columns of one name" in error_of(twice)


def indexed(index: Any, **columns: Any) -> pd.DataFrame:
    """A frame without a column of ids, whose texts are the labels of its index."""
    index = pd.Index(index) if not isinstance(index, pd.Index) else index
    texts = [f"row {label}" for label in index]
    return pd.DataFrame(
        {"text": texts, "target": ["a", "b"] * (len(index) // 2), **columns}, index=index
    )


@pytest.mark.parametrize(
    "index",
    [
        [3, 1, 0, 2],  # shuffled
        ["d", "b", "c", "a"],
        pd.RangeIndex(60, 64),  # the end of a frame
        pd.RangeIndex(8, 0, -2),
        pd.Index(["p1", "p2", "p3", "p4"], name="patient"),
        pd.date_range("2024-01-01", periods=4),
        pd.Index([0.5, 1.5, 2.5, 3.5]),
    ],
)
@pytest.mark.parametrize("way", ["frame", "objects", "parquet", "stored"])
def test_labels_of_an_index_are_ids(index: Any, way: str, tmp_path: Path) -> None:
    frame = indexed(index)
    source: Any = frame
    if way == "objects":
        source = frame.assign(image=[picture()] * 4)
    if way == "parquet":
        frame.to_parquet(source := tmp_path / "m.parquet")
    if way == "stored":
        source = DataSpec.of(frame, store=True).settings
    data = fz.create_dataset(source)
    for text, label in zip(frame["text"], data.ids, strict=True):
        assert label.split(" ")[0] == text.split(" ")[1]
    assert not data.provenance.numbered
    assert "ids are the labels of the DataFrame's index" in "\n".join(data_summary(data))


def test_rows_keep_their_split_when_a_frame_is_shuffled_or_cut() -> None:
    frame = indexed(range(100, 200))
    of_text = dict(zip(frame["text"], fz.create_dataset(frame).split_names, strict=True))
    for other in (frame.sample(frac=1, random_state=1), frame.iloc[50:]):
        data = fz.create_dataset(other)
        made = dict(zip(other["text"], data.split_names, strict=True))
        assert sum(of_text[text] != split for text, split in made.items()) <= 2  # moved ones


@pytest.mark.parametrize(
    "index",
    [
        [0, 1, 2, 3],
        pd.RangeIndex(4),
        [7, 7, 8, 9],
        pd.Index(["a", None, "b", "c"]),
        pd.MultiIndex.from_product([["a", "b"], [1, 2]]),
    ],
)
def test_an_index_that_counts_rows_or_repeats_labels_is_no_id(index: Any) -> None:
    data = fz.create_dataset(indexed(index))
    assert data.ids == ["0", "1", "2", "3"]
    assert data.provenance.numbered


def test_a_column_of_ids_goes_before_an_index() -> None:
    frame = indexed([3, 1, 0, 2], key=list("wxyz"))
    assert fz.create_dataset(frame, columns={"id": "key"}).ids == list("wxyz")
    assert fz.create_dataset(frame.rename(columns={"key": "ID"})).ids == list("wxyz")


def test_an_index_is_no_input_that_is_inferred() -> None:
    draw = np.random.default_rng(0)
    frame = indexed([f"p{n}" for n in range(40)], weight=draw.normal(size=40))
    frame.index.name = "patient"
    data = fz.create_dataset(frame, target="target")
    assert data.ids[:2] == ["p0", "p1"]
    assert "patient" not in str(data.provenance.unused)
    assert [field.name for field in data.table["tabular"].type] == ["weight"]


@pytest.mark.parametrize("first", [0, 0x9F << 120 | 0x40 << 72])
@pytest.mark.parametrize("column", ["id", "group", "target", "index"])
@pytest.mark.parametrize("way", ["frame", "rows", "objects", "arrow", "parquet"])
def test_uuids_are_read_as_their_text(way: str, column: str, first: int, tmp_path: Path) -> None:
    values = [uuid.UUID(int=first + n) for n in range(4)]
    frame = pd.DataFrame({"text": list("abcd"), "split": ["train"] * 4, column: values})
    source: Any = frame.set_index("index") if column == "index" else frame
    if way == "rows":
        source = frame.rename(columns={"index": "id"}).to_dict("records")
    if way == "objects":
        source = source.assign(image=[picture()] * 4)
    if way in ("arrow", "parquet"):
        source = pa.Table.from_pandas(source)
    if way == "parquet":
        pq.write_table(source, tmp_path / "m.parquet")
        source = tmp_path / "m.parquet"
    if column == "index" and way == "arrow":
        return  # an Arrow table has no index
    data = fz.create_dataset(source)
    texts = [str(value) for value in values]
    if column == "target":
        assert data.labels == texts
    else:
        assert (data.groups if column == "group" else data.ids) == texts


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ([("a", 0), ("a", 1)], ["a;0", "a;1"]),
        ([("a", "b"), ("c", "d")], ["a;b", "c;d"]),
        ([frozenset("a"), frozenset("b")], ["a", "b"]),
        ([np.array([1, 0]), np.array([0, 1])], ["0;1", "1;0"]),
        ([torch.tensor(3), torch.tensor(4)], ["3", "4"]),
    ],
)
def test_tuples_and_arrays_of_labels_are_read_as_lists(labels: Any, classes: list[str]) -> None:
    rows = [{"text": "t", "split": "train", "target": label} for label in labels]
    assert fz.create_dataset(rows).classes == classes
    frame = pd.DataFrame({"text": "t", "split": "train", "target": labels})
    assert fz.create_dataset(frame).classes == classes


def test_tables_by_split_are_one_data_set() -> None:
    parts = {
        name: pa.table({"text": [f"{name} {n}" for n in range(3)], "target": ["a", "b", "a"]})
        for name in ("train", "test")
    }
    data = fz.create_dataset(parts)
    assert data.splits == {"train": 3, "test": 3}
    assert data.provenance.split_rule == "the keys of the dict"
    assert len(set(data.ids)) == 6


def test_structs_in_parquet_refer_to_files_of_the_folder_alone(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.png").write_bytes(png())
    (tmp_path / "secret.png").write_bytes(png())

    def write(path: str | None, contents: bytes | None = None) -> Path:
        cells = [{"bytes": png(), "path": "/etc/passwd"}, {"bytes": contents, "path": path}]
        table = pa.table({"id": ["x", "y"], "image": cells, "text": ["a", "b"]})
        pq.write_table(table, folder / "t.parquet")
        return folder / "t.parquet"

    data = fz.create_dataset(write("a.png"))
    assert torch.equal(data[0].values["image"], data[1].values["image"])
    assert fz.create_dataset(write(None)).present.tolist() == [[True, True], [False, True]]
    says = error_of(write("../secret.png"))
    assert "row 2, sample 'y': image cell '../secret.png' leads to" in says
    assert "does not exist" in error_of(write("b.png"))
    assert "outside of" in error_of(write(str(tmp_path / "secret.png")), on_error="missing")
    opened = fz.create_dataset(write("../secret.png"), allow_outside=True)
    assert opened[1].values["image"].shape == (3, 3, 4)


def test_a_struct_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("secret")
    table = pa.table({"text": [{"path": "a.txt"}], "vector": [[1.0]]})
    pq.write_table(table, tmp_path / "t.parquet")
    says = error_of(tmp_path / "t.parquet")
    assert "column 'text' is of kind text, and holds struct<path: string>" in says


# ---- declared types


def declared(features: dict[str, Any], columns: dict[str, Any]) -> pa.Table:
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    return pa.table(columns).replace_schema_metadata(metadata)


LABEL = {"names": ["cat", "dog"], "_type": "ClassLabel"}


def test_class_labels_have_their_names_and_are_the_target() -> None:
    columns = {"text": list("abcd"), "kind": [0, 1, 0, 1], "split": ["train"] * 3 + ["val"]}
    data = fz.create_dataset(declared({"kind": LABEL}, columns))
    assert (data.classes, data.labels) == (["cat", "dog"], ["cat", "dog", "cat", "dog"])
    assert "inferred  column 'kind' is the target" in data_summary(data)
    named = fz.create_dataset(declared({"kind": LABEL}, {**columns, "target": list("xxyy")}))
    assert named.classes == ["x", "y"]
    two = {"kind": LABEL, "label": {"names": ["l", "m"], "_type": "ClassLabel"}}
    both = fz.create_dataset(declared(two, {**columns, "label": [1, 1, 0, 0]}))
    assert both.labels == ["m", "m", "l", "l"]
    chosen = fz.create_dataset(
        declared(two, {**columns, "label": [1, 1, 0, 0]}), columns={"target": "kind"}
    )
    assert chosen.classes == ["cat", "dog"]


def test_lists_of_class_labels_are_labels_of_a_sample() -> None:
    columns = {"text": list("abc"), "tags": [[0, 1], [], [1]], "split": ["train"] * 3}
    feature = {"tags": {"feature": LABEL, "_type": "List"}}
    data = fz.create_dataset(declared(feature, columns), targets={"tags": "multilabel"})
    assert data.targets.tolist() == [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]


def test_a_class_without_a_label_or_name_is_no_class() -> None:
    columns = {"text": list("abc"), "label": [0, -1, 1], "split": ["train", "train", "val"]}
    says = error_of(declared({"label": LABEL}, columns))
    assert "row 2, sample '1' (split 'train') has no target" in says
    columns["label"] = [0, 2, 1]
    assert "'label' names only 2 of its classes" in error_of(declared({"label": LABEL}, columns))


@pytest.mark.parametrize("text", ["[]", '{"info": 3}', '{"info": {"features": [1]}}'])
def test_metadata_of_another_shape_is_ignored(text: str) -> None:
    table = pa.table({"text": ["a"]}).replace_schema_metadata({"huggingface": text})
    assert fz.create_dataset(table).modalities == {"text": "text"}


# ---- Hugging Face


@pytest.fixture(name="hf")
def _hf() -> Any:
    return pytest.importorskip("datasets", exc_type=ImportError)


def small(hf: Any, **changes: Any) -> Any:
    features = {
        "img": hf.Image(),
        "text": hf.Value("string"),
        "label": hf.ClassLabel(names=["cat", "dog"]),
    }
    columns = {"img": [picture(), None] * 3, "text": list("abcdef"), "label": [0, 1] * 3}
    return hf.Dataset.from_dict({**columns, **changes}, features=hf.Features(features))


def test_pictures_of_hugging_face_are_decoded_on_access(
    hf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = small(hf)
    monkeypatch.setattr(hf.Image, "decode_example", lambda *_, **__: pytest.fail("decoded"))
    data = fz.create_dataset(source.shuffle(seed=1))
    assert data.modalities == {"text": "text", "img": "image"}
    assert data.classes == ["cat", "dog"]
    order = source.shuffle(seed=1)["text"]
    assert [data[n].values["text"] for n in range(6)] == list(order)
    assert data.present[:, 1].tolist() == [letter in "ace" for letter in order]
    assert data[list(order).index("c")].values["img"].shape == (3, 3, 4)


def test_a_transform_of_hugging_face_is_applied(hf: Any) -> None:
    def upper(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"text": [text.upper() for text in batch["text"]], "target": batch["label"]}

    data = fz.create_dataset(small(hf).with_transform(upper))
    assert data[1].values["text"] == "B"
    assert data.modalities == {"text": "text"}


def test_keys_of_a_dataset_dict_are_the_splits(hf: Any) -> None:
    splits = hf.DatasetDict(train=small(hf), test=small(hf).add_column("split", ["odd"] * 6))
    data = fz.create_dataset(splits)
    assert data.splits == {"train": 6, "test": 6}
    assert data.provenance.split_rule == "the keys of the DatasetDict"
    assert len(set(data.ids)) == 12
    other = hf.Dataset.from_dict({"text": [1, 2]})
    says = error_of(hf.DatasetDict(train=small(hf), test=other))
    assert says.startswith("the splits of the DatasetDict differ: ")


def saved(folder: Path, rows: pa.Table, **options: Any) -> Path:
    """Write rows as `save_to_disk` does, without its library."""
    folder.mkdir(parents=True)
    features = {"info": {"features": {"photo": {"_type": "Image"}, "y": {"names": ["no", "yes"]}}}}
    rows = rows.replace_schema_metadata({"huggingface": json.dumps(features)})
    with pa.ipc.new_stream(folder / "data.arrow", rows.schema, **options) as writer:
        writer.write_table(rows)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    return folder


def arrow_rows() -> pa.Table:
    photo = pa.array(
        [{"bytes": png(), "path": None}, None],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    split = ["train", "train"]
    return pa.table({"photo": photo, "text": ["a", "b"], "y": [1, 0], "split": split})


def test_a_data_set_on_disk_is_opened_without_its_library(tmp_path: Path) -> None:
    for split in ("train", "test"):
        saved(tmp_path / split, arrow_rows())
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    data = fz.create_dataset(tmp_path)
    assert (data.splits, data.classes) == ({"train": 2, "test": 2}, ["no", "yes"])
    assert data.provenance.split_rule == "the keys of the DatasetDict"
    assert data[2].values["photo"].shape == (3, 3, 4)
    assert data[3].values["photo"] is None
    assert len(fz.create_dataset(tmp_path / "train")) == 2


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("state.json", '{"_data_files": [{"filename": "../data.arrow"}]}', "names no file of data"),
        ("state.json", "[]", "must hold a JSON object"),
        ("dataset_dict.json", '{"splits": [".."]}', "does not list the splits"),
        ("dataset_dict.json", '{"splits": ["train"]}', "train/state.json cannot be read"),
        ("data.arrow", None, "data.arrow does not exist"),
    ],
)
def test_a_damaged_data_set_on_disk_is_an_error_in_one_line(
    tmp_path: Path, file: str, content: str | None, says: str
) -> None:
    folder = saved(tmp_path / "a", arrow_rows())
    (folder / file).unlink(missing_ok=True)
    if content is not None:
        (folder / file).write_text(content)
    assert says in error_of(folder)


def test_arrow_files_neither_expand_nor_lead_elsewhere(tmp_path: Path) -> None:
    packed = pa.ipc.IpcWriteOptions(compression="zstd")
    assert "is compressed" in error_of(saved(tmp_path / "a", arrow_rows(), options=packed))
    coded = arrow_rows().set_column(1, "text", pa.array(["a", "b"]).dictionary_encode())
    assert "is compressed" in error_of(saved(tmp_path / "b", coded, options=packed))
    assert len(fz.create_dataset(saved(tmp_path / "c", coded))) == 2
    folder = saved(tmp_path / "d", arrow_rows())
    (folder / "data.arrow").unlink()
    (folder / "data.arrow").symlink_to(tmp_path / "c" / "data.arrow")
    assert "outside of" in error_of(folder)
    folder = saved(tmp_path / "e", arrow_rows())
    whole = (folder / "data.arrow").read_bytes()
    for size in (10, len(whole) // 3, len(whole) - 40):
        (folder / "data.arrow").write_bytes(whole[:size])
        assert "cannot be read as a stream of Arrow" in error_of(folder)


def test_a_missing_parquet_file_of_a_split_is_an_error(hf: Any, tmp_path: Path) -> None:
    small(hf).to_parquet(tmp_path / "train-00000-of-00002.parquet")
    assert "1 of 2 Parquet files of 'train'" in error_of(tmp_path)


def test_parquet_files_in_folders_named_after_splits(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / "default" / split).mkdir(parents=True)
        pq.write_table(pa.table({"text": [split]}), tmp_path / "default" / split / "0000.parquet")
    assert fz.create_dataset(tmp_path / "default").splits == {"train": 1, "val": 1}
    (tmp_path / "other").mkdir()
    for name in ("default", "other"):
        pq.write_table(pa.table({"text": ["x"]}), tmp_path / name / "train.parquet")
    assert "names one of its folders: default, other" in error_of(tmp_path)


# ---- PyTorch


def test_items_are_read_once_for_labels_and_again_for_values() -> None:
    items = [{"image": picture(), "sound": (np.zeros(9), 8), "target": n % 2} for n in range(6)]
    source = Counted(items)
    data = fz.create_dataset(source)
    assert source.reads == [1] * 6
    assert data.targets.tolist() == [0, 1] * 3
    sample = data[2]
    assert sample.values["image"].shape == (3, 3, 4)
    assert sample.values["sound"].rate == 8
    assert source.reads == [1, 1, 2, 1, 1, 1]  # once for both modalities


def test_items_may_be_tuples_with_fields_or_names() -> None:
    class Item(NamedTuple):
        image: Any
        target: torch.Tensor

    tuples = Counted([(picture(), n, torch.tensor(n % 2)) for n in range(4)])
    data = fz.create_dataset(tuples, fields="image, _, target")
    assert data.targets.tolist() == [0, 1, 0, 1]
    assert "fields=['image', 'target', '_']" in error_of(tuples)
    assert "item 0 has 3 entries, but fields names 2" in error_of(tuples, fields=["image", "text"])
    named = Counted([Item(picture(), torch.tensor(n)) for n in range(2)])
    assert fz.create_dataset(named, targets={}).modalities == {"image": "image"}


def test_an_item_that_fails_later_is_a_value_that_cannot_be_read() -> None:
    items = [{"id": str(n), "image": picture(), "text": "words"} for n in range(30)]
    data = fz.create_dataset(Counted(items, broken=(3,)), on_error="missing")
    assert [data[n].values["image"] is None for n in range(5)] == [False] * 3 + [True, False]
    assert data.failures() == [("3", "image")]
    strict = fz.create_dataset(Counted(items, broken=(3,)))
    with pytest.raises(FusionZooError, match=r"sample '3', image: .* OSError: disk gone"):
        strict[3]


def test_an_iterable_data_set_is_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from ({"text": f"t{n}"} for n in range(5))

        def __len__(self) -> int:
            return 5

    assert fz.create_dataset(Stream()).ids == list("01234")
    monkeypatch.setattr(in_memory, "STREAM_LIMIT", 4)
    says = error_of(Stream())
    assert "the Stream is a stream of more than 4" in says and "give `list(stream)`" in says


# ---- views and display


def test_an_open_data_set_takes_the_settings_of_views() -> None:
    data = fz.create_dataset(rows())
    assert fz.create_dataset(data, modalities="text").modalities == {"text": "text"}
    labelled = fz.create_dataset(data, targets={"weight": "regression"})
    assert labelled.targets[:, 0].argsort().tolist() == list(range(40))
    assert "takes no setting 'modalites'. Did you mean 'modalities'?" in error_of(
        data, modalites="text"
    )


def test_data_in_memory_survives_pickling() -> None:
    data = fz.create_dataset([{"image": picture(), "vector": np.ones(2), "text": "a"}] * 2)
    again = pickle.loads(pickle.dumps(data))
    assert torch.equal(again[1].values["image"], data[1].values["image"])


def test_repr_shows_splits_modalities_classes_and_a_sample() -> None:
    table = [{**row, "photo": picture() if n % 2 else None} for n, row in enumerate(rows(8))]
    lines = repr(fz.create_dataset(table)).splitlines()
    assert lines[0] == "PairedDataset the list: 8 samples (train 4, val 2, test 2)"
    assert lines[1:3] == ["  have    text 8, vector 8, photo (image) 4", "  classes 2: a 4, b 4"]
    assert lines[3] == (
        "  first   id 'r0', target 'a', text 'red 0', vector 3 float32, photo missing"
    )
    numbers = fz.create_dataset(table, targets={"weight": "regression"})
    assert "  targets weight (regression)" in repr(numbers).splitlines()


def test_a_notebook_shows_tables_that_are_escaped() -> None:
    script = "<script>alert(1)</script>"
    data = fz.create_dataset([{"id": script, "text": script, "target": script, "split": script}])
    page = data._repr_html_()
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") >= 4
    assert "<td>text</td><td>text</td><td>1 (100%)</td>" in page


# ---- lengths, ratios


def test_values_in_memory_have_lengths_and_aspect_ratios() -> None:
    from fusionzoo.datasets.samplers import group_values

    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(400), 8000, format="WAV")
    data = fz.create_dataset(
        [
            {"audio": buffer.getvalue(), "image": png()},
            {"audio": (np.zeros(50), 8000), "image": picture((8, 4))},
        ]
    )
    lengths = data.lengths()
    assert lengths[0] > lengths[1]
    assert group_values(data, "aspect_ratio").tolist() == pytest.approx([4 / 3, 2.0])


# ---- train, evaluate, predict, embed, benchmark

QUICK: dict[str, Any] = {
    "epochs": 2,
    "num_workers": 0,
    "log": "none",
    "device": "cpu",
    "encoders": {"text": {"name": "chars", "dim": 8, "num_heads": 2}},
}


@pytest.fixture
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_cache")
def test_every_function_takes_data_in_memory(tmp_path: Path) -> None:
    table = rows()
    run = fz.train(table, **QUICK, out="run")
    assert run.metrics["test"]["accuracy"] >= 0
    items = Counted(table)
    settings: dict[str, Any] = {"num_workers": 0, "device": "cpu"}
    plain = [{**row, "vector": row["vector"].tolist()} for row in table]
    metrics = [fz.evaluate(run.model, data, **settings) for data in (table, items, plain)]
    assert metrics[0] == metrics[1] == metrics[2]
    pictures = {"name": "manifest", "root": items, "columns": {"id": "weight"}}
    predicted = [fz.predict(run.model, data, **settings) for data in (table, plain, pictures)]
    assert predicted[0] == predicted[1]
    assert [row["id"] for row in predicted[0]] == [row["id"] for row in table]
    assert predicted[2]["weight"].to_pylist()[:2] == [0.0, 0.5]
    path = fz.embed(run.model, iter(table), out=tmp_path / "e.parquet", **settings)
    assert sorted(pq.read_table(path)["id"].to_pylist()) == sorted(row["id"] for row in table)


@pytest.mark.usefixtures("_cache")
def test_lists_that_arrow_holds_are_stored_and_opened_again() -> None:
    plain = [{**row, "vector": row["vector"].tolist(), "image": {"bytes": png()}} for row in rows()]
    settings = DataSpec.of(plain, store=True).recorded
    assert settings["name"] == "manifest"
    assert DataSpec.of(plain, store=True).recorded == settings
    data = fz.create_dataset(**settings)
    assert torch.equal(data[3].values["vector"], torch.from_numpy(rows()[3]["vector"]))
    assert data[3].values["image"].shape == (3, 3, 4)
    assert DataSpec.of(rows(), store=True).recorded == {"name": "in_memory"}


@pytest.mark.usefixtures("_cache")
def test_labels_in_memory_are_read_by_the_objective() -> None:
    numbers = fz.train(Counted(rows()), **QUICK, targets={"weight": "regression"}, out="run")
    assert "mae" in numbers.metrics["test"]
