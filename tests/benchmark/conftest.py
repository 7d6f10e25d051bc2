"""Each test has its own cache."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_cache(own_cache: Path) -> None:
    """Use an empty cache instead of the user's."""
