"""What all tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may ask a hub, and none waits for one

import pytest
import torch

from fusionzoo.encoders._torchaudio import torchaudio_or_none
from fusionzoo.ground import plugins
from helpers.leftovers import ended_with
from helpers.nightly import BY_NAME, record

plugins._loaded_groups.add(plugins.GROUP)  # tests are about fusionzoo, whatever is installed


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that helpers/nightly.py uses."""
    parser.addoption("--only", type=Path, help="file that names the tests, or files, to run")
    parser.addoption("--record", type=Path, help="CSV file in which results and figures are kept")
    parser.addoption("--part", default="nightly", help="the part of the night that this is")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: pytest.ExitCode
) -> None:
    """Record what ran, if asked to; a file of which only some tests ran has no row."""
    config = terminalreporter.config
    part = BY_NAME[config.getoption("--part")]
    if (path := config.getoption("--record")) and not (
        part.by_file and exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    ):
        kinds = ("", "passed", "failed", "error", "skipped", "xfailed")
        record([x for kind in kinds for x in terminalreporter.stats.get(kind, ())], path, part)


LIMITS = {"slow": 600, "nightly": 3600}  # s; 120 for all others


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that `--only` names, and give each the time limit of its tier."""
    if only := config.getoption("--only"):
        names = set(only.read_text(encoding="utf-8").splitlines())
        items[:] = [x for x in items if names & {x.nodeid, x.nodeid.partition("::")[0]}]
    for item in items:
        for tier, seconds in LIMITS.items():
            if item.get_closest_marker(tier):
                item.add_marker(pytest.mark.timeout(seconds))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `needs(module)` where the module is not installed, or `torchaudio` where
    it cannot be imported."""
    if item.get_closest_marker("torchaudio") and torchaudio_or_none() is None:
        pytest.skip("torchaudio cannot be imported beside this torch")
    for marker in item.iter_markers("needs"):
        if find_spec(marker.args[0]) is None:
            extra = marker.kwargs.get("extra", "all")
            pytest.skip(f"needs {marker.args[0]}: pip install 'fusionzoo[{extra}]'")


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start from one seed, and leave no process behind."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats stacks for other devices
    with ended_with(request.node.nodeid):
        yield


@pytest.fixture(scope="session")
def real_stamps() -> Path:
    """The folder of the real `stamps`, 160 MB that a user's cache or `.ci/run` holds."""
    from fusionzoo.datasets.builtin import stamps
    from fusionzoo.errors import FusionZooError

    try:
        return stamps.find(None)
    except FusionZooError as error:
        pytest.skip(str(error))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache instead of the user's."""
    monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def no_figures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draw no figure of a report, which takes time, except in a module that is marked `drawn`."""
    from fusionzoo.benchmark.report import plots

    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("drawn") is None:
            patch.setattr(plots, "render", lambda *_: "<svg></svg>")
        yield


@pytest.fixture
def forget_plugins() -> Iterator[Callable[[], None]]:
    """Let a test register components and import plugins; what is returned undoes all of it, as a
    new process would. It is called at the test's end."""
    from fusionzoo.api import REGISTRIES
    from fusionzoo.evaluation.metrics import METRICS
    from fusionzoo.evaluation.robustness import CORRUPTIONS
    from fusionzoo.targets import KINDS

    tables: list[dict[str, Any]] = [KINDS, METRICS._entries, *CORRUPTIONS.values()]
    stored = [dict(table) for table in tables]
    for registry in REGISTRIES.values():
        registry._fill()  # else a test that is the first to list them fills what is undone
    entries = {name: dict(registry._entries) for name, registry in REGISTRIES.items()}
    modules, path, groups = set(sys.modules), list(sys.path), set(plugins._loaded_groups)

    def forget() -> None:
        for name, registry in REGISTRIES.items():
            registry._entries.clear()
            registry._entries.update(entries[name])
        for table, before in zip(tables, stored, strict=True):
            table.clear()
            table.update(before)
        for name in set(sys.modules) - modules:
            if name.startswith("fusionzoo.ground.plugins.") or "own_plugin" in name:
                del sys.modules[name]
        sys.path[:] = path
        plugins._loaded_groups.clear()
        plugins._loaded_groups.update(groups)

    yield forget
    forget()
