"""Hand-made hostile files: bombs, lies in headers, links, traversals, wrong types."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile
from PIL import Image

from .files import MEDIA, SVG

SHEET = "xl/worksheets/sheet1.xml"  # in a workbook
XMLNS = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"


@dataclass
class Case:
    """Files to write, links to make, and the cell or file to open."""

    format: str
    name: str
    files: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    cell: str = ""  # of a modality; else the file is opened as what its format says
    kind: str = ""
    special: str = ""  # fifo, folder: made instead of the cell's file


def hand_made(secret: Path) -> list[Case]:
    """Return all cases; `secret` holds files outside of every root."""
    return [
        *_pictures(),
        *_drawings(secret),
        *_clips(),
        *_arrays(),
        *_cells(secret),
        *_tables(secret),
        *_recipes(),
        *_model_files(),
    ]


def _media(format: str, name: str, contents: bytes) -> Case:
    kind = {"txt": "text"}.get(format) or MEDIA[format]
    return Case(format, name, {f"a.{format}": contents}, cell=f"a.{format}", kind=kind)


def png(width: int, height: int, depth: int = 8, colour: int = 2, body: bytes = b"") -> bytes:
    """Return a PNG with any header."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + body
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _saved(picture: Image.Image, kind: str, **settings: Any) -> bytes:
    contents = io.BytesIO()
    picture.save(contents, kind, **settings)
    return contents.getvalue()


def _pictures() -> Iterator[Case]:
    top = 2**31 - 1
    for width, height in (
        (30_000, 30_000),
        (1, top),
        (top, 1),
        (top, top),
        (0, 0),
        (0, 9),
        (9000, 9900),
    ):
        yield _media("png", f"header of {width} x {height}", png(width, height))
    for depth, colour in ((16, 6), (1, 2), (255, 255), (8, 3)):
        yield _media("png", f"depth {depth}, colour type {colour}", png(9, 9, depth, colour))
    bomb = zlib.compress(bytes(200_000_000), 1)
    yield _media("png", "pixels beyond its size", png(9, 9, body=_chunk(b"IDAT", bomb)))
    yield _media(
        "png", "text that expands to 200 MB", png(9, 9, body=_chunk(b"zTXt", b"a\0\0" + bomb))
    )
    yield _media("png", "profile that expands", png(9, 9, body=_chunk(b"iCCP", b"a\0\0" + bomb)))
    yield _media("png", "a palette of 2 GB", png(9, 9, 8, 3, struct.pack(">I", top) + b"PLTE"))
    yield _media("png", "1 x 9000", _saved(Image.new("RGB", (1, 9000)), "png"))
    yield _media("png", "9400 x 9400 RGBA", _saved(Image.new("RGBA", (9400, 9400)), "png"))
    yield _media("png", "9400 x 9400, 16 bits", _saved(Image.new("I;16", (9400, 9400)), "png"))
    yield _media("tiff", "9000 x 9000 floats", _saved(Image.new("F", (9000, 9000)), "tiff"))
    jpeg = _saved(Image.new("RGB", (16, 16)), "jpeg")
    size = jpeg.index(b"\xff\xc0") + 5
    for height, width in ((65535, 65535), (0, 0), (65535, 1), (1, 65535)):
        announced = jpeg[:size] + struct.pack(">HH", height, width) + jpeg[size + 4 :]
        yield _media("jpg", f"header of {width} x {height}", announced)
    yield _media("jpg", "CMYK of 9000 x 9000", _saved(Image.new("CMYK", (9000, 9000)), "jpeg"))
    exif = Image.Exif()
    exif[0x0112] = 99
    yield _media("jpg", "an orientation of 99", _saved(Image.new("RGB", (9, 9)), "jpeg", exif=exif))
    broken = _saved(Image.new("RGB", (9, 9)), "jpeg", exif=b"Exif\0\0" + b"\xff" * 60)
    yield _media("jpg", "EXIF of junk", broken)
    gif = bytearray(_saved(Image.new("P", (9, 9)), "gif"))
    for width, height in ((65535, 65535), (0, 0)):
        gif[6:10] = struct.pack("<HH", width, height)
        yield _media("gif", f"a screen of {width} x {height}", bytes(gif))
    frames = [Image.new("P", (99, 99), i % 9) for i in range(2000)]
    moving = _saved(frames[0], "gif", save_all=True, append_images=frames[1:])
    yield _media("gif", "2000 frames", moving)
    bmp = bytearray(_saved(Image.new("RGB", (9, 9)), "bmp"))
    for width, height in ((top, top), (-9, 9), (9, -9), (9, -(2**31)), (0, 0), (60_000, 60_000)):
        bmp[18:26] = struct.pack("<ii", width, height)
        yield _media("bmp", f"header of {width} x {height}", bytes(bmp))
    for tag, value in (
        (256, 2**31 - 1),
        (257, 60_000),
        (258, 255),
        (259, 99),
        (277, 60_000),
        (278, 0),
        (273, 9),
    ):
        yield _media("tiff", f"tag {tag} is {value}", _with_tag(tag, value))
    yield _media("tiff", "a directory that follows itself", b"II*\0\x08\0\0\0\0\0\x08\0\0\0")
    webp = bytearray(_saved(Image.new("RGB", (9, 9)), "webp"))
    webp[26:30] = b"\xff\x3f\xff\x3f"
    yield _media("webp", "header of 16383 x 16383", bytes(webp))
    contents = {
        "nothing": b"",
        "a byte": b"\x89",
        "text": b"not a picture at all",
        "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n",
        "PDF": b"%PDF-1.7\n" + bytes(99),
        "HEIC": b"\0\0\0\x18ftypheic" + bytes(99),
        "AVIF": b"\0\0\0\x18ftypavif" + bytes(99),
        "a page of HTML": b"<!DOCTYPE html><html><body>404</body></html>",
        "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid 0\nsize 9\n",
        "zeros": bytes(5000),
    }
    for name, data in contents.items():
        for format in ("png", "jpg"):
            yield _media(format, name, data)


