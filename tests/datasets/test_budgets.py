"""A value beyond its budget, cut off or of an unknown format is one line, by its header."""

from __future__ import annotations

import gzip
import io
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pytest
import soundfile
import torchvision.io  # noqa: F401, before memory is traced, which slows imports
from PIL import Image

import fusionzoo as fz
from fusionzoo.datasets.media.audio import AudioFile, decode_audio
from fusionzoo.datasets.media.budgets import BUDGETS
from fusionzoo.datasets.media.decode import decode, decode_image
from fusionzoo.encoders.audio import WaveProcessor
from fusionzoo.errors import FusionZooError
from helpers.memory import at_most

MEGABYTE = 1 << 20


def refusal(kind: str, value: Any) -> str:
    """Return the one line that refuses a value; little memory may be taken until then."""
    with at_most(20 * MEGABYTE), pytest.raises(FusionZooError) as caught:
        decode(kind, value)
    message = str(caught.value)
    assert "\n" not in message
    return message


def npy_header(shape: str, dtype: str = "<f4") -> bytes:
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def test_a_picture_far_longer_than_wide_is_refused() -> None:
    contents = io.BytesIO()
    Image.new("RGB", (1, 9000)).save(contents, "png")
    assert "1 x 9000 pixels; at most 1,000 times as long as wide" in refusal(
        "image", contents.getvalue()
    )
    assert "9000 x 1 pixels" in refusal("image", np.zeros((1, 9000), np.uint8))
    contents = io.BytesIO()
    Image.new("RGB", (9, 9000)).save(contents, "png")
    assert decode_image(contents.getvalue()).shape == (3, 9000, 9)


