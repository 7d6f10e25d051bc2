"""Every hostile file as a job, and a process for each."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
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
from .files import FORMATS, MEDIA, MODEL_FILES, TABLES, model_folder, mutate, originals
from .run import (
    COLOUR,
    LEVEL,
    SECRET,
    Outcome,
    open_media,
    open_model,
    open_recipe,
    open_table,
    run,
)
from .spreadsheets import spreadsheets


@dataclass
class Job:
    """One file to open: how it is written below a root, and what then opens it."""

    format: str
    source: str  # mutated, hand-made
    name: str
    prepare: Callable[[Path], Callable[[], Any]]


def make_jobs(folder: Path, per_format: int, seed: int, every: int = 1) -> Iterator[Job]:
    """Yield every file; `folder` gets the secret files and the model folder.

    Of the hand-made files of one format, each `every`-th; all of `spreadsheets`.
    """
    secret = write_secrets(folder / "secret")
    model = model_folder(folder)
    files = originals()
    for name in MODEL_FILES:
        files[name] = [path.read_bytes() for path in _model_paths(model, name)]
    donors = [contents for group in files.values() for contents in group]
    for number, format in enumerate(FORMATS):
        draw = random.Random(1000 * seed + number)
        for count in range(per_format):
            index = draw.randrange(len(files[format]))
            how, data = mutate(files[format][index], donors, draw)
            yield Job(format, "mutated", f"{how} {count}", _opener(format, index, data, model))
    for case in hand_made(secret)[::every]:
        yield Job(case.format, "hand-made", case.name, lambda root, x=case: _open(x, root, model))
    for sheet in spreadsheets():
        work = lambda root, x=sheet: lambda: x.open(root)  # type: ignore[misc]  # noqa: E731
        yield Job(sheet.format, "hand-made", sheet.name, work)


def write_secrets(folder: Path) -> Path:
    """Write files that no case may read."""
    folder.mkdir()
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
    return lambda: open_table(path)


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
    open_model(folder / "model")
    warm_up(folder)

    def work(job: Job) -> Outcome:
        root = Path(tempfile.mkdtemp(dir=folder))
        try:
            return run(job.prepare(root), root)
        finally:
            shutil.rmtree(root)

    with ThreadPoolExecutor(2) as pool:
        results = []
        for job, outcome in zip(jobs, pool.map(work, jobs), strict=True):
            results.append((job, outcome))
            if outcome.result == "fault":
                print(f"{job.format}, {job.source}, {job.name}: {outcome.message}", flush=True)
    return results
