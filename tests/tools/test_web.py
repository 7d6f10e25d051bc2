"""The page of an exported model is whole and alone, and prepares values as Python does."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import pytest
import torch
from PIL import Image

import fusionzoo as fz
from fusionzoo.encoders.image import RESIZES, ImageProcessor, Preparation
from fusionzoo.errors import FusionZooError
from fusionzoo.ground.resampling import ROLL_OFF, ZERO_CROSSINGS, resampler
from fusionzoo.html.template import template
from fusionzoo.model.fusion_model import FusionModel, create_model
from fusionzoo.tools.export import web
from fusionzoo.tools.export.export import export
from helpers.browser import as_script, browser, served
from helpers.raw_files import raw_files

CHROMIUM, NODE = shutil.which("chromium"), shutil.which("node")
SOURCES = Path(web.__file__).parent
SIZES = ((31, 47), (90, 20), (16, 16), (200, 150))  # width, height
FITS = (
    Preparation(size=(24, 24), fit="pad", interpolation="bicubic"),
    Preparation(size=(24, 24), fit="crop", resized=(27, 27)),
    Preparation(size=(24, 20), fit="crop", resized=(28, 24), rounds_down=True),
    Preparation(size=(24, 24), fit="squash", resized=(29, 29), interpolation=RESIZES[-1]),
)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Stand-ins of the packages that npm fetches."""
    folder = tmp_path / "node_modules"
    for name, (_, files) in web.PACKAGES.items():
        for file in files:
            (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / file).write_text("export class Tokenizer {}\n")
    return folder


@pytest.fixture
def page(tmp_path: Path, packages: Path) -> Path:
    """The page of a model, whose exported folder holds three files."""
    for name in ("model.onnx", "preprocess.json", "labels.json"):
        (tmp_path / "exported").mkdir(exist_ok=True)
        (tmp_path / "exported" / name).write_text("{}")
    web.write_page(tmp_path / "exported", tmp_path / "page", ["image", "<b>"], packages)
    return tmp_path / "page"


def small_model() -> FusionModel:
    encoder = {"name": "vector/mlp", "in_dim": 6, "dim": 8, "hidden": 8}
    model = create_model("late_mean", {"a": encoder, "b": encoder}, classes=["no", "yes"], dim=8)
    return model.eval()


def test_a_page_is_whole_and_may_load_nothing_from_elsewhere(page: Path) -> None:
    files = {x.relative_to(page).as_posix() for x in page.rglob("*") if x.is_file()}
    parts = {f"packages/{Path(x).name}" for _, files in web.PACKAGES.values() for x in files}
    assert files == parts | {
        *("index.html", "page.js", "prepare.js"),
        *("model.onnx", "preprocess.json", "labels.json"),
    }
    text = (page / "index.html").read_text()
    assert "default-src 'none'" in text and "<b>" not in text and "&lt;b&gt;" in text
    assert "script-src 'self' 'wasm-unsafe-eval'; connect-src 'self';" in text
    for name in ("page.js", "prepare.js"):
        assert "://" not in (page / name).read_text()


def test_a_missing_package_is_named_and_no_page_is_left(tmp_path: Path, packages: Path) -> None:
    shutil.rmtree(packages / "onnxruntime-web")
    (tmp_path / "exported").mkdir()
    with pytest.raises(FusionZooError, match=r"ort.wasm.min.mjs is missing: `npm install onnx"):
        web.write_page(tmp_path / "exported", tmp_path / "page", ["a"], packages)
    assert not (tmp_path / "page").exists()


def test_without_npm_it_says_how_to_get_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path))
    monkeypatch.setattr(web.shutil, "which", lambda _: None)
    with pytest.raises(FusionZooError, match=r"--web needs npm.*`npm install .*--npm_packages"):
        web.fetch_packages()


def test_packages_are_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    def pack(command: list[str], cwd: str, **_: Any) -> Any:
        import tarfile

        fetched.append(command[2])
        (Path(cwd) / "package").mkdir(exist_ok=True)
        (Path(cwd) / "package" / "package.json").write_text("{}")
        with tarfile.open(Path(cwd) / "a.tgz", "w:gz") as archive:
            archive.add(Path(cwd) / "package", "package")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path))
    monkeypatch.setattr(web.shutil, "which", lambda name: name)
    monkeypatch.setattr(web.subprocess, "run", pack)
    folder = web.fetch_packages()
    assert web.fetch_packages() == folder and len(fetched) == len(web.PACKAGES) == 2
    assert fetched[0].startswith("onnxruntime-web@>=")
    assert (folder / "@huggingface" / "tokenizers" / "package.json").is_file()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "torch-export"}, "web= is of ONNX models"),
        ({}, "exists and is not empty: choose another web="),
    ],
)
def test_options_that_do_not_go_together_are_one_clear_error(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "mine.txt").write_text("")
    with pytest.raises(FusionZooError, match=message):
        export(small_model(), tmp_path / "out", web=tmp_path / "page", **settings)
    assert not (tmp_path / "out").exists()


