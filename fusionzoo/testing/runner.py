"""Run the checks of a component, and print what was tried and what failed."""

from __future__ import annotations

import argparse
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
    from fusionzoo.testing import fusions

    from .fusions import Maker, build, maker

    checks: Checks[Maker] = Checks(
        {**fusions.CHECKS, **fusions.CHECKS, **fusions.CHECKS, **fusions.CHECKS}
    )
    return Suite(checks, maker, build)


def encoder_suite() -> Suite:
    """Return the checks of encoders."""
    from .encoders import CHECKS, build, maker

    return Suite(CHECKS, maker, build)


def data_suite() -> Suite:
    """Return the checks of data sets."""
    from fusionzoo.testing import data

    from .data import Source, source

    checks: Checks[Source] = Checks({**data.CHECKS, **data.CHECKS})
    return Suite(checks, source, lambda opened: opened.data)


def balance_suite() -> Suite:
    """Return the checks of training strategies."""
    from .strategies import CHECKS, ShortRun, strategy

    return Suite(CHECKS, strategy, ShortRun)


def objective_suite() -> Suite:
    """Return the checks of objectives."""
    from .objectives import CHECKS, Subject, subject

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


KINDS = {  # what an option names
    "encoder": "an encoder",
    "data": "a data set",
    "balance": "a training strategy",
    "objective": "an objective",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of the subcommand."""
    targets = parser.add_mutually_exclusive_group(required=True)
    words = "a fusion: NAME, module:Class or path/to/file.py:Class"
    targets.add_argument("fusion", nargs="?", metavar="TARGET", help=words)
    for kind, name in KINDS.items():
        targets.add_argument(f"--{kind}", metavar="TARGET", help=f"{name} instead")
    words = "settings of its constructor, say pretrained=false size=64"
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help=words)


def run(parsed: argparse.Namespace) -> int:
    """Check the component; return 0 if every check passes."""
    from fusionzoo.config.flags import parse_flags
    from fusionzoo.plugins import load_plugins

    load_plugins(parsed.plugins)
    kind = next((kind for kind in KINDS if getattr(parsed, kind)), "fusion")
    settings = parse_flags([f"--{setting}" for setting in parsed.set])
    return main_check(getattr(parsed, kind), kind, settings)
