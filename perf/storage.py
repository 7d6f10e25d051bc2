"""Measure how fast samples are read from files, Parquet shards and WebDataset, cold and warm.

`python perf/storage.py [--rows 1500]` writes results/storage.csv. Cold: the page cache was dropped
(`/proc/sys/vm/drop_caches`, for which one must be root; else `posix_fadvise` for every file) right
before the pass. "read" only fetches the bytes of every value; "decode" also decodes the image,
the clip and the text. Sequential passes are in the order of the data, shuffled ones in that of
training. One process, no workers. Bar: Parquet shards at least 5 times as fast as files, cold.
"""

from __future__ import annotations

import argparse
import csv
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from fusionzoo import convert, create_dataset
from fusionzoo.datasets import PairedBatchSampler, PairedDataset, make_sampler

RATE = 16_000
SIZES = {"small": (64, 0.5), "large": (224, 5.0)}  # pixels, seconds
FORMATS = ("parquet", "webdataset")
ORDERS, STATES = ("sequential", "shuffled"), ("cold", "warm")


def make_files(folder: Path, rows: int, size: str) -> Path:
    """Write JPEG images, FLAC clips, texts and a manifest."""
    side, seconds = SIZES[size]
    draw = np.random.default_rng(0)
    pictures, clips = [], []
    for number in range(32):  # contents repeat, files do not
        smooth = draw.integers(0, 255, (28, 28, 3), dtype=np.uint8)
        picture, clip = folder / f"p{number}.jpg", folder / f"c{number}.flac"
        Image.fromarray(smooth).resize((side, side)).save(picture, quality=90)
        steps = np.arange(int(RATE * seconds)) / RATE
        tone = 0.3 * np.sin(2 * np.pi * (200 + 20 * number) * steps)
        soundfile.write(clip, tone + 0.003 * draw.standard_normal(len(steps)), RATE)
        pictures.append(picture.read_bytes())
        clips.append(clip.read_bytes())
        picture.unlink()
        clip.unlink()
    lines = [["id", "split", "target", "image", "text", "audio"]]
    for n in draw.permutation(rows).tolist():  # files are not in the order of the manifest
        below = folder / f"{n % 97:02d}"
        below.mkdir(exist_ok=True)
        (below / f"{n}.jpg").write_bytes(pictures[n % 32])
        (below / f"{n}.flac").write_bytes(clips[n % 32])
        (below / f"{n}.txt").write_text(f"sample number {n} of a benchmark " * 20)
    for n in range(rows):
        start = f"{n % 97:02d}/{n}"
        lines.append([str(n), "train", str(n % 4), f"{start}.jpg", f"{start}.txt", f"{start}.flac"])
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    return path


def drop_caches(folder: Path) -> str:
    """Drop what the system keeps of the files below a folder; return how."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
        return "drop_caches"
    except OSError:
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return "posix_fadvise"


def order_of(dataset: PairedDataset, shuffle: bool) -> Iterator[tuple[int, int]]:
    """Return the samples in the order of a pass."""
    sampler = make_sampler(dataset, shuffle=shuffle, seed=1)
    for batch in PairedBatchSampler(sampler, 32):
        yield from batch


def fetch(dataset: PairedDataset, shuffle: bool) -> int:
    """Fetch the bytes of every value; return their number."""
    total = 0
    for index, _ in order_of(dataset, shuffle):
        row = int(dataset.rows[index])
        for name in dataset.modalities:
            value = dataset.reference(name, row)
            value = value.read_bytes() if isinstance(value, Path) else value
            total += len(value)
    return total


def decode(dataset: PairedDataset, shuffle: bool) -> int:
    """Decode every value; return the number of samples."""
    return sum(dataset[key] is not None for key in order_of(dataset, shuffle))


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Return how many seconds a piece of work takes, and how many of them on a core."""
    start, core = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - core


def measure(roots: dict[str, Path], top: Path, rounds: int, size: str) -> Iterator[dict[str, Any]]:
    """Yield the rates of every pass: rows per second, medians of rounds in which formats alternate.

    Other work on the machine slows all formats; seconds on a core hardly depend on it.
    """
    passes = [("read", fetch, order, state) for order in ORDERS for state in STATES]
    if size == "large":
        passes += [("decode", decode, "shuffled", state) for state in STATES]
    for name, work, order, state in passes:
        times: dict[str, list[tuple[float, float]]] = {format: [] for format in roots}
        how = ""
        for _ in range(rounds if work is fetch else 1):
            for format, root in roots.items():
                dataset = open_data(root)
                decode(dataset.subset(range(3)), False)  # loads the libraries
                if state == "warm":
                    fetch(open_data(root), False)
                else:
                    how = drop_caches(top)
                dataset = open_data(root)
                times[format].append(timed(partial(work, dataset, order == "shuffled")))
        for format, pairs in times.items():
            wall, core = np.median(np.array(pairs), axis=0).tolist()
            yield {
                "format": format,
                "work": name,
                "order": order,
                "cache": state,
                "rows_per_s": round(len(dataset) / wall, 1),
                "rows_per_core_s": round(len(dataset) / core, 1),
                "how": how,
            }


def open_data(root: Path) -> PairedDataset:
    """Open the data in one of the formats."""
    return create_dataset(str(root), **({"paths": "text"} if root.suffix == ".csv" else {}))


def main() -> None:
    """Write results/storage.csv."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default=str(Path("results") / "storage.csv"))
    parser.add_argument("--folder", help="on the disk to measure; default: the temporary folder")
    parsed = parser.parse_args()
    table: list[dict[str, Any]] = []
    for size in SIZES:
        with tempfile.TemporaryDirectory(dir=parsed.folder) as name:
            top = Path(name)
            manifest = make_files(top, parsed.rows, size)
            roots = {"files": manifest}
            for format in FORMATS:
                roots[format] = top / format
                written = convert(str(manifest), roots[format], format=format, paths="text")
            about = {"size": size, "rows": parsed.rows, "mb": round(written.bytes / 1e6, 1)}
            table += [{**about, **row} for row in measure(roots, top, parsed.rounds, size)]
    files = {key(row): row["rows_per_s"] for row in table if row["format"] == "files"}
    for row in table:
        row["times_files"] = round(row["rows_per_s"] / files[key(row)], 2)
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    with Path(parsed.out).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)


def key(row: dict[str, Any]) -> tuple[str, ...]:
    """Return what is compared between formats."""
    return row["size"], row["work"], row["order"], row["cache"]


if __name__ == "__main__":
    main()