def test_without_jinja_nothing_is_traced_for_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    template.cache_clear()
    monkeypatch.setattr("fusionzoo.tools.export.export._write_graph", None)
    with pytest.raises(FusionZooError, match="HTML pages need Jinja"):
        export(small_model(), tmp_path / "out", web=tmp_path / "page")


@pytest.mark.parametrize(
    ("by", "decode", "message"),
    [("own", [{}], "a is prepared by Mine"), ("vector", [], "the model has no target")],
)
def test_a_model_that_a_page_cannot_ask_is_refused(
    by: str, decode: list[dict[str, Any]], message: str
) -> None:
    about = {"modalities": {"a": {"processor": {"by": by, "processor": "Mine"}}}}
    with pytest.raises(FusionZooError, match=message):
        web.check_web(about, decode)


def run_node(page: Path, code: str) -> Any:
    """Run a script beside the page's, which may import them; return what it prints."""
    assert NODE is not None
    script = page / "test.mjs"
    script.write_text(f'import * as page from "./prepare.js";\n{code}')
    done = subprocess.run(
        [NODE, str(script)], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def pictures() -> list[Image.Image]:
    draw = np.random.default_rng(0)
    return [
        Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for width, height in SIZES
    ]


def as_objects(images: list[Image.Image]) -> str:
    """Write pictures as the page's objects."""
    parts = [
        {"width": x.width, "height": x.height, "data": np.asarray(x).ravel().tolist()}
        for x in images
    ]
    return (
        f"const pictures = {json.dumps(parts)};\n"
        "for (const x of pictures) x.data = Uint8ClampedArray.from(x.data);\n"
    )


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
def test_pictures_are_resized_as_pillow_does(page: Path) -> None:
    names, (width, height) = (
        ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"),
        (40, 33),
    )
    code = as_objects(pictures()) + (
        f"console.log(JSON.stringify({json.dumps(names)}.map((name) => pictures.map((x) =>"
        f" Array.from(page.resize(x, {width}, {height}, name).data)))));"
    )
    for name, resized in zip(names, run_node(page, code), strict=True):
        for picture, shades in zip(pictures(), resized, strict=True):
            wanted = picture.resize((width, height), Image.Resampling[name.upper()])
            off = np.abs(np.array(shades) - np.asarray(wanted).ravel().astype(int))
            # Versions of Pillow round differently, and cut small weights of bicubic differently.
            assert off.mean() < 1 and np.median(off) <= 1, (name, picture.size)


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
def test_pictures_fit_the_input_as_the_encoder_prepares_them(page: Path) -> None:
    described = [
        {
            "size": x.size,
            "resized": x.before_crop,
            "rounds_down": x.rounds_down,
            "fit": x.fit,
            "interpolation": x.interpolation,
        }
        for x in FITS
    ]
    code = as_objects(pictures()) + (
        f"console.log(JSON.stringify({json.dumps(described)}.map((by) => pictures.map((x) =>"
        " Array.from(page.fit(x, by))))));"
    )
    for preparation, fitted in zip(FITS, run_node(page, code), strict=True):
        for picture, shades in zip(pictures(), fitted, strict=True):
            tensor = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
            wanted = ImageProcessor(preparation)(tensor)["pixels"].flatten().int().numpy()
            off = np.abs(np.array(shades) - wanted)
            assert off.max() <= 4 and off.mean() < 0.5, (preparation.fit, picture.size)


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
@pytest.mark.parametrize(("rate", "wanted"), [(44_100, 8_000), (8_000, 16_000)])
def test_sounds_are_resampled_as_the_model_resamples_them(
    rate: int, wanted: int, page: Path
) -> None:
    sound = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, 3_001)).float()
    by = {"rate": wanted, "zero_crossings": ZERO_CROSSINGS, "roll_off": ROLL_OFF}
    code = f"const sound = Float64Array.from({sound.tolist()});\n" + (
        f"console.log(JSON.stringify(Array.from(page.resample(sound, {rate}, {json.dumps(by)}))));"
    )
    expected = resampler(rate, wanted)(sound)
    np.testing.assert_allclose(run_node(page, code), expected, atol=1e-5)


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
def test_the_rate_of_a_sound_is_found(page: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    for ending in ("wav", "flac", "ogg"):
        soundfile.write(page / f"a.{ending}", np.zeros(500), 22_050)
    (page / "a.mp3").write_bytes(b"ID3")
    files = [str(page / f"a.{ending}") for ending in ("wav", "flac", "ogg", "mp3")]
    code = (
        'import fs from "fs";\nconst read = (file) => new Uint8Array(fs.readFileSync(file));\n'
        + (f"console.log(JSON.stringify({files}.map((x) => page.rateOf(read(x).buffer))));")
    )
    assert run_node(page, code) == [22_050, 22_050, 22_050, 48_000]


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
def test_a_long_text_keeps_what_the_tokenizer_puts_around_it(page: Path) -> None:
    code = """
    const reader = { encode: (line, settings) => {
      const own = line ? line.split(" ").map(Number) : [];
      return { ids: settings?.add_special_tokens === false ? own : [101, ...own, 102, 103] };
    } };
    const by = { max_length: 6, pad_id: 0 };
    console.log(JSON.stringify([
      page.encode(reader, "1 2", by), page.encode(reader, "1 2 3 4 5 6", by),
      page.encode(reader, "", by), page.encode({ encode: () => ({ ids: [] }) }, "", by),
      [0.5, 1.5, 2.5, -0.5, -1.5, 2.4].map(page.round),
    ]));
    """
    short, long, empty, nothing, rounded = run_node(page, code)
    assert short == [101, 1, 2, 102, 103] and long == [101, 1, 2, 3, 102, 103]
    assert empty == [101, 102, 103] and nothing == [0]
    assert rounded == [0, 2, 2, 0, -2, 2]


@pytest.mark.nightly
@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
@pytest.mark.parametrize("name", ["digits", "stamps"])
def test_a_browser_answers_raw_samples_as_the_model_does(
    name: str, tmp_path: Path, record_property: Any
) -> None:
    """30 raw samples, each with every subset of its modalities."""
    dataset = fz.create_dataset(name)
    config = {"config": "stamps"} if name == "stamps" else {"data": "digits"}
    model = fz.train(**config, epochs=3, out=tmp_path / "run").model.to("cpu")  # type: ignore[arg-type]
    export(model, tmp_path / "out", web=tmp_path / "page")
    (tmp_path / "raw").mkdir()
    samples = raw_files(dataset.split("test"), tmp_path / "raw", 30)
    asked = [
        {key: sample[key] for key in keys}
        for sample in samples
        for count in range(1, len(sample) + 1)
        for keys in itertools.combinations(sample, count)
    ]
    expected = model.predict(asked)
    assert CHROMIUM is not None
    with served(tmp_path / "page") as address, browser(CHROMIUM) as tab:
        tab.open(address, 'document.body?.dataset.ready === "yes"')
        ask = 'import("./page.js").then((page) => page.answer(SAMPLE))'
        answers = [tab.run(ask.replace("SAMPLE", as_script(x)))["target"] for x in asked]
    pairs = list(zip(answers, expected, strict=True))
    same = np.array([max(x, key=x.__getitem__) == y.label for x, y in pairs])
    off = max(abs(x[key] - p) for x, y in pairs for key, p in y.probabilities.items())
    record_property("same", f"{same.mean():.3f}")
    record_property("answers", len(same))
    record_property("probabilities_within", f"{off:.4f}")
    assert {urlparse(x).hostname for x in tab.requests} == {urlparse(address).hostname}
    assert tab.complaints == [] and same.mean() >= 0.97


@pytest.mark.nightly
@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
def test_a_browser_reads_tables_vectors_and_sequences_as_the_model_does(tmp_path: Path) -> None:
    age = {"name": "age", "mean": 40.0, "std": 12.0}
    colour = {"name": "colour", "values": ["blue", "red", "yellow"]}
    encoders = {
        "table": {"name": "tabular/mlp", "columns": [age, colour]},
        "scores": {"name": "vector/identity", "in_dim": 3},
        "steps": {"name": "sequence/transformer", "in_dim": 2, "dim": 16},
    }
    torch.manual_seed(0)
    model = create_model("concat", encoders, classes=["no", "yes", "perhaps"], dim=16).eval()
    rows = [
        {"age": 31.5, "colour": "red"},
        {"age": None, "colour": "yellow"},
        {"age": -7, "colour": None},
        {"age": 1e6, "colour": "purple"},
    ]
    scores, steps = [0.5, -1.25, 3.0], [[0.1, 0.2], [-1.0, 2.0], [0.0, 4.0]]
    asked: list[dict[str, Any]] = [{"table": row} for row in rows]
    asked += [{"scores": scores}, {"steps": steps}, {"steps": steps[:1]}]
    asked += [{"table": row, "scores": scores, "steps": steps} for row in rows]
    export(model, tmp_path / "out", web=tmp_path / "page")
    assert CHROMIUM is not None
    with served(tmp_path / "page") as address, browser(CHROMIUM) as tab:
        tab.open(address, 'document.body?.dataset.ready === "yes"')
        for sample, expected in zip(asked, model.predict(asked), strict=True):
            ask = f'import("./page.js").then((page) => page.answer({as_script(sample)}))'
            answer = tab.run(ask)
            assert answer["target"] == pytest.approx(expected.probabilities, abs=1e-5), sample
        tab.run('document.querySelector("form input").value = "31.5"')
        tab.run('document.querySelector("form select").value = "red"')
        tab.run('document.querySelector("form button").click()')
        output = 'document.querySelector("output").textContent'
        tab.wait(f'!{output}.startsWith("Give")')
        shown = tab.run(output)
    first = model.predict([{"table": rows[0]}])[0]
    assert f"{first.label}{100 * max(first.probabilities.values()):.1f} %" in shown
    assert tab.complaints == []