def _with_tag(tag: int, value: int) -> bytes:
    """Return a TIFF in which one entry of the directory has another value."""
    data = bytearray(_saved(Image.new("RGB", (9, 9)), "tiff"))
    start = struct.unpack_from("<I", data, 4)[0]
    for entry in range(struct.unpack_from("<H", data, start)[0]):
        position = start + 2 + 12 * entry
        if struct.unpack_from("<H", data, position)[0] == tag:
            struct.pack_into("<HII", data, position + 2, 4, 1, value)
    return bytes(data)


def _drawings(secret: Path) -> Iterator[Case]:
    start = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    picture = secret / "secret.png"
    uses = "".join(f'<g id="a{i}">{f"""<use href="#a{i - 1}"/>""" * 10}</g>' for i in range(1, 9))
    laughs = "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 12))
    box = '<rect width="9" height="9" filter="url(#f)" fill="url(#p)" mask="url(#m)"/>'
    bodies = {
        "a picture elsewhere": f'<image href="{picture}" width="9" height="9"/>',
        "a picture elsewhere, old style": f'<image xlink:href="{picture}" width="9" height="9"/>',
        "a picture elsewhere by URL": f'<image href="file://{picture}" width="9" height="9"/>',
        "a picture of a filter": f'<filter id="f"><feImage href="{picture}"/></filter>{box}',
        "a picture in escapes": f'<image href="&#47;{str(picture)[1:]}" width="9" height="9"/>',
        "a picture in the folder above": '<image href="../secret/secret.png" width="9"/>',
        "a picture of the web": '<image href="http://127.0.0.1:1/a.png" width="9" height="9"/>',
        "a style that imports": f"<style>@import url({picture});</style>{box}",
        "uses of uses": f'<defs><g id="a0">{box}</g>{uses}</defs><use href="#a8"/>',
        "a use of itself": '<g id="a"><use href="#a"/></g>',
        "a pattern of a million": '<pattern id="p" width="1e6" height="1e6" patternUnits='
        f'"userSpaceOnUse"><rect width="5" height="5"/></pattern>{box}',
        "a filter of a million": '<filter id="f" x="-999999%" y="-999999%" width="2000000%" height='
        f'"2000000%"><feTurbulence numOctaves="99"/></filter>{box}',
        "a blur of a million": f'<filter id="f"><feGaussianBlur stdDeviation="1e6"/></filter>{box}',
        "a mask of itself": f'<mask id="m">{box}</mask>{box}',
        "numbers beyond floats": '<rect width="1e999" height="-1e999" x="nan"/>',
        "a path of a million": f'<path d="M0 0 {"L9 9 L1 2 " * 100_000}"/>',
        "nested groups": "<g>" * 5000 + "</g>" * 5000,
        "unclosed": "<g><g>",
        "text": '<text y="9">words</text>',
        "a script": "<script>while(1);</script>",
    }
    for name, body in bodies.items():
        yield _media("svg", name, f'{start} width="9" height="9">{body}</svg>'.encode())
    for size in ('width="1e9" height="1e9"', 'width="0" height="0"', 'viewBox="0 0 1e30 1"', ""):
        yield _media("svg", f"a size of {size}", f"{start} {size}><rect width='9'/></svg>".encode())
    for name, entity in (
        ("entities of entities", f'<!ENTITY a0 "aaaaaaaaaa">{laughs}'),
        ("an external entity", f'<!ENTITY a11 SYSTEM "{secret / "secret.txt"}">'),
    ):
        text = f"<!DOCTYPE svg [{entity}]>{start} width='9' height='9'><text>&a11;</text></svg>"
        yield _media("svg", name, text.encode())
    yield _media("svg", "compressed", gzip.compress(SVG.encode()))
    yield _media("svg", "UTF-16", SVG.encode("utf-16"))


