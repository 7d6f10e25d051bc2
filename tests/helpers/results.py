"""Say which tables in results/ are older than the code that they measure: `make results`.

A table was measured at the commit in its column `commit`, or else at the one that last changed it.
It is older than its code where a later commit, or a change that is not committed, touches a file of
that code. Every change counts, be it a comment: `make same` shows whether training still computes
the same. `--run` runs the commands of the older tables, `--run NAME ...` those of the named ones;
some take hours, some need `fusionzoo data fetch`. Look at what they wrote, then commit it.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = (
    "fusionzoo/model/fusion_model.py",
    "fusionzoo/structures.py",
    "encoders",
    "datasets",
    "fusion",
)
TRAINING = (*MODEL, "fusionzoo/features", "fusionzoo/training", "fusionzoo/machine/distributed.py")
BENCHMARK = (*MODEL, "fusionzoo/features", "benchmark.py", "fusionzoo/benchmark")
BENCHMARK += ("fusionzoo/evaluation",)
READING = ("datasets", "encoders", "fusionzoo/config", "fusionzoo/model/loading.py")
READING += ("fusionzoo/model/folder.py",)
SHARED = ("perf/_cells.py",)


@dataclass(frozen=True)
class Table:
    """A file or folder below results/, the command that makes it and the code that it measures."""

    path: str
    command: str
    code: tuple[str, ...]
    partial: str = ""  # where an interrupted command keeps finished work, relative to the root
    report: str = ""  # the folder from which the files of a benchmark's report are copied

    @property
    def name(self) -> str:
        """The name on the command line: `mfeat`, `benchmark/mfeat`."""
        return self.path.removesuffix(".csv")


def script(name: str, code: tuple[str, ...], partial: str = "") -> Table:
    """Describe a table that perf/<name>.py writes."""
    file = f"perf/{name}.py"
    return Table(f"{name}.csv", f"python {file}", (file, *code), partial)


def recipe(name: str, *code: str) -> Table:
    """Describe a table with a row per seed of a training recipe."""
    return Table(f"{name}.csv", f"python perf/recipes.py {name}", ("train.py", *TRAINING, *code))


def balance(name: str, imbalance: str) -> Table:
    """Describe the table of training strategies under one imbalance."""
    command = f"python perf/balance.py --imbalance {imbalance}"
    code = ("perf/balance.py", "perf/situations.py", *TRAINING, *SHARED)
    return Table(f"{name}.csv", command, code, "runs/balance.jsonl")


def benchmark(name: str, flags: str = "") -> Table:
    """Describe a report of benchmark.py on one data set."""
    config, out = f"configs/benchmarks/{name}.yaml", f"report/{name}"
    command = f"python benchmark.py --config {config} {flags}--out {out}"
    return Table(f"benchmark/{name}", command, (*BENCHMARK, config), out, out)


SEVEN = "sum,concat,lmf,mlb,gmu,mbt,concat_transformer"  # the example of README
ATTENTION = (  # what missed a bar of perf/heads.py on the stamps
    "perceiver,mca,zorro,momke,mult,co_attention,flex_moe,fuse_moe,multiway,concat,gated_xattn"
    ",healnet,concat_transformer,mbt"
)
REPORTS = ("stamps", "digits", "mfeat", "interactions")
TABLES = (
    recipe("digits"),
    recipe("stamps", "configs/stamps.yaml"),
    balance("balance", "rate"),
    balance("balance_content", "content"),
    script("autogluon", ("perf/_autogluon_fit.py", "configs/stamps_finetune.yaml", *TRAINING)),
    Table(
        "faults.csv",
        "python tests/helpers/faults.py",
        ("tests/helpers/faults.py", "train.py", *TRAINING),
    ),
    Table(
        "authors.csv",
        "python perf/authors.py runs/authors",  # clones of the repositories that it names
        ("perf/authors.py", "perf/_authors", "fusion", "fusionzoo/training/balance"),
    ),
    script("coverage", ("fusionzoo/evaluation/statistics.py",)),
    script("default", ("perf/_autogluon_fit.py", *TRAINING, "encoders/tabular.py")),
    script("encoder_costs", ("encoders", "datasets/collate.py")),
    script("encoders", ("perf/_tiny_checkpoints.py", "fusionzoo/testing/encoders.py", "encoders")),
    script(
        "export", ("fusionzoo/tools/export", "fusionzoo/machine/graphs.py", "fusion", "encoders")
    ),
    script("hostile", ("perf/_hostile", *READING)),
    script("inference", ("fusionzoo/tools/export", *MODEL)),
    script("fusions", ("fusion", "fusionzoo/evaluation/cost.py")),
    script("gpu", ("perf/_gpu_parts.py", *TRAINING, "fusionzoo/benchmark")),  # needs a CUDA GPU
    script("interactions", (*TRAINING, *SHARED), "runs/interactions.jsonl"),
    script("linear", ("datasets/builtin/hanzi.py", "datasets/packages.py", "encoders")),
    script("mfeat", (*TRAINING, *SHARED), "runs/mfeat.jsonl"),
    script("missing", (*MODEL, "fusionzoo/training/balance", *SHARED), "runs/missing.jsonl"),
    Table(
        "papers.csv",
        "python perf/papers.py",  # the papers' data files in runs/papers-data
        ("perf/papers.py", "configs/papers", "fusionzoo/tools/reproduce.py", *TRAINING),
        "runs/papers",
    ),
    Table(
        "search_exact.csv", "python perf/search.py", ("perf/search.py", "fusionzoo/tools/search")
    ),
    Table(
        "startup.csv", "python perf/startup.py", ("perf/startup.py", "fusionzoo/cli.py", *READING)
    ),
    script("which", ("perf/situations.py", *BENCHMARK), "runs/which"),
    Table("zoo.csv", "python perf/zoo.py digits", ("perf/zoo.py", *BENCHMARK)),  # and other sets
    Table("strategies.csv", "python perf/zoo.py digits --strategies", ("perf/zoo.py", *BENCHMARK)),
    *(benchmark(name, "--fusions all ") for name in REPORTS[:-1]),
    benchmark("interactions", "--folds 0 "),
    Table(
        "benchmark/stamps_seven",
        f"python benchmark.py --config configs/benchmarks/stamps.yaml --fusions {SEVEN}"
        " --out report/stamps_seven",
        (*BENCHMARK, "configs/benchmarks/stamps.yaml"),
        "report/stamps_seven",
        "report/stamps_seven",
    ),
    Table(
        "benchmark/stamps_attention",
        f"python benchmark.py --config configs/benchmarks/stamps.yaml --fusions {ATTENTION}"
        " --seeds 1 --controls false --corruptions none --baselines alone,linear"
        " --out report/stamps_attention",
        (*BENCHMARK, "configs/benchmarks/stamps.yaml"),
        "report/stamps_attention",
        "report/stamps_attention",
    ),
    script(
        "heads",
        tuple(f"results/benchmark/{name}/summary.json" for name in (*REPORTS, "stamps_attention")),
    ),
    Table(
        "benchmark/zoo",
        "python perf/zoo.py",
        ("fusionzoo/benchmark/report/combine.py", "results/zoo"),
    ),
)


OF_TESTS = "nightly.csv"  # `make nightly-status` says how old it is
# Measured once; results/LOG.md says at which commit the command still exists.
RETIRED = ("audit.csv", "augment.csv", "branches.csv", "cache.csv", "cells.csv", "loader.csv")
RETIRED += ("linear_skip.csv", "missing_products.csv", "pid.csv", "predict_rows.csv")
RETIRED += ("retrieval.csv", "rows.csv", "storage.csv")


@dataclass(frozen=True)
class Age:
    """When a table was measured, and what happened to its code since."""

    commit: str
    date: str
    commits_since: int
    uncommitted: bool

    @property
    def stale(self) -> bool:
        """Whether the code is newer than the table."""
        return self.commits_since > 0 or self.uncommitted


def main() -> int:
    """Print the state of every table, or run commands."""
    by_name = {table.name: table for table in TABLES}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--run",
        nargs="*",
        metavar="NAME",
        choices=by_name,
        help=f"run the commands of the older tables, or of: {', '.join(by_name)}",
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep what an interrupted command has finished"
    )
    parsed = parser.parse_args()
    ages = {table.name: age(table) for table in TABLES}
    if parsed.run is None:
        show(ages)
        return 0
    names = parsed.run or [name for name in by_name if ages[name].stale]
    return max((run(by_name[name], parsed.resume) for name in names), default=0)


def age(table: Table) -> Age:
    """Compare a table's commit with those of its code."""
    commits = recorded_commits(ROOT / "results" / table.path)
    if not commits:
        commits = {git("log", "-1", "--format=%h", "--", f"results/{table.path}")}
    if commits == {""}:
        return Age("never", "", 0, True)
    since = {x: int(git("rev-list", "--count", f"{x}..HEAD", "--", *table.code)) for x in commits}
    oldest = max(since, key=lambda commit: since[commit])
    date = git("log", "-1", "--format=%cs", oldest)
    return Age(oldest, date, since[oldest], bool(git("status", "--short", "--", *table.code)))


