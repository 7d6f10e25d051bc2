"""Open mutated and hand-made hostile files: `python perf/hostile.py` writes results/hostile.csv.

More than 2,000 seeded mutations and 250 hand-made files over all formats, parsers and the files of
a model folder. Each is opened in a process of its own, with a limit on memory and time, the way a
user's file is: a manifest of it is opened, decoded and made a batch, or a recipe is read, or a
model folder loaded and asked. What is read from tars, the feature cache, and by runs whose data
changed (`_hostile_families.py`) is also compared with what was written. Each must end well or as
one line (`FusionZooError`); a crash, a hang, another exception, wrong values, memory beyond the
budget, or a file opened outside of the root is a fault, which is named, and makes the script fail.
Takes about nine minutes on two cores.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from _hostile_cases import Case, hand_made
from _hostile_families import families
from _hostile_files import FORMATS, MEDIA, MODEL_FILES, TABLES, model_folder, mutate, originals
from _hostile_run import (
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
from PIL import Image

from fusionzoo.errors import FusionZooError

OUT = Path(__file__).parents[1] / "results" / "hostile.csv"
PER_FORMAT = 100  # mutations
COLUMNS = (
    "format",
    "source",
    "files",
    "ok",
    "refused",
    "faults",
    "most_seconds",
    "most_mb",
    "named",
)


@dataclass
class Job:
    """One file to open: how it is written below a root, and what then opens it."""

    format: str
    source: str  # mutated, hand-made
    name: str
    prepare: Callable[[Path], Callable[[], Any]]


def main() -> int:
    """Run all files; return 1 if any is a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a format")
    parser.add_argument("--per-format", type=int, default=PER_FORMAT)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="hostile-") as folder:
        jobs = list(make_jobs(Path(folder), options.per_format, options.seed))
        jobs = [job for job in jobs if options.only in ("", job.format)]
        results = run_jobs(jobs, Path(folder))
    faults = write_table(results, options.out)
    total = Counter(outcome.result for _, outcome in results)
    print(f"{len(results)} files, {dict(total)}, {time.monotonic() - start:.0f} s")
    return 1 if faults else 0


def make_jobs(folder: Path, per_format: int, seed: int) -> Iterator[Job]:
    """Yield every file; `folder` gets the secret files and the model folder."""
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
    for case in hand_made(secret):
        yield Job(case.format, "hand-made", case.name, lambda root, x=case: _open(x, root, model))
    for family in families():
        yield Job(
            family.format,
            "hand-made",
            family.name,
            lambda root, x=family: lambda: x.open(root),  # type: ignore[misc]
        )


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


def write_table(results: list[tuple[Job, Outcome]], path: Path) -> int:
    """Write a row per format and source, others stay (`--only`); return the number of faults."""
    rows: list[tuple[Any, ...]] = []
    for format, source in dict.fromkeys((job.format, job.source) for job, _ in results):
        group = [(j, o) for j, o in results if (j.format, j.source) == (format, source)]
        counts = Counter(outcome.result for _, outcome in group)
        faults = [f"{job.name}: {o.message}" for job, o in group if o.result == "fault"]
        most = [max(getattr(o, x) for _, o in group) for x in ("seconds", "megabytes")]
        numbers = (len(group), counts["ok"], counts["refused"], counts["fault"])
        rows.append(
            (format, source, *numbers, f"{most[0]:.2f}", f"{most[1]:.0f}", "; ".join(faults))
        )
    done = {(str(row[0]), str(row[1])) for row in rows}
    stored = path.read_text(encoding="utf-8").splitlines()[1:] if path.is_file() else []
    others = [tuple(row) for row in csv.reader(stored) if (row[0], row[1]) not in done]
    rows = sorted([*rows, *others], key=lambda row: (row[1] != "mutated", row[0]))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS, *rows])
    return sum(outcome.result == "fault" for _, outcome in results)


if __name__ == "__main__":
    sys.exit(main())
