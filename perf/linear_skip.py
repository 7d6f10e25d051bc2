"""Compare every fusion with and without `linear_skip`: `python perf/linear_skip.py`.

Each fusion is trained twice on the same folds of each data set, as its benchmark's recipe
(configs/benchmarks) says: encoders frozen, features cached, default settings, one seed. With
`linear_skip` a linear layer of each modality is added to its logits, and its own start at zero.

Writes results/linear_skip.csv after each fusion: accuracy without and with it, the difference in
points with the 95 % interval of the paired samples (overlapping folds and groups counted), and the
logistic regression on everything. The fusions with products come first, then those of attention
that results/heads.csv finds below that regression. All 59 take about 80 minutes on two idle cores
from an empty cache, estimated: the training seconds in results/benchmark/{stamps,digits}/costs.csv
add up to 4,100 s for 5 folds with and without, and the models are trained anew on train and
validation. A second start goes on where the first ended, after Ctrl-C or a kill; lines of the table
that are not measured again stay (delete it and runs/linear_skip after a change to the code). Needs
`fusionzoo data fetch stamps`.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusionzoo.benchmark import candidates
from fusionzoo.benchmark.bench import Bench, open_bench
from fusionzoo.benchmark.clock import Clock
from fusionzoo.benchmark.prepare import prepare
from fusionzoo.benchmark.schedule import run_stages
from fusionzoo.config import BenchmarkConfig, from_settings
from fusionzoo.evaluation.statistics import by_group, crossed
from fusionzoo.fusion import fusion_info, list_fusions

ROOT = Path(__file__).parents[1]
DATA = ("stamps", "digits")
PRODUCTS = (
    *("lmf", "mlb", "mfb", "mfh", "mutan", "block", "tfn", "mcb", "multiplicative", "hpfn"),
)
MISSED = (
    *("gated_xattn", "healnet", "concat_transformer", "fuse_moe", "co_attention", "flex_moe"),
    *("mbt", "perceiver", "multiway", "mult", "mca", "zorro", "momke", "concat"),
)
GATES = ("gmu", "film", "mmtm", "mmdynamics", "dynmm", "drfuse")
COLUMNS = (
    *("data", "fusion", "family", "without", "with", "difference", "low", "high"),
    *("logistic_regression", "modalities", "samples", "folds"),
)


class Setting(NamedTuple):
    """A data set with its features, and the logistic regression's accuracy."""

    bench: Bench
    linear: float


def main() -> None:
    """Train what is not trained yet; write the table after each fusion."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", nargs="*", default=DATA)
    parser.add_argument("--modalities", nargs="*", help="some of the data's, to try the script")
    parser.add_argument("--only", nargs="*", default=in_order(), help="some fusions")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "linear_skip")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "linear_skip.csv")
    flags = parser.parse_args()
    settings = {name: open_setting(name, flags) for name in flags.data}
    lines = read_lines(flags.out)
    for number, fusion in enumerate(flags.only, 1):
        for name, setting in settings.items():
            line = {"data": name, **compare(setting, fusion)}
            print(f"{number} of {len(flags.only)}:", *line.values(), flush=True)
            lines.pop((name, fusion), None)
            lines[name, fusion] = line
        with flags.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(lines.values(), key=lambda x: order_of(x["data"], flags.data)))
    print(f"wrote {flags.out}")


def read_lines(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the lines of an earlier table by data set and fusion; none if there is none."""
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        return {(line["data"], line["fusion"]): line for line in csv.DictReader(file)}


def order_of(data: str, listed: Sequence[str]) -> int:
    """Return where a data set's lines stand: those that are not measured now come last."""
    return list(listed).index(data) if data in listed else len(listed)


def in_order() -> list[str]:
    """Return all fusions, those first that are likeliest to gain."""
    known = list_fusions()
    return list(dict.fromkeys([x for x in (*PRODUCTS, *MISSED, *GATES) if x in known] + known))


def open_setting(name: str, flags: argparse.Namespace) -> Setting:
    """Open a data set as its recipe says and compute its features."""
    recipe = ROOT / "configs" / "benchmarks" / f"{name}.yaml"
    changes: dict[str, Any] = {"tune": 0, "seeds": 1, "controls": False, "corruptions": False}
    changes |= {"jobs": flags.jobs, "out": str(flags.runs / name)}
    if flags.modalities:
        changes["data"] = {"name": name, "modalities": flags.modalities}
    cfg = from_settings(BenchmarkConfig, changes, str(recipe))
    bench, dataset = open_bench(cfg)
    bench = prepare(bench, dataset, tokens=True, clock=Clock())
    return Setting(bench, scores(bench, candidates.linear_baseline(bench)).mean())


def compare(setting: Setting, fusion: str) -> dict[str, Any]:
    """Return a line of the table."""
    bench = setting.bench
    common = {**bench.cfg.fusion, "linear_skip": True}
    plain = scores(bench, fusion)
    skipping = scores(replace(bench, cfg=replace(bench.cfg, fusion=common)), fusion)
    gain = by_group(skipping[None] - plain[None], bench.groups or None)
    interval, _ = crossed(gain, len(bench.folds))
    accuracies = {"without": plain.mean(), "with": skipping.mean()}
    points = dict(zip(("difference", "low", "high"), interval, strict=True))
    return {
        "fusion": fusion,
        "family": fusion_info(fusion).family,
        **{key: f"{x:.4f}" for key, x in accuracies.items()},
        **{key: f"{100 * x:.2f}" for key, x in points.items()},
        "logistic_regression": f"{setting.linear:.4f}",
        "modalities": "+".join(bench.modalities),
        "samples": len(plain),
        "folds": len(bench.folds),
    }


def scores(bench: Bench, candidate: str) -> NDArray[np.float64]:
    """Train a candidate on every fold; return whether each tested sample is right, by fold."""
    return np.concatenate(list(_by_fold(bench, candidate)))


def _by_fold(bench: Bench, candidate: str) -> Iterator[NDArray[np.float64]]:
    *_, stage = run_stages(bench, [candidate], Clock())
    if stage.stopped:
        raise SystemExit(f"stopped by {stage.stopped}: the same command goes on")
    for job, seed_results, error in stage.results.reported:
        if error is not None:
            raise SystemExit(f"{candidate}, fold {job.fold}: {error}")
        yield seed_results[0].scores[0].astype(np.float64)


if __name__ == "__main__":
    main()
