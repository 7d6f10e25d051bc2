"""Start processes by torchrun, or join the group of those that a launcher started."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

from fusionzoo.config import DistConfig

from .malloc import keep_freed_memory
from .process_group import World, process_group


def launch_or_join(
    cfg: DistConfig,
    device: str,
    work: Callable[[World], int],
    *,
    script: str,
    args: Sequence[str],
) -> int:
    """Start `cfg.nproc` processes of `script`, or do `work` in one of them; return the code."""
    if cfg.nproc > 1 and not launched():
        return launch(cfg, script, args)
    keep_freed_memory()
    with process_group(cfg, device) as world:
        return work(world)


def launched() -> bool:
    """Whether a launcher (torchrun, or `launch`) started this process."""
    return "WORLD_SIZE" in os.environ


def launch(cfg: DistConfig, script: str, args: Sequence[str]) -> int:
    """Start `cfg.nproc` processes of `script` on this machine by torchrun; return the exit code.

    What asks the run to stop is passed on to them; they save, and the code is theirs.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # Each process would otherwise take all cores for itself.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // cfg.nproc)))
    options = ["--standalone", f"--nproc-per-node={cfg.nproc}"]
    options += ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
    try:
        torchrun([*options, "--", script, *args])  # or --log would be its own
    except ChildFailedError as error:
        return next(iter(error.failures.values())).exitcode
    except SignalException as error:  # torchrun has none of the processes' codes by then
        return {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGUSR1: 75}.get(error.sigval, 1)
    return 0
