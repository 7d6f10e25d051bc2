"""Shards: written from any source, read by block, the same batches for any number of readers."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile
import torch
from PIL import Image

import fusionzoo as fz
from fusionzoo.cli import main as console
from fusionzoo.datasets import PairedBatchSampler, PairedDataset, make_sampler
from fusionzoo.datasets.shards.blocks import Blocks, StoredCells
from fusionzoo.datasets.shards.write import Settings, write_shards
from fusionzoo.errors import FusionZooError
from helpers.samples import assert_same, load
from helpers.stopped import hashes, stop_at

ROWS = 60
SMALL = {"shard_mb": 1, "block_mb": 0.002}  # several blocks


def make_rows(folder: Path, rows: int = ROWS) -> Path:
    """Write a manifest of all kinds; a third of each modality's values is missing, but of text."""
    draw = np.random.default_rng(0)
    np.save(folder / "sequences.npy", draw.standard_normal((rows, 4, 3)).astype(np.float32))
    lines = []
    for n in range(rows):
        row: dict[str, Any] = {"id": f"row/{n}.x", "text": f"sample {n}, with ü", "size": n / 3}
        pixels = draw.integers(0, 255, (9, 7 + n % 3, 3), dtype=np.uint8)
        if n % 3:
            row["image"] = f"{n}.png" if n % 2 else f"{n}.jpg"
            Image.fromarray(pixels).save(folder / row["image"])
        if n % 3 != 1:
            row["audio"] = f"{n}.flac"
            wave = draw.uniform(-0.5, 0.5, (400 + n, 1 + n % 2))
            soundfile.write(folder / row["audio"], wave, 8000)
        if n % 3 != 2:
            row["vector"] = draw.standard_normal(3).tolist()
            row["sequence"] = f"sequences.npy[{n}]"
        split = ("train", "train", "test", "val")[n % 4]
        lines.append({**row, "split": split, "target": "ab"[n % 2], "patient": f"p{n // 8}"})
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> PairedDataset:
    path = make_rows(tmp_path_factory.mktemp("rows"))
    return fz.create_dataset(path, group_column="patient", columns={"tabular": "size"})