def _wave(chunks: dict[bytes, bytes], size: int | None = None) -> bytes:
    body = b"".join(
        name + struct.pack("<I", len(data) if size is None or name != b"data" else size) + data
        for name, data in chunks.items()
    )
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


def _format(kind: int = 1, channels: int = 1, rate: int = 8000, bits: int = 16) -> bytes:
    align = channels * bits // 8
    bytes_per_second = rate * align
    return struct.pack(
        "<HHIIHH", kind, channels, rate, bytes_per_second % 2**32, align % 65536, bits
    )


def _clips() -> Iterator[Case]:
    noise = bytes(4000)
    for name, about in {
        "rate 0": _format(rate=0),
        "rate 1": _format(rate=1),
        "rate 44101": _format(rate=44_101),
        "rate of 2 GHz": _format(rate=2**31 - 1),
        "rate 767999": _format(rate=767_999),
        "no channel": _format(channels=0),
        "1024 channels": _format(channels=1024),
        "65535 channels": _format(channels=65535),
        "0 bits": _format(bits=0),
        "64 bits": _format(bits=64),
        "1 bit": _format(bits=1),
        "kind 0xFFFF": _format(kind=0xFFFF),
        "MP3 in WAV": _format(kind=0x55),
        "floats": _format(kind=3, bits=32),
        "GSM": _format(kind=0x31),
    }.items():
        yield _media("wav", name, _wave({b"fmt ": about, b"data": noise}))
    for size in (2**32 - 1, 2**31, 10**9, 0, 3999, 4001):
        contents = _wave({b"fmt ": _format(), b"data": noise}, size)
        yield _media("wav", f"announces {size} bytes", contents)
    yield _media("wav", "no format", _wave({b"data": noise}))
    yield _media("wav", "no data", _wave({b"fmt ": _format()}))
    yield _media("wav", "data first", _wave({b"data": noise, b"fmt ": _format()}))
    yield _media(
        "wav", "100000 empty chunks", _wave({b"fmt ": _format()}) + (b"JUNK" + bytes(4)) * 100_000
    )
    yield _media(
        "wav", "RF64", b"RF64\xff\xff\xff\xffWAVEds64" + struct.pack("<I", 28) + b"\xff" * 28
    )
    square = np.where(np.arange(9000) % 40 < 20, 32767, -32768).astype("<i2").tobytes()
    yield _media("wav", "full scale", _wave({b"fmt ": _format(), b"data": square}))
    for value in (np.nan, np.inf, 1e30):
        floats = np.full(900, value, "<f4").tobytes()
        yield _media(
            "wav", f"floats of {value}", _wave({b"fmt ": _format(3, bits=32), b"data": floats})
        )
    silent = io.BytesIO()
    with soundfile.SoundFile(silent, "w", 8000, 1, format="FLAC") as file:
        for _ in range(600):
            file.write(np.zeros(60 * 8000, np.int16))
    yield _media("flac", "ten hours of silence", silent.getvalue())
    flac = bytearray(silent.getvalue()[:2000])
    yield _media("flac", "ten hours, cut after 2000 bytes", bytes(flac))
    flac[18:26] = b"\xff" * 8
    yield _media("flac", "header of ones", bytes(flac))
    yield _media("flac", "magic alone", b"fLaC")
    yield _media("ogg", "a page of 255 segments", b"OggS\0\x02" + bytes(20) + b"\xff" * 256)
    yield _media("ogg", "magic alone", b"OggS")
    yield _media("mp3", "a tag of 256 MB", b"ID3\x04\0\0\x7f\x7f\x7f\x7f" + bytes(99))
    yield _media("mp3", "frames of ones", b"\xff\xfb\x90\x64" * 5000)
    for name, start in {
        "M4A": b"\0\0\0\x20ftypM4A ",
        "WEBM": b"\x1a\x45\xdf\xa3",
        "AMR": b"#!AMR\n",
        "AIFF": b"FORM\0\0\0\xffAIFFCOMM",
        "AU": b".snd" + b"\xff" * 20,
        "CAF": b"caff\0\x01\0\0desc" + b"\xff" * 40,
        "W64": b"riff\x2e\x91\xcf\x11" + b"\xff" * 80,
        "nothing": b"",
        "text": b"not a clip at all",
        "zeros": b"\0",
    }.items():
        for format in ("wav", "mp3"):
            yield _media(format, name, start + bytes(500) * bool(start))


