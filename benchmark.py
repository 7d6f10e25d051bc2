"""Compare fusions: `python benchmark.py --data.name digits --fusions concat,gmu,mbt --out report`.

Which is better, by how much, at what cost, and did fusion help at all? Reads downward: the command
line; then data, features, cells, report. The same command goes on where it was interrupted.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this folder: its `datasets` would hide Hugging Face's

from collections.abc import Sequence
from pathlib import Path

from fusionzoo.config import BenchmarkConfig, from_args, help_text, write_yaml
from fusionzoo.console import quiet_pipe
from fusionzoo.errors import FusionZooError


@quiet_pipe
def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; an error that the user can mend is one line and exit code 2."""
    args = sys.argv[1:] if args is None else args
    if {"-h", "--help"} & set(args):
        print(f"{(__doc__ or '').strip()}\n\nSettings and defaults:\n{help_text(BenchmarkConfig)}")
        return 0
    try:
        cfg = from_args(BenchmarkConfig, args)
        if cfg.combine:
            from fusionzoo.benchmark.report.combine import combine

            return combine(cfg.combine, Path(cfg.out))
        return benchmark(cfg)
    except FusionZooError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped: the same command goes on where it was", file=sys.stderr)
        return 130


def benchmark(cfg: BenchmarkConfig) -> int:
    """Run what is not done yet, and write the report; return 1 if a strategy failed."""
    from fusionzoo.benchmark import strategies
    from fusionzoo.benchmark.bench import open_bench
    from fusionzoo.benchmark.features.prepare import prepare
    from fusionzoo.benchmark.report import summary, verdict, writers
    from fusionzoo.benchmark.trials import schedule, tune
    from fusionzoo.distributed.malloc import keep_freed_memory
    from fusionzoo.fusion import fusion_info
    from fusionzoo.plugins import load_plugins

    # ---- what is asked: names and settings are checked before anything is computed
    load_plugins(cfg.plugins)
    writers.check()
    if cfg.tune:
        tune.check()
    keep_freed_memory()
    bench, dataset = open_bench(cfg)
    singles = [f"alone:{name}" for name in bench.modalities]
    fusions = strategies.choose(cfg.fusions, len(bench.modalities))
    strategies.check(cfg, [*singles, *fusions])
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    write_yaml(cfg, out / "config.yaml")

    # ---- frozen features, once for all strategies and seeds
    tokens = any(fusion_info(name).reads == "tokens" for name in fusions)
    prepare(bench, dataset, tokens)

    # ---- the cells: strategies x folds x seeds, and the controls
    results = schedule.run_all(bench, [*singles, *fusions])

    # ---- what came of it
    whole = summary.summarise(bench, results)
    found = verdict.figures(whole)
    writers.write(whole, found, out)
    writers.show(found, out)
    return 1 if whole.failed else 0


if __name__ == "__main__":
    sys.exit(main())