def recorded_commits(path: Path) -> set[str]:
    """Return the commits that a table's rows name; those of changed trees count as their parent."""
    if not path.is_file():
        return set()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {row["commit"].removesuffix("-dirty") for row in rows if row.get("commit")}


def git(*words: str) -> str:
    """Run a git command in this repository; return what it printed."""
    command = ["git", "-C", str(ROOT), *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def show(ages: dict[str, Age]) -> None:
    """Print a line per table."""
    line = "{:<24}{:<20}{:<27}{}"
    print(line.format("results/", "measured at", "changes to its code since", "command"))
    for table in TABLES:
        state = ages[table.name]
        changes = [f"{state.commits_since} commits"] if state.commits_since else []
        changes += ["uncommitted"] if state.uncommitted else []
        measured = f"{state.commit} {state.date}".strip()
        print(line.format(table.path, measured, ", ".join(changes) or "none", table.command))
    print(f"{sum(x.stale for x in ages.values())} of {len(ages)} tables are older than their code")


def run(table: Table, resume: bool) -> int:
    """Run a table's command, from scratch unless `resume`; return its exit code."""
    partial = ROOT / table.partial
    if table.partial and not resume:
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
    print(f"{table.path}: {table.command}", flush=True)
    words = shlex.split(table.command)
    status = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, check=False).returncode
    if status == 0 and table.report:
        for file in (ROOT / "results" / table.path).iterdir():
            shutil.copy(ROOT / table.report / file.name, file)
    return status


if __name__ == "__main__":
    sys.exit(main())