def npy(shape: str, dtype: str = "<f4", body: bytes = b"", order: str = "False") -> bytes:
    """Return an array with any header."""
    text = f"{{'descr': {dtype}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body


def _arrays() -> Iterator[Case]:
    for shape in (
        *("(1000000000000,)", "(1000000, 1000000)", "(-1,)", "(9,)", "()", "(0,)", "(3, 0)"),
        *("(2**40,)", "'abc'", "(1.5,)", "(True,)", "[9]", "(9,) * 99", "(__import__('os'),)"),
        "(" * 90 + ")" * 90,
    ):
        yield _media("npy", f"shape {shape[:30]}", npy(shape, "'<f4'", bytes(8)))
    for dtype in (
        "'|O'",
        "'<U100000'",
        "'<M8[s]'",
        "'<c16'",
        "[('a', '<f4')]",
        "'|V99'",
        "None",
        "'<f16'",
        "'|b1'",
    ):
        yield _media("npy", f"type {dtype}", npy("(3,)", dtype, bytes(99)))
    yield _media("npy", "infinite", npy("(2,)", "'<f4'", np.full(2, np.inf, "<f4").tobytes()))
    yield _media("npy", "a header of 4 GB", b"\x93NUMPY\x02\x00\xff\xff\xff\xff")
    yield _media("npy", "version 9", b"\x93NUMPY\x09\x00" + bytes(99))
    pickled = io.BytesIO()
    np.save(pickled, np.array([_Bomb()], dtype=object), allow_pickle=True)
    yield _media("npy", "a pickle that runs a command", pickled.getvalue())
    yield _media("npy", "a pickle alone", pickle.dumps(_Bomb()))
    for name, member in {
        "a zip bomb": npy("(50000000,)", "'<f4'", bytes(200_000_000)),
        "an array that lies": npy("(1000000000000,)", "'<f4'"),
        "objects": pickled.getvalue(),
    }.items():
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("../../a.npy", member)
        yield _media("npz", name, archive.getvalue())


class _Bomb:
    """An object whose pickle runs a command when it is loaded."""

    def __reduce__(self) -> Any:
        return os.open, ("/tmp/fusionzoo-was-run", os.O_CREAT | os.O_RDWR)


