"""Lists of images and clips in shards: Parquet has lists of bytes, a tar numbered members."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import torch
from PIL import Image

import fusionzoo as fz
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.shards.blocks import StoredCells
from fusionzoo.errors import FusionZooError
from helpers.samples import epoch, plain
from helpers.stopped import hashes, stop_at, without_checksums

ROWS = 18
FORMATS = pytest.mark.parametrize("format", ["parquet", "webdataset"])
SMALL = {"shard_mb": 1, "block_mb": 0.002}  # several blocks


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows.jsonl: 0 to 3 images and 0 to 2 clips per sample, and one `icon`."""
    folder = tmp_path_factory.mktemp("rows")
    draw = np.random.default_rng(0)
    lines = []
    for n in range(ROWS):
        row: dict[str, Any] = {"id": f"r{n}", "text": f"text {n}", "target": "ab"[n % 2]}
        row["image"] = [f"{n}-{i}.{'png' if i % 2 else 'jpg'}" for i in range(n % 4)]
        row["audio"] = [f"{n}-{i}.wav" for i in range(n % 3)]
        row["icon"] = f"icon-{n}.png" if n % 5 else None
        for name in (*row["image"], *([row["icon"]] if row["icon"] else [])):
            pixels = draw.integers(0, 255, (9, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name)
        for name in row["audio"]:
            soundfile.write(folder / name, draw.uniform(-0.5, 0.5, 100 + 10 * n), 8000)
        lines.append({**row, "split": ("train", "train", "train", "test", "val")[n % 5]})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def open_rows(root: Path) -> PairedDataset:
    return fz.create_dataset(root / "rows.jsonl", kinds={"icon": "image"})


@pytest.fixture(scope="module")
def shards(root: Path) -> Path:
    """Folders of shards `parquet` and `webdataset` of the rows."""
    for format in ("parquet", "webdataset"):
        fz.convert(open_rows(root), root / format, format=format, **SMALL)
    return root


def contents(data: PairedDataset) -> dict[str, Any]:
    return {
        key: {name: plain(value) for name, value in data[n].values.items()}
        for n, key in enumerate(data.ids)
    }


def cells(data: PairedDataset, name: str = "image") -> StoredCells:
    values = data.memory[name]
    assert isinstance(values, StoredCells)
    return values


@FORMATS
def test_shards_hold_the_same_lists_as_their_source(
    format: str, root: Path, shards: Path, tmp_path: Path
) -> None:
    source, opened = open_rows(root), fz.create_dataset(shards / format)
    expected = contents(source)
    assert [len(x) for x in map(source.reference, ["image"] * 4, range(4)) if x] == [1, 2, 3]
    assert contents(opened) == expected and opened.ids == source.ids
    assert torch.equal(opened.present, source.present)
    files = [None if x is None else [y.read_bytes() for y in x] for x in source.references("image")]
    assert opened.references("image") == files
    assert isinstance(opened.reference("icon", 1), bytes) and not cells(opened, "icon").has_lists
    other = "webdataset" if format == "parquet" else "parquet"
    again = fz.convert(opened, tmp_path / "again", format=other, **SMALL)
    assert contents(fz.create_dataset(again.folder)) == expected
    joined = PairedDataset.join({"a": opened.select("image,audio"), "b": source.select("text")})
    fz.convert(joined, tmp_path / "joined", format=format)
    values = contents(fz.create_dataset(tmp_path / "joined"))["r7"]
    assert values["image"] == expected["r7"]["image"] and len(values["image"]) == 3


@FORMATS
def test_lists_are_read_without_the_index_too(format: str, shards: Path, tmp_path: Path) -> None:
    for file in (shards / format).iterdir():
        if file.suffix in (".parquet", ".tar"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    opened = fz.create_dataset(tmp_path, kinds={"icon": "image"})
    assert cells(opened).has_lists and cells(opened, "audio").has_lists
    assert contents(opened) == contents(fz.create_dataset(shards / format))


def test_members_of_a_tar_are_numbered(shards: Path) -> None:
    with tarfile.open(shards / "webdataset/train-000000.tar") as tar:
        names = [name for name in tar.getnames() if name.startswith("00000004.")]
    assert names == [  # row 6: the fifth of the split
        "00000004.image.0.jpg",
        "00000004.image.1.png",
        "00000004.icon.png",
        "00000004.json",
        "00000004.txt",
    ]


@FORMATS
def test_counts_and_sizes_of_lists_are_those_of_the_source(
    format: str, root: Path, shards: Path
) -> None:
    source, opened = open_rows(root), fz.create_dataset(shards / format)
    assert torch.equal(source.lengths(), opened.lengths())
    assert source.by_length() == opened.by_length()  # one window has all samples
    assert cells(opened).blocks.reads == 0
    row = opened.table["audio"][5].as_py()
    sizes = [(root / f"5-{i}.wav").stat().st_size for i in range(2)]
    assert cells(opened, "audio").sizes[row] == sum(sizes)
    assert source.lengths().unique().numel() > 10


@FORMATS
def test_batches_are_those_of_the_source_for_any_workers_also_behind_a_url(
    format: str, root: Path, shards: Path
) -> None:
    expected = epoch(open_rows(root).split("train"), 0, 5)
    assert len(expected) > 2
    opened = fz.create_dataset(shards / format).split("train")
    files = fsspec.filesystem("memory")
    files.put(str(shards / format), f"/several-{format}", recursive=True)
    remote = fz.create_dataset(f"memory://several-{format}").split("train")
    for data, workers in ((opened, 2), (remote, 0)):
        assert epoch(data, workers, 5) == expected
    files.rm(f"/several-{format}", recursive=True)


@FORMATS
def test_prepared_lists_hold_small_pictures_and_flac(format: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    pictures = [draw.integers(0, 255, (260, 270 + n, 3), dtype=np.uint8) for n in range(2)]
    clip = (np.sin(np.arange(4000) / 9).astype(np.float32) / 2, 8000)
    rows = [{"image": pictures, "audio": [clip, clip]}, {"image": pictures[0], "audio": None}]
    fz.convert(rows, tmp_path / "out", format=format, prepare=True)
    small = fz.create_dataset(tmp_path / "out")
    values = small[0].values
    assert [x.shape for x in values["image"]] == [(3, 256, 266), (3, 256, 267)]
    assert [(x.rate, len(x.samples)) for x in values["audio"]] == [(16_000, 8000)] * 2
    assert all(x.startswith(b"fLaC") for x in small.reference("audio", 0))
    assert torch.equal(small[1].values["image"], values["image"][0])


def test_parts_of_clips_in_lists_are_stored(root: Path, tmp_path: Path) -> None:
    rows = [{"audio": ["5-0.wav", "5-1.wav"], "start": 0.002, "end": 0.01, "split": "train"}]
    (root / "parts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    fz.convert(root / "parts.jsonl", tmp_path / "out")
    source, opened = fz.create_dataset(root / "parts.jsonl"), fz.create_dataset(tmp_path / "out")
    assert [x.frames for x in opened[0].values["audio"]] == [64, 64]
    assert contents(opened) == contents(source)


@FORMATS
def test_a_list_with_an_unreadable_item_is_treated_as_a_single_value(
    format: str, root: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG, and no more")
    good = str(root / "1-0.jpg")
    rows = [{"id": "x", "image": [good, "gone.png"]}, {"id": "y", "image": [good, "broken.png"]}]
    lines = [json.dumps({**row, "text": "a", "split": "train"}) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    settings = {"allow_outside": True, "max_errors": 1.0}
    with pytest.raises(FusionZooError, match=r"sample 'x'.*gone\.png does not exist"):
        fz.convert(tmp_path / "rows.jsonl", tmp_path / format, format=format, **settings)
    settings["on_error"] = "missing"
    source = fz.create_dataset(tmp_path / "rows.jsonl", **settings)
    with pytest.raises(FusionZooError, match=r"sample 'x', image: item 2 of 2: .*gone\.png cannot"):
        fz.convert(source.with_policy(on_error="raise"), tmp_path / "out", format=format)
    written = fz.convert(source, tmp_path / format, format=format)
    assert written.failed == 1
    opened = fz.create_dataset(tmp_path / format, on_error="missing", max_errors=1.0)
    assert opened.present.tolist() == [[False, True], [True, True]]
    assert contents(opened) == contents(source)
    assert opened.failures() == [("y", "image")]
    with pytest.raises(FusionZooError, match=r"item 2 of 2: .* cannot be read as an image"):
        fz.create_dataset(tmp_path / format)[1]


@FORMATS
def test_a_conversion_of_lists_that_was_stopped_goes_on(
    format: str, root: Path, shards: Path, tmp_path: Path
) -> None:
    def convert() -> Any:
        return fz.convert(open_rows(root), tmp_path / "out", format=format, **SMALL)

    stop_at(28, convert)  # in the second of three shards
    assert not (tmp_path / "out/shards.json").exists()
    assert convert().resumed == 1
    assert hashes(tmp_path / "out") == hashes(shards / format)


def test_a_conversion_does_not_go_on_with_lists_where_values_were_single(tmp_path: Path) -> None:
    pixels = np.zeros((4, 4, 3), np.uint8)
    fz.convert([{"image": pixels, "text": "a"}], tmp_path / "out")
    with pytest.raises(FusionZooError, match="holds shards of other samples"):
        fz.convert([{"image": [pixels, pixels], "text": "a"}], tmp_path / "out")


def png(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (shade,) * 3).save(buffer, format="png")
    return buffer.getvalue()


def shades(data: PairedDataset, name: str) -> list[list[int]]:
    values = [data[n].values[name] for n in range(len(data))]
    items = [x if isinstance(x, list) else [] if x is None else [x] for x in values]
    return [[int(picture[0, 0, 0]) for picture in pictures] for pictures in items]


def test_numbered_members_of_any_tar_are_lists_in_the_order_of_their_numbers(
    tmp_path: Path,
) -> None:
    members = {
        "a.10.png": 10,
        "a.scan.0.png": 20,
        "a.2.png": 2,
        "a.scan.1.png": 21,
        "b.png": 3,
        "c.scan.7.png": 4,
    }
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        for name, shade in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(png(shade))
            tar.addfile(member, io.BytesIO(png(shade)))
    data = fz.create_dataset(tmp_path)
    assert list(data.modalities.items()) == [("image", "image"), ("scan", "image")]
    assert shades(data, "image") == [[2, 10], [3], []]
    assert shades(data, "scan") == [[20, 21], [], [4]]


def test_lists_in_other_parquet_files_are_read_by_row_group(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4), (9,) * 3).save(tmp_path / "9.png")
    lists = [[png(1), png(2)], [png(3)], None, [], [png(4)], [png(5), png(6)]]
    structs: list[Any] = [x and [{"bytes": y, "path": None} for y in x] for x in lists]
    structs[1] = [{"bytes": None, "path": "9.png"}, {"bytes": png(3), "path": None}]
    table = pa.table({"image": lists, "scan": structs, "text": list("abcdef")})
    pq.write_table(table, tmp_path / "train.parquet", row_group_size=2)
    data = fz.create_dataset(tmp_path, kinds={"scan": "image"})
    assert cells(data).blocks.reads == 0 and len(cells(data).blocks.starts) == 4
    assert data.present[:, 0].tolist() == [True, True, False, False, True, True]
    assert shades(data, "image") == [[1, 2], [3], [], [], [4], [5, 6]]
    assert shades(data, "scan") == [[1, 2], [9, 3], [], [], [4], [5, 6]]


@FORMATS
def test_an_index_whose_items_do_not_fit_is_an_error(
    format: str, shards: Path, tmp_path: Path
) -> None:
    for file in (shards / format).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    without_checksums(tmp_path)
    with pa.ipc.open_file(str(tmp_path / "samples.arrow")) as file:
        table = file.read_all()
    structs = table["_bytes"].combine_chunks()
    fields = {field.name: structs.field(field.name) for field in structs.type}
    damages: dict[str, Any] = {
        "_bytes lacks the items of image": [[None]] * ROWS,
        "_bytes has no field image": None,
    }
    if format == "webdataset":
        damages["of image differ in their items"] = [[1, 1, 1, 1]] * ROWS
        sizes = [x and [10**9] * len(x) for x in fields["image"].to_pylist()]
        damages["place of a member is outside"] = sizes
    for message, numbers in damages.items():
        image = {"image": pa.array(numbers, pa.list_(pa.int64()))} if numbers else {}
        kept = {name: x for name, x in fields.items() if name != "image"} | image
        struct = pa.StructArray.from_arrays(list(kept.values()), list(kept))
        changed = table.set_column(table.schema.get_field_index("_bytes"), "_bytes", struct)
        with pa.ipc.new_file(str(tmp_path / "samples.arrow"), changed.schema) as out:
            out.write_table(changed)
        with pytest.raises(FusionZooError, match=message):
            contents(fz.create_dataset(tmp_path))
