"""Shards that were damaged, cut or written in ways that would be misread: refused, by name."""

from __future__ import annotations

import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest

import fusionzoo as fz
from fusionzoo.errors import FusionZooError


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
    with pytest.raises(FusionZooError, match=r"train-000000\.tar, 0001\.vector\.npy is stored wi"):
        fz.create_dataset(tmp_path)


# ---- the end of a tar: 40 of 119 cuts opened silently


def test_a_tar_that_was_cut_anywhere_is_refused_unless_only_padding_is_gone(
    tmp_path: Path,
) -> None:
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
    with pytest.raises(FusionZooError, match=r"neither a member nor the end mark .* byte 2,048 of"):
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


def test_two_members_for_one_modality_of_a_sample_are_refused(tmp_path: Path) -> None:
    write(tmp_path, member("1.jpg", b"\xff\xd8\xff"), member("1.png", b"\x89PNG"), bytes(1024))
    with pytest.raises(FusionZooError, match=r"1\.png: its sample has another member for image"):
        fz.create_dataset(tmp_path)
