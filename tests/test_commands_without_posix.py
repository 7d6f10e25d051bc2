"""Everything that writes works without what Windows lacks, as far as Linux can show it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Removed before fusionzoo is imported: modules, signals and functions that only POSIX has.
WITHOUT_POSIX = """
import asyncio, multiprocessing.util, os, signal, subprocess, sys, tempfile, torch
for name in ("fcntl", "resource", "grp", "pwd", "termios"):
    sys.modules[name] = None
for name in ("SIGUSR1", "SIGKILL", "SIGHUP", "SIGQUIT", "SIGXCPU", "SIGALRM", "pthread_sigmask"):
    vars(signal).pop(name, None)
for name in ("fork", "getuid", "sysconf", "sched_getaffinity", "memfd_create", "killpg", "pread"):
    vars(os).pop(name, None)
from fusionzoo.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
COMMANDS = (
    "train table.csv --target y --train.epochs 2 --train.num_workers 0 --out run",
    "train --resume --out run",
    "evaluate run --out figures.json",
    "predict run table.csv --out answers.csv",
    "embed run --out embeddings.parquet",
    "search embeddings.parquet --id 3",
    "report run --html page.html",
    "explain run --html why.html",
)


@pytest.mark.slow
def test_commands_need_nothing_that_only_posix_has(tmp_path: Path) -> None:
    rows = [f"{x},{x % 7},{'abc'[x % 3]},{'ny'[x % 7 > 3]}" for x in range(60)]
    (tmp_path / "table.csv").write_text("\n".join(["id,age,city,y", *rows]))
    for command in COMMANDS:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_POSIX, *command.split()],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    written = {"figures.json", "answers.csv", "embeddings.parquet", "page.html", "why.html"}
    assert written <= {x.name for x in tmp_path.iterdir()}
