"""Run Python code in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_python(code: str, *args: str, cwd: Path | None = None, **environment: str) -> str:
    """Run code, which must succeed; return what it prints. `cwd` is no place to import from."""
    command, env = [sys.executable, "-P", "-c", code, *args], {**os.environ, **environment}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
