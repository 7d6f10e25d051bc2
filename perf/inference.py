"""Measure answering: `python perf/inference.py runs/stamps exported` writes results/inference.csv.

The model of a run (eager, under bfloat16 autocast, compiled) against its exported folder (ONNX and,
if it holds one, int8), on one thread, with 1 and 32 prepared rows of the run's test split; and one
raw sample end to end, decoding included. Figures are CPU seconds of a call, and their ratio to
eager's in the same rounds: the median and its quartiles.
"""

from __future__ import annotations

import argparse
import csv
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _timing import compare, interleaved

import fusionzoo as fz
from fusionzoo.config import read_yaml
from fusionzoo.inputs.data import open_dataset

OUT = Path(__file__).parents[1] / "results" / "inference.csv"
ROWS = (1, 32)


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a run folder")
    parser.add_argument("exported", help="the folder that fusionzoo export wrote of it")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    model = fz.load(given.model)
    dataset = open_dataset(read_yaml(Path(given.model) / "config.yaml")["data"]).split("test")
    full = dataset.present.all(1).nonzero()[:, 0].tolist()
    lines = []
    for rows in ROWS:
        batch = model.collate()([dataset[row] for row in (full * rows)[:rows]])
        works = forms(model, given.exported, batch, not given.no_compile)
        lines += table(f"{rows} prepared rows", works, given.rounds, rows)
    raw = {name: dataset.reference(name, full[0]) for name in model.modalities}
    onnx = fz.load(given.exported, runtime="onnx", threads=1)
    works = {"eager": lambda: model.predict([raw]), "onnx": lambda: onnx.predict([raw])}
    lines += table("one raw sample, decoding included", works, given.rounds, 1)
    with OUT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def forms(model: Any, exported: str, batch: Any, compiles: bool) -> dict[str, Callable[[], object]]:
    """Return the ways to answer a batch, by name."""
    onnx = fz.load(exported, runtime="onnx", threads=1)

    @torch.no_grad()
    def eager() -> object:
        return model(batch)

    @torch.no_grad()
    def bfloat16() -> object:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch)

    works = {"eager": eager, "bfloat16": bfloat16, "onnx": lambda: onnx.answer(batch)}
    if (Path(exported) / "model.int8.onnx").is_file():
        int8 = fz.load(exported, runtime="onnx", int8=True, threads=1)
        works["int8"] = lambda: int8.answer(batch)
    if compiles:
        quick = torch.compile(model)

        @torch.no_grad()
        def compiled() -> object:
            return quick(batch)

        compiled()
        works["compiled"] = compiled
    return works


def table(
    case: str, works: dict[str, Callable[[], object]], rounds: int, rows: int, base: str = "eager"
) -> list[dict[str, object]]:
    """Time the ways in turns; return a line for each, with its ratio to `base`."""
    times = interleaved(works, rounds)
    lines = []
    for name, spent in times.items():
        ratio = compare(spent, times[base])
        median = sorted(spent)[len(spent) // 2]
        line = {"case": case, "form": name, "cpu_ms": f"{1000 * median:.1f}"}
        line |= {"rows_per_cpu_s": f"{rows / median:.1f}"}
        line |= {key: ratio[key] for key in ("ratio", "quartile_low", "quartile_high")}
        print(line, flush=True)
        lines.append(line)
    return lines


if __name__ == "__main__":
    main()