@pytest.fixture(scope="module")
def shards(source: PairedDataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "out"
    write_shards(source, folder, Settings(**SMALL))
    return folder


def stored(dataset: PairedDataset) -> Blocks:
    cells = next(x for x in dataset.memory.values() if isinstance(x, StoredCells))
    return cells.blocks


@pytest.mark.parametrize("format", ["parquet", "webdataset"])
def test_shards_hold_the_same_samples_as_their_source(
    format: str, source: PairedDataset, tmp_path: Path
) -> None:
    written = write_shards(source, tmp_path / "out", Settings(format=format, **SMALL))
    opened = fz.create_dataset(tmp_path / "out")
    assert written.samples == ROWS and len(stored(opened).starts) > 5
    assert_same(source, opened)
    again = write_shards(opened, tmp_path / "again", Settings(format=format, **SMALL))
    assert_same(source, fz.create_dataset(again.folder))


def test_shards_hold_the_bytes_of_the_files(source: PairedDataset, shards: Path) -> None:
    table = pq.read_table(shards / "val-00000-of-00001.parquet")
    row = table.to_pylist()[0]
    files = dict(zip(source.ids, source.references("audio"), strict=True))
    assert row["audio"] == files[row["id"]].read_bytes()
    assert row["image"] is None or row["image"][:3] in (b"\xff\xd8\xff", b"\x89PN")


@pytest.mark.parametrize("format", ["parquet", "webdataset"])
def test_shards_without_their_index_hold_the_same_samples(
    format: str, source: PairedDataset, tmp_path: Path
) -> None:
    """As other tools write them; WebDataset has no place for columns of numbers."""
    source = source.select("image,text,audio,vector,sequence")
    write_shards(source, tmp_path, Settings(format=format, **SMALL))
    (tmp_path / "shards.json").unlink()
    (tmp_path / "samples.arrow").unlink()
    opened = fz.create_dataset(tmp_path)
    position = {key: row for row, key in enumerate(source.ids)}
    assert_same(source.subset([position[key] for key in opened.ids]), opened)


def test_nothing_but_the_index_is_read_when_shards_are_opened(shards: Path) -> None:
    opened = fz.create_dataset(shards)
    _ = opened.lengths(), opened.blocking(), opened.present
    assert stored(opened).reads == 0


# ---- orders


def keys(dataset: PairedDataset, rank: int, world: int, batch: int, **options: Any) -> list[Any]:
    sampler = make_sampler(dataset, shuffle=True, distributed=(rank, world), seed=3)
    return list(PairedBatchSampler(sampler, batch, **options))


def small_windows(dataset: PairedDataset, window: int = 3) -> PairedDataset:
    stored(dataset).window = window
    return dataset


def test_two_ranks_read_the_batches_of_one(shards: Path) -> None:
    train = small_windows(fz.create_dataset(shards).split("train"))
    whole = keys(train, 0, 1, 8)
    halves = [keys(train, rank, 2, 4) for rank in (0, 1)]
    assert len(whole) == 4
    for batch, first, second in zip(whole, *halves, strict=True):
        assert batch[0::2] == first and batch[1::2] == second
    assert sorted(index for batch in whole for index, _ in batch)[: len(train)] == sorted(
        index for batch in whole for index, _ in batch
    )


def test_a_window_holds_a_few_blocks_and_epochs_differ(shards: Path) -> None:
    train = small_windows(fz.create_dataset(shards).split("train"))
    blocking = train.blocking()
    sampler = make_sampler(train, shuffle=True, seed=3)
    orders = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        order, windows = sampler.order(), sampler.windows()
        assert windows is not None and sorted(order.tolist()) == list(range(len(train)))
        assert windows[order].diff().min() >= 0
        for window in windows.unique():
            assert len(blocking.blocks[windows == window].unique()) <= 3
        orders.append(order)
    assert len(blocking.blocks.unique()) > 6
    assert not torch.equal(*orders)
    pairs = [blocking.blocks[order][:10].tolist() for order in orders]
    assert pairs[0] != pairs[1]


def test_one_window_of_all_blocks_is_the_order_of_a_source_without_blocks(
    source: PairedDataset, shards: Path
) -> None:
    opened = fz.create_dataset(shards)
    assert keys(small_windows(opened, 1000), 0, 1, 7) == keys(source, 0, 1, 7)


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_of_similar_lengths_stay_within_windows(shuffle: bool, shards: Path) -> None:
    train = small_windows(fz.create_dataset(shards).split("train"))
    sampler = make_sampler(train, shuffle=shuffle, seed=3)
    batches = PairedBatchSampler(sampler, 2, lengths=train.lengths())
    windows, order = sampler.windows(), torch.cat(batches.batches())
    assert windows is not None and sorted(order.tolist()) == list(range(len(train)))
    firsts = windows[torch.stack([batch[0] for batch in batches.batches()])]
    assert len(firsts.unique()) > 2 and firsts.diff().min() >= 0


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_block_is_read_once_per_epoch(shuffle: bool, shards: Path) -> None:
    train = small_windows(fz.create_dataset(shards).split("train")).select("image")
    sampler = make_sampler(train, shuffle=shuffle, seed=3)
    for batch in PairedBatchSampler(sampler, 4):
        for key in batch:
            assert train[key] is not None
    blocking = train.blocking()
    assert stored(train).reads == len(blocking.blocks.unique()) > 6


def test_the_longest_samples_come_first_within_a_window(shards: Path) -> None:
    train = small_windows(fz.create_dataset(shards).split("train"))
    order = train.by_length()
    blocking, lengths = train.blocking(), train.lengths()
    windows = blocking.windows(torch.arange(len(train)), None)
    assert sorted(order) == list(range(len(train))) and windows[order].diff().min() >= 0
    first = [row for row in order if windows[row] == 0]
    assert lengths[first].diff().max() <= 0 and lengths[first[0]] > lengths[first[-1]]


def test_joined_shards_are_shuffled_by_their_blocks(source: PairedDataset, shards: Path) -> None:
    opened = small_windows(fz.create_dataset(shards))
    parts = {"image": opened.select("image"), "text": source.select("text")}
    joined = PairedDataset.join(parts, how="outer")
    blocking = joined.blocking()
    assert blocking is not None and blocking.window == 3
    assert len(blocking.blocks) == ROWS
    assert PairedDataset.join({"text": source.select("text")}).blocking() is None


def loaded(
    data: PairedDataset, workers: int, start: int = 0, rank: int = 0, world: int = 1
) -> list[list[str]]:
    sampler = make_sampler(data, shuffle=True, distributed=(rank, world), seed=5)
    batches = PairedBatchSampler(sampler, 6 // world)
    batches.set_part(1, start, None)
    return load(data, batches, workers)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on two cores
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_workers_and_ranks_load_the_same_batches(workers: int, shards: Path) -> None:
    train = small_windows(fz.create_dataset(shards).split("train"))
    alone = loaded(train, 0)
    assert len(alone) == 5 and len({key for batch in alone for key in batch}) == len(train)
    assert loaded(train, workers) == alone
    ranks = [loaded(train, workers, rank=rank, world=2) for rank in (0, 1)]
    assert [[*a, *b] for a, b in zip(*ranks, strict=True)] == [[*x[::2], *x[1::2]] for x in alone]


def test_a_resumed_epoch_goes_on_with_the_next_batch(shards: Path) -> None:
    train = small_windows(fz.create_dataset(shards).split("train"))
    assert loaded(train, 0, start=3) == loaded(train, 0)[3:]


# ---- conversions that stop


@pytest.mark.parametrize("format", ["parquet", "webdataset"])
def test_a_conversion_that_was_stopped_goes_on(
    format: str, source: PairedDataset, tmp_path: Path
) -> None:
    settings, out = Settings(format=format, **SMALL), tmp_path / "out"
    whole = write_shards(source, tmp_path / "whole", settings)
    stop_at(100, lambda: write_shards(source, out, settings))  # in the second of three shards
    assert not (out / "shards.json").exists()
    resumed = write_shards(source, out, settings)
    assert (resumed.resumed, resumed.files) == (1, whole.files)
    assert hashes(out) == hashes(whole.folder)


def test_a_damaged_shard_is_written_again(source: PairedDataset, tmp_path: Path) -> None:
    from fusionzoo.datasets.shards import write

    whole, out = tmp_path / "whole", tmp_path / "out"
    write_shards(source, whole, Settings(**SMALL))
    done = write_shards(source, out, Settings(**SMALL))
    assert done.resumed == 0
    # As if killed before the index was written, with a flipped byte in the first shard.
    (out / write.PARTIAL).mkdir()
    (out / "shards.json").unlink()
    shard = out / "train-00000-of-00001.parquet"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    (out / "samples.arrow").unlink()
    (out / "SHA256SUMS").unlink()
    with pytest.raises(FusionZooError, match="is not an empty folder"):
        write_shards(source, out, Settings(**SMALL))
    (out / write.PARTIAL / "shards.json").write_bytes((whole / "shards.json").read_bytes())
    assert write_shards(source, out, Settings(**SMALL)).resumed == 0
    assert hashes(out) == hashes(whole)


def test_a_finished_conversion_is_verified(
    source: PairedDataset, shards: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write_shards(source, out, Settings(**SMALL))
    assert write_shards(source, out, Settings(**SMALL)).resumed == 3
    with pytest.raises(FusionZooError, match="holds shards of other samples or settings"):
        write_shards(source.split("train"), out, Settings(**SMALL))
    shard = out / "val-00000-of-00001.parquet"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(FusionZooError, match="was changed: remove "):
        write_shards(source, out, Settings(**SMALL))
    done = subprocess.run(
        ["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=shards, check=False
    )
    assert done.returncode == 0


def test_a_shard_that_was_cut_is_named(source: PairedDataset, tmp_path: Path) -> None:
    write_shards(source, tmp_path, Settings(**SMALL))
    shard = tmp_path / "val-00000-of-00001.parquet"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(FusionZooError, match=r"val-00000-of-00001\.parquet has .* copy it again"):
        fz.create_dataset(tmp_path)
    shard.unlink()
    with pytest.raises(FusionZooError, match=r"listed in shards\.json, cannot be opened"):
        fz.create_dataset(tmp_path)


def test_the_command_converts_and_says_what_comes_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest, out = make_rows(tmp_path, 8), tmp_path / "out"
    words = ["data", "convert", str(manifest), str(out), "--format", "webdataset"]
    assert console(words) == 0
    assert "wrote   8 samples" in capsys.readouterr().out
    assert console(words) == 0
    assert "3 of them there already" in capsys.readouterr().out
    assert_same(fz.create_dataset(manifest), fz.create_dataset(out))
    assert console(["data", "convert", str(manifest)]) == 2
    assert "DATA OUT" in capsys.readouterr().err


def test_the_next_command_after_a_conversion_says_what_the_targets_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": f"note {n} of words", "tags": ["a", "b"][: 1 + n % 2]} for n in range(60)]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [str(tmp_path / "m.jsonl"), str(tmp_path / "out"), "--target", "tags"]
    assert console(["data", "convert", *words]) == 0
    assert capsys.readouterr().out.endswith(" --targets.target multilabel\n")


def test_prepared_shards_hold_small_pictures_and_flac(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    Image.fromarray(draw.integers(0, 255, (300, 400, 3), dtype=np.uint8)).save(tmp_path / "a.jpg")
    Image.fromarray(draw.integers(0, 255, (40, 30, 3), dtype=np.uint8)).save(tmp_path / "b.png")
    soundfile.write(tmp_path / "a.wav", np.sin(np.arange(44_100) / 9) / 2, 44_100)
    rows = [
        {"image": str(tmp_path / "a.jpg"), "audio": str(tmp_path / "a.wav")},
        {"image": str(tmp_path / "b.png"), "audio": None},
    ]
    fz.convert(rows, tmp_path / "out", prepare=True)
    small = fz.create_dataset(tmp_path / "out")
    assert [small[row].values["image"].shape for row in (0, 1)] == [(3, 256, 341), (3, 40, 30)]  # type: ignore[union-attr]
    clip = small[0].values["audio"]  # type: ignore[union-attr]
    assert (clip.rate, len(clip.samples)) == (16_000, 16_000)
    assert abs(float(clip.samples[4000:12000].abs().max()) - 0.5) < 0.01
    assert small.references("audio")[0][:4] == b"fLaC"
    assert small.references("image")[1] == (tmp_path / "b.png").read_bytes()


def test_values_that_cannot_be_read_are_missing_if_the_policy_says_so(tmp_path: Path) -> None:
    manifest, out = make_rows(tmp_path, 8), tmp_path / "out"
    (tmp_path / "2.jpg").unlink()
    with pytest.raises(FusionZooError, match="does not exist"):
        fz.convert(manifest, out)
    written = fz.convert(manifest, out, on_error="missing")
    assert written.failed == 1
    names = list(fz.create_dataset(out).ids)
    assert names == [f"row/{n}.x" for n in range(8)]
    assert int(fz.create_dataset(out).present[2, 0]) == 0


@pytest.fixture
def killed() -> Iterator[str]:
    """A program that converts, and kills itself in the second shard."""
    yield """
import os, sys
from fusionzoo.datasets.shards import writers
real, count = writers.ParquetShard.write, [0]
def write(self, *block):
    count[0] += 1
    if count[0] == int(sys.argv.pop()):
        os.kill(os.getpid(), 9)
    sys.argv.append("12")
    return real(self, *block)
writers.ParquetShard.write = write
import fusionzoo
fusionzoo.convert(sys.argv[1], sys.argv[2], shard_mb=1, block_mb=0.002)
"""


@pytest.mark.slow
def test_a_killed_conversion_goes_on(killed: str, tmp_path: Path) -> None:
    manifest = make_rows(tmp_path)
    out, whole = tmp_path / "out", tmp_path / "whole"
    fz.convert(manifest, whole, **SMALL)
    words = [sys.executable, "-c", killed, str(manifest), str(out), "12"]
    assert subprocess.run(words, check=False).returncode == -9
    assert not (out / "shards.json").exists() and (out / ".partial").is_dir()
    fz.convert(manifest, out, **SMALL)
    assert hashes(out) == hashes(whole)


@pytest.mark.parametrize(
    ("contents", "says"),
    [(b"[" * 100_000 + b"]" * 100_000, "cannot be read"), (b"\xff\xfe\xff", "can't decode")],
)
def test_a_json_member_that_cannot_be_read_is_named(
    contents: bytes, says: str, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "train-000000.tar", "w") as tar:
        for name, data in (("a.txt", b"x"), ("a.json", contents)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    with pytest.raises(FusionZooError) as caught:
        fz.create_dataset("manifest", root=str(tmp_path))
    assert "train-000000.tar, a.json" in str(caught.value)
    assert says in str(caught.value) and "\n" not in str(caught.value)
