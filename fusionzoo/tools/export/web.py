"""A page that answers in the browser: an exported model, its scripts, and packages of npm."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fusionzoo.errors import FusionZooError
from fusionzoo.files import cache_root, replacing_folder, write_text
from fusionzoo.html.template import template
from fusionzoo.model.folder import NAME as DIGESTS
from fusionzoo.model.folder import OPTIONAL

from .preprocess import OWN

# npm packages: the least version, and the files of each that the page needs.
PACKAGES = {
    "onnxruntime-web": (
        "1.20",
        (
            "dist/ort.wasm.min.mjs",
            "dist/ort-wasm-simd-threaded.mjs",
            "dist/ort-wasm-simd-threaded.wasm",
        ),
    ),
    "@huggingface/tokenizers": ("0.2", ("dist/tokenizers.min.mjs",)),
}
SCRIPTS = ("page.js", "prepare.js")
NEED_NOT = ("example.py", DIGESTS, *OPTIONAL)  # of the exported folder


def check_web(about: Mapping[str, Any], decode: list[dict[str, Any]]) -> None:
    """Raise an error for a model that a page cannot feed or whose answers it cannot show."""
    for name, modality in about["modalities"].items():
        if modality["processor"]["by"] == OWN:
            raise FusionZooError(
                f"--web: {name} is prepared by {modality['processor']['processor']}, for which a"
                " browser has no counterpart"
            )
    if not decode:
        raise FusionZooError("--web: the model has no target, so a page has no answer to show")


def write_page(exported: Path, page: Path, modalities: Collection[str], packages: Path) -> None:
    """Write a static page with a copy of an exported model; it loads nothing from elsewhere.

    Args:
        exported: folder that `export` wrote, of a whole ONNX model
        page: folder to write, new or empty
        modalities: their names
        packages: folder with the packages of npm, as `node_modules`
    """
    with replacing_folder(page) as folder:
        shutil.copytree(
            exported, folder, ignore=shutil.ignore_patterns(*NEED_NOT), dirs_exist_ok=True
        )
        (folder / "packages").mkdir()
        for name, (_, files) in PACKAGES.items():
            for file in files:
                source = packages / name / file
                if not source.is_file():
                    raise FusionZooError(f"{source} is missing: {_how_to_get(packages)}")
                shutil.copy2(source, folder / "packages" / source.name)
        for name in SCRIPTS:
            shutil.copy2(Path(__file__).with_name(name), folder / name)
        text = page_template().render(title=f"A model of {', '.join(modalities)}")
        write_text(folder / "index.html", text)


def page_template() -> Any:
    """Return the page's template; an error where Jinja is missing."""
    return template("page.html", "fusionzoo.tools.export")


def fetch_packages() -> Path:
    """Return the cache's folder of npm packages, fetched by npm the first time."""
    folder = cache_root() / "npm"
    for name, (version, _) in PACKAGES.items():
        if not (folder / name).is_dir():
            _fetch(name, version, folder)
    return folder


def _fetch(name: str, version: str, folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise FusionZooError(f"--web needs npm, to fetch {name} once; without it, {_how_to_get()}")
    print(f"fetching {name} by npm into {folder}")
    with TemporaryDirectory() as scratch, replacing_folder(folder / name) as target:
        command = [npm, "pack", f"{name}@>={version}", "--pack-destination", scratch]
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=scratch)
        archives = list(Path(scratch).glob("*.tgz"))
        if done.returncode or len(archives) != 1:
            lines = done.stderr.strip().splitlines() or ["no archive"]
            raise FusionZooError(f"{' '.join(command[:3])}: {lines[-1]}; {_how_to_get()}")
        with tarfile.open(archives[0]) as archive:
            archive.extractall(scratch, filter="data")
        shutil.copytree(Path(scratch) / "package", target, dirs_exist_ok=True)


def _how_to_get(folder: Path | None = None) -> str:
    """Say how to get the packages on a machine with npm."""
    return (
        f"`npm install {' '.join(PACKAGES)}` elsewhere, and --npm_packages"
        f" {folder or 'node_modules'}, its folder node_modules"
    )
