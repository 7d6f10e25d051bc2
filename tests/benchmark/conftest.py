"""Each test has its own cache."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache instead of the user's."""
    monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
