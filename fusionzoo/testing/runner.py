"""Run the checks of a component, and print what was tried and what failed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple

from fusionzoo.errors import FusionZooError, check_choice, check_known
from fusionzoo.ground.plugins import definition_of

from .checks import Checks, describe

KINDS = {  # what an option names
    "encoder": "an encoder",
    "data": "a data set",
    "balance": "a training strategy",
    "objective": "an objective",
}


class Suite(NamedTuple):
    """The checks of one kind of component."""

    checks: Checks[Any]
    load: Callable[..., Any]  # (target, settings) -> the component, as the checks take it
    build: Callable[[Any], object]  # what the checks begin with


def _suite(name: str, load: str, build: str) -> Suite:
    module = import_module(f"{__package__}.{name}")
    return Suite(module.CHECKS, getattr(module, load), attrgetter(build)(module))


SUITES: dict[str, Callable[[], Suite]] = {  # each imports only what it needs
    "fusion": partial(_suite, "fusions", "maker", "build"),
    "encoder": partial(_suite, "encoders", "maker", "build"),
    "data": partial(_suite, "data", "source", "opened"),
    "balance": partial(_suite, "strategies", "strategy", "ShortRun"),
    "objective": partial(_suite, "objectives", "subject", "Subject.build"),
}


class Result(NamedTuple):
    """What one check found."""

    check: str  # what must hold, in words
    tried: str
    problem: str | None  # None: it holds


def results(target: str, kind: str, settings: Mapping[str, Any]) -> Iterator[Result]:
    """Yield what each check finds in a component that `target` names."""
    suite = SUITES[kind]()
    component = suite.load(target, settings)
    unreported = None
    try:
        suite.build(component)
    except FusionZooError:  # a wrong setting, a download that is needed
        raise
    except Exception as error:  # a bug of the component: most checks build it and fail as well
        unreported = describe(error)
    for name, problem in suite.checks.run(component):
        unreported = None if problem else unreported
        yield Result(name.replace("_", " "), suite.checks[name].__doc__ or "", problem)
    if unreported:
        yield Result("it can be built", "Tried: building it before the first check.", unreported)


def main_check(target: str, kind: str = "fusion", settings: Mapping[str, Any] | None = None) -> int:
    """Print what was tried and what failed; return 0 if nothing did."""
    failed = total = 0
    for check, tried, problem in results(target, kind, settings or {}):
        total += 1
        print(f"{'FAIL' if problem else 'ok  '}  {check}")
        if problem:
            failed += 1
            print(f"      {tried}\n      Found: {problem}")
    print(f"{target}: {total - failed} of {total} checks passed")
    return int(failed > 0)


def require(target: str | Callable[..., Any], kind: str, settings: Mapping[str, Any]) -> None:
    """Raise an `AssertionError` that names the checks that failed, if any did."""
    name = _name(target)
    outcomes = list(results(name, kind, settings))
    failed = [f"\n- {x.check}\n  {x.tried}\n  Found: {x.problem}" for x in outcomes if x.problem]
    if failed:
        what = KINDS.get(kind, "a fusion")
        raise AssertionError(
            f"{name} fails {len(failed)} of {len(outcomes)} checks of {what}:{''.join(failed)}"
        )


def cases(
    targets: Sequence[str | Callable[..., Any]],
    kind: str,
    settings: Mapping[str, Any],
    names: Sequence[str] | None,
    expected_failed: Mapping[str, str],
) -> list[Any]:
    """Return parameters of pytest: for each target and check, a function that runs the check.

    A component is loaded once, by the first of its checks. Those that are expected to fail, with
    the reason, are marked so, strictly.
    """
    import pytest

    check_choice("kind", kind, (*SUITES,))
    suite = SUITES[kind]()
    for name in (*expected_failed, *(names or ())):
        problem = f"there is no check {name!r} of {KINDS.get(kind, 'a fusion')}"
        check_known(name, suite.checks, problem, "There are")
    parameters = []
    for target in targets:
        load = cache(partial(suite.load, _name(target), settings))
        start = "" if len(targets) == 1 else f"{_name(target).rpartition(':')[2]}-"
        for name in suite.checks if names is None else names:
            reason = expected_failed.get(name)
            marks = [] if reason is None else [pytest.mark.xfail(reason=reason, strict=True)]
            check = partial(_run, suite.checks[name], load)
            parameters.append(pytest.param(check, id=f"{start}{name}", marks=marks))
    return parameters


def _run(check: Callable[[Any], None], load: Callable[[], Any]) -> None:
    check(load())


def _name(target: str | Callable[..., Any]) -> str:
    """Return what names a class or function, also to another process."""
    if isinstance(target, str):
        return target
    if not target.__qualname__.isidentifier():
        raise FusionZooError(
            f"{target.__qualname__} is defined inside of a function or class, where no other"
            " process finds it: move it to the top of its module"
        )
    return definition_of(target)


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
    from fusionzoo.ground.plugins import load_plugins

    load_plugins(parsed.plugins)
    kind = next((kind for kind in KINDS if getattr(parsed, kind)), "fusion")
    settings = parse_flags([f"--{setting}" for setting in parsed.set])
    return main_check(getattr(parsed, kind), kind, settings)
