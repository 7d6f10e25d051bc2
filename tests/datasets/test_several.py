"""Several images or clips in a sample: lists, patterns, segments, their batches, and in shards."""

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
from fusionzoo.datasets import Collate, PairedDataset
from fusionzoo.datasets.media.audio import Segment
from fusionzoo.datasets.media.decode import decode
from fusionzoo.datasets.opening.in_memory import store_table
from fusionzoo.datasets.shards.blocks import StoredCells
from fusionzoo.datasets.shards.writers import stored_value
from fusionzoo.datasets.summary import data_summary
from fusionzoo.datasets.tables.paths import collecting
from fusionzoo.encoders import create_encoder
from fusionzoo.encoders.audio import WaveProcessor
from fusionzoo.encoders.image import ImageProcessor, Preparation
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.robustness import corrupt
from fusionzoo.features.encode import Compute, encode, fingerprint
from fusionzoo.model.fusion_model import encode_rows
from fusionzoo.structures import ITEM_COUNTS, Audio, Sample
from fusionzoo.tools.audit.scan import scan_values
from helpers.samples import epoch, plain
from helpers.stopped import hashes, stop_at, without_checksums

RATE = 8000
PICTURES = ImageProcessor(Preparation(size=(8, 8)))


def picture(shade: int, size: int = 8) -> torch.Tensor:
    return torch.full((3, size, size), shade, dtype=torch.uint8)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with frames/1.png to frames/12.png, whose pixels are their number, and a.wav."""
    (tmp_path / "frames").mkdir()
    for number in range(1, 13):
        Image.new("RGB", (8, 8), (number,) * 3).save(tmp_path / f"frames/{number}.png")
    samples = np.arange(4 * RATE, dtype=np.int16)
    soundfile.write(tmp_path / "a.wav", samples, RATE)
    return tmp_path


def shades(value: Any) -> list[int]:
    pictures = value if isinstance(value, list) else [value]
    return [int(x[0, 0, 0]) for x in pictures]


def write(root: Path, rows: list[dict[str, Any]], name: str = "data.jsonl") -> Path:
    (root / name).write_text("\n".join(json.dumps({"split": "train", **row}) for row in rows))
    return root / name


def images(data: Any) -> list[list[int]]:
    return [shades(data[n].values["image"]) for n in range(len(data))]


def test_lists_in_cells_are_several_pictures(root: Path) -> None:
    files = [f"frames/{number}.png" for number in (3, 1, 2)]
    rows = [{"image": files}, {"image": files[:1]}, {"image": [], "text": "a"}]
    data = fz.create_dataset(write(root, rows))
    assert data.present[:, 0].tolist() == [True, True, False]
    assert shades(data[0].values["image"]) == [3, 1, 2]
    assert isinstance(data[1].values["image"], torch.Tensor)  # as a cell with a path
    table = pa.table({"image": [files, files[:1]]})
    pq.write_table(table, root / "data.parquet")
    assert images(fz.create_dataset(root / "data.parquet")) == [[3, 1, 2], [3]]


def test_bytes_and_objects_in_lists_are_several_pictures(root: Path) -> None:
    paths = [root / f"frames/{number}.png" for number in (4, 5)]
    contents = [path.read_bytes() for path in paths]
    columns = {
        "bytes": contents,
        "structs": [{"bytes": contents[0], "path": None}, {"bytes": None, "path": str(paths[1])}],
        "pil": [Image.open(path) for path in paths],
        "paths": [str(path) for path in paths],
        "arrays": [picture(4).numpy(), picture(5).numpy()],
    }
    for name, value in columns.items():
        data = fz.create_dataset([{"image": value, "text": name, "split": "train"}])
        assert images(data) == [[4, 5]], name
    clips = [(np.zeros(80, np.float32), RATE), (np.ones(160, np.float32) / 2, RATE)]
    sample = fz.create_dataset([{"audio": clips, "split": "train"}])[0]
    assert [clip.frames for clip in sample.values["audio"]] == [80, 160]


def test_a_pattern_gives_its_files_sorted_by_number(root: Path) -> None:
    rows = [{"id": "x", "image": "frames/*.png"}, {"id": "y", "image": "frames/?.png"}]
    data = fz.create_dataset(write(root, rows))
    assert images(data) == [list(range(1, 13)), list(range(1, 10))]
    assert any("patterns in image" in line for line in data_summary(data))
    few = fz.create_dataset(write(root, rows), frames=3)
    assert images(few) == [[3, 7, 11], [2, 5, 8]]


def test_a_pattern_without_files_is_an_error_that_names_its_cell(root: Path) -> None:
    rows = [{"id": "x", "image": "frames/*.png"}, {"id": "y", "image": "lost/*.jpg"}]
    manifest = write(root, rows)
    with pytest.raises(
        FusionZooError, match=r"row 2, sample 'y': image cell 'lost/\*.jpg' matches"
    ):
        fz.create_dataset(manifest)
    data = fz.create_dataset(manifest, on_error="missing", max_errors=1.0)
    assert data[1].values["image"] is None
    assert data.failures() == [("y", "image")]
    with collecting() as refusals:
        fz.create_dataset(manifest)
    assert [(x.kind, x.row) for x in refusals if "matches no file" in x.message] == [("path", 1)]


@pytest.mark.parametrize("cell", ["../*.png", ["../secret.png"], "/etc/host*"])
def test_lists_and_patterns_open_nothing_outside_of_the_folder(root: Path, cell: Any) -> None:
    (root / "data").mkdir()
    Image.new("RGB", (8, 8)).save(root / "secret.png")
    manifest = write(root / "data", [{"id": "x", "image": cell}])
    with pytest.raises(FusionZooError, match="outside of"):
        fz.create_dataset(manifest)


def test_a_missing_file_of_a_list_and_a_wrong_list_are_named(root: Path) -> None:
    with pytest.raises(FusionZooError, match=r"row 1, sample 'x': image file .*gone\.png does not"):
        fz.create_dataset(write(root, [{"id": "x", "image": ["frames/1.png", "gone.png"]}]))
    with pytest.raises(FusionZooError, match="image holds list<item: double>, expected paths"):
        fz.create_dataset(write(root, [{"id": "x", "image": [1.0, 2.0]}]))
    with pytest.raises(FusionZooError, match=r"item 2 of 2: .*a\.wav cannot be read as an image"):
        decode("image", [root / "frames/1.png", root / "a.wav"])


def test_segments_read_their_stretch_of_a_clip(root: Path, monkeypatch: Any) -> None:
    whole = decode("audio", root / "a.wav").samples
    rows = [
        {"audio": "a.wav", "start": 1, "end": 1.5},
        {"audio": "a.wav", "start": 3.5, "end": None},
        {"audio": "a.wav", "start": None, "end": None},
    ]
    data = fz.create_dataset(write(root, rows))
    parts = [data[n].values["audio"].samples for n in range(3)]
    assert [len(part) for part in parts] == [RATE // 2, RATE // 2, 4 * RATE]
    assert torch.equal(parts[0], whole[RATE : RATE + RATE // 2])
    assert torch.equal(parts[1], whole[-RATE // 2 :])
    assert any("segments of audio by 'start' and 'end'" in line for line in data_summary(data))
    assert data.lengths()[0] < data.lengths()[2]
    monkeypatch.setattr("fusionzoo.datasets.media.audio.MAX_READ_IF_SEEKABLE", 100)
    lazy = data[0].values["audio"]
    assert lazy.frames == RATE // 2
    assert torch.equal(lazy.read(10, 50), whole[RATE + 10 : RATE + 60])


def test_segments_have_columns_of_other_names_and_for_single_modalities(root: Path) -> None:
    rows = [{"audio": "a.wav", "noise": "a.wav", "from": 1, "audio_end": 2, "noise_start": 3.0}]
    data = fz.create_dataset(write(root, rows), columns={"start": "from"}, kinds={"noise": "audio"})
    values = data[0].values
    assert values["audio"].frames == RATE
    assert torch.equal(values["noise"].samples, decode("audio", root / "a.wav").samples[3 * RATE :])


@pytest.mark.parametrize(
    ("row", "settings", "reason"),
    [
        ({"start": -1}, {}, r"row 1: the segment of audio from -1 s to nan s"),
        ({"start": 2, "end": 2}, {}, "the segment of audio from 2 s to 2 s"),
        ({"audio_start": "soon"}, {}, "row 1: audio_start is 'soon', no number of seconds"),
        ({"start": 1}, {"columns": {"end": "stop"}}, "no column 'stop' for columns="),
        ({"x": 1}, {"columns": {"image_start": "x"}}, "is for neither clips nor videos"),
    ],
)
def test_a_wrong_segment_is_one_clear_error(
    root: Path, row: dict[str, Any], settings: Any, reason: str
) -> None:
    with pytest.raises(FusionZooError, match=reason):
        fz.create_dataset(write(root, [{"audio": "a.wav", **row}]), **settings)


def test_a_segment_beyond_the_file_is_an_error_of_its_sample(root: Path) -> None:
    for row, reason in (({"start": 9}, "starts at 9 s, .* is 4 s"), ({"end": 9}, "ends at 9 s")):
        data = fz.create_dataset(write(root, [{"audio": "a.wav", **row}]))
        with pytest.raises(FusionZooError, match=reason):
            data[0]


def test_a_column_start_that_holds_no_seconds_stays_unused(root: Path) -> None:
    data = fz.create_dataset(write(root, [{"audio": "a.wav", "start": "May 2020"}]))
    assert data[0].values["audio"].frames == 4 * RATE
    assert data.provenance.unused == ("start",)


def test_a_manifest_of_lists_and_segments_is_written_and_read_again(root: Path) -> None:
    rows = [{"image": ["frames/1.png", "frames/2.png"], "audio": "a.wav", "start": 1, "end": 2}]
    data = fz.create_dataset(write(root, rows))
    for name, embed in (("a.jsonl", False), ("b.parquet", False), ("c.parquet", True)):
        again = fz.create_dataset(data.to_manifest(root / name, embed=embed))
        assert images(again) == [[1, 2]], name
        assert torch.equal(again[0].values["audio"].samples, data[0].values["audio"].samples), name
    with pytest.raises(FusionZooError, match=r"lists, which \.csv cannot store"):
        data.to_manifest(root / "d.csv")
    settings = store_table({"root": pa.table({"image": [["frames/1.png"]]})}, root)
    assert pq.read_table(settings["root"])["image"][0].as_py() == [
        str(Path("frames/1.png").absolute())
    ]


@pytest.mark.parametrize(
    ("value", "prepare"), [(Segment(Path("a.mp4"), 1.0), False), (Path("a.mp4"), True)]
)
def test_shards_refuse_frames_of_videos(value: Any, prepare: bool) -> None:
    with pytest.raises(FusionZooError, match="shards hold whole videos, not parts or frames"):
        stored_value("image", value, prepare)


# ---- batches and encoders


def batch_of(values: list[Any], processor: Any = PICTURES) -> Any:
    samples = [Sample(str(n), "", 0, {"image": value}) for n, value in enumerate(values)]
    return Collate({"image": processor})(samples)


def test_several_pictures_are_a_stack_with_their_counts() -> None:
    inputs = batch_of([picture(1), None, picture(3)]).inputs["image"]
    assert inputs.keys() == {"pixels"} and inputs["pixels"].shape == (3, 3, 8, 8)
    batch = batch_of([picture(1), [picture(2), picture(3), picture(4)], None])
    inputs = batch.inputs["image"]
    assert inputs["pixels"].shape == (3, 3, 3, 8, 8)
    assert inputs[ITEM_COUNTS].tolist() == [1, 3, 1]
    assert batch.present[:, 0].tolist() == [True, True, False]
    assert batch.take(torch.tensor([1])).inputs["image"][ITEM_COUNTS].tolist() == [3]


@pytest.fixture(scope="module")
def encoder() -> Any:
    torch.manual_seed(0)
    return create_encoder("image", "timm/test_vit", pretrained=False, img_size=32).eval()


def test_tokens_of_all_pictures_stand_one_after_another(encoder: Any) -> None:
    processor = encoder.processor(False)
    noise = torch.Generator().manual_seed(0)
    a, b, c = (torch.randint(255, (3, 32, 32), generator=noise, dtype=torch.uint8) for _ in "abc")
    single = encoder(processor.collate([processor(x) for x in (a, b, c)]))
    batch = batch_of([a, [a, b, c], None], processor)
    count = single.tokens.shape[1]
    for frozen in (False, True):
        encoder.frozen, encoder.frozen_rows = frozen, 2
        features = encode_rows(encoder, batch.inputs["image"], batch.presence()[:, 0])
        assert features.mask.sum(1).tolist() == [count, 3 * count, 0]
        torch.testing.assert_close(features.tokens[1], single.tokens.flatten(0, 1))
        torch.testing.assert_close(features.tokens[0, :count], single.tokens[0])
        torch.testing.assert_close(features.pooled[1], single.pooled.mean(0))
        torch.testing.assert_close(features.pooled[0], single.pooled[0])
        assert not features.pooled[2].any()
    encoder.frozen = False


def test_every_picture_of_a_sample_gets_a_gradient_and_padding_none(encoder: Any) -> None:
    noise = torch.Generator().manual_seed(0)
    pixels = torch.rand(2, 3, 3, 32, 32, generator=noise).requires_grad_()
    features = encoder({"pixels": pixels, ITEM_COUNTS: torch.tensor([3, 1])})
    (features.tokens.square().sum() + features.pooled.sum()).backward()
    per_item = pixels.grad.abs().sum((2, 3, 4)) > 0
    assert per_item.tolist() == [[True, True, True], [True, False, False]]
    encoder.zero_grad()


def test_stored_features_of_lists_are_those_of_the_batch(root: Path, encoder: Any) -> None:
    files = [["2.png", "1.png"], ["3.png", "1.png"], ["4.png"]]
    table = [
        {"split": "train", "image": [str(root / "frames" / x) for x in names]} for names in files
    ]
    data = fz.create_dataset(table)
    stored = encode(encoder, data, Compute(progress=False))
    batch = Collate({"image": encoder.processor(False)})([data[n] for n in range(3)])
    features = encode_rows(encoder, batch.inputs["image"], batch.presence()[:, 0])
    taken = stored.take(torch.arange(3))
    torch.testing.assert_close(taken.pooled, features.pooled, rtol=1e-4, atol=1e-5)
    assert torch.equal(taken.mask, features.mask)
    torch.testing.assert_close(taken.tokens[0], features.tokens[0], rtol=1e-4, atol=1e-5)
    before = fingerprint(data, "image")
    Image.new("RGB", (9, 9)).save(root / "frames/2.png")
    assert fingerprint(data, "image") != before


def test_damage_changes_each_picture_by_a_draw_of_its_own() -> None:
    values = [picture(100), picture(100)]
    damaged = corrupt(values, "image", "noise", 3, seed=5)
    assert len(damaged) == 2 and not torch.equal(damaged[0], damaged[1])
    assert torch.equal(damaged[0], corrupt(values[0], "image", "noise", 3, seed=5))


def test_the_audit_measures_all_items_of_a_sample(root: Path) -> None:
    rows = [{"image": ["frames/1.png", "frames/2.png"], "audio": ["a.wav", "a.wav"]}]
    values = scan_values(fz.create_dataset(write(root, rows)), progress=False)
    assert not values["image"].errors and not values["audio"].errors
    assert values["audio"].numbers["active"].tolist() == pytest.approx([8.0], abs=0.01)


# ---- windows of long clips


def test_evaluation_takes_the_middle_or_several_windows_and_training_one_at_random() -> None:
    clip = Audio(torch.linspace(-1, 1, 10 * RATE), RATE)
    middle = WaveProcessor(RATE, 1.0)
    several = WaveProcessor(RATE, 1.0, num_windows=4)
    items = several.items(clip)
    assert [len(item["wave"]) for item in items] == [RATE] * 4
    starts = [round(float(item["wave"][0]) / 32767 * 5 + 5, 1) for item in items]
    assert starts == [0.0, 3.0, 6.0, 9.0]
    assert len(several.items(clip, torch.Generator().manual_seed(1))) == 1
    assert len(several.items(Audio(clip.samples[:RATE], RATE))) == 1
    assert torch.equal(middle.items(clip)[0]["wave"], middle(clip)["wave"])
    with pytest.raises(FusionZooError, match="windows=0"):
        WaveProcessor(RATE, 1.0, num_windows=0)


def test_features_of_windows_are_averaged() -> None:
    clip = Audio(torch.randn(5 * RATE, generator=torch.Generator().manual_seed(0)) / 9, RATE)
    settings = {"rate": RATE, "num_mels": 16, "longest": 1.0}
    encoder = create_encoder("audio", "mel/stats", windows=3, **settings)
    model = fz.create_model("mean", {"audio": {"name": "mel/stats", "windows": 3, **settings}}, 2)
    pooled = model.embed([{"audio": (clip.samples.numpy(), RATE)}])["audio"][0]
    processor = encoder.processor(False)
    parts = [encoder(processor.collate([item])).pooled[0] for item in processor.items(clip)]
    assert len(parts) == 3
    torch.testing.assert_close(pooled, torch.stack(parts).mean(0))
    assert len(encoder.processor(True).items(clip, torch.Generator())) == 1


# ---- in shards


ROWS = 18
FORMATS = pytest.mark.parametrize("format", ["parquet", "webdataset"])
SMALL = {"shard_mb": 1, "block_mb": 0.002}  # several blocks


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def open_rows(listed: Path) -> PairedDataset:
    return fz.create_dataset(listed / "rows.jsonl", kinds={"icon": "image"})


@pytest.fixture(scope="module")
def shards(listed: Path) -> Path:
    """Folders of shards `parquet` and `webdataset` of the rows."""
    for format in ("parquet", "webdataset"):
        fz.convert(open_rows(listed), listed / format, format=format, **SMALL)
    return listed


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
    format: str, listed: Path, shards: Path, tmp_path: Path
) -> None:
    source, opened = open_rows(listed), fz.create_dataset(shards / format)
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
    format: str, listed: Path, shards: Path
) -> None:
    source, opened = open_rows(listed), fz.create_dataset(shards / format)
    assert torch.equal(source.lengths(), opened.lengths())
    assert source.by_length() == opened.by_length()  # one window has all samples
    assert cells(opened).blocks.reads == 0
    row = opened.table["audio"][5].as_py()
    sizes = [(listed / f"5-{i}.wav").stat().st_size for i in range(2)]
    assert cells(opened, "audio").sizes[row] == sum(sizes)
    assert source.lengths().unique().numel() > 10


@FORMATS
def test_batches_are_those_of_the_source_for_any_workers_also_behind_a_url(
    format: str, listed: Path, shards: Path
) -> None:
    expected = epoch(open_rows(listed).split("train"), 0, 5)
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


def test_parts_of_clips_in_lists_are_stored(listed: Path, tmp_path: Path) -> None:
    rows = [{"audio": ["5-0.wav", "5-1.wav"], "start": 0.002, "end": 0.01, "split": "train"}]
    (listed / "parts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    fz.convert(listed / "parts.jsonl", tmp_path / "out")
    source, opened = fz.create_dataset(listed / "parts.jsonl"), fz.create_dataset(tmp_path / "out")
    assert [x.frames for x in opened[0].values["audio"]] == [64, 64]
    assert contents(opened) == contents(source)


@FORMATS
def test_a_list_with_an_unreadable_item_is_treated_as_a_single_value(
    format: str, listed: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG, and no more")
    good = str(listed / "1-0.jpg")
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
    format: str, listed: Path, shards: Path, tmp_path: Path
) -> None:
    def convert() -> Any:
        return fz.convert(open_rows(listed), tmp_path / "out", format=format, **SMALL)

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


def shades_of(data: PairedDataset, name: str) -> list[list[int]]:
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
    assert shades_of(data, "image") == [[2, 10], [3], []]
    assert shades_of(data, "scan") == [[20, 21], [], [4]]


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
    assert shades_of(data, "image") == [[1, 2], [3], [], [], [4], [5, 6]]
    assert shades_of(data, "scan") == [[1, 2], [9, 3], [], [], [4], [5, 6]]


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
        "_bytes of image does not fit the shards": [[None]] * ROWS,
        r"samples\.arrow does not fit the shards": None,
    }
    if format == "webdataset":
        sizes = [x and [10**9] * len(x) for x in fields["image"].to_pylist()]
        damages["place of a member is outside.*1,000,000,000 bytes"] = sizes
        damages["place of a member is outside.*zip"] = [[1, 1, 1, 1]] * ROWS
    for message, numbers in damages.items():
        image = {"image": pa.array(numbers, pa.list_(pa.int64()))} if numbers else {}
        kept = {name: x for name, x in fields.items() if name != "image"} | image
        struct = pa.StructArray.from_arrays(list(kept.values()), list(kept))
        changed = table.set_column(table.schema.get_field_index("_bytes"), "_bytes", struct)
        with pa.ipc.new_file(str(tmp_path / "samples.arrow"), changed.schema) as out:
            out.write_table(changed)
        with pytest.raises(FusionZooError, match=message):
            contents(fz.create_dataset(tmp_path))
