"""Shards: written from any source, read by block, the same batches for any number of readers."""

from __future__ import annotations

import ast
import io
import json
import random
import re
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
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
from fusionzoo.cli import main as console
from fusionzoo.datasets import PairedBatchSampler, PairedDataset, make_sampler
from fusionzoo.datasets.shards.blocks import Blocks, StoredCells
from fusionzoo.datasets.shards.write import Settings, write_shards
from fusionzoo.embeddings.files import read_embeddings
from fusionzoo.errors import FusionZooError
from helpers.samples import assert_same, load
from helpers.stopped import hashes, stop_at, without_checksums

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
    # As if killed before the index was written, with a FLIPPED byte in the first shard.
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


# ---- damaged shards


def npy(value: float, size: int = 64) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.full(size, value, np.float32))
    return buffer.getvalue()


def member(name: str, data: bytes, **pax_headers: str) -> bytes:
    """A member of a tar file: its header and its data, padded."""
    info = tarfile.TarInfo(name)
    info.size, info.pax_headers = (
        len(data),
        {x.replace("_", "."): y for x, y in pax_headers.items()},
    )
    header = info.tobuf(tarfile.PAX_FORMAT if pax_headers else tarfile.GNU_FORMAT)
    return header + data + bytes(-len(data) % 512)


def vectors(*numbers: int) -> bytes:
    return b"".join(member(f"{n:04d}.vector.npy", npy(n)) for n in numbers)


def write(folder: Path, *parts: bytes) -> Path:
    (folder / "train-000000.tar").write_bytes(b"".join(parts))
    return folder


# ---- sparse members: 30 of 31 vectors were wrong


def gnu_sparse(name: str, data: bytes) -> bytes:
    """A member as `tar --sparse` stores it: the middle third of the data is left out."""
    third = len(data) // 3 // 512 * 512
    stored = data[:third] + data[2 * third :]
    header = bytearray(member(name, stored)[:512])
    header[156:157] = tarfile.GNUTYPE_SPARSE
    places = [(0, third), (2 * third, len(data) - 2 * third)]
    for number, place in enumerate(places):
        struct.pack_into("12s12s", header, 386 + 24 * number, *(b"%011o\0" % x for x in place))
    header[483:495] = b"%011o\0" % len(data)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + stored + bytes(-len(stored) % 512)


SPARSE = {
    "gnu": gnu_sparse("0001.vector.npy", npy(1, 1024)),
    "pax 0.1": member(
        "0001.vector.npy",
        npy(1),
        GNU_sparse_map=f"0,{len(npy(1))}",
        GNU_sparse_numblocks="1",
        GNU_sparse_size="900",
    ),
    "pax 1.0": member(
        "GNUSparseFile.1/0001.vector.npy",
        b"1\n0\n384\n".ljust(512, b"\0") + npy(1),
        GNU_sparse_major="1",
        GNU_sparse_minor="0",
        GNU_sparse_name="0001.vector.npy",
        GNU_sparse_realsize="900",
    ),
    "star": member("0001.vector.npy", npy(1), SCHILY_realsize="900"),
}
# ---- the end of a tar: 40 of 119 cuts opened silently


def test_a_tar_that_was_cut_anywhere_is_refused_unless_only_padding_is_gone(tmp_path: Path) -> None:
    whole = vectors(0, 1, 2, 3) + bytes(10240)
    end = len(whole) - 10240
    for cut in [*range(512, end + 2048, 512), 1, 700, end + 1, end + 1023]:
        write(tmp_path, whole[:cut])
        if cut < end + 1024:
            with pytest.raises(FusionZooError, match=r"train-000000\.tar"):
                fz.create_dataset(tmp_path)
        else:
            assert len(fz.create_dataset(tmp_path)) == 4


