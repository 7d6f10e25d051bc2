"""Measure answering: `python perf/inference.py RUN EXPORTED [RUN EXPORTED ...]` writes
results/inference.csv; lines of other models stay.

The model of each run (eager, under bfloat16 autocast, in float16, compiled) against its exported
folder (ONNX), on one thread, with 1 and 32 prepared rows of the run's
test split; and one raw sample end to end, decoding included. Figures are CPU seconds of a call, and
their ratio to eager's in the same rounds: the median and its quartiles. Before that, answers are
compared on the whole test split, with every subset of modalities: the largest difference, over
max(1, value). Where a form of eager is timed, the difference is that of the timed rows.
"""

from __future__ import annotations

import argparse
import copy
import csv
import warnings
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from _timing import compare, interleaved

import fusionzoo as fz
from fusionzoo.config import read_yaml
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.structures import Sample

OUT = Path(__file__).parents[1] / "results" / "inference.csv"
ROWS = (1, 32)
COLUMNS = ("model", "case", "form", "difference", "cpu_ms", "rows_per_cpu_s", "ratio")
COLUMNS += ("quartile_low", "quartile_high")


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", help="a run, the folder exported of it, and so on")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for run, exported in zip(arguments.folders[::2], arguments.folders[1::2], strict=True):
        lines = measured(run, exported, arguments.rounds, not arguments.no_compile)
        write(Path(run).name, lines)


def write(model: str, lines: Sequence[dict[str, object]]) -> None:
    """Replace the lines of a model in the table, or add them."""
    with OUT.open(newline="", encoding="utf-8") as file:
        others = [line for line in csv.DictReader(file) if line["model"] != model]
    with OUT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*others, *({"model": model, **line} for line in lines)])


def measured(run: str, exported: str, rounds: int, compiles: bool) -> list[dict[str, object]]:
    """Compare and time a model and its exported folder; return the lines of the table."""
    model, onnx = fz.load(run), fz.load(exported, runtime="onnx", threads=1)
    dataset = DataSpec(settings=read_yaml(Path(run) / "config.yaml")["data"]).open().split("test")
    worst, count = largest_difference(model, onnx, dataset)
    line = {"case": f"{count} test samples, every subset", "form": "onnx", "difference": worst}
    print(line, flush=True)
    lines: list[dict[str, object]] = [line]
    full = dataset.present.all(1).nonzero()[:, 0].tolist()
    for rows in ROWS:
        batch = model.collate()([dataset[row] for row in (full * rows)[:rows]])
        works = forms(model, exported, batch, compiles)
        case = f"{rows} prepared row" + "s" * (rows > 1)
        differences = differences_from_eager(works)
        timed = table(case, works, rounds, rows)
        lines += [{**line, "difference": differences[str(line["form"])]} for line in timed]
    raw = {name: dataset.reference(name, full[0]) for name in model.modalities}
    works = {"eager": lambda: model.predict([raw]), "onnx": lambda: onnx.predict([raw])}
    return lines + table("one raw sample, decoding included", works, rounds, 1)


@torch.no_grad()
def largest_difference(model: Any, onnx: Any, dataset: Any) -> tuple[str, int]:
    """Return the largest difference of logits on a data set, and the number of its samples."""
    worst, collate = 0.0, model.collate()
    for start in range(0, len(dataset), 16):
        samples = [dataset[row] for row in range(start, min(start + 16, len(dataset)))]
        for count in range(1, len(model.modalities) + 1):
            for names in combinations(model.modalities, count):
                batch = collate([without_others(sample, names) for sample in samples])
                expected = model.calibrated_logits(model.encode(batch))
                off = (onnx.answer(batch)["logits"] - expected).abs().max()
                worst = max(worst, float(off / expected.abs().max().clamp(min=1)))
    return f"{worst:.1e}", len(dataset)


def differences_from_eager(works: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Return the largest difference of each form's logits from eager's; empty for a graph's."""
    expected = works["eager"]().logits
    largest = expected.abs().max().clamp(min=1)
    differences = dict.fromkeys(works, "")
    for form in ("bfloat16", "float16", "compiled"):
        if form in works:
            off = float((works[form]().logits - expected).abs().max() / largest)
            differences[form] = f"{off:.1e}"
    return differences


def without_others(sample: Sample, names: Sequence[str]) -> Sample:
    """Return a sample with these modalities only."""
    values = {name: x if name in names else None for name, x in sample.values.items()}
    return sample._replace(values=values)


def forms(model: Any, exported: str, batch: Any, compiles: bool) -> dict[str, Callable[[], Any]]:
    """Return the ways to answer a batch, by name."""
    onnx = fz.load(exported, runtime="onnx", threads=1)

    @torch.no_grad()
    def eager() -> object:
        return model(batch)

    @torch.no_grad()
    def bfloat16() -> object:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch)

    half = copy.deepcopy(model).half()

    @torch.no_grad()
    def float16() -> object:
        return half(batch)

    works = {"eager": eager, "bfloat16": bfloat16, "float16": float16}
    works["onnx"] = lambda: onnx.answer(batch)
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