def _cells(secret: Path) -> Iterator[Case]:
    """Yield cells that lead elsewhere, for every kind of modality."""
    names = {
        "image": "secret.png",
        "text": "secret.txt",
        "audio": "secret.wav",
        "vector": "secret.npy",
    }
    for kind, name in names.items():
        format = name.rpartition(".")[2]
        path = str(secret / name)
        for cell in (path, f"../secret/{name}", f"./../secret/{name}", f"sub/../../secret/{name}"):
            yield Case(format, f"cell {cell.replace(str(secret), '')}", cell=cell, kind=kind)
        yield Case(format, "a link to a file elsewhere", links={"a": path}, cell="a", kind=kind)
        yield Case(
            format,
            "a link to a folder elsewhere",
            links={"d": str(secret)},
            cell=f"d/{name}",
            kind=kind,
        )
        yield Case(format, "a link to itself", links={"a": "a"}, cell="a", kind=kind)
        yield Case(format, "a device", links={"a": "/dev/zero"}, cell="a", kind=kind)
        yield Case(format, "a pipe", cell="a", kind=kind, special="fifo")
        yield Case(format, "a folder", cell="a", kind=kind, special="folder")
        for cell in (
            f"file://{path}",
            "a\0b",
            "x" * 5000,
            "~/.bashrc",
            "/proc/self/environ",
            "",
            "no such file",
        ):
            yield Case(format, f"cell {cell[:20]!r}", cell=cell, kind=kind)
    for name, data in {
        "latin-1": "größe".encode("latin-1"),
        "UTF-16": "größe".encode("utf-16"),
        "nulls": bytes(5000),
        "41 MB": b"x" * 41_000_000,
        "9 million characters": b"x" * 9_000_000,
        "marks of direction": "\u202e\u2066".encode() * 999,
    }.items():
        yield _media("txt", name, data)


def _compressed_tables(head: bytes) -> Iterator[Case]:
    row = b"a,train,x," + b"y" * 1000 + b"\n"
    for name, data in {
        "2 GB of one row": gzip.compress(head) + gzip.compress(row * 1000) * 2100,
        "2 GB without a row's end": gzip.compress(head) + gzip.compress(b"y" * 10**6) * 2100,
        "half of it": gzip.compress(head + row * 99)[:-40],
        "no gzip": head + row,
        "junk behind the end": gzip.compress(head + row) + b"junk",
    }.items():
        yield Case("csv.gz", name, {"data.csv.gz": data})
    for name, parts in {
        "no sheet": {},
        "half a GB of blanks": {SHEET: b" " * (1 << 29)},
        "a cell in the far corner": _sheet('<c r="XFD1048576"><v>1</v></c>', row=1_048_576),
        "a row of number 10^18": _sheet('<c r="A1"><v>1</v></c>', row=10**18),
        "entities of entities": {SHEET: _laughs()},
        "a text that is not there": _sheet('<c r="A1" t="s"><v>999999999</v></c>', row=1),
    }.items():
        yield Case("xlsx", name, {"data.xlsx": workbook(parts)})


def _sheet(cells: str, row: int) -> dict[str, bytes]:
    """Return the part of a workbook that is its sheet."""
    rows = f'<row r="1"><c r="A1" t="str"><v>text</v></c></row><row r="{row}">{cells}</row>'
    sheet = f'<worksheet xmlns="{XMLNS}"><sheetData>{rows}</sheetData></worksheet>'
    return {SHEET: sheet.encode()}


def _laughs() -> bytes:
    entities = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 10}">' for i in range(1, 12))
    return f'<!DOCTYPE x [<!ENTITY e0 "ha">{entities}]><x>&e11;</x>'.encode()


