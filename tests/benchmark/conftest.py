"""Each test has its own cache, and draws no figure unless it or its module is marked `drawn`."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusionzoo.benchmark.report import plots

RENDER = plots.render


@pytest.fixture(autouse=True)
def _own_cache(own_cache: Path) -> None:
    """Use an empty cache instead of the user's."""


@pytest.fixture(scope="module", autouse=True)
def _no_figures(no_figures: None) -> None:
    """Draw no figures, also of what a module's tests share."""


@pytest.fixture(autouse=True)
def _drawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the figures of a test that is marked."""
    if request.node.get_closest_marker("drawn"):
        monkeypatch.setattr(plots, "render", RENDER)