@pytest.mark.parametrize("padding", [1024, 10240])
def test_a_joined_tar_warns_of_its_second_archive(
    padding: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = vectors(0, 1) + bytes(padding)
    assert len(fz.create_dataset(write(tmp_path, one))) == 2
    assert not caplog.records
    assert len(fz.create_dataset(write(tmp_path, one, vectors(2), bytes(1024)))) == 2
    assert "bytes behind its end mark, which are not read" in caplog.text
    assert "train-000000.tar" in caplog.text


def test_keys_are_those_of_one_file_and_without_the_folder_dot(tmp_path: Path) -> None:
    parts = vectors(0), member("./0000.txt", b"nil"), vectors(1), member("0001.txt", b"one")
    for split, chosen in (("train", parts), ("val", parts[:2])):
        (tmp_path / f"{split}-000000.tar").write_bytes(b"".join(chosen) + bytes(1024))
    data = fz.create_dataset(tmp_path)
    assert data.ids == ["train-000000/0000", "train-000000/0001", "val-000000/0000"]
    assert data.references("text") == ["nil", "one", "nil"]
    assert [data[row].values["vector"][0] for row in range(3)] == [0, 1, 0]  # type: ignore[union-attr]
    (tmp_path / "val-000000.tar").unlink()
    assert fz.create_dataset(tmp_path).ids == ["0000", "0001"]


def members(*names: str) -> bytes:
    return b"".join(member(x, b'{"a": 1}' if x.endswith("json") else b"x") for x in names)


def no_file(kind: bytes) -> bytes:
    """A member that is a link, or a pipe, beside a file."""
    info = tarfile.TarInfo("1.txt")
    info.type, info.linkname = kind, "0.txt"
    return members("0.txt") + info.tobuf()


TWICE = r"tar has two members 0001\.vector\.npy: write"
APART = r"of sample '0': write .*--sort=name"
DOTS = r"train-000000\.tar, {}: {} has .*ends at the first dot"
WITH_DOTS = [
    ("7 Track 2.0 (Clean Version).png", "7 Track 2.0 (Clean Version).txt"),
    ("img.left.png", "img.left.cls"),
    ("7.txt", "7.caption"),
    ("v1.0.json", "v1.1.json"),
]
NO_FILES = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE)
FLIPPED = bytearray(vectors(0, 1, 2, 3))
FLIPPED[len(vectors(0, 1)) + 3] ^= 4
REFUSED: dict[str, tuple[bytes, str]] = {
    **{
        f"sparse, {form}": (vectors(0) + x + vectors(2), r"tar, 0001\.vector\.npy is a link, a sp")
        for form, x in SPARSE.items()
    },
    "a damaged header": (bytes(FLIPPED), "is cut off or damaged at byte 2,048"),
    "twice": (vectors(0, 1, 2, 1), TWICE),
    "twice, by a path": (vectors(0, 1, 2) + member("./0001.vector.npy", npy(5)), TWICE),
    **{
        f"a key with dots, {first}": (
            members(first, second),
            DOTS.format(*map(re.escape, (second, first))),
        )
        for first, second in WITH_DOTS
    },
    **{
        f"a key before the dot that all share, {x}": (
            members("img.000000.png", f"img.000000.{x}", "img.000001.png", f"img.000001.{x}"),
            rf"img\.000000\.{x}: 000000 is no modality",
        )
        for x in ("cls", "txt")
    },
    "samples apart": (members("0.txt", "1.txt", "2.txt", "0.cls", "1.cls", "2.cls"), APART),
    "one astray": (members("0.cls", "0.txt", "1.cls", "1.txt", "0.json"), APART),
    **{
        f"no file, {kind!r}": (no_file(kind), r"train-000000\.tar, 1\.txt is .*--dereference")
        for kind in NO_FILES
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_members_that_would_be_misread_are_refused_by_name(case: str, tmp_path: Path) -> None:
    data, says = REFUSED[case]
    with pytest.raises(FusionZooError, match=says):
        fz.create_dataset(write(tmp_path, data, bytes(1024)))


def test_members_that_are_no_modality_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = {"README": b"x", "._0.txt": b"x", "0.pkl": b"x", "0.emb.pkl": b"x"}
    fields = member("0.json", b'{"text": "other", "target": "a"}')
    write(tmp_path, member("0.txt", b"x"), *map(member, *zip(*others.items(), strict=True)), fields)
    with (tmp_path / "train-000000.tar").open("ab") as file:
        file.write(bytes(1024))
    dataset = fz.create_dataset(tmp_path)
    assert (dataset[0].values["text"], dataset.labels) == ("x", ["a"])
    assert "'text' of 1 .json members is not read" in caplog.text
    assert "2 members ending in .pkl are not read, such as 0.pkl" in caplog.text
    assert "2 members without a name or an ending are not read, such as README" in caplog.text


# ---- bits that rot: 77 of 80 flips were used silently


FLIPS = 40
FORMATS = ("parquet", "webdataset")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = np.random.default_rng(0)
    rows = [
        {
            "id": f"r{n}",
            "image": draw.integers(0, 255, (5, 6, 3), dtype=np.uint8) if n % 3 else None,
            "vector": draw.standard_normal(24).astype(np.float32),
            "text": f"word {n}",
            "split": "train" if n % 4 else "test",
            "target": "ab"[n % 2],
        }
        for n in range(24)
    ]
    top = tmp_path_factory.mktemp("shards")
    for format in FORMATS:
        fz.convert(rows, top / format, format=format, shard_mb=1, block_mb=0.001)
    return top


def contents(root: Path | str) -> list[Any]:
    """All values of a data set, its ids and classes."""
    data = fz.create_dataset(root)
    values = [data.references(name) for name in data.modalities]
    plain = [[x.tolist() if isinstance(x, np.ndarray) else x for x in column] for column in values]
    return [plain, data.ids, data.labels, data.split_names, dict(data.modalities)]


def flip_bits(path: Path, read: Callable[[], Any], stop: int | None = None) -> tuple[int, int]:
    """Flip bits of a file, one at a time: count errors that name it, and flips without effect."""
    whole, before, draw = path.read_bytes(), read(), random.Random(path.name)
    errors = harmless = 0
    for _ in range(FLIPS):
        data = bytearray(whole)
        position, bit = draw.randrange(stop or len(data)), draw.randrange(8)
        data[position] ^= 1 << bit
        path.write_bytes(data)
        try:
            after = read()
        except FusionZooError as error:
            assert path.name in str(error) and "\n" not in str(error), (position, bit, str(error))
            errors += 1
        else:
            assert after == before, f"bit {bit} of byte {position} of {path.name} changes values"
            harmless += 1
    path.write_bytes(whole)
    return errors, harmless


@pytest.mark.parametrize("format", FORMATS)
def test_a_flipped_bit_of_shards_is_an_error_or_changes_nothing(
    format: str, both: Path, tmp_path: Path
) -> None:
    for file in (both / format).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for path in sorted(tmp_path.iterdir()):
        if path.name != "SHA256SUMS":
            errors, _ = flip_bits(path, lambda: contents(tmp_path))
            assert errors > (0 if path.suffix in (".tar", ".parquet") else FLIPS // 2), path.name


def test_a_flipped_bit_of_a_remote_block_is_an_error_that_names_the_url(both: Path) -> None:
    files = fsspec.filesystem("memory")
    files.put(str(both / "webdataset"), "/rotten", recursive=True)
    before = contents("memory://rotten")
    data = bytearray(files.cat_file("/rotten/train-000000.tar"))
    data[700] ^= 1
    files.pipe_file("/rotten/train-000000.tar", bytes(data))
    with pytest.raises(FusionZooError, match=r"memory://rotten/train-000000\.tar: bytes 0 to "):
        contents("memory://rotten")
    files.rm("/rotten", recursive=True)
    assert before[1][0] == "r0"


@pytest.mark.parametrize("format", FORMATS)
def test_shards_of_an_earlier_version_are_read_and_said_not_to_be_checked(
    format: str, both: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in (both / format).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    before = contents(tmp_path)
    assert not caplog.records
    assert contents(without_checksums(tmp_path)) == before
    assert "without checksums: whether its bytes were changed is not checked" in caplog.text


def columns_end(path: Path) -> int:
    """Where the columns of a Parquet file end, and its footer starts."""
    return path.stat().st_size - 8 - pq.read_metadata(path).serialized_size


@pytest.mark.parametrize("kind", ["manifest", "shards of others", "embeddings"])
def test_a_flipped_bit_in_the_columns_of_parquet_is_an_error_that_names_it(
    kind: str, both: Path, tmp_path: Path
) -> None:
    path = tmp_path / "train-00000-of-00001.parquet"
    read: Callable[[], Any] = lambda: contents(path)  # noqa: E731
    vectors = np.random.default_rng(0).standard_normal((32, 8)).astype(np.float32)
    if kind == "manifest":
        rows = [{"id": f"{n}", "vector": x, "target": "ab"[n % 2]} for n, x in enumerate(vectors)]
        fz.create_dataset(rows).to_manifest(path, embed=True)
    elif kind == "shards of others":
        path.write_bytes((both / "parquet" / path.name).read_bytes())
        read = lambda: contents(tmp_path)  # noqa: E731
    else:
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), 8)
        table = pa.table({"id": [f"{n}" for n in range(32)], "fused": column})
        pq.write_table(table, path, write_page_checksum=True)
        read = lambda: [np.asarray(x).tolist() for x in read_embeddings(path)]  # noqa: E731
    errors, _ = flip_bits(path, read, columns_end(path))
    assert errors > FLIPS // 2


@pytest.mark.parametrize("has_bytes", [True, False])
def test_files_of_a_converted_stream_are_those_that_were_written(
    has_bytes: bool, tmp_path: Path
) -> None:
    hf = pytest.importorskip("datasets")
    rows: dict[str, list[Any]] = {"id": list("abcdef"), "text": list("uvwxyz")}
    if has_bytes:
        rows["audio"] = [bytes(9)] * 6
    whole_set = hf.Dataset.from_dict(rows)
    parts = {"train": whole_set.select(range(4)), "test": whole_set.select([4, 5])}
    streams = {split: part.to_iterable_dataset() for split, part in parts.items()}
    out = tmp_path / "out"
    fz.convert(hf.IterableDatasetDict(streams), out)
    path = out / "test-00000-of-00001.parquet"
    whole = path.read_bytes()
    assert fz.create_dataset(str(out)).split_names == ["test"] * 2 + ["train"] * 4
    for position in (columns_end(path), len(whole) - 30, len(whole) - 1):  # of the footer
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(FusionZooError, match=r"test-00000.*bytes .* changed: copy it again"):
            fz.create_dataset(str(out))
    path.write_bytes(whole[:-1])
    with pytest.raises(FusionZooError, match=r"bytes, and files\.json says .* copy it again"):
        fz.create_dataset(str(out))
    path.rename(out / "val-00000-of-00001.parquet")
    with pytest.raises(FusionZooError, match=r"listed in files\.json, cannot be opened"):
        fz.create_dataset(str(out))
    path.write_bytes(whole)
    with pytest.raises(FusionZooError, match=r"val-00000.* is not listed in files\.json: move it"):
        fz.create_dataset(str(out))


def test_all_parquet_is_written_and_read_with_checksums_of_its_pages() -> None:
    write, read = "write_page_checksum", "page_checksum_verification"
    needed = {"pq.write_table": write, "pq.ParquetWriter": write, "ParquetWriter": write}
    needed |= {"pq.read_table": read, "pq.ParquetFile": read}
    root, calls = Path(fz.__file__).parents[1], 0
    for folder in ("fusionzoo", "datasets", "encoders", "fusion"):
        for path in sorted((root / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            for call in ast.walk(ast.parse(text)) if "parquet" in text else ():
                if isinstance(call, ast.Call):
                    words = {keyword.arg for keyword in call.keywords}
                    names = {ast.unparse(x) for x in (call.func, *call.args[:1])} & set(needed)
                    calls += len(names)
                    for name in names:
                        assert {needed[name], None} & words, (path.name, call.lineno)
    assert calls > 10
