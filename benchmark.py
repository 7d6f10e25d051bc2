"""Compare fusions: `python benchmark.py --data.name digits --fusions concat,gmu,mbt --out report`.

Which is better, by how much, at what cost, and did fusion help at all? The steps (data, features,
trials, report) are `run` in fusionzoo/benchmark/api.py, which `fusionzoo.benchmark(...)` runs too.
The same command continues an interrupted benchmark.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this folder: its `datasets` would hide Hugging Face's

from collections.abc import Sequence
from pathlib import Path

from fusionzoo.config import BenchmarkConfig
from fusionzoo.config.load import Usage, run_command
from fusionzoo.ground.plugins import load_plugins
from fusionzoo.inputs.command import complete_run
from fusionzoo.zoo.cards import show_data_settings

USAGE = Usage(
    name="benchmark",
    purpose="Compare fusions: which is better, by how much, at what cost, and does fusion help?",
    words=("data",),
    examples=(
        "my.csv --target diagnosis --fusions concat,gmu,mbt",
        "digits --fusions all --time_limit 30m --out report",
        "--combine report,report2 --out both",
    ),
    common=(
        *("data", "target", "fusions", "encoders", "mode", "seeds", "folds", "corruptions"),
        *("time_limit", "out"),
    ),
    more="The same command continues an interrupted benchmark.",
    show_details=show_data_settings,
)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a candidate failed, 2 after a user's mistake."""
    args = sys.argv[1:] if args is None else args
    note = "stopped: the same command continues it"
    return run_command(BenchmarkConfig, USAGE, args, start, interrupted=note)


def start(cfg: BenchmarkConfig) -> int:
    """Compare candidates, or combine finished reports; return the exit code."""
    if cfg.combine:
        from fusionzoo.benchmark.report.combine import combine
        from fusionzoo.datasets.tables.table import word_list

        return combine(word_list(cfg.combine), Path(cfg.out), pdf=cfg.figures == "pdf")
    load_plugins(cfg.plugins)
    cfg, data = complete_run(cfg)  # before torch is imported, which takes a second
    from fusionzoo.benchmark.api import run, run_shard
    from fusionzoo.benchmark.schedule import CTRL_C

    if cfg.shard:
        return run_shard(cfg, data)
    report = run(cfg, data)
    report.print()
    if report.figures["stopped"] == CTRL_C:
        return 130
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
