"""The same 200 samples through every kind of source give the same batches.

A source is a function in `SOURCES` that gets a folder and the samples, writes or makes what a user
has, and returns the data set of it. Others add theirs there.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import multiprocessing
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import torch
from PIL import Image

import fusionzoo as fz
from fusionzoo import PairedDataset
from fusionzoo.config import DistConfig, EmbedConfig
from fusionzoo.datasets import Collate
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.embeddings.extract import ExtractionPlan
from fusionzoo.embeddings.run import embed
from fusionzoo.machine.distributed import World, process_group
from fusionzoo.structures import Audio, Batch, Sample

NUM_SAMPLES, WIDTH, RATE = 200, 5, 8000
CLASSES = ("cat", "a dog")
MODALITIES = ("image", "text", "audio", "vector")
MEDIA = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


class Row(NamedTuple):
    """A sample; a modality that it lacks is None."""

    id: str
    split: str
    target: str
    image: np.ndarray | None  # uint8 (H, W, 3)
    text: str | None
    audio: np.ndarray | None  # float32 (n,)
    vector: np.ndarray | None  # float32 (WIDTH,)

    png: bytes | None  # the image as a file
    wav: bytes | None  # the clip as a file, exact

    @property
    def plain(self) -> dict[str, str]:
        """The columns of every source."""
        return {"id": self.id, "split": self.split, "target": self.target}


def png(image: np.ndarray | None) -> bytes | None:
    if image is None:
        return None
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="png")
    return buffer.getvalue()


def wav(audio: np.ndarray | None) -> bytes | None:
    if audio is None:
        return None
    buffer = io.BytesIO()
    soundfile.write(buffer, audio, RATE, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


@cache
def samples() -> tuple[Row, ...]:
    draw = np.random.default_rng(15)
    rows = []
    for number in range(NUM_SAMPLES):
        height, width = draw.integers(4, 9, 2)
        split = "train" if number % 5 < 3 else ("val", "test")[number % 2]
        values: dict[str, Any] = {
            "image": draw.integers(0, 256, (height, width, 3)).astype(np.uint8),
            "text": f'sample {number}, "quoted"; naïve{"猫" * (number % 3)}',
            "audio": draw.uniform(-0.9, 0.9, int(draw.integers(100, 300))).astype(np.float32),
            "vector": draw.standard_normal(WIDTH).astype(np.float32),
        }
        for position, name in enumerate(MODALITIES):
            if number % (4 + position) == 1 + position:
                values[name] = None
        values |= {"png": png(values["image"]), "wav": wav(values["audio"])}
        rows.append(Row(f"s{number:03}", split, CLASSES[number % 2], **values))
    return tuple(rows)


# ---- files


def write_files(folder: Path, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Write media and arrays; return the rows of a manifest, whose cells are paths."""
    cells = []
    for row in rows:
        cell: dict[str, Any] = {**row.plain, "text": row.text}
        for name, suffix, contents in (("image", "png", row.png), ("audio", "wav", row.wav)):
            if contents is not None:
                cell[name] = f"{name}/{row.id}.{suffix}"
                (folder / name).mkdir(exist_ok=True)
                (folder / cell[name]).write_bytes(contents)
        if row.vector is not None:
            cell["vector"] = f"{row.id}.npy"
            np.save(folder / cell["vector"], row.vector)
        cells.append({name: cell.get(name) for name in (*row.plain, *MODALITIES)})
    return cells


