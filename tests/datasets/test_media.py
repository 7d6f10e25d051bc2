"""Whatever the file, an image is RGB uint8, a clip mono float32, or one clear error."""

from __future__ import annotations

import base64
import gzip
import io
import os
import re
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pytest
import resvg_py
import soundfile
import torch
import torchvision.io  # noqa: F401, before memory is traced, which slows imports
from PIL import Image, ImageOps, PngImagePlugin, TiffImagePlugin

import fusionzoo as fz
from fusionzoo import create_dataset
from fusionzoo.config import RunConfig
from fusionzoo.datasets.media.audio import AudioFile, decode_audio
from fusionzoo.datasets.media.budgets import BUDGETS
from fusionzoo.datasets.media.decode import decode, decode_image, decode_text
from fusionzoo.encoders.audio import WaveProcessor
from fusionzoo.errors import FusionZooError
from fusionzoo.inputs.data import with_image_range
from helpers.memory import at_most

RED = (200, 30, 40)


def saved(picture: Image.Image, path: Path, **settings: Any) -> Path:
    picture.save(path, **settings)
    return path


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "bmp", "tiff"])
def test_each_format_gives_the_same_picture(suffix: str, tmp_path: Path) -> None:
    path = saved(Image.new("RGB", (6, 4), RED), tmp_path / f"a.{suffix}")
    image = decode_image(path)
    assert image.shape == (3, 4, 6)
    assert image.dtype == torch.uint8
    assert (image[:, 1, 1].int() - torch.tensor(RED)).abs().max() <= 6


def test_transparency_is_composed_on_white(tmp_path: Path) -> None:
    clear = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    half = Image.new("RGBA", (2, 2), (255, 0, 0, 128))
    grey = Image.new("LA", (2, 2), (0, 0))
    assert (decode_image(saved(clear, tmp_path / "a.png")) == 255).all()
    assert decode_image(saved(half, tmp_path / "b.png"))[:, 0, 0].tolist() == [255, 127, 127]
    assert (decode_image(saved(grey, tmp_path / "c.png")) == 255).all()
    one_colour = saved(Image.new("RGB", (2, 2), RED), tmp_path / "d.png", transparency=RED)
    assert (decode_image(one_colour) == 255).all()
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, *RED])
    palette.putpixel((1, 0), 1)
    image = decode_image(saved(palette, tmp_path / "e.gif", transparency=0))
    assert image[:, 0].T.tolist() == [[255] * 3, list(RED)]


def test_cmyk_grey_and_one_bit_pictures_become_rgb(tmp_path: Path) -> None:
    cmyk = Image.new("RGB", (8, 8), RED).convert("CMYK")
    found = decode_image(saved(cmyk, tmp_path / "a.jpg"))[:, 4, 4].int()
    assert (found - torch.tensor(RED)).abs().max() <= 6
    for mode, value, grey in (("L", 77, 77), ("1", 1, 255)):
        image = decode_image(saved(Image.new(mode, (2, 2), value), tmp_path / "b.png"))
        assert image[:, 0, 0].tolist() == [grey] * 3


def test_sixteen_bits_are_scaled_and_not_cut_off(tmp_path: Path) -> None:
    ramp = np.array([[0, 16384, 32768, 65535]], dtype=np.uint16)
    image = decode_image(saved(Image.fromarray(ramp), tmp_path / "a.png"))
    assert image[0, 0].tolist() == [0, 63, 127, 255]
    dark = np.full((2, 2), 257, dtype=np.uint16)
    assert (decode_image(saved(Image.fromarray(dark), tmp_path / "b.png")) == 1).all()


RAMP = np.linspace(0, 1, 64)[None]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (RAMP.astype(np.float32), "has 32 bits, and values from 0 to 1: .*image_range 0,1 says"),
        ((255 * RAMP - 20).astype(np.int32), "values from -20 to 235: .*image_range -20,255 says"),
        (np.where(RAMP < 0.1, -np.inf, RAMP).astype(np.float32), "that are not finite"),
        (np.where(RAMP > 0.9, np.nan, RAMP).astype(np.float32), "that are not finite"),
    ],
)
def test_a_picture_with_values_that_have_no_grey_is_refused(
    values: np.ndarray, reason: str, tmp_path: Path
) -> None:
    path = saved(Image.fromarray(values), tmp_path / "scan.tiff")
    with pytest.raises(FusionZooError, match=rf"scan\.tiff .*{reason}"):
        decode_image(path)
    with pytest.raises(FusionZooError, match=rf"the image .*{reason}"):
        decode_image(Image.fromarray(values))


