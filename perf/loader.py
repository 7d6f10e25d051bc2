"""Time the data loader, one worker, against a bare loop that decodes the same files.

`python perf/loader.py`. Bar: at least 0.85 of the bare loop's samples per second. The files
are made here: JPEG pictures, FLAC clips, short texts, in a CSV manifest. The bare loop decodes and
prepares them with the same encoders' processors, in one process, and pads nothing.
"""

from __future__ import annotations

import csv
import json
import tempfile
from pathlib import Path

import numpy as np
import soundfile
from _timing import ratio
from PIL import Image

from fusionzoo import create_dataset, create_model
from fusionzoo.config import RunConfig, from_args
from fusionzoo.datasets.media import decode_audio, decode_image
from fusionzoo.distributed.process_group import World
from fusionzoo.structures import Audio
from fusionzoo.training.data import build_loader

ROWS, RATE = 256, 16_000


def make_files(root: Path) -> Path:
    """Write pictures of 320 x 240, clips of 1 to 2 s and a manifest."""
    draw = np.random.default_rng(0)
    rows = []
    for i in range(ROWS):
        smooth = draw.integers(0, 255, (12, 16, 3), dtype=np.uint8)
        Image.fromarray(smooth).resize((320, 240)).save(root / f"{i}.jpg", quality=90)
        wave = 0.1 * draw.standard_normal(int(RATE * draw.uniform(1, 2)))
        soundfile.write(root / f"{i}.flac", wave, RATE)
        rows.append((f"{i}", "train", f"{i % 4}", f"{i}.jpg", f"sample number {i}", f"{i}.flac"))
    with (root / "data.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", "split", "target", "image", "text", "audio"), *rows])
    return root / "data.csv"


def main() -> None:
    """Print one JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = create_dataset("manifest", root=make_files(Path(folder))).split("train")
        scratch = {"pretrained": False}
        encoders = {
            "image": {"name": "timm/resnet18", **scratch},
            "text": {"name": "chars"},
            "audio": {"name": "mel/resnet10t", "duration": 2.0, **scratch},
        }
        model = create_model("concat", encoders, 4)
        processors = {name: encoder.processor(False) for name, encoder in model.named_encoders()}
        cfg = from_args(RunConfig, ["--train.num_workers", "1", "--train.batch_size", "32"])
        loader = build_loader(dataset, model.collate(), cfg, World(), "train")

        def ours() -> None:
            rows = sum(len(batch.ids) for batch in loader)
            assert rows == ROWS

        def bare() -> None:
            for i in range(ROWS):
                processors["image"](decode_image(Path(folder) / f"{i}.jpg"))
                processors["text"](f"sample number {i}")
                clip: Audio = decode_audio(Path(folder) / f"{i}.flac")
                processors["audio"](clip)

        figures = ratio(ours, bare, rounds=7)
        speed = 1 / figures["ratio"]
        rate = ROWS / figures["ours_s"]
        print(
            json.dumps(
                {
                    "benchmark": "loader",
                    "samples_per_second": round(rate, 1),
                    "of_bare_loop": round(speed, 3),
                    **figures,
                }
            )
        )


if __name__ == "__main__":
    main()