def workbook(
    parts: Mapping[str, bytes],
    change: Mapping[str, Callable[[bytes], bytes]] = MappingProxyType({}),
) -> bytes:
    """Return an .xlsx file of one sheet with some of its parts exchanged, others changed."""
    import openpyxl

    plain, contents = io.BytesIO(), io.BytesIO()
    book = openpyxl.Workbook()
    book.active.append(["text"])
    book.save(plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(contents, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            if parts or name != SHEET:
                new.writestr(name, parts.get(name, change.get(name, bytes)(old.read(name))))
    return contents.getvalue()


def _tables(secret: Path) -> Iterator[Case]:
    head = b"id,split,target,text\n"
    rows = b"".join(b"%d,train,a,words\n" % i for i in range(9))
    for name, data in {
        "nothing": b"",
        "a header alone": head,
        "blank lines": b"\n" * 9999,
        "a repeated id": head + b"a,train,x,b\na,train,x,b\n",
        "an empty id": head + b",train,x,b\n",
        "no modality": b"id,split\na,train\n",
        "columns of one name": b"id,id,text\na,b,c\n",
        "columns of one name but for case": b"id,ID ,text\na,b,c\n",
        "ragged": head + b"a,b\n1,2,3,4,5\n",
        "an open quote": head + b'a,train,x,"' + b"y" * 2_000_000,
        "a cell of 20 MB": head + b"a,train,x," + b"y" * 20_000_000 + b"\n",
        "100000 columns": ",".join(f"c{i}" for i in range(100_000)).encode() + b"\n",
        "nulls": head + bytes(9999),
        "UTF-16": (head + rows).decode().encode("utf-16"),
        "latin-1": head + "a,train,x,größe\n".encode("latin-1"),
        "a mark of byte order": b"\xef\xbb\xbf" + head + rows,
        "a formula": head + b'a,train,x,=cmd|"/c calc"!A0\n',
        "binary": bytes(range(256)) * 99,
        "text that looks like a path": head + f"a,train,x,{secret / 'secret.txt'}\n".encode(),
        "a split of no known name": head + b"a,../..,x,b\n",
        "only carriage returns": (head + rows).replace(b"\n", b"\r"),
        "a label that train lacks": head + b"a,train,x,b\nc,test,y,d\n",
        "a target of 5 MB": head + b"a,train," + b"y" * 5_000_000 + b",b\n",
    }.items():
        yield Case("csv", name, {"data.csv": data})
    yield from _compressed_tables(head)
    line = b'{"id": "a", "split": "train", "text": "b"}\n'
    for name, data in {
        "nothing": b"",
        "not JSON": b"id: a\n",
        "a list": b"[1, 2]\n",
        "a number": b"3\n",
        "deep": b'{"id": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
        "an open object": line + b'{"id": ',
        "types that change": line + b'{"id": 3, "split": [], "text": {}}\n',
        "half of a character": b'{"id": "\\ud800", "split": "train", "text": "\\udfff"}\n',
        "NaN": b'{"id": "a", "text": NaN}\n',
        "a huge number": b'{"id": ' + b"9" * 9999 + b', "text": "b"}\n',
        "a repeated key": b'{"id": "a", "id": "b", "text": "c"}\n',
        "a row of 20 MB": b'{"id": "a", "split": "train", "text": "' + b"y" * 20_000_000 + b'"}\n',
        "bad UTF-8": b'{"id": "a", "text": "\xff\xfe"}\n',
        "a vector of words": b'{"id": "a", "vector": ["x"]}\n',
        "a vector of infinities": b'{"id": "a", "vector": [1e999]}\n',
        "vectors of two widths": b'{"id": "a", "vector": [1]}\n{"id": "b", "vector": [1, 2]}\n',
        "an empty vector": b'{"id": "a", "vector": []}\n',
        "a sequence of ragged rows": b'{"id": "a", "sequence": [[1], [1, 2]]}\n',
        "objects for pictures": b'{"id": "a", "image": {"path": "/etc/passwd"}}\n',
        "nulls alone": b'{"id": null, "text": null}\n',
    }.items():
        yield Case("jsonl", name, {"data.jsonl": data})
    many = 2_000_000
    tables: dict[str, pa.Table] = {
        "a long text 100000 times": pa.table(
            {
                "text": pa.DictionaryArray.from_arrays(
                    pa.array(np.zeros(100_000, "int32")), ["x" * 500_000]
                )
            }
        ),
        "2 million lists of zeros": pa.table(
            {
                "vector": pa.FixedSizeListArray.from_arrays(
                    pa.array(np.zeros(many * 64, "float32")), 64
                )
            }
        ),
        "2 million nulls": pa.table({"text": pa.nulls(many, pa.string())}),
        "no column": pa.table({}),
        "no row": pa.table({"id": pa.array([], pa.string()), "text": pa.array([], pa.string())}),
        "columns of one name": pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]),
        "a struct": pa.table({"text": pa.array([{"a": 1}])}),
        "a map": pa.table({"text": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))}),
        "dates": pa.table({"id": ["a"], "text": pa.array([0], pa.timestamp("us"))}),
        "decimals": pa.table(
            {"id": ["a"], "vector": pa.array([[1]], pa.list_(pa.decimal128(9, 2)))}
        ),
        "bytes": pa.table({"id": ["a"], "image": pa.array([b"\x89PNG"])}),
        "bytes that are not UTF-8": pa.table({"id": pa.array([b"\xff"]), "text": ["b"]}),
        "empty lists": pa.table({"vector": pa.array([[], []], pa.list_(pa.float32()))}),
        "a null type": pa.table({"text": pa.nulls(3)}),
        "nested lists": pa.table({"vector": pa.array([[[[[1.0]]]]])}),
        "booleans": pa.table({"vector": pa.array([[True, False]]), "split": [True]}),
    }
    for name, table in tables.items():
        contents = io.BytesIO()
        pq.write_table(table, contents, compression="zstd", data_page_size=1 << 20)
        yield Case("parquet", name, {"data.parquet": contents.getvalue()})
    for name, data in {
        "nothing": b"",
        "magic alone": b"PAR1PAR1",
        "a footer of 4 GB": b"PAR1" + bytes(99) + b"\xff\xff\xff\xffPAR1",
        "text": b"id,text\na,b\n",
    }.items():
        yield Case("parquet", name, {"data.parquet": data})


