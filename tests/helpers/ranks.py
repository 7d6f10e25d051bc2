"""Start the ranks of a distributed test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[1])


def run(file: str, size: int, *words: object, timeout: float = 300) -> None:
    """Run `python -P FILE RANK WORDS` as `size` processes, which must succeed."""
    paths = os.pathsep.join(filter(None, [TESTS, os.environ.get("PYTHONPATH", "")]))
    command, env = [sys.executable, "-P", file], {**os.environ, "PYTHONPATH": paths}
    ranks = [
        subprocess.Popen([*command, str(rank), *map(str, words)], env=env) for rank in range(size)
    ]
    assert [process.wait(timeout) for process in ranks] == [0] * size
