"""Shards that were damaged, cut or written in ways that would be misread: refused, by name."""

from __future__ import annotations

import ast
import io
import random
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fusionzoo as fz
from fusionzoo.embeddings.files import read_embeddings
from fusionzoo.errors import FusionZooError
from helpers.stopped import without_checksums


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


@pytest.mark.parametrize("form", SPARSE)
def test_a_sparse_member_of_a_tar_is_refused_by_name(form: str, tmp_path: Path) -> None:
    write(tmp_path, vectors(0), SPARSE[form], vectors(2), bytes(1024))
    with pytest.raises(
        FusionZooError, match=r"train-000000\.tar, 0001\.vector\.npy is a link, a sp"
    ):
        fz.create_dataset(tmp_path)


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


def test_a_damaged_header_does_not_end_a_tar(tmp_path: Path) -> None:
    data = bytearray(vectors(0, 1, 2, 3) + bytes(1024))
    data[len(vectors(0, 1)) + 3] ^= 4
    write(tmp_path, data)
    with pytest.raises(FusionZooError, match=r"is cut off or damaged at byte 2,048"):
        fz.create_dataset(tmp_path)


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


def test_a_member_that_is_there_twice_is_refused_by_name(tmp_path: Path) -> None:
    for again in (vectors(1), member("./0001.vector.npy", npy(5))):
        write(tmp_path, vectors(0, 1, 2), again, bytes(1024))
        with pytest.raises(FusionZooError, match=r"tar has two members 0001\.vector\.npy: write"):
            fz.create_dataset(tmp_path)


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


@pytest.mark.parametrize(
    "names",
    [
        ("7 Track 2.0 (Clean Version).png", "7 Track 2.0 (Clean Version).txt"),
        ("img.left.png", "img.left.cls"),
        ("7.txt", "7.caption"),
        ("v1.0.json", "v1.1.json"),
    ],
)
def test_a_key_with_dots_is_refused_where_it_would_lose_a_member(
    names: tuple[str, str], tmp_path: Path
) -> None:
    contents = [b'{"a": 1}' if name.endswith("json") else b"x" for name in names]
    write(tmp_path, *map(member, names, contents), bytes(1024))
    with pytest.raises(FusionZooError) as caught:
        fz.create_dataset(tmp_path)
    assert f"train-000000.tar, {names[1]}: {names[0]} has" in str(caught.value)
    assert "ends at the first dot" in str(caught.value)


@pytest.mark.parametrize("ending", ["cls", "txt"])
def test_a_key_before_the_dot_that_all_samples_share_is_refused(
    ending: str, tmp_path: Path
) -> None:
    names = [f"img.00000{i}.{x}" for i in range(2) for x in ("png", ending)]
    write(tmp_path, *(member(name, b"x") for name in names), bytes(1024))
    with pytest.raises(FusionZooError, match=rf"img\.000000\.{ending}: 000000 is no modality"):
        fz.create_dataset(tmp_path)


@pytest.mark.parametrize("order", ["by type", "one astray"])
def test_members_of_a_sample_that_stand_apart_are_refused_with_the_remedy(
    order: str, tmp_path: Path
) -> None:
    names = [f"{i}.{ending}" for ending in ("txt", "cls") for i in range(3)]
    if order == "one astray":
        names = ["0.cls", "0.txt", "1.cls", "1.txt", "0.json"]
    contents = [b"{}" if name.endswith("json") else b"x" for name in names]
    write(tmp_path, *map(member, names, contents), bytes(1024))
    with pytest.raises(FusionZooError, match=r"of sample '0': write .*--sort=name"):
        fz.create_dataset(tmp_path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_members_that_are_no_plain_files_are_refused_by_name(kind: bytes, tmp_path: Path) -> None:
    info = tarfile.TarInfo("1.txt")
    info.type, info.linkname = kind, "0.txt"
    write(tmp_path, member("0.txt", b"x"), info.tobuf(), bytes(1024))
    with pytest.raises(FusionZooError, match=r"train-000000\.tar, 1\.txt is .*--dereference"):
        fz.create_dataset(tmp_path)


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
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    format: str, shards: Path, tmp_path: Path
) -> None:
    for file in (shards / format).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for path in sorted(tmp_path.iterdir()):
        if path.name != "SHA256SUMS":
            errors, _ = flip_bits(path, lambda: contents(tmp_path))
            assert errors > (0 if path.suffix in (".tar", ".parquet") else FLIPS // 2), path.name


def test_a_flipped_bit_of_a_remote_block_is_an_error_that_names_the_url(shards: Path) -> None:
    files = fsspec.filesystem("memory")
    files.put(str(shards / "webdataset"), "/rotten", recursive=True)
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
    format: str, shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in (shards / format).iterdir():
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
    kind: str, shards: Path, tmp_path: Path
) -> None:
    path = tmp_path / "train-00000-of-00001.parquet"
    read: Callable[[], Any] = lambda: contents(path)  # noqa: E731
    vectors = np.random.default_rng(0).standard_normal((32, 8)).astype(np.float32)
    if kind == "manifest":
        rows = [{"id": f"{n}", "vector": x, "target": "ab"[n % 2]} for n, x in enumerate(vectors)]
        fz.create_dataset(rows).to_manifest(path, embed=True)
    elif kind == "shards of others":
        path.write_bytes((shards / "parquet" / path.name).read_bytes())
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
