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
