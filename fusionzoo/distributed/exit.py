"""Exit a process, skipping interpreter teardown under torchrun."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def exit_process(code: int) -> NoReturn:
    """Exit; under torchrun, without interpreter teardown.

    During teardown a torch thread that is still running can abort a successful run ("terminate
    called without an active exception"). The process group is already destroyed and files are
    closed; exit handlers (loader processes, progress bars, loggers) run here.
    """
    if "WORLD_SIZE" not in os.environ:
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
