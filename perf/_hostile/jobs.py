"""Every hostile file as a job, and a process for each."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from PIL import Image

from fusionzoo.errors import FusionZooError

from .cases import Case, hand_made
from .families import families
from .files import FORMATS, MEDIA, MODEL_FILES, TABLES, model_folder, mutate, originals
from .run import (
    COLOUR,
    LEVEL,
    SECONDS,
    SECRET,
    Outcome,
    open_media,
    open_model,
    open_recipe,
    open_table,
    run,
)


@dataclass
class Job:
    """One file to open: how it is written below a root, and what then opens it."""

    format: str
    source: str  # mutated, hand-made, planted
    name: str
    prepare: Callable[[Path], Callable[[], Any]]
    seconds: float = SECONDS


def mutated(folder: Path, formats: Collection[str], per_format: int, seed: int) -> Iterator[Job]:
    """Yield mutations of whole files of some formats."""
    model, files = folder / "model", originals()
    for name in [name for name in MODEL_FILES if name in formats]:
        model_folder(folder)
        files[name] = [path.read_bytes() for path in _model_paths(model, name)]
    donors = [contents for group in files.values() for contents in group]
    for number, format in enumerate(FORMATS):
        draw = random.Random(1000 * seed + number)
        for count in range(per_format if format in formats else 0):
            index = draw.randrange(len(files[format]))
            how, data = mutate(files[format][index], donors, draw)
            yield Job(format, "mutated", f"{how} {count}", _opener(format, index, data, model))


def made_by_hand(folder: Path, formats: Collection[str]) -> Iterator[Job]:
    """Yield the hand-made files of some formats."""
    secret, model = write_secrets(folder), model_folder(folder)
    for case in filter(lambda case: case.format in formats, hand_made(secret)):
        yield Job(case.format, "hand-made", case.name, lambda root, x=case: _open(x, root, model))
    for family in filter(lambda family: family.format in formats, families()):
        yield Job(
            family.format,
            "hand-made",
            family.name,
            lambda root, x=family: lambda: x.open(root),  # type: ignore[misc]
        )


def planted(folder: Path) -> Iterator[Job]:
    """Yield what must be noticed as a fault, and two jobs that are none."""
    secret = write_secrets(folder)

    def refuse(message: str) -> None:
        raise FusionZooError(message)

    for name, work in {
        "abort": lambda root: os.abort,
        "sleep": lambda root: lambda: time.sleep(60),
        "divide": lambda root: lambda: 1 / 0,
        "allocate": lambda root: lambda: bytearray(1 << 36),
        "open outside": lambda root: (secret / "secret.txt").read_text,
        "return outside": lambda root: lambda: ["a text with " + SECRET],
        "two lines": lambda root: lambda: refuse("two\nlines"),
        "one line": lambda root: lambda: refuse("one line"),
        "write inside": lambda root: lambda: (root / "a").write_text("x"),
    }.items():
        yield Job("fault", "planted", name, work, 2 if name == "sleep" else SECONDS)


def write_secrets(folder: Path) -> Path:
    """Write files that no case may read, and return their folder."""
    folder /= "secret"
    folder.mkdir(exist_ok=True)
    (folder / "secret.txt").write_text(SECRET)
    Image.new("RGB", (16, 16), COLOUR).save(folder / "secret.png")
    soundfile.write(folder / "secret.wav", np.full(8000, LEVEL, np.float32), 8000, "FLOAT")
    np.save(folder / "secret.npy", np.full(9, LEVEL, np.float32))
    return folder


def _model_paths(model: Path, name: str) -> list[Path]:
    return sorted((model / "text").iterdir()) if name == "tokenizer" else [model / name]


def _opener(
    format: str, index: int, data: bytes, model: Path
) -> Callable[[Path], Callable[[], Any]]:
    """Return what writes a mutated file below a root, and returns what opens it."""

    def prepare(root: Path) -> Callable[[], Any]:
        if format in MODEL_FILES:
            target = _model_paths(model, format)[index].relative_to(model)
            return _open_copy(model, root, {str(target): data})
        if format in MEDIA:
            (root / f"a.{format}").write_bytes(data)
            return lambda: open_media(MEDIA[format], f"a.{format}", root)
        path = root / f"data.{format}"
        path.write_bytes(data)
        return lambda: open_table(path) if format in TABLES else open_recipe(path)

    return prepare


def _open_copy(model: Path, root: Path, files: dict[str, bytes]) -> Callable[[], Any]:
    """Copy the model folder with other files; digests stay only where they are the subject."""
    copy = root / "model"
    shutil.copytree(model, copy)
    if "digests.json" not in files:
        (copy / "digests.json").unlink()
    for name, data in files.items():
        (copy / name).write_bytes(data)
    return lambda: open_model(copy)


def _open(case: Case, root: Path, model: Path) -> Callable[[], Any]:
    if case.format in MODEL_FILES:
        files = {name.removeprefix("model/"): data for name, data in case.files.items()}
        if "edit" in files:
            config = json.loads((model / "config.json").read_text())
            files = {"config.json": json.dumps(config | json.loads(files["edit"])).encode()}
        return _open_copy(model, root, files)
    for name, data in case.files.items():
        (root / name).write_bytes(data)
    for name, target in case.links.items():
        (root / name).symlink_to(target)
    if case.special:
        {"fifo": os.mkfifo, "folder": os.mkdir}[case.special](root / case.cell)
    if case.kind:
        return lambda: open_media(case.kind, case.cell, root)
    (path,) = (root / name for name in case.files)
    return lambda: open_recipe(path) if case.format == "yaml" else open_table(path)


def warm_up(folder: Path) -> None:
    """Open a whole file of each format, so that no process has to import what it needs."""
    for format, files in originals().items():
        with tempfile.TemporaryDirectory(dir=folder) as root:
            (Path(root) / f"a.{format}").write_bytes(files[0])
            with suppress(FusionZooError):  # npz
                if format in MEDIA:
                    open_media(MEDIA[format], f"a.{format}", Path(root))
                elif format in TABLES:
                    open_table(Path(root) / f"a.{format}")


def run_jobs(jobs: list[Job], folder: Path) -> list[tuple[Job, Outcome]]:
    """Run all jobs, two at a time."""
    torch.set_num_threads(1)
    if (folder / "model").exists():
        open_model(folder / "model")
    warm_up(folder)

    def work(job: Job) -> Outcome:
        root = Path(tempfile.mkdtemp(dir=folder))
        try:
            return run(job.prepare(root), root, job.seconds)
        finally:
            shutil.rmtree(root)

    with ThreadPoolExecutor(2) as pool:
        results = []
        for job, outcome in zip(jobs, pool.map(work, jobs), strict=True):
            results.append((job, outcome))
            if outcome.result == "fault":
                print(f"{job.format}, {job.source}, {job.name}: {outcome.message}", flush=True)
    return results