def _recipes() -> Iterator[Case]:
    laughs = "a0: &a0 [x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40)
    )
    for name, text in {
        "aliases of aliases": laughs,
        "an alias of itself": "a: &a {b: *a}",
        "deep": "[" * 20_000,
        "deep by indent": "".join("  " * i + "a:\n" for i in range(500)),
        "a tag of Python": "out: !!python/object/apply:os.system ['touch /tmp/fusionzoo-was-run']",
        "a name of Python": "out: !!python/name:os.system",
        "a rate of infinity": "optim: {lr: .inf}",
        "a rate of NaN": "optim: {lr: .nan}",
        "a rate of yes": "optim: {lr: yes}",
        "epochs of yes": "train: {epochs: on}",
        "a key twice": "seed: 1\nseed: 2",
        "a key twice, in quotes": "seed: 1\n'seed': 2",
        "a list for a mapping": "- seed",
        "a key that is a list": "? [a, b]\n: 1",
        "a key that is a number": "1: 2",
        "a date": "seed: 2001-01-01",
        "no date": "seed: 2001-99-99",
        "to base 60": "train: {epochs: 1:30}",
        "5000 digits": "seed: " + "9" * 5000,
        "nulls": "\0\0\0",
        "two documents": "--- {}\n--- {}",
        "5 MB": "# " + "x" * 5_000_000,
        "merged keys": "a: &a {lr: 1}\noptim: {<<: *a, <<: *a}",
        "a number too small": "train: {batch_size: -1}",
        "a number too large": "train: {batch_size: 1e400}",
    }.items():
        yield Case("yaml", name, {"recipe.yaml": text.encode()})
    yield Case("yaml", "not UTF-8", {"recipe.yaml": b"out: \xff"})


