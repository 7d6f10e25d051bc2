"""Exit a process, skipping interpreter teardown under torchrun."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def exit_process(code: int) -> NoReturn:
    """Exit; one of several processes exits without tearing the interpreter down.

    During teardown a thread of torch that is still ending can abort a run that has succeeded
    ("terminate called without an active exception"). By now the process group is destroyed and
    files are closed; exit handlers (loader processes, progress bars, loggers) are run here.
    """
    if "WORLD_SIZE" not in os.environ:
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
