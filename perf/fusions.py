"""Cost of each fusion: time, memory, parameters and MACs, relative to `concat_transformer`.

`python perf/fusions.py` times forward and backward of every strategy (batch 64; image 49
tokens x 512, text 32 x 384, audio 50 x 256; dim 256), also with four times the tokens, beside
`concat_transformer`, which is timed again after every few, and writes results/fusions.csv. With a
GPU: bfloat16, eager and compiled, into results/fusions_gpu.csv. About 10 minutes on two cores.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from _timing import seconds
from tqdm import tqdm

from fusionzoo.evaluation.cost import STANDARD, cost, random_features, standard_fusion
from fusionzoo.fusion import Fusion, fusion_info, list_fusions
from fusionzoo.machine.memory import keep_freed_memory
from fusionzoo.structures import Features

ROOT = Path(__file__).parents[1]
BATCH, REFERENCE, REFRESH = 64, "concat_transformer", 11
HEADER = ["fusion", "family", "mode", "tokens_times", "milliseconds", f"ratio_to_{REFERENCE}"]
HEADER += ["peak_MiB", "parameters", "macs_per_sample"]
Given = dict[str, Features]


class Case(NamedTuple):
    """One setting in which all strategies are measured."""

    times: int  # the tokens of the standard case
    compiled: bool


def step(fusion: Fusion, given: Given, device: torch.device) -> Callable[[], None]:
    """Return one forward and backward pass."""

    def work() -> None:
        fusion.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            output = fusion(given)
        (output.logits.float().square().sum() + output.embedding.float().square().sum()).backward()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return work


def peak_mebibytes(work: Callable[[], None], device: torch.device) -> float:
    """Return the peak memory of `work`, above the memory in use before it."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    ctypes.CDLL(None).malloc_trim(0)
    before = memory_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from the memory in use now
    work()
    return max(0, memory_kib("VmHWM") - before) / 2**10


def memory_kib(key: str) -> int:
    """Return the memory in use now (`VmRSS`) or at its peak (`VmHWM`), in KiB, by /proc.

    getrusage's peak would be that of the parent process, too.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def measure(name: str, case: Case, rounds: int, device: torch.device) -> tuple[float, float]:
    """Return seconds of a step of one strategy, and its peak memory."""
    given = {
        m: Features(*(x.to(device) for x in f))
        for m, f in random_features(STANDARD, BATCH, case.times).items()
    }
    work = step(_built(name, device, case.compiled), given, device)
    if case.compiled:
        work()
    peak = peak_mebibytes(work, device)
    return statistics.median(seconds(work) for _ in range(rounds)), peak


def row(
    name: str, case: Case, figures: tuple[float, float], reference: float, mode: str
) -> list[str]:
    """Return one strategy's row of the table."""
    sizes = {m: (case.times * count, width) for m, (count, width) in STANDARD.items()}
    needed = cost(standard_fusion(name), sizes)
    taken, peak = figures
    shown = [f"{1000 * taken:.1f}", f"{taken / reference:.3f}", f"{peak:.0f}"]
    return [name, fusion_info(name).family, mode, f"{case.times}", *shown, *map(str, needed)]


def _built(name: str, device: torch.device, compiled: bool) -> Fusion:
    torch.manual_seed(0)
    fusion = standard_fusion(name).to(device).train()
    return torch.compile(fusion) if compiled else fusion  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="some strategies")
    parser.add_argument("--out", type=Path, help="CSV file")
    flags = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)
        keep_freed_memory()
    out = flags.out or ROOT / "results" / ("fusions_gpu.csv" if on_gpu else "fusions.csv")
    modes = (False, True) if on_gpu else (False,)
    names = flags.only or list_fusions()
    with out.open("w", newline="") as file, tqdm(total=2 * len(names) * len(modes)) as bar:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        for case in (Case(times, compiled) for compiled in modes for times in (1, 4)):
            mode = "bf16 compiled" if case.compiled else "bf16" if on_gpu else "fp32"
            for number, name in enumerate(names):
                if number % REFRESH == 0:  # a machine drifts
                    reference, _ = measure(REFERENCE, case, flags.rounds, device)
                figures = measure(name, case, flags.rounds, device)
                writer.writerow(row(name, case, figures, reference, mode))
                file.flush()
                bar.update()
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