def test_an_array_that_announces_too_many_numbers_is_refused_by_its_header(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    for header, reason in (
        (npy_header("(1000000, 1000000)"), "bytes are missing"),
        (npy_header("(1,)", "|O"), "values of type object, which are never loaded"),
        (npy_header("(1,)", "<U1000"), "bytes are missing"),
        (b"\x93NUMPY\x01\x00\xff\xff", "cannot be read as an array"),
        (b"junk", "is no .npy file"),
    ):
        path.write_bytes(header)
        message = refusal("vector", path)
        assert reason in message and str(path) in message


def test_text_is_limited_and_must_be_unicode(tmp_path: Path) -> None:
    most = BUDGETS["characters"].limit
    assert f"at most {most:,} characters" in refusal("text", "x" * (most + 1))
    assert len(decode("text", "x" * most)) == most
    assert "not Unicode" in refusal("text", "half \ud800 a character")
    with (tmp_path / "huge.txt").open("wb") as file:
        file.truncate(BUDGETS["text file"].limit + 1)  # takes no space on the disk
    assert "huge.txt is too large: 40,000,001 bytes" in refusal("text", tmp_path / "huge.txt")


@pytest.mark.parametrize("kind", ["image", "audio", "text", "vector"])
def test_a_pipe_never_blocks(kind: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "pipe is no file" in refusal(kind, pipe)


def test_ten_silent_hours_are_read_in_part_only(tmp_path: Path) -> None:
    """Half an hour here, which is encoded faster; the header gives the length."""
    path = tmp_path / "silent.flac"
    with soundfile.SoundFile(path, "w", 16_000, 1) as file:
        for _ in range(30):
            file.write(np.zeros(60 * 16_000, np.int16))
    with at_most(20 * MEGABYTE):
        clip = decode_audio(path)
        assert isinstance(clip, AudioFile) and clip.frames == 1800 * 16_000
        assert len(WaveProcessor(16_000, 5.0)(clip)["wave"]) == 80_000


def test_a_rate_that_no_device_has_is_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "fast.wav", np.zeros(100), 3_000_000)
    message = refusal("audio", tmp_path / "fast.wav")
    assert "3,000,000 Hz; at most 768,000 Hz: resample it" in message
    with pytest.raises(FusionZooError, match="a clip of rate nan"):
        decode_audio((np.zeros(100, np.float32), float("nan")))


def test_a_rate_whose_resampling_would_exhaust_memory_is_refused() -> None:
    clip = decode_audio((np.zeros(50_000, np.float32), 44_101))
    with pytest.raises(FusionZooError, match=r"44101 Hz cannot be resampled.*ffmpeg"):
        WaveProcessor(16_000, 1.0)(clip)
    clip = decode_audio((np.zeros(50_000, np.float32), 44_100))
    assert len(WaveProcessor(16_000, 1.0)(clip)["wave"]) == 16_000


@pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "bmp", "tiff", "webp"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_cut_picture_is_noticed(suffix: str, share: float, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (12, 16, 3), dtype=np.uint8)
    path = tmp_path / f"cut.{suffix}"
    Image.fromarray(noise).resize((160, 120)).save(path)
    assert decode_image(path).shape == (3, 120, 160)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert f"cut.{suffix}" in refusal("image", path)
    if suffix == "png":
        path.write_bytes(whole[:-12])
        assert "last chunk, IEND, is missing" in refusal("image", path)


@pytest.mark.parametrize("seconds", [0.5, 30])
@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3"])
def test_a_cut_clip_is_noticed_and_a_whole_one_is_not(
    suffix: str, seconds: float, tmp_path: Path
) -> None:
    wave = 0.3 * np.random.default_rng(0).standard_normal(int(seconds * 22_050))
    path = tmp_path / f"cut.{suffix}"
    soundfile.write(path, wave, 22_050)
    assert len(decode_audio(path).samples) == len(wave)
    whole = path.read_bytes()
    for length in (len(whole) - 30, int(0.9 * len(whole)), int(0.5 * len(whole))):
        path.write_bytes(whole[:length])
        with pytest.raises(FusionZooError, match=rf"cut\.{suffix}"):
            _ = decode_audio(path).samples


@pytest.mark.parametrize(
    ("kind", "name", "contents", "words"),
    [
        ("audio", "a b.m4a", b"\0\0\0\x20ftypM4A ", ["M4A", "ffmpeg -i ", "a b.flac'"]),
        ("audio", "a.wma", b"\x30\x26\xb2\x75", ["WMA or ASF", "WAV, FLAC, OGG and MP3"]),
        ("image", "a.heic", b"\0\0\0\x18ftypheic", ["HEIC", "PNG, JPEG", "a.png"]),
        ("image", "a.png", b"%!PS-Adobe-3.0 EPSF-3.0\n", ["PostScript", "a-converted.png"]),
        ("audio", "a.xyz", b"nothing of that kind", ["convert it: ffmpeg -i"]),
    ],
)
def test_an_unknown_format_says_what_is_read_and_how_to_convert(
    kind: str, name: str, contents: bytes, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(contents + bytes(100))
    message = refusal(kind, tmp_path / name)
    assert all(word in message for word in [*words, name])


@pytest.mark.parametrize(
    "body",
    [
        '<image href="{}" width="8" height="8"/>',
        '<image xlink:href="file://{}" width="8" height="8"/>',
        '<filter id="f"><feImage href="{}"/></filter><rect width="8" height="8" filter="url(#f)"/>',
        '<image href="&path;" width="8" height="8"/>',
    ],
)
def test_a_drawing_shows_no_other_file(body: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    Image.new("RGB", (8, 8), (1, 200, 3)).save(secret)
    (tmp_path / "data").mkdir()
    drawing = tmp_path / "data" / "a.svg"
    drawing.write_text(
        f'<!DOCTYPE svg [<!ENTITY path "{secret}">]><svg xmlns="http://www.w3.org/2000/svg"'
        f' xmlns:xlink="http://www.w3.org/1999/xlink" width="8" height="8">{body.format(secret)}'
        "</svg>"
    )
    message = refusal("image", drawing)
    assert "a.svg" in message and "refers to the file" in message


def test_a_compressed_table_far_larger_than_its_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUDGETS, "table", replace(BUDGETS["table"], limit=1 << 20))
    rows = b"id,text\n" + b"".join(b"%d,%b\n" % (row, b"y" * 1000) for row in range(3000))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(rows))
    with pytest.raises(FusionZooError, match=r"bytes and would take 2,097,152 or more"):
        fz.create_dataset(tmp_path / "a.csv.gz")


def test_a_sheet_of_a_cell_in_the_far_corner_is_refused(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    book.active.append(["text"])
    book.active.cell(9999, 9999, "far away")
    book.save(tmp_path / "a.xlsx")
    with pytest.raises(FusionZooError, match=r"99,980,001 cells; at most 50,000,000 cells"):
        fz.create_dataset(tmp_path / "a.xlsx")
