"""What every script does around its work: --help, settings, and a user's mistakes on one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from fusionzoo.console import quiet_pipe
from fusionzoo.errors import FusionZooError

from .load import from_args, help_text

C = TypeVar("C")


@quiet_pipe
def run_command(
    cls: type[C],
    doc: str,
    args: Sequence[str],
    start: Callable[[C], int],
    *,
    interrupted: str = "stopped",
) -> int:
    """Build the configuration from `args` and start the work; return its exit code.

    `--help` prints `doc` and the settings. A user's mistake is one line and exit code 2; Ctrl-C
    before the work handles it itself prints `interrupted`, exit code 130.
    """
    if {"-h", "--help"} & set(args):
        print(f"{doc.strip()}\n\nSettings and defaults:\n{help_text(cls)}")
        return 0
    try:
        return start(from_args(cls, args))
    except BrokenPipeError:
        raise  # `quiet_pipe` handles it
    except (FusionZooError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130