def test_signed_values_of_eight_bits_are_refused(tmp_path: Path) -> None:
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags[339] = 2  # signed, which Pillow ignores
    path = saved(Image.new("L", (6, 4), 200), tmp_path / "scan.tiff", tiffinfo=tags)
    with pytest.raises(FusionZooError, match=r"scan\.tiff has signed values of 8 bits"):
        decode_image(path)


@pytest.mark.parametrize(
    ("dtype", "ending"),
    [(np.uint16, "png"), (np.uint16, "tiff"), (np.int32, "tiff"), (np.float32, "tiff")],
)
def test_images_of_more_than_eight_bits_have_the_range_of_the_data(
    dtype: Any,
    ending: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fusionzoo.errors._warned", {})
    steps = np.array([[0, 100, 1000, 2000, 4000, 4095]]).astype(dtype)
    path = saved(Image.fromarray(steps), tmp_path / f"scan.{ending}")
    greys = decode_image(path, (0, 4000))[0, 0].tolist()
    assert greys == [0, 6, 63, 127, 255, 255]
    assert decode_image(path, (1000, 2000))[0, 0].tolist() == [0, 0, 0, 255, 255, 255]
    assert "17% of its values lie outside of 0 to 4000" in caplog.text


def deep_table(folder: Path, highest: float, ending: str = "tiff", dtype: Any = np.uint16) -> str:
    """A table of 12 pictures whose values rise from row to row up to `highest`, in the last one."""
    rows = ["id,scan,split,target"]
    for row in range(12):
        values = np.full((6, 6), highest * (row + 1) / 12).astype(dtype)
        saved(Image.fromarray(values), folder / f"{row}.{ending}")
        split = "train" if row % 2 else "val" if row % 4 else "test"
        rows.append(f"{row},{row}.{ending},{split},{'ab'[row % 3 == 0]}")
    (folder / "t.csv").write_text("\n".join(rows))
    return str(folder / "t.csv")


@pytest.mark.parametrize(
    ("highest", "dtype", "white"),
    [(4071, np.uint16, 4095), (1.02, np.float32, 1.02), (300, np.int32, 300), (1000, "i4", 1023)],
)
def test_one_range_is_learnt_for_all_images_of_a_data_set(
    highest: float, dtype: Any, white: float, tmp_path: Path
) -> None:
    settings = {"root": deep_table(tmp_path, highest, dtype=dtype), "kinds": {"scan": "image"}}
    dataset = fz.create_dataset("manifest", **settings)
    cfg, learned = with_image_range(RunConfig(data=settings), dataset)
    assert cfg.data["image_range"] == {"scan": [0, pytest.approx(white)]}
    assert "in scan (--data.image_range)" in learned.provenance.reading[-1]
    again = fz.create_dataset("manifest", **{**settings, "image_range": [0, 2 * white]})
    assert with_image_range(RunConfig(), again)[1] is again
    greys = [[int(x[row].values["scan"].max()) for row in (5, 11)] for x in (learned, again)]
    assert greys[0] == [pytest.approx(2 * x, abs=1) for x in greys[1]]
    assert again.split("train")[0].values["scan"].max() < again[11].values["scan"].max()


@pytest.mark.parametrize("ranges", [[0], [5, 5], [0, "x"], [0, float("nan")], {"scan": [3, 1]}, 7])
def test_a_range_that_is_none_is_one_clear_error(ranges: Any, tmp_path: Path) -> None:
    with pytest.raises(FusionZooError, match="image_range"):
        fz.create_dataset(
            "manifest", root=deep_table(tmp_path, 4000), kinds={"scan": "image"}, image_range=ranges
        )


@pytest.mark.slow
def test_a_model_reads_images_in_the_range_of_its_training(tmp_path: Path) -> None:
    table = deep_table(tmp_path, 4000, dtype=np.int32)
    net = {"name": "timm/resnet10t", "pretrained": False, "size": 32}
    run = fz.train(
        table,
        kinds={"scan": "image"},
        encoders={"scan": net},
        epochs=1,
        fusion="mean",
        out=tmp_path / "run",
    )
    model = fz.load(run.folder)
    assert model.data_settings["image_range"] == {"scan": [0, 4095]}
    pixels = model.batch([{"scan": str(tmp_path / "11.tiff")}]).inputs["scan"]["pixels"]
    assert pixels.unique().tolist() == [4000 * 255 // 4095]
    answer = model.predict([{"scan": str(tmp_path / "11.tiff")}])[0].probabilities
    predicted = fz.predict(run, table, split="all").to_pylist()
    assert predicted[11]["p_a"] == pytest.approx(answer["a"], abs=1e-4)


BLOCKS = np.kron(np.arange(6).reshape(2, 3) * 40, np.ones((16, 16))).astype(np.uint8)  # no symmetry


def orientation_tag(value: int, form: str = "H", order: str = ">", count: int = 1) -> bytes:
    """EXIF with an orientation as a number, or a list, of 8, 16 or 32 bits."""
    types = {"B": 1, "H": 3, "I": 4}
    values = struct.pack(order + form * count, *[value] * count).ljust(4, b"\0")
    entry = struct.pack(order + "HHI", 0x0112, types[form], count) + values
    start = b"MM\0*\0\0\0\x08" if order == ">" else b"II*\0\x08\0\0\0"
    return start + struct.pack(order + "H", 1) + entry + bytes(4)


def xmp(text: str) -> bytes:
    return f"<x:xmpmeta xmlns:x='adobe:ns:meta/'>{text}</x:xmpmeta>".encode()


def in_jpeg(*segments: bytes) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(BLOCKS).save(buffer, "JPEG", quality=95)
    data = buffer.getvalue()
    coded = [b"\xff\xe1" + struct.pack(">H", len(x) + 2) + x for x in segments]
    return data[:2] + b"".join(coded) + data[2:]


EXIF, XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
PLACEMENTS = {
    "none": [],
    "8 bits": [EXIF + orientation_tag(6, "B")],
    "little-endian": [EXIF + orientation_tag(6, order="<")],
    "32 bits": [EXIF + orientation_tag(8, "I", "<")],
    "a list": [EXIF + orientation_tag(6, count=2)],
    "header twice": [EXIF + EXIF + orientation_tag(5)],
    "behind XMP": [XMP + xmp(""), EXIF + orientation_tag(7)],
    "XMP": [XMP + xmp("<tiff:Orientation>6</tiff:Orientation>")],
    "an attribute of XMP": [XMP + xmp('<a tiff:Orientation="8"/>')],
    "EXIF before XMP": [EXIF + orientation_tag(1), XMP + xmp('<a tiff:Orientation="8"/>')],
    "upright, then not": [XMP + xmp('<a tiff:Orientation="1"/>'), EXIF + orientation_tag(3)],
    "two segments": [EXIF + orientation_tag(1), EXIF + orientation_tag(6)],
    "another place": [b"other\0" + orientation_tag(6)],
    "99": [EXIF + orientation_tag(99)],
}


def as_pillow_turns(data: bytes) -> torch.Tensor:
    with Image.open(io.BytesIO(data)) as image:
        turned = ImageOps.exif_transpose(image).convert("RGB")
    return torch.from_numpy(np.array(turned)).permute(2, 0, 1)


@pytest.mark.filterwarnings("ignore:Metadata Warning, tag 274 had too many entries")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_jpeg_is_turned_as_pillow_turns_it(placement: str) -> None:
    data = in_jpeg(*PLACEMENTS[placement])
    assert torch.equal(decode_image(data), as_pillow_turns(data))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpeg", "png", "tiff", "webp"])
def test_every_orientation_is_applied_in_every_format(suffix: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    by_xmp = xmp(f'<a tiff:Orientation="{orientation}"/>')
    text = PngImagePlugin.PngInfo()
    text.add_itxt("XML:com.adobe.xmp", by_xmp.decode())
    settings: list[dict[str, Any]] = [{"exif": exif}]
    settings += [{"pnginfo": text}] if suffix == "png" else []
    settings += [{"xmp": by_xmp}] if suffix in ("jpeg", "webp") else []
    for setting in settings:
        buffer = io.BytesIO()
        Image.fromarray(BLOCKS).convert("RGB").save(buffer, suffix, **setting)
        image = decode_image(buffer.getvalue())
        assert torch.equal(image, as_pillow_turns(buffer.getvalue()))
        assert image.shape[1:] == ((48, 32) if orientation > 4 else (32, 48))


def test_an_image_whose_exif_cannot_be_read_is_not_turned_which_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusionzoo.errors._warned", {})
    for suffix, exif in (("png", b"XX\0*" + bytes(9)), ("webp", b"MM\0*")):
        damaged = saved(Image.fromarray(BLOCKS), tmp_path / f"a.{suffix}", exif=EXIF + exif)
        assert decode_image(damaged).shape == (3, 32, 48)
        reason = "its EXIF cannot be read, and so the image is not turned"
        assert caplog.records[-1].getMessage() == f"{damaged}: {reason}"


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_the_fast_decoder_and_pillow_agree(mode: str, suffix: str, tmp_path: Path) -> None:
    if (mode, suffix) == ("CMYK", "png"):
        mode = "P"  # PNG has no CMYK
    noise = np.random.default_rng(0).integers(0, 255, (9, 7, 3), dtype=np.uint8)
    picture = Image.fromarray(noise).resize((70, 50)).convert(mode)
    path = saved(picture, tmp_path / f"a.{suffix}")
    with Image.open(path) as reference:
        wanted = torch.from_numpy(np.array(reference.convert("RGB"))).permute(2, 0, 1)
    assert torch.equal(decode_image(path), wanted)


def test_a_png_whose_pixels_are_damaged_is_refused_and_ends_no_process(tmp_path: Path) -> None:
    """torchvision 0.29 ends the process; Pillow alone may return other pixels."""
    noise = np.random.default_rng(0).integers(0, 255, (40, 30, 3), dtype=np.uint8)
    path = saved(Image.fromarray(noise), tmp_path / "a.png")
    whole = path.read_bytes()
    first = whole.index(b"IDAT") + 4
    for position in (first, first + 50, len(whole) - 17, len(whole) - 13):  # to the checksum's end
        damaged = bytearray(whole)
        damaged[position] ^= 1
        with pytest.raises(FusionZooError, match="is damaged: the checksum of its pixels does not"):
            decode_image(bytes(damaged))
    pixels = zlib.compress(bytes(7))  # too few, with a checksum that is right
    chunk = struct.pack(">I", len(pixels)) + b"IDAT" + pixels
    chunk += struct.pack(">I", zlib.crc32(b"IDAT" + pixels))
    with pytest.raises(FusionZooError, match="cannot be read as an image: "):
        decode_image(whole[: first - 8] + chunk + whole[-12:])


def test_of_an_animation_the_first_picture_counts(tmp_path: Path) -> None:
    first, second = Image.new("RGB", (3, 3), RED), Image.new("RGB", (3, 3), (0, 0, 0))
    path = saved(first, tmp_path / "a.gif", save_all=True, append_images=[second])
    assert decode_image(path)[:, 0, 0].tolist() == list(RED)


def test_a_drawing_is_rendered_on_white(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    path.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10">'
        '<rect width="5" height="10" fill="#c81e28"/></svg>'
    )
    image = decode_image(path)
    assert image.shape == (3, 512, 512)
    assert image[:, 256, 100].tolist() == list(RED)
    assert image[:, 256, 400].tolist() == [255] * 3


def png_header(width: int, height: int) -> bytes:
    """A PNG that announces a size and holds nothing."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    whole = struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    empty = struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    return b"\x89PNG\r\n\x1a\n" + whole + empty


def jpeg_header(width: int, height: int) -> bytes:
    """Return a JPEG that states another size than that of its pixels, behind its tables."""
    data, size = in_jpeg(), struct.pack(">HH", *BLOCKS.shape[:2])
    assert data.count(size) == 1
    return data.replace(size, struct.pack(">HH", height, width))


# Up to twice its limit Pillow only warns; a user's warnings are no errors, and the budget refuses.
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("header", [png_header, jpeg_header])
@pytest.mark.parametrize(("width", "height"), [(30_000, 30_000), (10_000, 9_000), (1, 65_535)])
def test_a_picture_of_too_many_pixels_is_refused_by_its_header(
    header: Callable[[int, int], bytes],
    width: int,
    height: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decode_nothing(*_: object) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr("fusionzoo.datasets.media.decode._decode_jpeg", decode_nothing)
    path = tmp_path / "huge.picture"
    path.write_bytes(header(width, height))
    size = rf"({width * height} pixels|{width} x {height} pixels)"
    with pytest.raises(FusionZooError, match=rf"huge\.picture .*{size}"):
        decode_image(path)


SVG = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
RECT = '<rect width="5" height="5" fill="red"/>'
MANY_USES = "".join(
    f'<g id="a{i}">{f"""<use xlink:href="#a{i - 1}"/>""" * 10}</g>' for i in range(1, 9)
)


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        ('width="20" height="10"', (256, 512)),
        ('width="1in" height="144pt"', (512, 256)),
        ('viewBox="0 0 10 20"', (512, 256)),
        ('width="1" height="100000000"', (512, 1)),
        ('width="100000000" height="1"', (1, 512)),
        ('width="100000000" height="100000000"', (512, 512)),
    ],
)
def test_the_longer_side_of_a_drawing_is_fixed(size: str, shape: tuple[int, int]) -> None:
    assert decode_image(f"{SVG}{size}>{RECT}</svg>".encode()).shape == (3, *shape)


def test_a_drawing_wider_than_high_keeps_its_pixels() -> None:
    text = f'{SVG}width="20" height="10"><circle cx="9" cy="5" r="4" fill="red"/></svg>'
    by_width = bytes(resvg_py.svg_to_bytes(svg_string=text, width=512))
    assert torch.equal(decode_image(text.encode()), decode_image(by_width))


@pytest.mark.parametrize(
    ("drawing", "reason"),
    [
        (
            '<pattern id="p" width="1000000" height="1000000" patternUnits="userSpaceOnUse">'
            f'{RECT}</pattern><rect width="10" height="10" fill="url(#p)"/>',
            "takes more than 2 GiB of memory to render",
        ),
        (
            '<filter id="f" x="-999999%" y="-999999%" width="2000000%" height="2000000%">'
            + '<feTurbulence baseFrequency="9" numOctaves="500"/>' * 9
            + '</filter><rect width="9" height="9" filter="url(#f)"/>',
            "takes more than 1 s of CPU time to render",
        ),
        (f'<defs><g id="a0">{RECT}</g>{MANY_USES}</defs><use xlink:href="#a8"/>', "read|draw"),
        ("<rect", "cannot be read as a drawing"),
    ],
)
def test_a_drawing_that_the_renderer_cannot_bear_is_one_error(
    drawing: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusionzoo.datasets.media.decode.MAX_SECONDS", 1)
    path = tmp_path / "hostile.svg"
    path.write_text(f'{SVG}width="10" height="10">{drawing}</svg>')
    with pytest.raises(FusionZooError, match=reason) as caught:
        decode_image(path)
    assert "hostile.svg" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("folder", ["data:a", "#", "data:a#,", "#a"])
@pytest.mark.parametrize(
    "element",
    [
        '<image href="{}" width="9" height="9"/>',
        '<image xlink:href=" {}" width="9" height="9"/>',
        '<filter id="f"><feImage href="{}"/></filter><rect width="9" height="9" filter="url(#f)"/>',
    ],
)
def test_a_link_that_only_begins_like_one_into_the_drawing_is_refused(
    element: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    (data / folder).mkdir(parents=True)
    saved(Image.new("RGB", (9, 9), RED), tmp_path / "secret.png")
    monkeypatch.chdir(data)
    drawing = element.format(f"{folder}/../../secret.png")
    (data / "a.svg").write_text(f'{SVG}width="9" height="9">{drawing}</svg>')
    with pytest.raises(FusionZooError, match=r"a\.svg cannot .* refers to the file '(data:|#)"):
        decode_image(data / "a.svg")


def test_a_drawing_inside_a_drawing_opens_no_file(tmp_path: Path) -> None:
    secret = saved(Image.new("RGB", (9, 9), RED), tmp_path / "secret.png")
    size = 'width="9" height="9"'
    inner = f'{SVG}{size}><image href="{secret}" {size}/></svg>'.encode()
    link = f"data:image/svg+xml;base64,{base64.b64encode(inner).decode()}"
    drawing = f'{SVG}{size}><image href="{link}" {size}/></svg>'
    assert (decode_image(drawing.encode()) == 255).all()


def test_links_to_data_and_to_names_in_the_drawing_are_rendered() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (9, 9), RED).save(buffer, "PNG")
    link = f"data:image/png;base64,\n{base64.b64encode(buffer.getvalue()).decode()}"
    size = 'width="9" height="9"'
    for drawing in (
        f'<image href="{link}" {size}/>',
        f'<defs><rect id="a-b.c" {size} fill="#c81e28"/></defs><use xlink:href="#a-b.c"/>',
    ):
        image = decode_image(f"{SVG}{size}>{drawing}</svg>".encode())
        assert image[:, 256, 256].tolist() == list(RED)


def test_drawings_are_rendered_in_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").touch()
    monkeypatch.setattr(
        "fusionzoo.datasets.media.decode.RENDER", "import os; exit(str(os.listdir()))"
    )
    with pytest.raises(FusionZooError, match=r"a drawing: \[\]$"):
        decode_image(f"{SVG}/>".encode())


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3"])
def test_stereo_of_any_format_becomes_mono_at_its_own_rate(suffix: str, tmp_path: Path) -> None:
    time = np.arange(22050) / 44100
    left = 0.5 * np.sin(2 * np.pi * 440 * time)
    path = tmp_path / f"a.{suffix}"
    soundfile.write(path, np.stack([left, np.zeros_like(left)], 1), 44100)
    clip = decode_audio(path)
    assert clip.rate == 44100
    assert clip.samples.ndim == 1
    assert clip.samples.dtype == torch.float32
    assert abs(len(clip.samples) - 22050) <= 2400  # MP3 adds a frame or two
    assert clip.samples[2000:20000].abs().max() == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize(
    ("kind", "suffix"), [("image", "png"), ("image", "jpg"), ("audio", "wav"), ("audio", "ogg")]
)
@pytest.mark.parametrize("damage", ["empty", "truncated", "not media", "missing"])
def test_a_damaged_file_is_one_error_that_names_it(
    kind: str, suffix: str, damage: str, tmp_path: Path
) -> None:
    path = tmp_path / f"broken.{suffix}"
    if kind == "image":
        noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        saved(Image.fromarray(noise), path)
    else:
        soundfile.write(path, np.zeros(8000), 8000)
    contents = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        cut = {"empty": b"", "truncated": contents[: 40 if kind == "audio" else len(contents) // 2]}
        path.write_bytes(cut.get(damage, b"this is no picture and no sound " * 9))
    with pytest.raises(FusionZooError) as caught:
        decode(kind, path)
    assert f"broken.{suffix}" in str(caught.value)


def test_texts_come_from_strings_and_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffgrüße\n", encoding="utf-8")
    assert decode_text(tmp_path / "a.txt") == "grüße"
    assert decode_text("a.txt") == "a.txt"
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FusionZooError, match=r"b\.txt is not UTF-8"):
        decode_text(tmp_path / "b.txt")


def test_values_that_are_no_finite_numbers_are_an_error(tmp_path: Path) -> None:
    np.save(tmp_path / "nan.npy", np.array([1.0, np.nan]))
    np.savez(tmp_path / "several.npz", a=np.ones(2), b=np.ones(2))
    soundfile.write(tmp_path / "nan.wav", np.array([0.0, np.inf]), 8000, subtype="FLOAT")
    wrong: list[tuple[str, Any]] = [
        ("vector", tmp_path / "nan.npy"),
        ("vector", tmp_path / "several.npz"),
        ("audio", tmp_path / "nan.wav"),
        ("vector", ["a"]),
        ("sequence", [[1.0], [2.0, 3.0]]),
        ("vector", [1.0, float("inf")]),
    ]
    for kind, value in wrong:
        with pytest.raises(FusionZooError):
            decode(kind, value)


def test_vectors_and_sequences_come_from_lists_and_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((3, 2)))
    assert decode("sequence", tmp_path / "a.npy").shape == (3, 2)
    assert decode("vector", [1, 2, 3]).tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(FusionZooError, match="expected 1 dimensions"):
        decode("vector", tmp_path / "a.npy")


# ---- what libraries write


@pytest.fixture
def in_a_worker_that_said_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusionzoo.errors._warned", {})
    monkeypatch.setattr("fusionzoo.datasets.media.decode.get_worker_info", lambda: True)


def with_junk(format: str, **settings: Any) -> bytes:
    """An image with bytes that do not belong there."""
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, format, **settings)
    data = bytearray(buffer.getvalue())
    if format == "JPEG":
        return bytes(data[:-2]) + b"123456789" + bytes(data[-2:])
    data[4000:4040] = b"\xff" * 40  # in TIFF, positions stay as they are
    return bytes(data)


@pytest.mark.usefixtures("in_a_worker_that_said_nothing")
@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("a.JPEG", {}, r"Corrupt JPEG data: \d extraneous bytes before marker 0xd9"),
        ("a.TIFF", {"compression": "tiff_adobe_deflate"}, "ZIPDecode: "),
        ("a.TIFF", {"compression": "tiff_lzw"}, "LZWDecode: |tempfile.tif: "),
    ],
)
def test_what_a_library_writes_to_stderr_is_one_line_with_the_name(
    name: str,
    settings: dict[str, Any],
    says: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for folder in ("x", "y"):
        path = tmp_path / folder / name
        path.parent.mkdir()
        path.write_bytes(with_junk(path.suffix[1:], **settings))
        with suppress(FusionZooError):
            decode_image(path)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    for folder, message in zip("xy", messages, strict=True):
        assert re.match(f"{tmp_path / folder / name}: ({says})", message)
    assert capfd.readouterr().err == ""


def test_a_large_picture_given_as_an_object_is_refused_before_it_is_loaded() -> None:
    with pytest.raises(FusionZooError, match=r"the image is too large.*10000 x 9000"):
        decode_image(Image.new("1", (10_000, 9_000)))


def test_outside_of_a_worker_the_process_keeps_its_stderr_and_warnings(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> int:
        pytest.fail("other threads may write now")

    monkeypatch.setattr("fusionzoo.datasets.media.decode._memory_file", fail)
    (tmp_path / "a.jpg").write_bytes(with_junk("JPEG"))
    decode_image(tmp_path / "a.jpg")
    decode_image(saved(Image.fromarray(BLOCKS), tmp_path / "a.png"))
    assert "Corrupt JPEG data" in capfd.readouterr().err


@pytest.mark.usefixtures("in_a_worker_that_said_nothing")
@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_a_warning_of_pillow_names_each_file(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    exif = EXIF + b"II*\0\x08\0\0\0\x05\0" + bytes(12)  # five tags, one of which is there
    paths = [
        saved(Image.fromarray(BLOCKS), tmp_path / f"{n}.{suffix}", exif=exif) for n in range(2)
    ]
    for path in paths:
        decode_image(path)
    messages = [record.getMessage() for record in caplog.records]
    assert [message.partition(": Corrupt EXIF data")[0] for message in messages] == [
        *map(str, paths)
    ]
    assert not recwarn.list


@pytest.mark.usefixtures("in_a_worker_that_said_nothing")
def test_a_warning_about_bytes_names_their_sample(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"id": name, "image": with_junk("JPEG")} for name in "ab"]
    data = create_dataset(rows, targets={})
    for sample in (data[0], data[1]):
        assert sample is not None
    messages = [x.getMessage() for x in caplog.records if "Corrupt JPEG" in x.getMessage()]
    assert [re.search(r"sample '(\w)', image: Corrupt", x)[1] for x in messages] == ["a", "b"]


# ---- beyond a budget, cut off, unknown


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