def delimited(
    suffix: str, delimiter: str, encoding: str = "utf-8"
) -> Callable[[Path, Sequence[Row]], PairedDataset]:
    def make(folder: Path, rows: Sequence[Row]) -> PairedDataset:
        cells = write_files(folder, rows)
        path = folder / f"data.{suffix}"
        opened = gzip.open if suffix.endswith("gz") else open
        with opened(path, "wt", newline="", encoding=encoding) as file:
            writer = csv.DictWriter(file, list(cells[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(cells)
        return fz.create_dataset(path)

    return make


def spreadsheet(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    import pandas as pd

    pd.DataFrame(write_files(folder, rows)).to_excel(folder / "data.xlsx", index=False)
    return fz.create_dataset(folder / "data.xlsx")


def write_vectors(folder: Path, rows: Sequence[Row], cell: str) -> list[dict[str, Any]]:
    """Write media; return the rows of a manifest whose vectors are `cell`, with a row number."""
    cells = write_files(folder, rows)
    for number, (values, row) in enumerate(zip(cells, rows, strict=True)):
        values["vector"] = None if row.vector is None else cell.format(number=number, id=row.id)
    return cells


def all_vectors(rows: Sequence[Row]) -> np.ndarray:
    """One row per sample, zeros for those without a vector."""
    empty = np.zeros(WIDTH, np.float32)
    return np.stack([empty if row.vector is None else row.vector for row in rows])


def rows_of_an_array(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    cells = write_vectors(folder, rows, "all.npy[{number}]")
    np.save(folder / "all.npy", all_vectors(rows))
    pq.write_table(pa.Table.from_pylist(cells), folder / "data.parquet")
    return fz.create_dataset(folder / "data.parquet")


def keys_of_an_npz(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    cells = write_vectors(folder, rows, "all.npz::{id}")
    vectors = {row.id: row.vector for row in rows if row.vector is not None}
    np.savez(folder / "all.npz", **vectors)
    pq.write_table(pa.Table.from_pylist(cells), folder / "data.parquet")
    return fz.create_dataset(folder / "data.parquet")


def rows_of_hdf5(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    import h5py

    cells = write_vectors(folder, rows, "all.h5::group/vectors[{number}]")
    with h5py.File(folder / "all.h5", "w") as file:
        file["group/vectors"] = all_vectors(rows)
    pq.write_table(pa.Table.from_pylist(cells), folder / "data.parquet")
    return fz.create_dataset(folder / "data.parquet")


def an_array_with_ids(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    """One array for all rows that have a vector, and the list of their ids, backwards."""
    cells = write_files(folder, rows)
    for cell in cells:
        del cell["vector"]
    pq.write_table(pa.Table.from_pylist(cells), folder / "data.parquet")
    having = [row for row in reversed(rows) if row.vector is not None]
    np.save(folder / "all.npy", np.stack([row.vector for row in having if row.vector is not None]))
    np.save(folder / "ids.npy", [row.id for row in having])
    arrays = {"vector": ["all.npy", "ids.npy"]}
    return fz.create_dataset(folder / "data.parquet", arrays=arrays)


def json_lines(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    cells = write_files(folder, rows)
    for cell, row in zip(cells, rows, strict=True):
        cell["vector"] = None if row.vector is None else row.vector.tolist()
    path = folder / "data.jsonl"
    path.write_text("\n".join(json.dumps(cell) for cell in cells), encoding="utf-8")
    return fz.create_dataset(str(path))


def parquet_of_paths(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    pq.write_table(pa.Table.from_pylist(write_files(folder, rows)), folder / "data.parquet")
    return fz.create_dataset("manifest", root=str(folder / "data.parquet"))


def embedded(rows: Sequence[Row]) -> pa.Table:
    """Return a table with images and clips as `{bytes, path}`, vectors as lists."""

    def media(contents: bytes | None) -> dict[str, Any] | None:
        return None if contents is None else {"bytes": contents, "path": "elsewhere.bin"}

    columns: dict[str, Any] = {
        name: pa.array([row.plain[name] for row in rows]) for name in rows[0].plain
    }
    columns["image"] = pa.array([media(row.png) for row in rows], MEDIA)
    columns["text"] = pa.array([row.text for row in rows], pa.string())
    columns["audio"] = pa.array([media(row.wav) for row in rows], MEDIA)
    vectors = [None if row.vector is None else row.vector.tolist() for row in rows]
    columns["vector"] = pa.array(vectors, pa.list_(pa.float32()))
    return pa.table(columns)


def parquet_of_structs(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    pq.write_table(embedded(rows), folder / "data.parquet", row_group_size=64)
    return fz.create_dataset(folder / "data.parquet")


def parquet_of_bytes(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    table = embedded(rows)
    for name, contents in (("image", [r.png for r in rows]), ("audio", [r.wav for r in rows])):
        position = table.column_names.index(name)
        table = table.set_column(position, name, pa.array(contents, pa.large_binary()))
    pq.write_table(table, folder / "data.parquet")
    return fz.create_dataset(folder / "data.parquet")


def parquet_folder(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    """The rows of each split in a file of its own, train's in two."""
    (folder / "data").mkdir()
    for split in ("train", "val", "test"):
        table = embedded([row for row in rows if row.split == split]).drop_columns("split")
        half = len(table) // 2
        shards = [table[:half], table[half:]] if split == "train" else [table]
        for number, shard in enumerate(shards):
            name = f"{split}-{number:05}-of-{len(shards):05}.parquet"
            pq.write_table(shard, folder / "data" / name)
    return fz.create_dataset(folder)


def class_folders(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    """Vectors have no class folders: they are joined from a table."""
    for row in rows:
        place = folder / "media" / row.split / row.target
        place.mkdir(parents=True, exist_ok=True)
        for suffix, contents in (("png", row.png), ("wav", row.wav)):
            if contents is not None:
                (place / f"{row.id}.{suffix}").write_bytes(contents)
        if row.text is not None:
            (place / f"{row.id}.txt").write_text(row.text, encoding="utf-8")
    media = fz.create_dataset("folders", root=str(folder / "media"))
    vectors = [
        {**row.plain, "id": f"{row.split}/{row.target}/{row.id}", "vector": row.vector}
        for row in rows
        if row.vector is not None
    ]
    sources = {"media": media, "vector": fz.create_dataset(vectors)}
    return PairedDataset.join(sources, how="outer")


# ---- memory


def objects(row: Row) -> dict[str, Any]:
    """A sample as Python code has it."""
    return {
        **row.plain,
        "image": None if row.image is None else Image.fromarray(row.image),
        "text": row.text,
        "audio": None if row.audio is None else (row.audio, RATE),
        "vector": row.vector,
    }


def list_of_dicts(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    return fz.create_dataset([{k: v for k, v in objects(r).items() if v is not None} for r in rows])


def list_of_bytes(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    return fz.create_dataset([{**objects(r), "image": r.png, "audio": r.wav} for r in rows])


def dict_of_columns(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    columns = {name: [objects(row)[name] for row in rows] for name in objects(rows[0])}
    columns["image"] = [row.image for row in rows]
    columns["vector"] = [None if r.vector is None else torch.tensor(r.vector) for r in rows]
    return fz.create_dataset(columns)


def arrow_table(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    return fz.create_dataset(embedded(rows))


def data_frame(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    import pandas as pd

    return fz.create_dataset(pd.DataFrame([objects(row) for row in rows]))


def data_frame_of_paths(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    import pandas as pd

    frame = pd.DataFrame(write_files(folder, rows))
    for name in ("image", "audio", "vector"):
        frame[name] = [None if pd.isna(cell) else str(folder / cell) for cell in frame[name]]
    return fz.create_dataset(frame)


class Torch(torch.utils.data.Dataset[Any]):
    """A map-style data set; of tuples if `names` is empty."""

    def __init__(self, rows: Sequence[Row], names: Sequence[str]) -> None:
        self.rows, self.names = rows, names

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        values = objects(self.rows[index])
        return {name: values[name] for name in self.names} or tuple(values.values())


def torch_dicts(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    return fz.create_dataset(Torch(rows, list(objects(rows[0]))))


def torch_tuples(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    return fz.create_dataset(Torch(rows, ()), fields=list(objects(rows[0])))


def stream(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    return fz.create_dataset(objects(row) for row in rows)


# ---- Hugging Face


def hugging_face_columns(rows: Sequence[Row]) -> Any:
    """A `datasets.Dataset` with the features Image, Audio and ClassLabel, named after no role."""
    import datasets as hf

    features = hf.Features(
        {
            "id": hf.Value("string"),
            "label": hf.ClassLabel(names=sorted(CLASSES)),
            "image": hf.Image(),
            "text": hf.Value("string"),
            "audio": hf.Audio(),
            "vector": hf.Sequence(hf.Value("float32")),
        }
    )
    table = embedded(rows)
    labels = [sorted(CLASSES).index(row.target) for row in rows]
    table = table.append_column("label", pa.array(labels)).drop_columns(["split", "target"])
    table = table.select(list(features)).cast(features.arrow_schema)
    return hf.Dataset(hf.table.InMemoryTable(table))


def hugging_face_dataset(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    """Shuffled and back, so that it has an index; the column of splits is text."""
    dataset = hugging_face_columns(rows).add_column("split", [row.split for row in rows])
    backwards = dataset.select(range(len(rows) - 1, -1, -1))
    return fz.create_dataset(backwards.select(range(len(rows) - 1, -1, -1)))


def hugging_face_dict(rows: Sequence[Row]) -> Any:
    import datasets as hf

    splits = {s: [row for row in rows if row.split == s] for s in ("train", "val", "test")}
    return hf.DatasetDict({s: hugging_face_columns(part) for s, part in splits.items()})


def hugging_face_splits(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    return fz.create_dataset(hugging_face_dict(rows))


def hugging_face_parquet(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    for split, part in hugging_face_dict(rows).items():
        part.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return fz.create_dataset(str(folder))


def hugging_face_on_disk(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    hugging_face_dict(rows).save_to_disk(folder / "saved", num_shards={"train": 2})
    return fz.create_dataset(str(folder / "saved"))


def hugging_face_stream(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    import datasets as hf

    parts = {s: part.to_iterable_dataset() for s, part in hugging_face_dict(rows).items()}
    return fz.create_dataset(hf.IterableDatasetDict(parts))


def hugging_face_stream_as_shards(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    parts = {s: part.to_iterable_dataset() for s, part in hugging_face_dict(rows).items()}
    import datasets as hf

    return fz.create_dataset(fz.convert(hf.IterableDatasetDict(parts), folder / "out").folder)


def parquet_shards(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    source = fz.create_dataset([objects(row) for row in rows])
    return fz.create_dataset(fz.convert(source, folder / "out", shard_mb=1).folder)


def webdataset_shards(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    source = fz.create_dataset([objects(row) for row in rows])
    return fz.create_dataset(fz.convert(source, folder / "out", format="webdataset").folder)


# ---- joins and round trips


def separate_sources(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    """A source per modality, each with the rows that have it."""
    sources = {}
    for name in MODALITIES:
        having = [objects(row) for row in rows if getattr(row, name) is not None]
        names = ("id", "split", "target", name)
        sources[name] = fz.create_dataset([{x: row[x] for x in names} for row in having])
    return PairedDataset.join(sources, how="outer")


def command_line_join(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    """A manifest of images and texts, joined with one of clips and vectors."""
    cells = write_files(folder, rows)
    halves = {"left": ("image", "text"), "right": ("audio", "vector")}
    for name, half in halves.items():
        columns = ("id", "split", "target", *half)
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(cell for cell in cells if any(cell[x] for x in half))
    return fz.create_dataset(
        folder / "left.csv", join={"sounds": str(folder / "right.csv")}, on="id", how="outer"
    )


def round_trip(suffix: str, embed: bool) -> Callable[[Path, Sequence[Row]], PairedDataset]:
    def make(folder: Path, rows: Sequence[Row]) -> PairedDataset:
        first = delimited("csv", ",")(folder, rows)
        return fz.create_dataset(**first.to_manifest(folder / f"copy.{suffix}", embed=embed))

    return make


def round_trip_of_objects(folder: Path, rows: Sequence[Row]) -> PairedDataset:
    list_of_dicts(folder, rows).to_manifest(folder / "copy.parquet")
    return fz.create_dataset(folder / "copy.parquet")


Maker = Callable[[Path, Sequence[Row]], PairedDataset]
SOURCES: dict[str, Maker] = {
    "csv": delimited("csv", ","),
    "tsv": delimited("tsv", "\t"),
    "csv.gz": delimited("csv.gz", ";"),
    "csv of UTF-16": delimited("csv", "|", "utf-16"),
    "xlsx": spreadsheet,
    "jsonl": json_lines,
    "rows of an array": rows_of_an_array,
    "keys of an npz": keys_of_an_npz,
    "rows of an HDF5 file": rows_of_hdf5,
    "an array with ids": an_array_with_ids,
    "parquet of paths": parquet_of_paths,
    "parquet of structs": parquet_of_structs,
    "parquet of bytes": parquet_of_bytes,
    "folder of parquet files": parquet_folder,
    "class folders": class_folders,
    "list of dicts": list_of_dicts,
    "list of dicts of bytes": list_of_bytes,
    "dict of columns": dict_of_columns,
    "arrow table": arrow_table,
    "DataFrame": data_frame,
    "DataFrame of paths": data_frame_of_paths,
    "torch data set of dicts": torch_dicts,
    "torch data set of tuples": torch_tuples,
    "stream": stream,
    "Hugging Face Dataset": hugging_face_dataset,
    "Hugging Face DatasetDict": hugging_face_splits,
    "Hugging Face Parquet files": hugging_face_parquet,
    "Hugging Face save_to_disk": hugging_face_on_disk,
    "Hugging Face streams": hugging_face_stream,
    "Hugging Face streams as shards": hugging_face_stream_as_shards,
    "Parquet shards": parquet_shards,
    "WebDataset shards": webdataset_shards,
    "join of sources": separate_sources,
    "join of manifests": command_line_join,
    "to_manifest csv": round_trip("csv", embed=False),
    "to_manifest tsv": round_trip("tsv", embed=False),
    "to_manifest jsonl": round_trip("jsonl", embed=False),
    "to_manifest parquet": round_trip("parquet", embed=False),
    "to_manifest embedded": round_trip("parquet", embed=True),
    "to_manifest of objects": round_trip_of_objects,
}

HUGGING_FACE = {name for name in SOURCES if name.startswith("Hugging Face")}


class Padded:
    """A processor that changes no value: what was decoded, flat and padded, with its shape."""

    def blank(self) -> dict[str, torch.Tensor]:
        return self(torch.zeros(0))

    def __call__(self, value: Any, generator: object = None) -> dict[str, torch.Tensor]:
        if isinstance(value, str):
            value = torch.tensor(list(value.encode()), dtype=torch.uint8)
        rate = getattr(value, "rate", 0)
        tensor = value.samples if rate else value
        shape = [rate, str(tensor.dtype) == "torch.uint8", *tensor.shape, 0, 0, 0]
        return {"values": tensor.flatten().double(), "shape": torch.tensor(shape[:5])}

    def collate(self, items: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        values = torch.nn.utils.rnn.pad_sequence([item["values"] for item in items], True, -1.0)
        return {"values": values, "shape": torch.stack([item["shape"] for item in items])}


@pytest.fixture(scope="module")
def collate() -> Collate:
    return Collate({name: Padded() for name in MODALITIES})


def batch_of(dataset: PairedDataset, collate: Collate) -> Batch:
    """Return all samples as a batch, in the order of the ids without their folders."""
    order = sorted(range(NUM_SAMPLES), key=lambda row: dataset.ids[row].rpartition("/")[2])
    return collate([dataset[row] for row in order])


@pytest.fixture(scope="module")
def expected(collate: Collate) -> Batch:
    """The batch of values that no source has touched."""
    batch = []
    for row in samples():
        values: dict[str, Any] = {"text": row.text, "vector": None, "image": None, "audio": None}
        if row.image is not None:
            values["image"] = torch.from_numpy(row.image).permute(2, 0, 1).contiguous()
        if row.audio is not None:
            values["audio"] = Audio(torch.from_numpy(row.audio), RATE)
        if row.vector is not None:
            values["vector"] = torch.from_numpy(row.vector)
        batch.append(Sample(row.id, row.split, sorted(CLASSES).index(row.target), values))
    return collate(batch)


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_the_same_batch(
    name: str, tmp_path: Path, collate: Collate, expected: Batch
) -> None:
    if name in HUGGING_FACE:
        pytest.importorskip("datasets", exc_type=ImportError)
    rows = samples()
    dataset = SOURCES[name](tmp_path, rows)
    assert len(dataset) == NUM_SAMPLES
    assert set(dataset.modalities) == set(MODALITIES)
    assert dataset.classes == sorted(CLASSES)
    splits = dict(
        zip((x.rpartition("/")[2] for x in dataset.ids), dataset.split_names, strict=True)
    )
    assert splits == {row.id: row.split for row in rows}
    batch = batch_of(dataset, collate)
    assert [x.rpartition("/")[2] for x in batch.ids] == expected.ids
    assert batch.target is not None and expected.target is not None
    assert torch.equal(batch.target, expected.target)
    assert torch.equal(batch.present, expected.present)
    for modality, inputs in expected.inputs.items():
        for key, tensor in inputs.items():  # type: ignore[union-attr]
            assert torch.equal(batch.inputs[modality][key], tensor), (modality, key)  # type: ignore[call-overload]


def test_the_samples_try_what_sources_may_lose() -> None:
    rows = samples()
    for name in MODALITIES:
        missing = sum(getattr(row, name) is None for row in rows)
        assert 20 < missing < 60
    assert any(row.text and "猫" in row.text for row in rows)
    assert len({row.image.shape for row in rows if row.image is not None}) > 10


# ---- order of embeddings

# Sources whose rows do not stand in the order in which they were written.
REGROUPED = {
    "class folders",
    "folder of parquet files",
    "join of sources",
    "join of manifests",
    "Hugging Face DatasetDict",
    "Hugging Face save_to_disk",
    "Hugging Face Parquet files",
    "Hugging Face streams",
    "Hugging Face streams as shards",
    "Parquet shards",
    "WebDataset shards",
}


def few_rows(count: int) -> list[Row]:
    """Return some of the samples, with texts of very different lengths, in no order."""
    splits = ["train"] * (count - 3) + ["val", "test", "val"]
    return [
        row._replace(text=f"{row.id}{' long' * (n * 7 % 11)}", split=split)
        for n, (row, split) in enumerate(zip(samples()[:count], splits, strict=True))
    ]


def settings(out: Path, dataset: PairedDataset, **more: Any) -> EmbedConfig:
    sizes: dict[str, Any] = {"batch_size": 2, "row_group": 4, "num_workers": 0, "device": "cpu"}
    return EmbedConfig(out=str(out), data=DataSpec.of(dataset).recorded, **{**sizes, **more})


def check_order(out: Path, dataset: PairedDataset, rows: Sequence[Row]) -> None:
    """Ids are the data set's, in its order, and each row has the vector of its own sample."""
    ids, vectors = fz.read_embeddings(out, "vector")
    assert ids == dataset.ids
    assert any(row.vector is None for row in rows)
    by_id = {row.id: row.vector for row in rows}
    expected = [by_id[sample_id.rpartition("/")[2]] for sample_id in ids]
    assert len(ids) == len(rows)
    for vector, wanted in zip(vectors, expected, strict=True):
        assert np.array_equal(vector, np.zeros(WIDTH) if wanted is None else wanted)


@pytest.fixture(scope="module")
def small_model() -> fz.FusionModel:
    """A model of which the vector of the modality `vector` is the sample's own."""
    chars = {"name": "chars", "dim": 4, "num_layers": 1, "num_heads": 1}
    identity = {"name": "vector/identity", "in_dim": WIDTH}
    return fz.create_model("sum", {"text": chars, "vector": identity}, 1, dim=4).eval()


@pytest.mark.parametrize("name", SOURCES)
def test_embeddings_have_the_order_of_every_source(
    name: str, tmp_path: Path, small_model: fz.FusionModel
) -> None:
    if name in HUGGING_FACE:
        pytest.importorskip("datasets", exc_type=ImportError)
    rows = few_rows(9)
    dataset = SOURCES[name](tmp_path, rows)
    if name not in REGROUPED:
        assert dataset.ids == [row.id for row in rows]
    batches = ExtractionPlan(dataset.only(["text", "vector"]).lengths(), 4, 2).batches(range(3))
    assert [row for batch in batches for row in batch.rows.tolist()] != [*range(9)]
    out = embed(
        settings(tmp_path / "e.parquet", dataset), World(), small_model, DataSpec(dataset=dataset)
    )
    check_order(out, dataset, rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "workers", "size"),
    [("csv", 2, 2), ("Parquet shards", 2, 1), ("WebDataset shards", 0, 2), ("stream", 2, 2)],
)
def test_workers_and_processes_keep_the_order(
    name: str, workers: int, size: int, tmp_path: Path, small_model: fz.FusionModel
) -> None:
    rows = few_rows(30)
    dataset = SOURCES[name](tmp_path, rows)
    cfg = settings(tmp_path / "e.parquet", dataset, num_workers=workers)

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        dist = DistConfig(init_method=f"file://{tmp_path}/meeting", rank=rank, world_size=size)
        with process_group(dist, "cpu") as world:
            embed(cfg, world, small_model, DataSpec(dataset=dataset))

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * size
    check_order(tmp_path / "e.parquet", dataset, rows)