def _model_files() -> Iterator[Case]:
    """Yield replacements of a model folder's files: `edit` changes keys, else whole contents."""
    edits: dict[str, dict[str, Any]] = {
        "a layer of 10^9": {"fusion": {"name": "gmu", "dim": 10**9}},
        "10^9 outputs": {"num_outputs": 10**9, "classes": []},
        "10^9 layers": {"encoders": {"text": {"name": "chars", "num_layers": 10**9}}, "kinds": {}},
        "a width of 10^40": {"fusion": {"name": "gmu", "dim": 10**40}},
        "negative": {"fusion": {"name": "gmu", "dim": -8}},
        "a width that is true": {"fusion": {"name": "gmu", "dim": True}},
        "an unknown fusion": {"fusion": {"name": "gmv", "dim": 8}},
        "an unknown key": {"extra": 1},
        "another format": {"format": 3},
        "a format of words": {"format": "1"},
        "code of a module": {"fusion": {"name": "os:system", "dim": 8}},
        "code of a file": {"fusion": {"name": "/tmp/evil.py:A", "dim": 8}},
        "a modality that leads elsewhere": {"encoders": {"/etc": {"name": "hf/x"}}, "kinds": {}},
        "a model of a hub": {"encoders": {"word": {"name": "hf/a/b", "kind": "text"}}, "kinds": {}},
        "timm of a hub": {"encoders": {"image": {"name": "timm/hf-hub:a/b"}}, "kinds": {}},
        "a checkpoint": {
            "encoders": {"image": {"name": "timm/resnet10t", "checkpoint_path": "/etc/passwd"}},
            "kinds": {},
        },
        "a picture of 10^6": {
            "encoders": {"image": {"name": "timm/resnet10t", "size": 10**6}},
            "kinds": {},
        },
        "no encoder": {"encoders": {}},
        "a list for encoders": {"encoders": []},
        "a kind of smell": {"kinds": {"text": "smell"}},
        "classes of numbers": {"classes": [1, 2]},
        "a million classes": {"classes": [str(i) for i in range(10**6)]},
        "targets of words": {"targets": ["price"]},
        "align of 10^9": {"align": {"text": 10**9}},
        "heads of 10^9": {"unimodal_dim": 10**9},
        "standardise what is not there": {"standardise": ["smell"]},
        "plugins": {"plugins": ["evil.py"]},
    }
    for name, changes in edits.items():
        yield Case("config.json", name, {"edit": json.dumps(changes).encode()})
    for name, data in {
        "nothing": b"",
        "deep": b"[" * 100_000,
        "a list": b"[]",
        "NaN": b'{"format": NaN}',
        "a key twice": b'{"format": 1, "format": 1}',
        "not UTF-8": b'{"format": "\xff"}',
        "half of a character": b'{"format": 1, "classes": ["\\ud800"]}',
    }.items():
        yield Case("config.json", name, {"model/config.json": data})
    for name, data in {
        "nothing": b"",
        "a header of 2^63": b"\xff" * 7 + b"\x7f" + b"{}",
        "a header of junk": struct.pack("<Q", 9) + b"not json!",
        "no tensor": struct.pack("<Q", 2) + b"{}",
        "a pickle": b"PK\x03\x04" + bytes(99),
        "a tensor of 10^12": _tensors(
            {"a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}
        ),
        "a negative shape": _tensors(
            {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}
        ),
        "overlapping": _tensors(
            {x: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for x in "ab"}
        ),
        "an unknown type": _tensors({"a": {"dtype": "OBJ", "shape": [1], "data_offsets": [0, 4]}}),
    }.items():
        yield Case("model.safetensors", name, {"model/model.safetensors": data})
    code = {
        "auto_map": {x: "planted.Planted" for x in ("AutoConfig", "AutoModel", "AutoTokenizer")}
    }
    for name, file, contents in (
        ("code of its own", "config.json", {"model_type": "planted", **code}),
        ("a width of 10^9", "config.json", {"model_type": "bert", "hidden_size": 10**9}),
        ("10^6 layers", "config.json", {"model_type": "bert", "num_hidden_layers": 10**6}),
        ("a vocabulary of 10^12", "config.json", {"model_type": "bert", "vocab_size": 10**12}),
        ("no kind of model", "config.json", {}),
        ("a tokenizer of its own", "tokenizer_config.json", {"tokenizer_class": "Planted", **code}),
        ("an empty tokenizer", "tokenizer.json", {}),
        ("a list for a tokenizer", "tokenizer.json", []),
    ):
        data = json.dumps(contents).encode()
        yield Case("tokenizer", name, {f"model/text/{file}": data, "model/text/planted.py": b"1/0"})
    for name, data in {
        "nothing": b"",
        "a list": b"[]",
        "a file elsewhere": b'{"algorithm": "sha256", "files": {"../secret/secret.txt": "0"}}',
        "an absolute path": b'{"algorithm": "sha256", "files": {"/etc/passwd": "0"}}',
        "another algorithm": b'{"algorithm": "none", "files": {}}',
        "a digest of another file": b'{"algorithm": "sha256", "files": {"config.json": "0"}}',
    }.items():
        yield Case("digests.json", name, {"model/digests.json": data})


def _tensors(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8)
