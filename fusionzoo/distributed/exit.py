"""The way out of a process."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End the process; one of several ends without tearing the interpreter down.

    There a thread of torch that is still on its way out can abort a run that has succeeded
    ("terminate called without an active exception"). By now the group is left, and files are
    closed; what asked to be told (loader processes, progress bars, boards) is told.
    """
    if "WORLD_SIZE" not in os.environ:
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
