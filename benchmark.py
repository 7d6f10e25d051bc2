"""Compare fusions, as fusionzoo/benchmark/api.py does: `python benchmark.py digits`."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this folder: its `datasets` would hide Hugging Face's

from collections.abc import Sequence
from pathlib import Path

from fusionzoo.config import BenchmarkConfig
from fusionzoo.config.load import Usage, run_command
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
    interrupted = "stopped: the same command continues it"
    return run_command(BenchmarkConfig, USAGE, args, start, interrupted=interrupted)


def start(cfg: BenchmarkConfig) -> int:
    """Compare candidates, or combine finished reports; return the exit code."""
    if cfg.combine:
        from fusionzoo.benchmark.report.combine import combine

        return combine(cfg.combine, Path(cfg.out), pdf=cfg.figures == "pdf")
    cfg, data = complete_run(cfg)  # before torch is imported, which takes a second
    from fusionzoo.benchmark.api import run, run_shard

    if cfg.shard:
        return run_shard(cfg, data)
    report = run(cfg, data)
    report.print()
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
