"""`python -m fusionzoo` is the console command `fusionzoo`."""

from __future__ import annotations

from typing import NoReturn

from .cli import main
from .processes import exit_process


def run() -> NoReturn:
    """Run the command line and end this process, under torchrun also."""
    exit_process(main())


if __name__ == "__main__":
    run()
