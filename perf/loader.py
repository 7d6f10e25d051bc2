"""Time the data loader with 0, 1 and 2 workers against a bare loop: `python perf/loader.py`.

Writes results/loader.csv. The data: `stamps` (if fetched), and JPEG images of 224 px, FLAC clips
of 5 s and of 180 s, of which 4 s are used, and short texts, in a CSV manifest. Both sides make
batches of 32. The bare loop calls torchvision, Pillow and soundfile itself: it seeks, reads and
decodes only what is used, checks nothing, prepares it with the encoders' processors, and stacks it
(it pads clips of unequal length). Rounds alternate, and figures are medians over them.

`of_bare` is the ratio of rows per second; `of_bare_cpu` that of rows per second of CPU, which other
work on the machine disturbs less, with its quartiles. These are CPU seconds of the busiest process,
which is a worker if there are any (of two their mean, over the half that each loads), as it limits
the rate;
`of_bare_cpu_all` counts all processes: sending batches to another one has a price. Bar:
`of_bare_cpu` at least 0.95 with 0 and 1 worker. Of stamps, the first `--rows` are used.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from _timing import compare, cpu_seconds_of
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from torchvision.io import ImageReadMode, decode_image, read_file

from fusionzoo import create_dataset, create_model
from fusionzoo.config import RunConfig, from_args
from fusionzoo.datasets import PairedDataset
from fusionzoo.distributed import World
from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Audio
from fusionzoo.training.loaders import build_loader

RATE, WINDOW, BATCH, BAR = 16_000, 4.0, 32, 0.95
SCRATCH = {"pretrained": False}
ENCODERS: dict[str, dict[str, Any]] = {
    "image": {"name": "timm/resnet18", **SCRATCH},
    "text": {"name": "chars"},
    "audio": {"name": "mel/resnet10t", "duration": WINDOW, **SCRATCH},
}


def make_files(root: Path, rows: int, seconds: float) -> Path:
    """Write images, clips and a manifest; eight contents of clips repeat."""
    draw = np.random.default_rng(0)
    lines = [("id", "split", "target", "image", "text", "audio")]
    for i in range(rows):
        smooth = draw.integers(0, 255, (14, 14, 3), dtype=np.uint8)
        Image.fromarray(smooth).resize((224, 224)).save(root / f"{i}.jpg", quality=90)
        clip = root / f"{i}.flac"
        if i < 8:
            soundfile.write(clip, 0.1 * draw.standard_normal(int(RATE * seconds)), RATE)
        else:
            clip.write_bytes((root / f"{i % 8}.flac").read_bytes())
        lines.append((f"{i}", "train", f"{i % 4}", clip.stem + ".jpg", f"sample {i}", clip.name))
    with (root / "data.csv").open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    return root / "data.csv"


def read_picture(path: Path) -> torch.Tensor:
    """Decode an image: a plain JPEG by torchvision, a PNG with transparency by Pillow."""
    if path.suffix == ".jpg":
        return decode_image(read_file(str(path)), ImageReadMode.RGB)
    image = Image.open(path).convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    rgb = np.array(Image.alpha_composite(white, image).convert("RGB"))
    return torch.from_numpy(rgb).permute(2, 0, 1).contiguous()


def read_clip(path: Path, seconds: float) -> Audio:
    """Decode the middle of a clip."""
    with soundfile.SoundFile(path) as file:
        count = min(file.frames, round(seconds * file.samplerate))
        file.seek((file.frames - count) // 2)
        block = file.read(count, dtype="float32", always_2d=True)
        mono = block[:, 0] if block.shape[1] == 1 else (block[:, 0] + block[:, 1]) / 2
        return Audio(torch.from_numpy(mono), file.samplerate)


def bare_loop(dataset: PairedDataset, processors: dict[str, Any], seconds: float) -> None:
    """Decode, prepare and stack every sample, in this process."""
    columns = {name: dataset.references(name) for name in dataset.modalities}
    for first in range(0, len(dataset), BATCH):
        items: dict[str, list[Any]] = {name: [] for name in columns}
        for row in range(first, min(first + BATCH, len(dataset))):
            for name, values in columns.items():
                value = values[row]
                if value is None:
                    items[name].append(processors[name].blank())
                    continue
                if name == "image":
                    value = read_picture(value)
                elif name == "audio":
                    value = read_clip(value, seconds)
                elif isinstance(value, Path):
                    value = value.read_text()
                items[name].append(processors[name](value))
        for parts in items.values():
            for key in parts[0]:
                tensors = [part[key] for part in parts]
                same = all(x.shape == tensors[0].shape for x in tensors)
                torch.stack(tensors) if same else pad_sequence(tensors, batch_first=True)


def timed(work: Callable[[], object], workers: list[int]) -> tuple[float, float, float]:
    """Return wall seconds, CPU seconds of the busiest kind of process, and of all processes."""
    processes = [os.getpid(), *workers]
    before, start = [cpu_seconds_of(x) for x in processes], time.perf_counter()
    work()
    wall = time.perf_counter() - start
    spent = [cpu_seconds_of(x) - y for x, y in zip(processes, before, strict=True)]
    busiest = max(spent[0], statistics.mean(spent[1:])) if workers else spent[0]
    return wall, busiest, sum(spent)


def measure(
    name: str, dataset: PairedDataset, encoders: dict[str, Any], rounds: int
) -> list[dict[str, Any]]:
    """Compare loaders with 0, 1 and 2 workers with the bare loop."""
    model = create_model("concat", encoders, 4)
    processors = {name: encoder.processor(False) for name, encoder in model.named_encoders()}
    seconds = float(encoders["audio"]["duration"])
    loaders: dict[int, Any] = {}
    for workers in (0, 1, 2):
        words = ["--train.num_workers", str(workers), "--train.batch_size", str(BATCH)]
        loaders[workers] = build_loader(
            dataset, model.collate(), from_args(RunConfig, words), World(), "train"
        )
    times: dict[int | str, list[tuple[float, float, float]]] = {"bare": [], 0: [], 1: [], 2: []}
    for number in range(rounds + 1):
        results: dict[int | str, tuple[float, float, float]] = {}
        results["bare"] = timed(lambda: bare_loop(dataset, processors, seconds), [])
        for workers, loader in loaders.items():
            running = getattr(loader._iterator, "_workers", [])
            pids = [int(worker.pid) for worker in running]
            results[workers] = timed(lambda loader=loader: consume(loader), pids)
        if number:  # the first round warms up, and starts the workers
            for key, figures in results.items():
                times[key].append(figures)
    rows = []
    for workers in loaders:
        ratios = np.array(times["bare"]) / np.array(times[workers])
        share = max(1, workers)  # of the rows, which each worker loads
        of_bare, _, of_bare_all = np.median(ratios, axis=0).tolist()
        bare_cpu, cpu = ([x[1] for x in times[key]] for key in ("bare", workers))
        per_core = compare(bare_cpu, [share * x for x in cpu])
        row = {
            "data": name,
            "workers": workers,
            "rows_per_s": round(len(dataset) / statistics.median(x[0] for x in times[workers]), 1),
            "of_bare": round(of_bare, 3),
            "of_bare_cpu": per_core["ratio"],
            "of_bare_cpu_all": round(of_bare_all, 3),
            "quartile_low": per_core["quartile_low"],
            "quartile_high": per_core["quartile_high"],
            "bar": BAR if workers < 2 else "",
        }
        row["met"] = "" if workers == 2 else "yes" if row["of_bare_cpu"] >= BAR else "no"
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
    return rows


def consume(loader: Any) -> None:
    """Load an epoch."""
    for batch in loader:
        assert len(batch.ids)


def main() -> None:
    """Write results/loader.csv."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--out", default=str(Path("results") / "loader.csv"))
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    table: list[dict[str, Any]] = []
    try:
        stamps = create_dataset("stamps").split("train")
    except FusionZooError as error:
        print(f"stamps left out: {error}")
    else:
        encoders = {**ENCODERS, "audio": {**ENCODERS["audio"], "duration": 2.5}}
        part = stamps.subset(range(min(len(stamps), parsed.rows)))
        table += measure("stamps", part, encoders, parsed.rounds)
    for seconds in (5, 180):
        with tempfile.TemporaryDirectory() as folder:
            manifest = make_files(Path(folder), parsed.rows, seconds)
            dataset = create_dataset("manifest", root=str(manifest)).split("train")
            table += measure(f"clips of {seconds} s", dataset, ENCODERS, parsed.rounds)
    with Path(parsed.out).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
