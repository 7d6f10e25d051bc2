"""Measure what verifying shards costs the loader: `python perf/checksums.py [--rows 400]`.

An epoch of the loader, without workers, with checksums (of a tar's blocks, of Parquet's pages)
verified and without, in rounds that alternate; files are in the page cache. Times are CPU time of
the process, which other work on the machine hardly disturbs. Prints, for each format and
size of sample, the median ratio and its quartiles. Bar: 1.03.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from loader import BATCH, ENCODERS, consume
from storage import FORMATS, SIZES, make_files, open_data

from fusionzoo import convert, create_model
from fusionzoo.config import RunConfig, from_args
from fusionzoo.datasets.shards.blocks import TarBlocks
from fusionzoo.distributed import World
from fusionzoo.training.loaders import build_loader

BAR = 1.03


@contextmanager
def unverified() -> Iterator[None]:
    """Read blocks without comparing checksums."""
    real, read = pq.ParquetFile, TarBlocks._range

    def open_file(*words: Any, page_checksum_verification: bool, **options: Any) -> Any:
        return real(*words, **options)

    def read_range(blocks: TarBlocks, file: int, number: int) -> bytes:
        blocks.files[file] = replace(blocks.files[file], checksums=())
        return read(blocks, file, number)

    pq.ParquetFile, TarBlocks._range = open_file, read_range  # type: ignore
    try:
        yield
    finally:
        pq.ParquetFile, TarBlocks._range = real, read  # type: ignore


def seconds(root: Path, collate: Any, verified: bool) -> float:
    """Return the CPU time of an epoch of the loader; opening the data is not part of it."""
    words = ["--train.num_workers", "0", "--train.batch_size", str(BATCH)]
    config = from_args(RunConfig, words)
    loader = build_loader(open_data(root), collate, config, World(), "train")
    with nullcontext() if verified else unverified():
        start = time.process_time()
        consume(loader)
        return time.process_time() - start


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=15)
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    collate = create_model("concat", ENCODERS, 4).collate()
    for size in SIZES:
        with tempfile.TemporaryDirectory() as name:
            manifest = make_files(Path(name), parsed.rows, size)
            for format in FORMATS:
                root = Path(name) / format
                convert(str(manifest), root, format=format, paths="text")
                times = [partial(seconds, root, collate, verified) for verified in (True, False)]
                ratios = []
                for number in range(parsed.rounds + 1):  # the first warms up; who begins alternates
                    order = (0, 1) if number % 2 else (1, 0)
                    spent = {which: times[which]() for which in order}
                    ratios.append(spent[0] / spent[1])
                low, ratio, high = np.quantile(ratios[1:], [0.25, 0.5, 0.75]).round(4).tolist()
                met = "yes" if ratio <= BAR else "no"
                print(f"{size}, {format}: {ratio} ({low} to {high}), met {met}", flush=True)


if __name__ == "__main__":
    main()
