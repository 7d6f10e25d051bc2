"""Run the checks of a component, and print what was tried and what failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fusionzoo.errors import FusionZooError

from .checks import Checks


class Suite(NamedTuple):
    """The checks of one kind of component."""

    checks: Checks[Any]
    load: Callable[..., Any]  # (target, settings) -> the component, as the checks take it
    build: Callable[[Any], object]  # what the checks begin with


def fusion_suite() -> Suite:
    """Return the checks of fusions."""
    from . import gradients, learning, masking, numerics
    from .fusions import Maker, build, maker

    checks: Checks[Maker] = Checks(
        {**numerics.CHECKS, **masking.CHECKS, **gradients.CHECKS, **learning.CHECKS}
    )
    return Suite(checks, maker, build)


def encoder_suite() -> Suite:
    """Return the checks of encoders."""
    from .encoder_inputs import build, maker
    from .encoders import CHECKS

    return Suite(CHECKS, maker, build)


def data_suite() -> Suite:
    """Return the checks of data sets."""
    from . import data, decoding
    from .samples import Source, source

    checks: Checks[Source] = Checks({**data.CHECKS, **decoding.CHECKS})
    return Suite(checks, source, lambda opened: opened.data)


def balance_suite() -> Suite:
    """Return the checks of training strategies."""
    from .short_run import ShortRun, strategy
    from .strategies import CHECKS

    return Suite(CHECKS, strategy, ShortRun)


def objective_suite() -> Suite:
    """Return the checks of objectives."""
    from .labels import Subject, subject
    from .objectives import CHECKS

    return Suite(CHECKS, subject, Subject.build)


SUITES: dict[str, Callable[[], Suite]] = {  # each imports only what it needs
    "fusion": fusion_suite,
    "encoder": encoder_suite,
    "data": data_suite,
    "balance": balance_suite,
    "objective": objective_suite,
}


def main_check(target: str, kind: str = "fusion", settings: Mapping[str, Any] | None = None) -> int:
    """Print what was tried and what failed; return 0 if nothing did."""
    suite = SUITES[kind]()
    component, failed = suite.load(target, settings or {}), 0
    try:
        suite.build(component)
    except FusionZooError:  # a wrong setting, a download that is needed
        raise
    except Exception:
        pass  # a bug of the component, which the checks report
    for name, problem in suite.checks.run(component):
        print(f"{'FAIL' if problem else 'ok  '}  {name.replace('_', ' ')}")
        if problem:
            failed += 1
            print(f"      {suite.checks[name].__doc__}\n      Found: {problem}")
    print(f"{target}: {len(suite.checks) - failed} of {len(suite.checks)} checks passed")
    return int(failed > 0)
