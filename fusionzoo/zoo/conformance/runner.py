"""Run the checks of fusions, and print what was tried and what failed."""

from __future__ import annotations

from collections.abc import Iterator

from . import gradients, learning, masking, numerics
from .checks import Checks
from .fusions import Maker, maker

CHECKS: Checks[Maker] = Checks(
    {**numerics.CHECKS, **masking.CHECKS, **gradients.CHECKS, **learning.CHECKS}
)


def run(make: Maker) -> Iterator[tuple[str, str | None]]:
    """Yield each check's name and what failed, or None."""
    for name, function in CHECKS.items():
        try:
            function(make)
        except Exception as error:  # whatever a fusion raises is a finding
            yield name, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        else:
            yield name, None


def main_check(target: str) -> int:
    """Print what was tried and what failed; return 0 if nothing did."""
    failed = 0
    for name, problem in run(maker(target)):
        print(f"{'FAIL' if problem else 'ok  '}  {name.replace('_', ' ')}")
        if problem:
            failed += 1
            print(f"      {CHECKS[name].__doc__}\n      Found: {problem}")
    print(f"{target}: {len(CHECKS) - failed} of {len(CHECKS)} checks passed")
    return int(failed > 0)
